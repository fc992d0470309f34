"""A run directory as a trainer leaves it, without training, and what MLflow holds of it."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from dflash import config as configuration
from dflash.metrics import MetricsFile
from dflash.run_dir import create_run, write_status
from tasks.mlflow_words import metrics_of
from tasks.tracking import connect

EDGES = (8, 16)
LAYERS, WIDTH = [0, 2], 4
TOKEN_BYTES = 2 * WIDTH * 4
PROVENANCE = {
    "code": {"commit": "c" * 40, "dirty": False},
    "packages": {"python": "3.11"},
    "target": {
        "name": "org/tiny",
        "revision": "main",
        "width": WIDTH,
        "dtype": "float32",
        "sha256": "a" * 64,
        "tokenizer": {"vocabulary_sha256": "b" * 64, "chat_template_sha256": "7" * 64},
    },
    "data": {"path": "/data/train.jsonl", "digest": "d" * 64, "report": {"samples": 12, "tokens": 345}},
    "heldout": {"path": "/data/heldout.jsonl", "digest": "e" * 64},
    "drafter": {"target_layer_ids": LAYERS},
    "parent": None,
    "started_from": None,
}


def new_run(root: Path, *, steps: int = 0, provenance: dict[str, Any] | None = None) -> Path:
    """A run directory with rows of this many steps, in state running."""
    config = configuration.parse(
        {
            "target": {"name": "org/tiny"},
            "data": {"path": "/data/train.jsonl"},
            "stream": {"bucket_edges": list(EDGES)},
            "run": {"name": "demo", "root": str(root)},
        }
    )
    run_dir = create_run(config)
    (run_dir / "provenance.json").write_text(json.dumps(provenance or PROVENANCE))
    write_status(run_dir, state="running", step=steps)
    add_rows(run_dir, range(1, steps + 1))
    return run_dir


def add_rows(run_dir: Path, steps: range, *, after_step: int = 2**31, loss: float = 1.0) -> None:
    """Appends a row for each step, cut off first behind `after_step`, as a resumed trainer does."""
    with MetricsFile(run_dir / "metrics.jsonl", after_step=after_step) as metrics:
        for step in steps:
            metrics.write(row(step, loss=loss))


def row(step: int, *, loss: float = 1.0) -> dict[str, Any]:
    """A row of every key that the trainer writes; a step takes half a second, draws 2 samples of 10 tokens, and 3 come in."""
    return {
        "step": step,
        "epoch": 0,
        "loss": loss + 1 / step,
        "tau": 1.5,
        "slot_accuracy": [0.5, 0.25, None],
        "gradient_norm": float("nan") if step % 5 == 0 else 2.0,
        "lr": 1e-3,
        "samples": [1, 2],
        "skipped_nonfinite": step // 5,
        "seconds_remaining": 10.0,
        "time": 1_800_000_000 + step / 2,
        "seconds": 0.5,
        "tokens": 20,
        "tokens_per_second": 40.0,
        "drafter_wait_share": 0.0,
        "target_wait_share": 0.1,
        "hs_samples": step,
        "hs_bytes": step * 10 * TOKEN_BYTES,
        "hs_bucket_samples": [0, step, 0],
        "hs_bucket_bytes": [0, step * 10 * TOKEN_BYTES, 0],
        "hs_gate_seconds": 0.0,
        "hs_blocked_seconds": 0.5,
        "hs_age_mean": 1.5,
        "hs_age_max": 2,
        "hs_mix": [0.0, 1.0, 0.0],
        "hs_mix_distance": 0.25,
        "hs_in": 3 * step,
        "hs_out": 2 * step,
        "hs_dropped": {"too long": 1},
        "gpu_allocated_bytes": 1000,
        "gpu_allocated_peak_bytes": 2000,
        "gpu_allocation_retries": 0,
    }


def in_mlflow(run_id: str) -> dict[tuple[str, int], list[float]]:
    """{(metric, step): every value that MLflow has of it}."""
    client, values = connect(), defaultdict(list)
    for key in client.get_run(run_id).data.metrics:
        for metric in client.get_metric_history(run_id, key):
            values[key, metric.step].append(metric.value)
    return dict(values)


def in_files(run_dir: Path) -> dict[tuple[str, int], list[float]]:
    """The same of the rows of the run directory as they are now, but for the target's speed."""
    values: dict[tuple[str, int], list[float]] = {}
    edges = json.loads((run_dir / "config.json").read_text())["stream"]["bucket_edges"]
    for name in ("metrics.jsonl", "heldout.jsonl", "evaluation.jsonl", "gpu.jsonl", "final.jsonl"):
        lines = (run_dir / name).read_text().splitlines() if (run_dir / name).exists() else []
        for line in map(json.loads, lines):
            values |= {(key, line["step"]): [value] for key, value in metrics_of(name, line, edges).items()}
    return values


def without_speed(values: dict[tuple[str, int], list[float]]) -> dict[tuple[str, int], list[float]]:
    """All but the target's speed, of which no step has two values."""
    speed = {key: of for key, of in values.items() if key[0].startswith("speed/target_") and "wait" not in key[0]}
    assert all(len(of) == 1 for of in speed.values())
    return {key: of for key, of in values.items() if key not in speed}
