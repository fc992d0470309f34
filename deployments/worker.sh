#!/bin/sh
# The worker, and after it whatever is still saving. A container, and a unit with KillMode=mixed, end with their first process,
# and everything in them at once. But a worker that is told to stop kills its flows without a word; the trainer notices that its
# supervisor is gone, and only then begins its checkpoint. So this is the first process: it passes SIGTERM to the worker alone, and
# ends when nothing that the worker started is left. A worker that ends by itself is started again; the run goes on meanwhile.
mark=DFLASH_WORKER=$$-$(date +%s) # in the environment of all that the worker starts, also of what has left its session

left() { # the processes that carry the mark; one that ends while it is looked at is no error
    grep -lzxF -- "$mark" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3
}

asked=
trap 'asked=yes; kill -TERM "$worker" 2>/dev/null' TERM INT
until [ "$asked" ]; do
    # `&` starts with SIGINT ignored, and a worker turns SIGTERM into a SIGINT to itself: it would never stop.
    # No --limit 1: dflash/restart has to start while a run is training; a second run waits for the machine by itself.
    env --default-signal=INT,QUIT "$mark" prefect worker start --pool dflash --type process &
    worker=$!
    wait "$worker"
    status=$?
    [ "$asked" ] && break
    echo "the worker ended with exit code $status; it is started again in 10 seconds" >&2
    sleep 10 &
    wait $!
done
wait "$worker" # again: the first wait ended with the signal
# A flow whose worker died went on, and no later worker knows it: tell it ourselves.
for process in $(left); do
    if tr '\0' ' ' 2>/dev/null <"/proc/$process/cmdline" | grep -q -- ' -m prefect\.engine '; then
        kill -TERM "$process" 2>/dev/null
    fi
done
while [ "$(left)" ]; do
    sleep 1
done
