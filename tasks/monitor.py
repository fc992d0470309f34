"""A run that is watched: progress for Prefect, GPU samples, a stall found, and an end in words."""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from uuid import UUID

import httpx
from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE

from dflash import run_dir as runs
from dflash.command import FINISHED, REFUSED, STOPPED
from dflash.metrics import read_rows
from tasks.child import Child
from tasks.outcome import TrainerEnded
from tasks.tracking import GpuLost, Tracker

POLL_SECONDS = 1.0
LOOK_SECONDS = 10.0  # between two looks at status.json, the GPUs and the signs of life
PROGRESS_SECONDS = 30.0  # an update costs the server some 50 ms
SIGNS_OF_LIFE = ("metrics.jsonl", "heldout.jsonl", "evaluation.jsonl", "trainer.log", "console.log", "checkpoints")


@task(name="monitor", cache_policy=NO_CACHE, persist_result=False)
def monitor(
    trainer: Child,
    tracker: Tracker,
    *,
    stall_seconds: float,
    stop_seconds: float,
    on_first_step: Callable[[float], None],
) -> None:
    """Until the trainer has finished. Raises TrainerEnded where it ends in any other way, or hangs.

    `on_first_step` is told, once there is a row, how many seconds it took.
    """
    run_dir, log = tracker.run_dir, get_run_logger()
    started = looked = time.monotonic()
    progress, stepped = _Progress(run_dir, log), False
    while (code := trainer.poll()) is None:
        time.sleep(POLL_SECONDS)
        if not stepped and _has_rows(run_dir):
            stepped = True
            on_first_step(time.monotonic() - started)
        if time.monotonic() - looked < LOOK_SECONDS:
            continue
        looked = time.monotonic()
        status = runs.read_status(run_dir)
        progress.show(status)
        try:
            tracker.sample_gpus(status["step"])
        except GpuLost as error:
            raise _given_up(trainer, run_dir, f"a GPU is lost: {error}", stop_seconds) from None
        silent = min(_silent_seconds(run_dir), time.monotonic() - started)
        if silent > stall_seconds:
            reason = f"hung: no sign of life for {silent:.0f} s at step {_step_reached(run_dir)} (stall_seconds={stall_seconds:g})"
            raise _given_up(trainer, run_dir, reason, stop_seconds)
    status = runs.read_status(run_dir)
    progress.show(status, last=True)
    if code != FINISHED:
        raise _ended(code, trainer, run_dir)
    log.info("finished: %d steps", status["step"])


def _has_rows(run_dir: Path) -> bool:
    path = run_dir / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


def _silent_seconds(run_dir: Path) -> float:
    """Since the run directory last showed a sign of life."""
    times = [0.0]
    for name in SIGNS_OF_LIFE:
        with contextlib.suppress(FileNotFoundError):
            times.append(os.stat(run_dir / name).st_mtime)
    return time.time() - max(times)


def _step_reached(run_dir: Path) -> int:
    """The last row's: status.json may be seconds older."""
    rows, _ = read_rows(run_dir / "metrics.jsonl")
    return rows[-1]["step"] if rows else runs.read_status(run_dir)["step"]


def _given_up(trainer: Child, run_dir: Path, reason: str, stop_seconds: float) -> TrainerEnded:
    """The end of a trainer that cannot go on: half hung it may still save, else it is killed."""
    if not trainer.stop(stop_seconds):
        trainer.kill()
    _declare_crashed(run_dir, reason, states=(*runs.LIVING, "stopped"))
    return TrainerEnded("crashed", reason, step=_step_reached(run_dir))


def _declare_crashed(run_dir: Path, reason: str, *, states: Collection[str] = runs.LIVING) -> None:
    try:
        runs.declare_crashed(run_dir, reason, states=states)
    except OSError as error:  # a full disk, say: the reason must still get to Prefect and MLflow
        get_run_logger().warning("%s: status.json cannot be written: %s", run_dir.name, error.strerror)


def _ended(code: int, trainer: Child, run_dir: Path) -> TrainerEnded:
    """The trainer's end as status.json tells it, which a killed one could not write."""
    if code < 0:
        name = signal.Signals(-code).name
        reason = f"the trainer was killed by {name}" + _who_kills(name)
        _declare_crashed(run_dir, reason)
        return TrainerEnded("crashed", reason, step=_step_reached(run_dir))
    status = runs.read_status(run_dir)
    state, reason = status["state"], status["reason"] or trainer.last_line().removeprefix("dflash: ")
    if code == STOPPED:
        reason = (
            order_to_stop(run_dir) or f"the trainer was told to stop at step {status['step']}, by nobody that we know"
        )
    elif code == REFUSED:
        state, reason = "refused", trainer.last_line().removeprefix("dflash: ")
    elif state in (*runs.LIVING, "finished"):  # it died in its last or first moments
        reason = f"the trainer ended with code {code}: {trainer.last_line()}"
        _declare_crashed(run_dir, reason)
        state = "crashed"
    return TrainerEnded(state, reason, step=_step_reached(run_dir))


def _who_kills(name: str) -> str:
    return ", as the kernel does when memory runs out (see dmesg)" if name == "SIGKILL" else ""


def order_to_stop(run_dir: Path) -> str | None:
    """Why somebody had this run stopped: dflash/restart leaves it here."""
    path = run_dir / "stop.txt"
    return path.read_text().strip() if path.exists() else None


class _Progress:
    """The progress artifact of the run's page. The server may be away for a while: a run does not end for that."""

    def __init__(self, run_dir: Path, log: logging.Logger | logging.LoggerAdapter):
        self._run_dir, self._log = run_dir, log
        self._artifact: UUID | None = None
        self._shown, self._failed = 0.0, False

    def show(self, status: dict, *, last: bool = False) -> None:
        if "total_steps" not in status or (time.monotonic() - self._shown < PROGRESS_SECONDS and not last):
            return
        self._shown = time.monotonic()
        percent = 100.0 * status["step"] / max(1, status["total_steps"])
        words = f"{self._run_dir.name}: step {status['step']:,} of {status['total_steps']:,}"
        if status.get("loss") is not None:
            words += f", loss {status['loss']:.3f}, simulated tau {status['tau']:.2f}, {status['tokens_per_second']:,.0f} tok/s"
        self._log.info(words)
        try:
            if self._artifact is None:
                made = create_progress_artifact(percent, key="training", description=words)
                assert isinstance(made, UUID)  # here, where nothing is awaited
                self._artifact = made
            else:
                update_progress_artifact(self._artifact, progress=percent, description=words)
            self._failed = False
        except httpx.HTTPError as error:
            if not self._failed:
                self._log.warning("Prefect's server does not answer (%s); the run goes on", type(error).__name__)
            self._failed = True
