"""Stages that are done once: found again by the content of everything that decides them, done by one run at a time.

The result of a stage is a small JSON record in Prefect's result storage, under a key of ours: Prefect's own input hashes know
neither the content of a file nor the code that a task calls. What a stage made is listed in it with its hash; where a file is gone
or altered, the stage is done again.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prefect import Task, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run
from prefect.settings import get_current_settings

from dflash import config as configuration
from dflash.config import Config
from dflash.files import sha256_of, sha256_of_json, taken, write_json
from tasks.child import run_job

SOURCE = Path(__file__).parent.parent / "dflash"
POLL_SECONDS = 1.0
RECORD_VERSION = 1  # part of every key: raised when a record holds something else
STAGE = {"cache_key_fn": lambda _, given: given["key"], "persist_result": True, "result_serializer": "json"}
"""What makes a task a stage: `@task(name="prepare", **STAGE)`, with a parameter `key`."""


def run_stage(stage: Task[..., Any], inputs: dict[str, Any], *, refresh: bool, **given: Any) -> dict[str, Any]:
    """The stage's record, from the cache if its inputs are known and all that it made is still there, else done now.

    Raises what the stage raises; then nothing is kept.
    """
    key = f"{stage.name}-{sha256_of_json([RECORD_VERSION, inputs])[:32]}"
    with _only_one(key):
        state = stage.with_options(refresh_cache=refresh)(key=key, **given, return_state=True)
        record = state.result()
        if state.name == "Cached" and (problem := altered(record["files"])) is not None:
            get_run_logger().warning("%s: %s since %s made it; doing it again", stage.name, problem, record["flow_run"])
            state = stage.with_options(refresh_cache=True)(key=key, **given, return_state=True)
            record = state.result()
    if state.name == "Cached":
        say_cached(record)
    return record


@task(name="from the cache", persist_result=False)
def say_cached(record: dict[str, Any]) -> None:
    """Tells in the run's page which run has done a stage before."""
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(record["time"]))
    get_run_logger().info("%s is from the cache: made by the run %s at %s", record["stage"], record["flow_run"], made)
    create_markdown_artifact(
        f"**{record['stage']}** came from the cache: {record['flow_run_link']} made it at {made}.\n\n"
        + "\n".join(f"- `{path}`" for path in list(record["files"])[:20]),
        key=f"{record['stage']}-from-cache",
        description=f"{record['stage']}: from the cache",
    )


def record_of(stage: str, files: Sequence[Path], **values: Any) -> dict[str, Any]:
    """What a stage leaves: the files that it made, who made them and what the next stages need of it."""
    return {
        "stage": stage,
        "flow_run": flow_run.name,
        "flow_run_link": run_link(),
        "time": time.time(),
        "files": {str(path): sha256_of(path) for path in files},
        **values,
    }


def reported_job(module: str, key: str, config: Config, directory: Path, flags: Sequence[str]) -> dict[str, Any]:
    """What `python -m MODULE --report` says of its work on a configuration; its files are in `directory`, named after the key."""
    directory.mkdir(parents=True, exist_ok=True)
    settings, report = directory / f".{key}.json", directory / f".{key}.report.json"
    write_json(settings, configuration.to_values(config))
    arguments = ["--config", str(settings), "--report", str(report), *flags]
    run_job(module, arguments, output=directory / f"{key}.log", log=get_run_logger())
    return json.loads(report.read_text())


def run_link() -> str:
    """This flow run's name, with a link to its page where there is one: an embedded server has none."""
    url = flow_run.ui_url or "None"
    return f"{flow_run.name}" if url.startswith("None") else f"[{flow_run.name}]({url})"


def altered(files: dict[str, str]) -> str | None:
    """What is wrong with a stage's files; None if each is there, byte for byte."""
    for path, sha256 in files.items():
        if not Path(path).exists():
            return f"{path} is gone"
        if sha256_of(Path(path)) != sha256:
            return f"{path} was altered"
    return None


def code_of(*modules: str) -> str:
    """Hash of the source of these modules of dflash: the code version of a stage."""
    return sha256_of_json([sha256_of(SOURCE / f"{module}.py") for module in modules])


@contextlib.contextmanager
def _only_one(key: str) -> Iterator[None]:
    """Excludes every other run of a stage with the same inputs; the kernel lets go when a holder dies, however that happens."""
    directory = get_current_settings().home / "dflash-locks"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / key).open("a") as lock:
        if not taken(lock):
            get_run_logger().info("another run is doing %s with the same inputs; waiting for its result", key)
            while not taken(lock):  # polled, so that a cancel gets through
                time.sleep(POLL_SECONDS)
        yield
