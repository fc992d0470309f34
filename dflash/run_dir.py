"""The run directory: made exclusively, written by its trainer alone (while it lives), read by everyone else.

runs/<name>-0007/
  config.json        the whole configuration, frozen
  provenance.json    code, packages, target, data, parent run
  status.json        state, pid, host, step, reason; replaced atomically
  .lock              held by its trainer, whose pid is in it
  metrics.jsonl      one row per step (metrics.py)
  trainer.log
  checkpoints/       checkpoint.py
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

from dflash import config as configuration
from dflash.config import Config
from dflash.files import taken, write_json

PACKAGES = ("dflash-stream", "torch", "transformers", "safetensors", "tokenizers", "numpy", "ray")
LOOK_SECONDS = 1.0  # far longer than anybody but a trainer holds a run directory


def create_run(config: Config) -> Path:
    """A new run directory that holds the frozen configuration. A number is never used twice, also by runs started at once.

    Raises ValueError when `run.root` cannot be written.
    """
    config = configuration.with_absolute_paths(config)
    root, name = Path(config.run.root), config.run.name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.number", "a+") as counter:
            counter.seek(0)
            used = [int(counter.read() or 0), *(_number(path, name) for path in root.iterdir())]
            # the counter remembers numbers whose directories somebody has deleted
            run_dir = root / f"{name}-{max(used) + 1:04d}"
            run_dir.mkdir()
            counter.truncate(0)
            counter.write(str(max(used) + 1))
        (run_dir / "checkpoints").mkdir()
        write_json(run_dir / "config.json", configuration.to_values(config))
        write_status(run_dir, state="created", step=0)
    except OSError as error:
        raise ValueError(f"run.root={root}: {error.strerror}; give a directory that can be written") from None
    return run_dir


def _number(path: Path, name: str) -> int:
    match = re.fullmatch(re.escape(name) + r"-(\d{4,})", path.name)
    return int(match[1]) if match else 0


def read_config(run_dir: Path) -> Config:
    """The configuration that a run was made with. Raises ValueError."""
    try:
        return configuration.parse(json.loads((run_dir / "config.json").read_text()))
    except OSError as error:
        cause = error.strerror
    except ValueError as error:
        cause = str(error)
    raise ValueError(f"{run_dir} is not a run directory (config.json: {cause}); start one with --config FILE")


@contextlib.contextmanager
def only_trainer(run_dir: Path) -> Iterator[None]:
    """Holds the run directory: two trainers never write one. The kernel lets go when the process dies. Raises ValueError."""
    try:
        file = open(run_dir / ".lock", "a+")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ValueError(f"{run_dir}: {error.strerror}; give a run directory that can be written") from None
    with file as lock:
        if not taken(lock, seconds=LOOK_SECONDS):
            owner = _pid_in(lock) or read_status(run_dir).get("pid")
            raise ValueError(f"{run_dir} is being trained by process {owner}; stop that one or start a new run")
        try:
            lock.truncate(0)
            print(os.getpid(), file=lock, flush=True)
            yield
        finally:
            lock.truncate(0)


@contextlib.contextmanager
def only_writer(run_dir: Path, *, seconds: float) -> Iterator[None]:
    """Holds the right to write a run directory for a drafter worker on any machine, waiting so long for one that was given up.

    Its trainer holds the directory itself, but may have lost sight of a worker that still lives. Raises ValueError.
    """
    with open(run_dir / ".writer", "a") as lock:
        if not taken(lock, seconds=seconds):
            raise ValueError(
                f"{run_dir} has been written by another drafter worker for {seconds:g} s; end that process "
                "(its machine was cut off?)"
            )
        yield


def trainer_of(run_dir: Path) -> int | None:
    """Pid of the process that trains in a run directory now; None where nobody does.

    The lock decides: a pid that a killed trainer left behind may be another process by now, so the one that is returned has the
    lock's file open. Raises ValueError where the lock is held and its holder cannot be seen from here.
    """
    if not (run_dir / ".lock").exists():
        return None
    deadline = time.monotonic() + LOOK_SECONDS
    with open(run_dir / ".lock") as lock:
        while not taken(lock, fcntl.LOCK_SH):
            pid = _pid_in(lock)
            if pid is not None and _has_open(pid, os.fstat(lock.fileno())):
                return pid
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{run_dir} is held by a process that cannot be seen from here (another container or machine, or "
                    "another user's); look for it there"
                )
            time.sleep(0.01)
    return None


LIVING = ("created", "starting", "running")  # states of a trainer that has not said how it ended


def declare_crashed(run_dir: Path, reason: str, *, states: Collection[str] = LIVING) -> bool:
    """Writes that a run crashed, for a trainer that can no longer say so; whether it did.

    Only where nobody trains and the last status is one of `states`; all else that it says stays, the dead one's pid too.
    """
    with open(run_dir / ".lock", "a") as lock:
        if not taken(lock, seconds=LOOK_SECONDS):
            return False
        status = read_status(run_dir)
        if status.get("state") not in states:
            return False
        write_json(run_dir / "status.json", status | {"state": "crashed", "reason": reason, "time": time.time()})
    return True


def _pid_in(lock: IO) -> int | None:
    lock.seek(0)
    text = lock.read().strip()
    return int(text) if text.isdecimal() else None


def _has_open(pid: int, file: os.stat_result) -> bool:
    """Whether a process has this file open."""
    with contextlib.suppress(OSError):  # no such process, or another user's
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.path.samestat(descriptor.stat(), file):
                    return True
    return False


@contextlib.contextmanager
def _locked(path: Path, mode: str) -> Iterator[Any]:
    with open(path, mode) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def write_status(run_dir: Path, *, state: str, step: int, reason: str | None = None, **more: Any) -> None:
    """Replaces status.json. States: created, starting, running, finished, stopped, failed, refused; and crashed, which a dead
    trainer cannot write: `declare_crashed` does.

    `best`, the checkpoint that decoded best, stays what it was unless it is given.
    """
    if "best" not in more:
        more["best"] = read_status(run_dir).get("best")
    status = {
        "state": state,
        "step": step,
        "reason": reason,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time": time.time(),
    }
    write_json(run_dir / "status.json", status | more)


def read_status(run_dir: Path) -> dict[str, Any]:
    """The last status that was written; {} before the first."""
    path = run_dir / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def code_version() -> dict[str, Any]:
    """The git commit of this package's source and whether it was changed since; None where it was installed without git."""

    def git(*words: str) -> str | None:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    if shutil.which("git") is None or (commit := git("rev-parse", "HEAD")) is None:
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def package_versions() -> dict[str, str]:
    """Versions of what decides a result."""
    installed = {package: _version(package) for package in PACKAGES}
    return {"python": platform.python_version(), **{name: version for name, version in installed.items() if version}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that was not installed
        return None
