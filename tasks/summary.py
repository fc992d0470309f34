"""What a run came to, for who looks in the morning: a page in Prefect, a picture in MLflow."""

from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from dflash import run_dir as runs
from dflash.metrics import read_rows
from tasks.register import Verdict
from tasks.registry import Champion
from tasks.tracking import Tracker


def picture(run_dir: Path) -> Path | None:
    """A PNG of loss, tau, queue fill and length mix in the run directory; None as long as no step was taken."""
    from dflash.plots import training  # here: a second of imports

    rows, heldout, evaluation = (
        read_rows(run_dir / f"{name}.jsonl")[0] for name in ("metrics", "heldout", "evaluation")
    )
    if not rows:
        return None
    config = runs.read_config(run_dir)
    path = run_dir / "training.png"
    training(
        path,
        rows,
        heldout,
        evaluation,
        edges=config.stream.bucket_edges,
        depth=config.stream.hs_queue_depth,
        title=run_dir.name,
    )
    return path


@task(name="summary", cache_policy=NO_CACHE, persist_result=False)
def summarise(run_dir: Path, tracker: Tracker, verdict: Verdict | None) -> None:
    """The run's page: how it ended, what was measured, where everything lies, what to do next."""
    status, url = runs.read_status(run_dir), tracker.run_url()
    drawn = picture(run_dir)
    if drawn is not None:
        tracker.log_file(drawn, "plots")
    lines = [
        f"# {run_dir.name}: {status['state']}",
        "",
        *([f"**{status['reason']}**", ""] if status.get("reason") else []),
        "| | |",
        "|---|---|",
        f"| steps | {status['step']:,} of {status.get('total_steps', 0):,} |",
    ]
    heldout = read_rows(run_dir / "heldout.jsonl")[0]
    if heldout:
        first, last = heldout[0], heldout[-1]
        lines.append(
            f"| held-out | simulated tau {first['tau']:.3f} -> {last['tau']:.3f}, loss {first['loss']:.2f} -> {last['loss']:.2f} |"
        )
    if verdict is not None:
        lines += [
            f"| version | {verdict.model} {verdict.version}{', **champion**' if verdict.promoted else ''} |",
            f"| gate | {verdict.reason} |",
        ]
    lines += [
        f"| MLflow | {f'[{run_dir.name}]({url})' if url else f'run {tracker.run_id}'} |",
        f"| run directory | `{run_dir}` |",
        f"| log | `{run_dir / 'trainer.log'}` |",
        "",
        f"Go on: `python -m dflash.train {run_dir}`. Start afresh: `prefect deployment run dflash/restart -p run={run_dir.name}`."
        if status["state"] != "finished"
        else f"Serve it: `{run_dir / 'export'}` (its README.md has the command lines).",
    ]
    create_markdown_artifact("\n".join(lines), key="summary", description=f"{run_dir.name}: {status['state']}")
    if url:
        create_link_artifact(
            url, link_text=f"MLflow: {run_dir.name}", key="mlflow-run", description="metrics, artifacts, versions"
        )


@task(name="evaluation", cache_policy=NO_CACHE, persist_result=False)
def show_evaluation(run_dir: Path, tracker: Tracker, evaluated: dict[str, Any], champion: Champion | None) -> None:
    """What real decoding measured, as a table in the run's page and as files and figures in its MLflow run."""
    result, checkpoint = evaluated["result"], Path(evaluated["result"]["drafter"]["path"]).name
    scopes = result["sets"] | ({"overall": result["overall"]} if len(result["sets"]) > 1 else {})
    against = "" if champion is None else f" | champion (version {champion.version}) | difference"
    lines = [f"# {run_dir.name} {checkpoint}", "", f"| prompts | number | tau | 95 % interval{against} | same output |"]
    lines.append("|---" * (lines[-1].count("|") - 1) + "|")
    for name, of in scopes.items():
        cells = [name, str(of["prompts"]), _number(of["tau"]), _interval(of["tau_interval"])]
        if champion is not None:
            cells += [
                _number(of["against"]["tau"]),
                f"{of['difference']:+.3f} ({_interval(of['difference_interval'])})",
            ]
        cells.append("-" if of["identical"] is None else f"{of['identical']:.1%}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"tau: tokens per forward of the target, 1 without a drafter. Details: `{evaluated['evaluation']}`"]
    create_markdown_artifact("\n".join(lines), key="evaluation", description=f"{run_dir.name}: real decoding")
    for key in ("evaluation", "picture"):
        tracker.log_file(Path(evaluated[key]), "evaluation")
    overall = result["overall"]
    tracker.log_final(result["drafter"]["step"], {name: overall[name] for name in ("tau", "speed_up", "identical")})


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(ends: list[float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"


def say_restarted(old: Path, step: int, new: Path) -> None:
    """Says in the page that the fresh run makes steps, and where both are.

    No task of its own: it happens inside of monitor, and would be shown as rolled back whenever that ends otherwise than well.
    """
    words = f"{old.name} stopped at step {step:,}, its checkpoints stay; {new.name} started from initialisation and makes steps"
    get_run_logger().info("%s: %s and %s", words, old, new)
    create_markdown_artifact(
        f"# Restarted\n\n{words}.\n\n- stopped: `{old}`\n- running: `{new}`", key="restart", description=words
    )
