"""launch -> monitor (-> restart -> monitor)*: one training run from its first process to its end."""

from collections.abc import Callable
from pathlib import Path

from prefect import get_run_logger
from prefect.exceptions import TerminationSignal

from dflash import run_dir as runs
from dflash.config import SuperviseConfig
from tasks.launch import launch
from tasks.monitor import monitor
from tasks.outcome import TrainerEnded
from tasks.restart import restart, worth_another_try
from tasks.tracking import Tracker


def supervise(
    run_dir: Path, tracker: Tracker, *, config: SuperviseConfig, slot: int, on_first_step: Callable[[float], None]
) -> None:
    """Trains until the run has finished. However this ends, the trainer has ended or is saving its last checkpoint.

    Raises TrainerEnded where the run ends otherwise; MLflow is told in either case.
    """
    watch = {"stall_seconds": config.stall_seconds, "stop_seconds": config.stop_seconds}
    before, restarts = None, 0
    try:
        trainer = launch(run_dir, slot=slot)
        while True:
            with trainer:
                try:
                    monitor(trainer, tracker, on_first_step=on_first_step, **watch)
                    tracker.end("finished", None)
                    return
                except TrainerEnded as end:
                    if restarts == config.max_restarts or not worth_another_try(end, before):
                        raise
                    before, restarts = end, restarts + 1
            trainer = restart(run_dir, before, attempt=restarts, of=config.max_restarts, slot=slot)
    except TrainerEnded as end:
        _tell_mlflow(tracker, end.state, end.reason)
        raise
    except (KeyboardInterrupt, TerminationSignal):
        reason = "cancelled in Prefect, or its process was told to end"
        state = runs.read_status(run_dir)["state"] if _has_ended(run_dir) else "stopped"
        _tell_mlflow(tracker, state, reason, wait_seconds=2)
        raise


def _tell_mlflow(tracker: Tracker, state: str, reason: str, *, wait_seconds: float = 60) -> None:
    try:
        tracker.end(state, reason, wait_seconds)
    except OSError as error:  # a full disk, say: Prefect must still be told; MLflow will be by the next run
        get_run_logger().warning("MLflow is not told yet, tracking.json cannot be written: %s", error.strerror)


def _has_ended(run_dir: Path) -> bool:
    return runs.read_status(run_dir).get("state") in ("finished", "failed", "refused", "stopped")
