"""A `python -m dflash.X` as a child: in its own session, and never outliving the process that started it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dflash.command import FINISHED, REFUSED, STOPPED

POLL_SECONDS = 0.5
STOP_SECONDS = 25.0  # Prefect kills a cancelled flow 30 s after its SIGTERM
LAST_LINES_BYTES = 20_000  # of a job's output: progress lines and the cause at the end


class JobFailed(Exception):
    """A job ended otherwise than well; the message is its own last line."""


class Child:
    """`with Child("dflash.train", [run_dir], output=file) as child: child.poll()`; leaving the block ends it gracefully.

    Its standard input is a pipe that only this process holds open: `--stop-with-stdin` makes it stop, with a checkpoint, when this
    process dies, however that happens. Its output goes to a file: a pipe would end it, or hold up whoever reads it, when this
    process is gone. `inherited` are descriptors that live on in it: the machine's slot is free when both are gone.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, output: Path, inherited: Sequence[int] = ()):
        self.output = output
        with output.open("ab") as file:
            self.starts_at = file.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--stop-with-stdin"],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a signal for the flow's group must not cut its save short
                pass_fds=inherited,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, negative for the signal that killed it; None while it runs."""
        return self._process.poll()

    def stop(self, seconds: float = STOP_SECONDS) -> bool:
        """Asks it to stop; whether it has within `seconds`. One that has not goes on saving, and ends with this process."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.poll() is not None

    def kill(self) -> None:
        """Ends it, and whatever it started, at once."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def last_line(self) -> str:
        """What it said last: the cause, when it did not end well."""
        with self.output.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.starts_at, size - LAST_LINES_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "it said nothing")

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_) -> None:
        self.stop()
        if self._process.stdin is not None:
            self._process.stdin.close()


def run_job(module: str, arguments: Sequence[str], *, output: Path, log) -> None:
    """Runs a job to its end and passes on what it says. Raises ValueError where it refuses, JobFailed where it fails."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with Child(module, arguments, output=output) as child, output.open(errors="replace") as said:
        said.seek(child.starts_at)
        while (code := child.poll()) is None:
            time.sleep(POLL_SECONDS)
            for line in _whole_lines(said):
                log.info(line)
        for line in _whole_lines(said):
            log.info(line)
    if code == FINISHED:
        return
    cause = child.last_line().removeprefix("dflash: ")
    if code == REFUSED:
        raise ValueError(cause)
    if code < 0:
        cause = f"killed by {signal.Signals(-code).name}"
    elif code == STOPPED:
        cause = "stopped by somebody else"
    raise JobFailed(f"python -m {module}: {cause}; all that it said: {output}")


def _whole_lines(file) -> Iterator[str]:
    for line in file:
        if line.strip():
            yield line.rstrip()
