"""What settles a run whose supervisor was killed: a small process that outlives it.

    python -m tasks.guard RUN_DIR --flow-run ID        started by the supervisor, told "over" through standard input, or cut off

Cut off, it waits until the trainer has saved and ended, kills one that hangs, tells MLflow and Prefect that the run has crashed,
and ends the embedded Prefect server that the supervisor left behind. Told "over" it only sees a trainer to its end that its
supervisor could not wait for. It imports nothing large before that.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

OVER = b"over"
SAVE_SECONDS = 90.0  # for the trainer's last checkpoint: Prefect and MLflow shall know within two minutes
LEAVE_SECONDS = 2.0  # to wait for a guard that has nothing left to do
REASON = "its supervisor was killed"


@contextlib.contextmanager
def guarded(run_dir: Path, *, flow_run: str | None) -> Iterator[None]:
    """Has a guard beside this process until the block is left."""
    servers = [argument for pid in _embedded_servers() for argument in ("--server", str(pid))]
    with (run_dir / "guard.log").open("ab") as output:
        guard = subprocess.Popen(
            [sys.executable, "-m", "tasks.guard", str(run_dir), "--flow-run", str(flow_run), *servers],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert guard.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):  # somebody killed it
            guard.stdin.write(OVER)
            guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(LEAVE_SECONDS)


def _embedded_servers() -> Iterator[int]:
    """Pids of this process' own Prefect server: it is a child that nobody ends when we are killed."""
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"prefect.server.api.server:create_app" in _command_of(int(child)):
                yield int(child)


def _command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def main() -> None:
    """Waits for the supervisor's word or its death."""
    parser = argparse.ArgumentParser(prog="python -m tasks.guard")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--flow-run")
    parser.add_argument("--server", type=int, action="append", default=[])
    parsed = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # it ends with its task, or with the machine
    is_over = sys.stdin.buffer.read() == OVER
    _end_trainer(parsed.run_dir)
    if is_over:
        return
    from tasks import tracking  # only now: seconds of imports

    for line in tracking.reconcile(parsed.run_dir.parent, name=parsed.run_dir.name, reason=REASON):
        print(line, flush=True)
    try:
        _tell_prefect(parsed.flow_run)
    finally:  # also where Prefect does not answer
        for pid in parsed.server:
            if b"prefect.server.api.server:create_app" in _command_of(pid):
                os.kill(pid, signal.SIGTERM)


def _end_trainer(run_dir: Path) -> None:
    """Until nobody trains in the run directory; a trainer that has not ended by itself by then is killed."""
    from dflash import run_dir as runs

    deadline = time.monotonic() + SAVE_SECONDS
    while (pid := runs.trainer_of(run_dir)) is not None:
        if time.monotonic() > deadline:
            print(f"trainer {pid} hangs: killed", flush=True)
            _kill(pid)
            runs.declare_crashed(run_dir, f"the trainer hung when it was to stop: killed after {SAVE_SECONDS:.0f} s")
        time.sleep(0.5)


def _kill(pid: int) -> None:
    """Ends a trainer with all that it started: it leads a group of its own, unless somebody started it by hand."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def _tell_prefect(flow_run: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Crashed

    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(flow_run))
        if run.state is None or not run.state.is_final():
            client.set_flow_run_state(run.id, Crashed(message=REASON), force=True)
            print(f"flow run {run.name} set to Crashed", flush=True)


if __name__ == "__main__":
    main()
