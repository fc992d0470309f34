"""dflash/evaluate: real decoding with a run's best checkpoint, against the present champion. (`evaluate` is a package: see design.)

prefect deployment run dflash/evaluate -p run=NAME -p promote=true
"""

from pathlib import Path

from prefect import flow

from dflash import run_dir as runs
from tasks.outcome import told_by_state
from tasks.parameters import NONE, Evaluate, changed
from tasks.pipeline import judge_run
from tasks.restart import find_run
from tasks.slot import machine_slot
from tasks.tracking import Tracker


@flow(name="dflash", persist_result=False, result_serializer="json")
@told_by_state
def evaluate(
    run: str, root: str = "runs", evaluate: Evaluate = NONE, promote: bool = False, refresh: bool = False
) -> None:
    """Decodes held-out prompts with a run's drafter and with the champion.

    Args:
        run: Name of a run that has a checkpoint, e.g. qwen3-8b-0007.
        root: Directory of the run directories (run.root), from the checkout.
        promote: Make it a model version too, and champion if it is better: what the end of a run does.
        refresh: Decode again although the result is known.
    """
    run_dir = find_run(Path(root).absolute(), run)
    settings = changed(runs.read_config(run_dir), {"evaluate": evaluate})
    with machine_slot(), Tracker(run_dir, trains=False) as tracker:
        judge_run(settings, run_dir, tracker, registers=promote, refresh=refresh)
