"""A new run directory that freezes what will be trained, on a machine that can."""

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dflash.config import Config
from dflash.machine import check_machine
from dflash.run_dir import create_run
from tasks import tracking


@task(name="deploy", cache_policy=NO_CACHE, persist_result=False)
def deploy(config: Config, *, samples: int) -> Path:
    """The run directory, made once it is clear that this machine has the devices, memory, disk and files that the run needs.

    Raises ValueError, one line, for what it has not.
    """
    gpus = tracking.gpus()
    check_machine(
        config, gpu_count=None if gpus is None else len(gpus), run_root=Path(config.run.root), samples=samples
    )
    run_dir = create_run(config)
    get_run_logger().info("run directory %s", run_dir)
    return run_dir
