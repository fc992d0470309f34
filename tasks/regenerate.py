"""Prompts to the target's own answers: a stage."""

import dataclasses
from pathlib import Path
from typing import Any

from prefect import task

from dflash.config import Config
from dflash.files import sha256_of
from tasks.stages import STAGE, code_of, record_of, reported_job, run_stage
from tasks.target_files import target_digest

CODE = (
    "regenerate",
    "answers",
    "answer_store",
    "endpoint",
    "generation",
    "prompt_file",
    "conversation",
    "sampling",
    "target",
)
NOT_DECIDING = (
    "out",
    "batch_rows",
    "requests_in_flight",
    "request_seconds",
    "outage_seconds",
    "endpoint_key",
    "prompts",
)
"""Fields that do not change an answer."""


def regenerate(config: Config, *, refresh: bool) -> Config:
    """The configuration with the target's own answers as its data; as it is where no prompts are given."""
    section = config.regenerate
    if section.prompts is None:
        return config
    if not Path(section.prompts).is_file():
        raise ValueError(f"regenerate.prompts={section.prompts}: no such file; give a JSONL or text file of prompts")
    record = run_stage(regenerate_stage, inputs_of(config), refresh=refresh, config=config, refresh_answers=refresh)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, path=record["conversations"]))


def inputs_of(config: Config) -> dict[str, Any]:
    """Everything that decides the answers, and which prompts they are to."""
    section = config.regenerate
    assert section.prompts is not None
    return {
        "code": code_of(*CODE),
        "prompts": sha256_of(Path(section.prompts)),
        "target": target_digest(config.target),
        "dtype": config.target.dtype,
        "template_kwargs": config.data.template_kwargs,
        "regenerate": {name: value for name, value in dataclasses.asdict(section).items() if name not in NOT_DECIDING},
    }


@task(name="regenerate", **STAGE)
def regenerate_stage(key: str, config: Config, refresh_answers: bool) -> dict[str, Any]:
    """The target answers the prompts; what a killed run has answered is not asked again."""
    made = reported_job(
        "dflash.regenerate", key, config, Path(config.regenerate.out), ["--refresh"] if refresh_answers else []
    )
    return record_of(
        "regenerate", [Path(made["conversations"])], conversations=made["conversations"], report=made["report"]
    )
