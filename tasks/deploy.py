"""A new run directory that freezes what will be trained, on a machine that can."""

import tempfile
from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dflash.config import Config, to_values
from dflash.files import write_json
from dflash.machine import check_machine
from dflash.run_dir import create_run
from tasks import tracking
from tasks.child import run_job


@task(name="deploy", cache_policy=NO_CACHE, persist_result=False)
def deploy(config: Config, *, samples: int) -> Path:
    """The run directory, made once it is clear that this machine has the devices, memory, disk and files that the run needs.

    Raises ValueError, one line, for what it has not.
    """
    gpus = tracking.gpus()
    check_machine(
        config, gpu_count=None if gpus is None else len(gpus), run_root=Path(config.run.root), samples=samples
    )
    if config.stream.engine == "ray":
        check_cluster(config)
    run_dir = create_run(config)
    get_run_logger().info("run directory %s", run_dir)
    return run_dir


def check_cluster(config: Config) -> None:
    """Raises ValueError, one line, for a cluster without room for the run, or with a machine that does not see its files."""
    root = Path(config.run.root)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".deploy-", dir=root) as scratch:
        settings, output = Path(scratch) / "config.json", Path(scratch) / "cluster.log"
        write_json(settings, to_values(config))
        run_job("dflash.cluster", ["--config", str(settings)], output=output, log=get_run_logger())
