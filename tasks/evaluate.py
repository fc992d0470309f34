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
NOT_DECIDING = ("prompts", "during_training")
"""Fields that change nothing here; of the prompts it is their content that decides."""
SHIPPED_PROMPTS = Path(configuration.__file__).parent / "prompts"


def evaluate(config: Config, drafter: Path, champion: Champion | None, *, refresh: bool) -> dict[str, Any]:
    """The record of decoding an exported drafter, beside its export; `result` is the JSON of `python -m dflash.evaluate`."""
    for path in _prompts_of(config):
        if not path.is_file():
            raise ValueError(f"evaluate.prompts={path}: no such file; give JSONL or text files of prompts")
    against = None if champion is None else champion.directory
    inputs = inputs_of(config, drafter, against)
    record = run_stage(evaluate_stage, inputs, refresh=refresh, config=config, drafter=drafter, against=against)
    return record | {"result": json.loads(Path(record["evaluation"]).read_text())}


def _prompts_of(config: Config) -> list[Path]:
    return [Path(path) for path in config.evaluate.prompts or sorted(SHIPPED_PROMPTS.glob("*.jsonl"))]


def inputs_of(config: Config, drafter: Path, against: Path | None) -> dict[str, Any]:
    """Everything that decides what decoding measures, but the machine's speed."""
    return {
        "code": code_of(*CODE),
        "drafter": [sha256_of(drafter / name) for name in ("config.json", WEIGHTS)],
        "champion": against and [sha256_of(against / name) for name in ("config.json", WEIGHTS)],
        "target": target_digest(config.target),
        "dtype": config.target.dtype,
        "devices": config.target.devices,
        "prompts": {path.stem: sha256_of(path) for path in _prompts_of(config)},
        "evaluate": {
            name: value for name, value in dataclasses.asdict(config.evaluate).items() if name not in NOT_DECIDING
        },
        "template_kwargs": config.data.template_kwargs,
    }


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
