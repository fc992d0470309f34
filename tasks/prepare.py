"""Conversations to tokenised samples: a stage."""

from pathlib import Path
from typing import Any

from prefect import task

from dflash.config import Config
from dflash.files import sha256_of
from tasks.stages import STAGE, code_of, record_of, reported_job, run_stage
from tasks.target_files import tokenizer_digest

CODE = ("data", "conversation")


def prepare(config: Config, *, refresh: bool) -> dict[str, Any]:
    """The record of the tokenised data, training and held-out, which the trainer finds again by content."""
    for knob, path in (("data.path", config.data.path), ("data.heldout_path", config.data.heldout_path)):
        if path is not None and not Path(path).is_file():
            raise ValueError(f"{knob}={path}: no such file; give a JSONL file of conversations")
    return run_stage(prepare_stage, inputs_of(config), refresh=refresh, config=config, rebuild=refresh)


def inputs_of(config: Config) -> dict[str, Any]:
    """Everything that decides the tokenised data."""
    heldout = config.data.heldout_path
    return {
        "code": code_of(*CODE),
        "data": sha256_of(Path(config.data.path)),
        "heldout": None if heldout is None else sha256_of(Path(heldout)),
        "tokenizer": tokenizer_digest(config.target),
        "template_kwargs": config.data.template_kwargs,
        "max_tokens": config.data.max_tokens,
        "block_size": config.drafter.block_size,  # it is refused where no reply is that long
        "directory": config.data.prepared_dir,
    }


@task(name="prepare", **STAGE)
def prepare_stage(key: str, config: Config, rebuild: bool) -> dict[str, Any]:
    """Chat template, tokens and loss mask of every conversation, proven on some of them."""
    made = reported_job("dflash.data", key, config, Path(config.data.prepared_dir), ["--rebuild"] if rebuild else [])
    sets = {name: prepared for name, prepared in made.items() if prepared is not None}
    files = [path for prepared in sets.values() for path in sorted(Path(prepared["directory"]).iterdir())]
    return record_of("prepare", files, **sets)
