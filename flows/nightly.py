"""dflash/nightly: dflash/train by the clock (prefect.yaml has it), skipped with a reason where it is off or would have to wait."""

import sys

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks import parameters as given
from tasks.command import run_here
from tasks.outcome import told_by_state
from tasks.parameters import read
from tasks.pipeline import train_and_register
from tasks.slot import Busy, machine_slot


@flow(name="dflash", persist_result=False, result_serializer="json")
@told_by_state
def nightly(
    config: str,
    enabled: bool = True,
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
    run: given.Run = given.NONE,
    supervise: given.Supervise = given.NONE,
    refresh: tuple[given.Stage, ...] = (),
) -> State | None:
    """Trains a drafter on tonight's data; the champion stays unless the new one is shown to be better.

    Args:
        config: YAML file, from the checkout, e.g. deployments/qwen3-8b-1gpu.yaml. The sections below override its fields.
        enabled: Off: tonight's run is skipped, the schedule stays.
        refresh: Stages to do again although their result is known.
    """
    if not enabled:
        return Completed(name="Skipped", message="nightly is off: enabled=false")
    settings = read(config, locals())
    try:
        with machine_slot(wait=False) as slot:
            train_and_register(settings, refresh=refresh, slot=slot)
    except Busy as busy:
        return Completed(name="Skipped", message=str(busy))


if __name__ == "__main__":
    sys.exit(run_here(nightly, "flows.nightly", __doc__))
