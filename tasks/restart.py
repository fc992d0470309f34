"""The two restarts, both explicit: after a crash in the same run, and on an operator's order in a fresh one."""

import dataclasses
import os
import re
import signal
import time
from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dflash import run_dir as runs
from dflash.config import Config
from dflash.files import replaced
from tasks.child import Child, JobFailed
from tasks.launch import launch
from tasks.outcome import TrainerEnded

HOPELESS = ("NonFinite", "MemoryError")  # reasons that come again at the same place
DISK_FULL = "No space left on device"  # in the words of Python and of the library that writes checkpoints
POLL_SECONDS = 0.5


# ---------------------------------------------------------------- after a crash


def worth_another_try(end: TrainerEnded, before: TrainerEnded | None) -> bool:
    """Whether a trainer that ended like this may get further; not when it just ended in the same way at the same step."""
    if end.state not in ("crashed", "failed") or end.reason.startswith(HOPELESS) or DISK_FULL in end.reason:
        return False
    return before is None or (end.step, end.reason) != (before.step, before.reason)


@task(name="restart", cache_policy=NO_CACHE, persist_result=False)
def restart(run_dir: Path, end: TrainerEnded, *, attempt: int, of: int, slot: int) -> Child:
    """The trainer once more, in its own run directory, from its own newest complete checkpoint."""
    get_run_logger().warning("restart %d of at most %d: %s", attempt, of, end.reason)
    with (run_dir / "console.log").open("a") as console:
        console.write(f"dflash: restart {attempt}: {end.reason}\n")
    return launch.fn(run_dir, slot=slot)


# ---------------------------------------------------------------- on an operator's order


def find_run(root: Path, name: str) -> Path:
    """The run directory of that name under `root`. Raises ValueError, and lists the runs that there are."""
    run_dir = root / name
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) and (run_dir / "config.json").is_file():
        return run_dir
    known = sorted(path.parent.name for path in root.glob("*/config.json"))
    there = f"there are {', '.join(known[-8:])}" if known else "there is none"
    raise ValueError(f"run={name}: no such run under {root}; {there}")


@task(name="stop", cache_policy=NO_CACHE, persist_result=False)
def stop(run_dir: Path, *, seconds: float) -> int:
    """Has a run's trainer save and end; proven by its lock, which the kernel frees with its death. Returns the step reached.

    Raises ValueError where it cannot be reached from here, JobFailed where it has not ended within `seconds`.
    """
    log = get_run_logger()
    pid = runs.trainer_of(run_dir)
    if pid is None:
        log.info("%s is not being trained: nothing to stop", run_dir.name)
        return runs.read_status(run_dir).get("step", 0)
    with replaced(run_dir / "stop.txt") as order:
        order.write(f"stopped by dflash/restart at {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}\n")
    os.kill(pid, signal.SIGTERM)
    log.info("asked process %d to stop", pid)
    deadline = time.monotonic() + seconds
    while runs.trainer_of(run_dir) == pid:
        if time.monotonic() > deadline:
            raise JobFailed(
                f"process {pid} of {run_dir.name} has not ended within {seconds:g} s (supervise.stop_seconds); no run was started"
            )
        time.sleep(POLL_SECONDS)
    status = runs.read_status(run_dir)
    log.info("%s has ended: %s at step %d", run_dir.name, status["state"], status["step"])
    return status["step"]


def fresh(config: Config) -> Config:
    """The configuration of a run that starts from initialisation."""
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume_from=None))
