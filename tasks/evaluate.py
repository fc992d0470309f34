"""Real decoding of held-out prompts with what will be served, against the present champion: a stage."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task

from dflash import config as configuration
from dflash.config import Config
from dflash.files import sha256_of, write_json
from tasks.child import run_job
from tasks.registry import WEIGHTS, Champion
from tasks.stages import STAGE, code_of, record_of, run_stage
from tasks.target_files import target_digest

CODE = (
    "evaluate",
    "decode",
    "sampling",
    "drafter",
    "attention",
    "shape",
    "formats",
    "conversation",
    "prompt_file",
    "target",
)
SHIPPED_PROMPTS = Path(configuration.__file__).parent / "prompts"


def evaluate(config: Config, drafter: Path, champion: Champion | None, *, refresh: bool) -> dict[str, Any]:
    """The record of decoding an exported drafter, beside its export; `result` is the JSON of `python -m dflash.evaluate`."""
    prompts = config.evaluate.prompts or tuple(sorted(map(str, SHIPPED_PROMPTS.glob("*.jsonl"))))
    for path in prompts:
        if not Path(path).is_file():
            raise ValueError(f"evaluate.prompts={path}: no such file; give JSONL or text files of prompts")
    inputs = {
        "code": code_of(*CODE),
        "drafter": [sha256_of(drafter / name) for name in ("config.json", WEIGHTS)],
        "champion": champion and [sha256_of(champion.directory / name) for name in ("config.json", WEIGHTS)],
        "target": target_digest(config.target),
        "dtype": config.target.dtype,
        "devices": config.target.devices,
        "prompts": {Path(path).stem: sha256_of(Path(path)) for path in prompts},
        "evaluate": {name: value for name, value in dataclasses.asdict(config.evaluate).items() if name != "prompts"},
        "template_kwargs": config.data.template_kwargs,
    }
    against = None if champion is None else champion.directory
    record = run_stage(evaluate_stage, inputs, refresh=refresh, config=config, drafter=drafter, against=against)
    return record | {"result": json.loads(Path(record["evaluation"]).read_text())}


@task(name="evaluate", **STAGE)
def evaluate_stage(key: str, config: Config, drafter: Path, against: Path | None) -> dict[str, Any]:
    """Every prompt decoded with the drafter, with the champion and without, by turns."""
    directory = drafter.parent.parent / "evaluations"
    directory.mkdir(exist_ok=True)
    settings, result, picture = (directory / f"{key}.{kind}" for kind in ("config.json", "json", "png"))
    write_json(settings, configuration.to_values(config))
    arguments = [str(drafter), "--config", str(settings), "--out", str(result), "--plot", str(picture)]
    arguments += [] if against is None else ["--against", str(against)]
    run_job("dflash.evaluate", arguments, output=directory / f"{key}.log", log=get_run_logger())
    return record_of("evaluate", [result, picture], evaluation=str(result), picture=str(picture))
