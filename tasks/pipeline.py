"""What every training flow does, in order."""

import contextlib
from collections.abc import Collection
from pathlib import Path

from prefect import get_run_logger
from prefect.runtime import flow_run

from dflash.config import Config
from tasks import registry
from tasks.deploy import deploy
from tasks.evaluate import evaluate
from tasks.export import best_checkpoint, export
from tasks.guard import guarded
from tasks.prepare import prepare
from tasks.regenerate import regenerate
from tasks.register import Verdict, comparable, register
from tasks.stages import run_link
from tasks.summary import say_restarted, show_evaluation, summarise
from tasks.supervise import supervise
from tasks.tracking import Tracker, mlflow_needed, reconcile


def train_and_register(
    config: Config, *, refresh: Collection[str], slot: int, instead_of: tuple[Path, int] | None = None
) -> None:
    """regenerate -> prepare -> deploy -> launch -> monitor (-> restart -> monitor)* -> evaluate -> register.

    `instead_of` is the run, and the step it had reached, that an operator had stopped for this one.
    """
    log = get_run_logger()
    for line in reconcile(Path(config.run.root)):
        log.warning("left behind by an earlier run: %s", line)
    config = regenerate(config, refresh="regenerate" in refresh)
    prepared = prepare(config, refresh="prepare" in refresh)
    run_dir = deploy(config, samples=prepared["data"]["report"]["samples"])

    def first_step(seconds: float) -> None:
        log.info("%s: first step after %.0f s", run_dir.name, seconds)
        if instead_of is not None:
            say_restarted(*instead_of, run_dir)

    with Tracker(run_dir, tags=_flow_tags(instead_of)) as tracker, guarded(run_dir, flow_run=flow_run.id):
        try:
            supervise(run_dir, tracker, config=config.supervise, slot=slot, on_first_step=first_step)
            verdict = judge_run(config, run_dir, tracker, registers=True, refresh="evaluate" in refresh)
        except Exception:
            with contextlib.suppress(OSError):  # a full disk, say: how the run ended matters more
                summarise(run_dir, tracker, None)
            raise
        summarise(run_dir, tracker, verdict)


def judge_run(config: Config, run_dir: Path, tracker: Tracker, *, registers: bool, refresh: bool) -> Verdict | None:
    """Export, real decoding against the champion, and, if it `registers`, a model version and the gate."""
    model = registry.model_name(config.target.name)
    once_back = f"prefect deployment run dflash/evaluate -p run={run_dir.name} -p promote=true"
    with mlflow_needed(f"{run_dir.name} is trained and not registered; once MLflow is back: {once_back}"):
        drafter = export(best_checkpoint(run_dir))
        champion = comparable(drafter, registry.champion(model, Path(config.run.root) / ".champions"))
        evaluated = evaluate(config, drafter, champion, refresh=refresh)
        show_evaluation(run_dir, tracker, evaluated, champion)
        if not registers:
            return None
        return register(model, drafter, evaluated, champion, tracker=tracker, settings=run_dir / "config.json")


def _flow_tags(instead_of: tuple[Path, int] | None) -> dict[str, str]:
    tags = {"prefect.flow_run": str(flow_run.name), "prefect.flow_run_id": str(flow_run.id)}
    tags["prefect.link"] = run_link()
    return tags | ({} if instead_of is None else {"dflash.restart_of": instead_of[0].name})
