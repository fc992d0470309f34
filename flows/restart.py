"""dflash/restart: an operator's order. A run is stopped gracefully, its checkpoints stay, and a fresh one starts elsewhere.

prefect deployment run dflash/restart -p run=NAME -p 'stream={"hs_min_ready": 30}'
"""

from pathlib import Path

from prefect import flow

from dflash import run_dir as runs
from tasks import parameters as given
from tasks.outcome import told_by_state
from tasks.parameters import changed
from tasks.pipeline import train_and_register
from tasks.restart import find_run, fresh, stop
from tasks.slot import machine_slot


@flow(name="dflash", persist_result=False, result_serializer="json")
@told_by_state
def restart(
    run: str,
    root: str = "runs",
    target: given.Target = given.NONE,
    data: given.Data = given.NONE,
    regenerate: given.Regenerate = given.NONE,
    drafter: given.Drafter = given.NONE,
    objective: given.Objective = given.NONE,
    optim: given.Optim = given.NONE,
    stream: given.Stream = given.NONE,
    cluster: given.Cluster = given.NONE,
    checkpoint: given.Checkpoint = given.NONE,
    evaluate: given.Evaluate = given.NONE,
    run_fields: given.Run = given.NONE,
    supervise: given.Supervise = given.NONE,
    refresh: tuple[given.Stage, ...] = (),
) -> None:
    """Stops a run with a checkpoint and trains a fresh one, with its configuration and what is changed here.

    Args:
        run: Name of the run to stop, e.g. qwen3-8b-0007. One that has ended is started afresh.
        root: Directory of the run directories (run.root), from the checkout.
        run_fields: Fields of the section run to change.
        refresh: Stages to do again although their result is known.
    """
    old = find_run(Path(root).absolute(), run)
    # refused before anything is stopped
    settings = fresh(changed(runs.read_config(old), locals() | {"run": run_fields}))
    step = stop(old, seconds=settings.supervise.stop_seconds)
    with machine_slot() as slot:
        train_and_register(settings, refresh=refresh, slot=slot, instead_of=(old, step))
