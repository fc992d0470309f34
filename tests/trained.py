"""Real checkpoints of our trainer on tiny targets, two steps old: what export, verification and decoding are tested on."""

from pathlib import Path

from tiny import conversations, tiny_target, write_jsonl

from dflash import checkpoint
from dflash import config as configuration
from dflash.run_dir import create_run
from dflash.train import FINISHED, main

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 24}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}


def trained(root: Path, family: str = "qwen3", **drafter) -> Path:
    """The last checkpoint of a run under `root`, whose target of that family is `root`/family."""
    target = root / family
    if not target.exists():
        tiny_target(target, family, hidden=32)
    data = root / "data.jsonl"
    if not data.exists():
        write_jsonl(data, conversations(12, longest_reply=20))
    values = {
        "target": {"name": str(target), "captured_layers": 2, "devices": ["cpu"]},
        "data": {"path": str(data), "prepared_dir": str(root / "prepared")},
        "drafter": {"layers": 2, "block_size": 4, "device": "cpu"} | drafter,
        "objective": {"anchors": 6},
        "optim": {"samples_per_step": 4},
        "stream": {"engine": "lockstep", "hs_min_ready": 4, "hs_queue_depth": 8},
        "run": {"root": str(root / "runs"), "epochs": 1, "max_steps": 2},
    }
    run_dir = create_run(configuration.parse(values))
    assert main([str(run_dir)]) == FINISHED
    return checkpoint.directory_of(run_dir, 2)
