"""What a run asks of the machine, checked before anything is started; without torch, so that whoever starts a run may ask too."""

import json
import math
import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dflash.config import Config, names_local_directory
from dflash.shape import Shape, chosen_layers, parameter_count, resolve_shape

CHECKPOINT_BYTES = 12  # a parameter: float32 weight and two moments
OPEN_FILES = 256  # a quarter of the usual limit; libraries, logs and a checkpoint being written need some tens
LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 4}  # on a CPU
# of a text config; without one of them nobody but transformers knows its model's shape
SHAPE_KEYS = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings")


def check_machine(config: Config, *, gpu_count: int | None, run_root: Path, samples: int | None = None) -> None:
    """Refuses a run that this machine cannot hold, in seconds and before anything is started. Raises ValueError, one line.

    `gpu_count` is None where nobody knows; then no GPU is judged. `samples` is how many the prepared data has, where that is known;
    otherwise the checkpoints are counted by run.max_steps and checkpoint.keep. A target by hub name is not downloaded for this: its
    weights and the drafter's size, and with it the disk, are left to the trainer's set-up, as are weights on a GPU. Devices and
    memory of a cluster are not this machine's: `python -m dflash.cluster` checks those.
    """
    elsewhere = config.stream.engine == "ray" and "RAY_ADDRESS" in os.environ
    _check_open_files()
    check_data_files(config)
    _check_other_files(config)
    if not elsewhere:
        _check_devices(config, gpu_count)
        queue_bytes(config)
    directory = _target_directory(config.target.name)
    if directory is None:
        return
    if not elsewhere:
        _check_target_memory(config, directory, gpu_count)
    shape = drafter_shape(config, directory)
    if shape is not None:
        check_disk(config, shape, run_root, samples=samples)


# ---------------------------------------------------------------- shared with the trainer's set-up


def check_data_files(config: Config) -> None:
    """Raises ValueError for a file of conversations that is not there."""
    for knob, path in (("data.path", config.data.path), ("data.heldout_path", config.data.heldout_path)):
        if path and not Path(path).exists():
            raise ValueError(f"{knob}={path}: no such file; give a JSONL file of conversations")


def queue_bytes(config: Config) -> int:
    """The queue's limit in bytes: the configured one, or half of the memory that is free. Raises ValueError for more than that."""
    free = free_memory_bytes()
    limit = config.stream.hs_queue_bytes or free // 2
    if limit > free:
        raise ValueError(
            f"stream.hs_queue_bytes={limit} exceeds the {free} bytes of memory that are free; lower it (none: half of them)"
        )
    return limit


