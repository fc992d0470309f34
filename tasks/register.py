"""A measured drafter becomes a model version, and champion only when it is shown to be better."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks import registry
from tasks.child import run_job
from tasks.registry import Champion
from tasks.tracking import MlflowDown, Tracker, tracking_uri, without_secret


@dataclass(frozen=True)
class Verdict:
    """What the gate decided about a version."""

    model: str
    version: int
    promoted: bool
    reason: str


def judge(result: dict[str, Any], champion: Champion | None) -> tuple[bool, str]:
    """(whether a measured drafter is better, why): than plain decoding, or than the champion on the same prompts.

    Better is what the 95 % interval says: tau of plain decoding is 1 by definition, so the lower end of tau must exceed it; against
    a champion, the lower end of the paired difference must exceed 0.
    """
    overall = result["overall"]
    tau = f"tau {overall['tau']:.3f}" if overall["tau"] is not None else "no tau: every reply is one token"
    if champion is None:
        interval, bar, other = overall["tau_interval"], 1.0, "plain decoding (1 token a forward)"
    else:
        interval, bar = overall["difference_interval"], 0.0
        other = f"the champion, version {champion.version}, on the same {overall['prompts']} prompts"
    if interval is None:
        return False, f"{tau}; one prompt of a set has no interval, so nothing is shown: give more prompts"
    ends = "{:+.3f} to {:+.3f}".format(*interval) if champion is not None else "{:.3f} to {:.3f}".format(*interval)
    measured = f"{tau}, difference {overall['difference']:+.3f}" if champion is not None else tau
    better = interval[0] > bar
    return (
        better,
        f"{measured} (95 % interval {ends}): {'better than' if better else 'not shown to be better than'} {other}",
    )


def comparable(drafter: Path, champion: Champion | None) -> Champion | None:
    """The champion, if it was trained for the very same weights of the target. Raises ValueError if for others."""
    if champion is not None:
        ours, theirs = (
            json.loads((path / "dflash.json").read_text())["target"] for path in (drafter, champion.directory)
        )
        if ours["sha256"] != theirs["sha256"]:
            raise ValueError(
                f"the champion, version {champion.version}, was trained for other weights of {theirs['name']} than this drafter: "
                "nothing compares them; delete the alias champion in MLflow to start anew with this target"
            )
    return champion


@task(name="register", cache_policy=NO_CACHE, persist_result=False)
def register(
    model: str, drafter: Path, evaluated: dict[str, Any], champion: Champion | None, *, tracker: Tracker, settings: Path
) -> Verdict:
    """The export, verified, as a version of `model` with what was measured; the alias champion moves if the gate says so."""
    log, output = get_run_logger(), drafter.parent / "export.log"
    run_job(
        "dflash.export", ["--describe", str(drafter), "--evaluation", evaluated["evaluation"]], output=output, log=log
    )
    run_job("dflash.export", ["--verify", str(drafter), "--config", str(settings)], output=output, log=log)
    record, overall = json.loads((drafter / "dflash.json").read_text()), evaluated["result"]["overall"]
    better, reason = judge(evaluated["result"], champion)
    tags = {
        "tau": "none" if overall["tau"] is None else f"{overall['tau']:.4f}",
        "tau_interval": json.dumps(overall["tau_interval"]),
        "prompts": str(overall["prompts"]),
        "speed_up": f"{overall['speed_up']:.3f}",
        "identical": str(overall["identical"]),
        "run": drafter.parent.parent.name,
        "data": record["data"]["digest"],
        "target": record["target"]["name"],
        "target_sha256": record["target"]["sha256"],
        "gate": reason,
        "compared_with": "plain decoding" if champion is None else f"version {champion.version}",
    }
    if tracker.run_id is None:
        raise MlflowDown(f"MLflow at {without_secret(tracking_uri())} was not reached")
    version = registry.register_version(
        model, drafter, run_id=tracker.run_id, step=record["checkpoint"]["step"], tags=tags
    )
    if champion is not None and champion.version == version:
        return Verdict(model, version, False, "it is the champion")
    promoted = better and registry.promote(model, version, instead_of=champion and champion.version)
    if better and not promoted:
        reason += "; but another version became champion meanwhile: evaluate again"
        registry.set_version_tags(model, version, {"gate": reason})
    log.info(
        "%s version %d: %s. %s", model, version, reason, "It is champion now." if promoted else "The champion stays."
    )
    return Verdict(model, version, promoted, reason)
