"""dflash/train: from conversations, or prompts, to a registered drafter. READ THIS FIRST, then dflash/train.py.

    prefect deployment run dflash/train -p config=deployments/FILE.yaml -p 'run={"epochs": 1}'
    python -m flows.train --config deployments/FILE.yaml [--SECTION.FIELD VALUE ...] [--refresh STAGE ...]

The second runs it here and now; Prefect is embedded where no server is configured. Exit codes: 0 completed, 1 failed, 2 refused
before anything was started, 3 stopped.
"""

import sys

from prefect import flow

from tasks import parameters as given
from tasks.command import run_here
from tasks.outcome import told_by_state
from tasks.parameters import read
from tasks.pipeline import train_and_register
from tasks.slot import machine_slot


@flow(name="dflash", persist_result=False, result_serializer="json")
@told_by_state
def train(
    config: str,
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
) -> None:
    """Trains a drafter, decodes held-out prompts with it, registers it, and makes it champion if it is better.

    Args:
        config: YAML file, from the checkout, e.g. deployments/qwen3-8b-1gpu.yaml. The sections below override its fields.
        refresh: Stages to do again although their result is known.
    """
    settings = read(config, locals())
    with machine_slot() as slot:
        train_and_register(settings, refresh=refresh, slot=slot)


if __name__ == "__main__":
    sys.exit(run_here(train, "flows.train", __doc__))
