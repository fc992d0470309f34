"""The trainer as a process of its own."""

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks.child import Child


@task(name="launch", cache_policy=NO_CACHE, persist_result=False)
def launch(run_dir: Path, *, slot: int) -> Child:
    """`python -m dflash.train RUN_DIR`, started; it holds the machine's slot and ends, with a checkpoint, when we do."""
    trainer = Child("dflash.train", [str(run_dir)], output=run_dir / "console.log", inherited=[slot])
    get_run_logger().info("trainer: process %d in %s", trainer.pid, run_dir)
    return trainer
