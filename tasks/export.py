"""A run's best checkpoint as the directory that serving engines load."""

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dflash import run_dir as runs
from tasks.child import run_job
from tasks.registry import checked


def best_checkpoint(run_dir: Path) -> Path:
    """The checkpoint that decoded best during training, else the newest complete one. Raises ValueError where there is none."""
    best = runs.read_status(run_dir).get("best")
    if best is not None and (run_dir / best["checkpoint"]).is_dir():
        return run_dir / best["checkpoint"]
    complete = sorted(path.parent for path in run_dir.glob("checkpoints/step-*/manifest.json"))
    if not complete:
        raise ValueError(f"{run_dir} has no complete checkpoint; train it first")
    return complete[-1]


@task(name="export", cache_policy=NO_CACHE, persist_result=False)
def export(checkpoint: Path) -> Path:
    """The exported drafter of a checkpoint in its run; one that is there already is checked and not made again."""
    out = checkpoint.parent.parent / "export" / checkpoint.name
    if out.exists():
        checked(out)
        get_run_logger().info("%s is there", out)
    else:
        log_file = out.parent / "export.log"
        run_job("dflash.export", [str(checkpoint), "--out", str(out)], output=log_file, log=get_run_logger())
    return out
