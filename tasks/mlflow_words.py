"""What a run directory says, in MLflow's words: rows as metrics, the configuration as params, provenance as tags.

MLflow's charts make a section of all names that share what stands before their last slash, and sort by name within it: hence
numbers of slots and token ranges with leading zeros.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

SPEED_STEPS, SPEED_SECONDS = 10, 10
"""The target's speed is taken over so many steps or seconds, whichever comes first: it delivers in groups of samples."""
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
TRAIN = {
    "lr": "train/learning_rate",
    "seconds": "speed/step_seconds",
    "seconds_remaining": "speed/seconds_remaining",
    "tokens_per_second": "speed/tokens_per_second",
    "drafter_wait_share": "speed/drafter_wait_share",
    "target_wait_share": "speed/target_wait_share",
}
NOT_METRICS = ("step", "time", "samples")
LONGEST_TEXT = 6000  # of a param, in MLflow


def metrics_of(file: str, row: dict[str, Any], edges: Sequence[int]) -> dict[str, float]:
    """What a row of this file says; a value that was not finite (null) is left out. `edges`: stream.bucket_edges."""
    named = {
        "metrics.jsonl": lambda: _of_step(row, edges),
        "heldout.jsonl": lambda: _of_heldout(row),
        "evaluation.jsonl": lambda: _of_evaluation(row),
        "gpu.jsonl": lambda: _of_gpus(row),
        "final.jsonl": lambda: ((f"final/{key}", value) for key, value in row.items() if key not in NOT_METRICS),
    }[file]()
    return {
        re.sub(r"[^\w./-]", "_", name): float(value)  # what MLflow takes in a name
        for name, value in named
        if isinstance(value, (int, float))
    }


def _of_step(row: dict[str, Any], edges: Sequence[int]) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if key in NOT_METRICS:
            continue
        if key == "slot_accuracy":
            yield from _numbered("slot_accuracy/slot", value)
        elif key == "hs_mix":
            yield from zip((f"queue_mix/{name}" for name in _ranges(edges)), value, strict=True)
        elif key in ("hs_bucket_samples", "hs_bucket_bytes"):
            what = key.removeprefix("hs_bucket_")
            yield from zip((f"queue_{what}/{name}" for name in _ranges(edges)), value, strict=True)
        elif key == "hs_dropped":
            yield from ((f"queue/dropped_{reason}", number) for reason, number in value.items())
        elif key.startswith("hs_"):
            yield f"queue/{key.removeprefix('hs_')}", value
        elif key.startswith("gpu_"):
            yield f"memory/{key.removeprefix('gpu_')}", value
        else:
            yield TRAIN.get(key, f"train/{key}"), value


def _of_heldout(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if key == "slot_accuracy":
            yield from _numbered("heldout/slot_accuracy", value)
        elif key not in NOT_METRICS:
            yield f"heldout/{key}", value


def _of_evaluation(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        name = f"eval/{key.removeprefix('eval/')}"
        if name == "eval/tau_interval" and value is not None:
            yield from zip(("eval/tau_low", "eval/tau_high"), value, strict=True)
        elif name == "eval/sets":
            yield from ((f"eval/tau_of_{prompts}", tau) for prompts, tau in (value or {}).items())
        elif key not in NOT_METRICS:
            yield name, value


def _of_gpus(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "gpu/devices", len(row["gpus"])
    for device, values in row["gpus"].items():
        yield from ((f"{device}/{key}", value) for key, value in values.items())


def _numbered(name: str, values: list[float | None]) -> Iterator[tuple[str, Any]]:
    return ((f"{name}_{number:02d}", value) for number, value in enumerate(values, 1))


def _ranges(edges: Sequence[int]) -> list[str]:
    """Names of the buckets' token ranges: 001-064, 065-128, 129-up."""
    digits = len(str(edges[-1] + 1))
    lows = [1, *(edge + 1 for edge in edges)]
    highs = [*(f"{edge:0{digits}d}" for edge in edges), "up"]
    return [f"{low:0{digits}d}-{high}" for low, high in zip(lows, highs, strict=True)]


def target_speed(
    row: dict[str, Any], since: dict[str, Any] | None, bytes_per_token: int | None
) -> tuple[dict[str, float], dict[str, Any]]:
    """(what the target has produced per second since the step of `since`, the `since` for the next row).

    A row counts samples on both sides of the queue, but tokens on the drafter's side only. What the target has put in is what
    was drawn and by how much the queue has grown, which is known in bytes.
    """
    here = {
        "step": row["step"],
        "time": row["time"],
        "in": row["hs_in"],
        "out": row["hs_out"],
        "bytes": row["hs_bytes"],
    }
    here["tokens"] = 0  # drawn since
    if since is None or row["hs_out"] <= since["out"]:  # the counts begin anew with every process
        return {}, here
    drawn = since["tokens"] + row["tokens"]
    seconds = row["time"] - since["time"]
    if seconds <= 0 or (row["step"] - since["step"] < SPEED_STEPS and seconds < SPEED_SECONDS):
        return {}, since | {"tokens": drawn}
    metrics = {"speed/target_samples_per_second": (row["hs_in"] - since["in"]) / seconds}
    if bytes_per_token is not None:
        tokens = drawn + (row["hs_bytes"] - since["bytes"]) / bytes_per_token
        metrics["speed/target_tokens_per_second"] = tokens / seconds
    return metrics, here


def feature_bytes(provenance: dict[str, Any]) -> int | None:
    """Bytes of one token's features in the queue; None for a dtype of another kind."""
    target = provenance["target"]
    size = BYTES.get(target["dtype"])
    return size and len(provenance["drafter"]["target_layer_ids"]) * target["width"] * size


def params_of(config: dict[str, dict[str, Any]]) -> dict[str, str]:
    """{section.field: text} of a whole config.json."""
    return {f"{section}.{field}": as_text(value) for section, of in config.items() for field, value in of.items()}


def tags_of(provenance: dict[str, Any]) -> dict[str, str]:
    """What identifies a run, of provenance.json; what is unknown is left out."""
    target, heldout = provenance["target"], provenance["heldout"] or {}
    tags = {
        "git.commit": provenance["code"]["commit"],
        "mlflow.source.git.commit": provenance["code"]["commit"],  # where MLflow's page shows it
        "git.dirty": provenance["code"]["dirty"],
        "target.name": target["name"],
        "target.revision": target["revision"],
        "target.sha256": target["sha256"],
        "target.template_sha256": target["tokenizer"]["chat_template_sha256"],
        "layer_ids": provenance["drafter"]["target_layer_ids"],
        "data.sha256": provenance["data"]["digest"],
        "heldout.sha256": heldout.get("digest"),
        "parent": provenance["parent"],
    }
    return {name: as_text(value) for name, value in tags.items() if value is not None}


def as_text(value: Any) -> str:
    """A text as it is, all else as JSON; without secrets, and not longer than MLflow takes it."""
    text = value if isinstance(value, str) else json.dumps(value)
    return without_secret(text)[:LONGEST_TEXT]


def without_secret(text: str) -> str:
    """A URL, or a text with URLs in it, without user names, passwords and keys."""
    text = re.sub(r"://[^/\s\"'@:]*:[^\s\"']*@|://[^/\s\"']*@", "://", text)
    return re.sub(r"(?i)([?&][\w.-]*(?:key|token|secret|password|sig|signature|auth)=)[^&\s\"'#]*", r"\1***", text)
