"""A process that has imported torch once and forks the runs of the tests, so that a run of its own costs no import.

`with Forks() as forks: child = forks.train(arguments, stderr=path)`; children die with it.
"""

import ctypes
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
PARTIAL = "checkpoints/.step-*.partial"
SHORT = 0.002  # seconds between two looks
LONG = 120  # seconds after which a test gives up on something that has no limit of its own


class Child:
    """A forked process."""

    def __init__(self, forks: "Forks", pid: int, stderr: Path):
        self._forks, self.pid, self.stderr = forks, pid, stderr
        self._code: int | None = None

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self._code is None:
            self._code = self._forks.ask({"poll": self.pid})
        return self._code

    def wait(self, seconds: float = LONG) -> int:
        """Exit code; fails, and kills it, when it has not ended by then."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"still running after {seconds} s:\n{self.stderr.read_text()}")
            time.sleep(SHORT)
        return code

    def until(self, condition: Callable[[], Any]) -> None:
        """Returns once `condition()`; fails when the process ends first."""
        until(lambda: condition() or self.poll() is not None)
        assert condition(), self.stderr.read_text()

    def last_line(self) -> str:
        """Of its stderr."""
        return self.stderr.read_text().strip().splitlines()[-1]


class Forks:
    """The tests' side."""

    def __enter__(self) -> "Forks":
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
            "OMP_NUM_THREADS": "1",  # a process that has started threads must not fork
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, str(TESTS / "forks.py")]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        return self

    def __exit__(self, *_) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, function: Callable, *, stderr: Path, **arguments: Any) -> Child:
        """A child that calls a function of this module and exits with what it returns."""
        return Child(self, self.ask({"call": function.__name__, "stderr": str(stderr), "with": arguments}), stderr)

    def train(self, run_dir: Path, *, then: str | None = None, **when: Any) -> Child:
        """A child that trains in a run directory; a thread in it does `then` (see ACTIONS) once `when` has come."""
        stderr = run_dir.parent / f"{run_dir.name}-{time.monotonic_ns()}.stderr"
        return self.start(train, stderr=stderr, run_dir=str(run_dir), then=then, when=when)


def until(condition: Callable[[], Any], seconds: float = LONG) -> None:
    """Returns once `condition()`; fails after a long time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(SHORT)


def count_rows(run_dir: Path) -> int:
    """Complete metrics rows of a run so far."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


# ---------------------------------------------------------------- what happens in a child


def train(run_dir: str, then: str | None, when: dict[str, Any]) -> int:
    from dflash.train import main

    def act() -> None:
        wait_for(Path(run_dir), **when)
        Path(f"{run_dir}.acted").touch()
        ACTIONS[then]()

    if then is not None:
        threading.Thread(target=act, daemon=True).start()
    return main([run_dir])


def wait_for(run_dir: Path, more_rows: int = 0, in_save: bool = False, seconds: float = 0.0) -> None:
    """Until the run is being set up, has written so many rows more, is in the middle of a save, and some seconds on.

    The seconds are cut short after four rows, so that a fast machine does not train to the end meanwhile.
    """
    rows, old = count_rows(run_dir), {path.stat().st_ino for path in run_dir.glob(PARTIAL)}
    until(lambda: json.loads((run_dir / "status.json").read_text())["pid"] == os.getpid())
    until(lambda: count_rows(run_dir) >= rows + more_rows)
    if in_save:
        until(lambda: any(inode_of(path) not in {None, *old} for path in run_dir.glob(PARTIAL)))
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() >= end or count_rows(run_dir) >= rows + 4)


def inode_of(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def bombard() -> None:
    """SIGTERM and SIGINT by turns until the process is gone."""
    while True:
        os.kill(os.getpid(), random.choice([signal.SIGTERM, signal.SIGINT]))
        time.sleep(0.0005)


def stop_often() -> None:
    """SIGTERM and SIGINT, several times at once, as from a supervisor and an impatient person."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        os.kill(os.getpid(), number)


def exit_worker() -> None:
    """SystemExit in the target worker's thread, wherever it is."""
    raise_in(*[thread for thread in threading.enumerate() if thread.name.startswith("target-")], SystemExit)


def exit_drafter() -> None:
    """SystemExit in the drafter's thread, wherever it is."""
    raise_in(threading.main_thread(), SystemExit)


def raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))


def limit_file_size() -> None:
    """From now on no file of this process grows beyond 60 KB: a write fails as on a full disk (Python ignores SIGXFSZ)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))


ACTIONS = {
    action.__name__: action for action in (kill, bombard, stop_often, exit_worker, exit_drafter, limit_file_size)
}


def save_for_ever(run_dir: str) -> int:
    """Checkpoints of 1 MB, one after the other, until killed."""
    import torch

    from dflash import checkpoint

    tensors = {"weight": torch.arange(250_000, dtype=torch.float32)}
    step = 1
    while True:
        directory = checkpoint.directory_of(Path(run_dir), step)
        if not directory.exists():
            checkpoint.write(directory, checkpoint.Checkpoint(tensors, tensors, {"step": step}))
        step += 1


# ---------------------------------------------------------------- the process that forks


def serve() -> None:
    import tiny  # noqa: F401
    import transformers

    import dflash.train  # noqa: F401

    transformers.logging.disable_progress_bar()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                become(request)
        print(json.dumps(answer), flush=True)


def become(request: dict[str, Any]) -> None:
    """The child's life: as a process of its own, with its own stderr."""
    code = 70
    try:
        stderr = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor, place in ((null, 0), (stderr, 1), (stderr, 2)):
            os.dup2(descriptor, place)
        code = globals()[request["call"]](**request["with"])
        sys.stderr.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
