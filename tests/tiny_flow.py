"""The smallest real training flow: a tiny target, a dozen conversations, a few steps; and its configuration as a file."""

import json
from pathlib import Path
from typing import Any

from tiny import conversations, tiny_target, write_jsonl

from dflash import config as configuration
from dflash.config import Config

PROMPTS = 3


def tiny_flow(root: Path, **changes: Any) -> dict[str, Any]:
    """The values of a flow's configuration, all of whose files are under `root`; changes are section__field=value.

    Lockstep: the same bytes every time. Where every prompt must gain for a drafter to count as better, a few steps do not suffice.
    """
    if not (root / "target").exists():
        root.mkdir(parents=True, exist_ok=True)
        tiny_target(root / "target", hidden=32)
        write_jsonl(root / "data.jsonl", conversations(16, longest_reply=20))
        write_jsonl(root / "heldout.jsonl", conversations(4, seed=1, longest_reply=20))
        asked = [row["messages"][:-1] for row in conversations(PROMPTS, seed=2)]
        write_jsonl(root / "asked.jsonl", [{"messages": messages} for messages in asked])
    values: dict[str, dict[str, Any]] = {
        "target": {"name": str(root / "target"), "layer_ids": [0, 2], "devices": ["cpu"]},
        "data": {
            "path": str(root / "data.jsonl"),
            "heldout_path": str(root / "heldout.jsonl"),
            "max_tokens": 256,
            "prepared_dir": str(root / "prepared"),
        },
        "drafter": {"layers": 2, "block_size": 4, "device": "cpu"},
        "objective": {"anchors": 8},
        "optim": {"samples_per_step": 2},
        "stream": {"engine": "lockstep", "hs_min_ready": 6, "hs_queue_depth": 12, "bucket_edges": [32, 64, 96]},
        "checkpoint": {"every_steps": 4},
        "evaluate": {"prompts": [str(root / "asked.jsonl")], "max_new_tokens": 12},
        "run": {"root": str(root / "runs"), "name": "tiny", "epochs": 1},
    }
    for name, value in changes.items():
        section, field = name.split("__")
        values.setdefault(section, {})[field] = value
    return values


def config_file(path: Path, values: dict[str, Any]) -> str:
    """The path of a file, now holding a configuration: what the flows' parameter `config` is given."""
    path.write_text(json.dumps(values))  # JSON is YAML
    return str(path)


def parsed(values: dict[str, Any]) -> Config:
    return configuration.with_absolute_paths(configuration.parse(values))