def free_memory_bytes() -> int:
    """Memory that this process may still take: the machine's, or less where its control group says so."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no control group, or the older kind
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))


def check_disk(config: Config, shape: Shape, place: Path, *, samples: int | None) -> None:
    """Raises ValueError where the checkpoints that will be kept do not fit the disk of `place`, which need not exist yet."""
    count, each = kept_checkpoints(config, samples), CHECKPOINT_BYTES * parameter_count(shape)
    there = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if count * each > free:
        raise ValueError(
            f"{place}: {count} checkpoints x {each} bytes = {count * each} do not fit the {free} bytes free on its disk; "
            "make room, set checkpoint.keep or raise checkpoint.every_steps"
        )


def kept_checkpoints(config: Config, samples: int | None) -> int:
    """How many lie on the disk at a time, at most; two where neither steps nor checkpoint.keep bound them."""
    section, run = config.checkpoint, config.run
    steps = [] if run.max_steps is None else [run.max_steps]
    if samples is not None:
        steps.append(run.epochs * math.ceil(samples / config.optim.samples_per_step))
    counts = []
    if section.every_steps == 0:
        counts.append(1)
    elif steps:
        counts.append(1 + min(steps) // section.every_steps)
    if section.keep is not None:
        # the new one is complete before the oldest goes, and the best one never goes
        counts.append(section.keep + 1 + bool(config.evaluate.during_training))
    return min(counts, default=2)


# ---------------------------------------------------------------- the parts


def _check_open_files() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < OPEN_FILES:
        raise ValueError(f"this process may open {limit} files, a trainer needs {OPEN_FILES}; raise it: ulimit -n 1024")


def _check_devices(config: Config, gpu_count: int | None) -> None:
    named = [("target.devices", device) for device in config.target.devices]
    for knob, device in (*named, ("drafter.device", config.drafter.device)):
        kind, _, index = device.partition(":")
        number = int(index) if index.isdecimal() else 0
        if kind == "cuda" and gpu_count is not None and number >= gpu_count:
            have = f"GPUs 0 to {gpu_count - 1}" if gpu_count else "no GPU"
            raise ValueError(f"{knob}={device}: this machine has {have}; name one that is there, auto or cpu")


def _check_other_files(config: Config) -> None:
    prompts = [("regenerate.prompts", config.regenerate.prompts)]
    prompts += [("evaluate.prompts", path) for path in config.evaluate.prompts or ()]
    for knob, path in prompts:
        if path is not None and not Path(path).exists():
            raise ValueError(f"{knob}={path}: no such file; give a file of prompts")
    for knob, path, file, remedy in (
        (
            "checkpoint.resume_from",
            config.checkpoint.resume_from,
            "manifest.json",
            "a complete step-XXXXXXXX directory",
        ),
        ("drafter.init_from", config.drafter.init_from, "config.json", "an exported drafter's directory"),
    ):
        if path is not None and not (Path(path) / file).is_file():
            fault = f"no {file} in it" if Path(path).is_dir() else "no such directory"
            raise ValueError(f"{knob}={path}: {fault}; name {remedy}")


def _target_directory(name: str) -> Path | None:
    """The target's directory, or None for a hub name. Raises ValueError for one that is not there."""
    if not names_local_directory(name):
        return None
    directory = Path(name).expanduser()
    if not (directory / "config.json").is_file():
        fault = "no config.json in it" if directory.is_dir() else "no such directory"
        raise ValueError(f"target.name={name}: {fault}; give a directory that save_pretrained wrote, or a hub name")
    return directory


def _check_target_memory(config: Config, directory: Path, gpu_count: int | None) -> None:
    target = config.target
    named = target.devices * config.cluster.target_workers  # 1 where the engine is not ray
    devices = [device if device != "auto" else "cpu" if gpu_count == 0 else "cuda" for device in named]
    copies = devices.count("cpu")
    if not copies:
        return
    values = sum(_values_in(path) for path in _weight_files(directory))
    need, free = copies * values * ITEM_BYTES[target.dtype], free_memory_bytes()
    if need > free:
        raise ValueError(
            f"target.name={target.name}: {copies} x {values} weights in memory take {need} bytes, {free} are free; "
            "name a smaller target, fewer target.devices (cluster.target_workers) or target.dtype=bfloat16"
        )


def _weight_files(directory: Path) -> list[Path]:
    """The files that transformers loads; some targets bring a second copy in another layout."""
    whole = directory / "model.safetensors"
    return [whole] if whole.exists() else sorted(directory.glob("model-*.safetensors"))


def _values_in(path: Path) -> int:
    """Numbers that a safetensors file holds, by its header."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, LONGEST_HEADER)))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{path} is no safetensors file; is target.name's directory whole?") from None


def drafter_shape(config: Config, directory: Path) -> Shape | None:
    """The drafter's shape by the target's own config.json; None where that leaves out what only transformers knows."""
    text = _text_config(directory / "config.json")
    if any(not isinstance(text.get(key), int) for key in SHAPE_KEYS):
        return None
    layers = text["num_hidden_layers"]
    return resolve_shape(
        config.drafter,
        target_config=SimpleNamespace(**text),
        width=text["hidden_size"],
        vocabulary=text["vocab_size"],
        target_layers=layers,
        target_layer_ids=chosen_layers(layers, config.target.layer_ids, config.target.captured_layers),
        mask_token_id=config.drafter.mask_token_id or 0,  # changes no size
    )


def _text_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return values.get("text_config") or values  # a model of several parts has its language model's apart
    except (ValueError, AttributeError):
        raise ValueError(f"target.name={path.parent}: its config cannot be read; is it whole?") from None
