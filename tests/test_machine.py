"""What a machine cannot hold is refused in one line with value and remedy, in seconds, without torch."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import FAMILIES, conversations, tiny_target, write_jsonl

from dflash import config as configuration
from dflash.config import Config
from dflash.drafter import Drafter
from dflash.machine import (
    CHECKPOINT_BYTES,
    check_disk,
    check_machine,
    drafter_shape,
    free_memory_bytes,
    kept_checkpoints,
)
from dflash.run_dir import create_run
from dflash.setup import set_up
from dflash.shape import parameter_count

HUGE = 10**12


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A target, data, prompts, and every bad input that the rows name."""
    place = tmp_path_factory.mktemp("machine")
    target = tiny_target(place / "target", hidden=32)
    write_jsonl(place / "data.jsonl", conversations(8, longest_reply=20))
    write_jsonl(place / "prompts.jsonl", [{"prompt": "How many bridges?"}])
    (place / "empty").mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [HUGE, 1000], "data_offsets": [0, 0]}}).encode()
    for name, weights in (
        ("large", len(header).to_bytes(8, "little") + header),
        ("torn", b"\x05"),
        ("no-header", b"\xff" * 64),
    ):
        shutil.copytree(target, place / name)
        (place / name / "model.safetensors").write_bytes(weights)
    shutil.copytree(target, place / "torn-config")
    (place / "torn-config" / "config.json").write_text("{")
    return place


def config(place: Path, changes: dict[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {
        "target": {"name": str(place / "target"), "captured_layers": 2, "devices": ["cpu"]},
        "data": {"path": str(place / "data.jsonl"), "prepared_dir": str(place / "prepared")},
        "drafter": {"layers": 1, "block_size": 4, "device": "cpu"},
        "stream": {"hs_min_ready": 4, "hs_queue_depth": 8},
        "run": {"root": str(place / "runs")},
    }
    for name, value in changes.items():
        section, field = name.split(".")
        values.setdefault(section, {})[field] = value
    return configuration.parse(values)


# changes, GPUs, value, remedy
REFUSALS: dict[str, tuple[dict[str, Any], int | None, str, str]] = {
    "target's GPU on a machine without": ({"target.devices": ["cuda:0"]}, 0, "target.devices=cuda:0", "has no GPU"),
    "target's second GPU": ({"target.devices": ["cuda:0", "cuda:1"]}, 1, "target.devices=cuda:1", "GPUs 0 to 0"),
    "drafter's GPU": ({"drafter.device": "cuda:4"}, 4, "drafter.device=cuda:4", "GPUs 0 to 3; name one that is there"),
    "drafter's GPU without a number": ({"drafter.device": "cuda"}, 0, "drafter.device=cuda", "auto or cpu"),
    "no target": ({"target.name": "{place}/none"}, None, "target.name={place}/none: no such directory", "hub name"),
    "target without config": (
        {"target.name": "{place}/empty"},
        None,
        "{place}/empty: no config.json",
        "save_pretrained",
    ),
    "target with torn config": ({"target.name": "{place}/torn-config"}, None, "{place}/torn-config", "is it whole?"),
    "no data": ({"data.path": "{place}/none"}, None, "data.path={place}/none", "give a JSONL file"),
    "no held-out data": ({"data.heldout_path": "{place}/none"}, None, "data.heldout_path={place}/none", "give a JSONL"),
    "no prompts": ({"regenerate.prompts": "{place}/none"}, None, "regenerate.prompts={place}/none", "file of prompts"),
    "no second prompts": (
        {"evaluate.prompts": ["{place}/prompts.jsonl", "{place}/none"]},
        None,
        "evaluate.prompts={place}/none",
        "give a file of prompts",
    ),
    "no checkpoint": ({"checkpoint.resume_from": "{place}/none"}, None, "resume_from={place}/none", "step-XXXXXXXX"),
    "a checkpoint that is none": (
        {"checkpoint.resume_from": "{place}/empty"},
        None,
        "no manifest.json",
        "step-XXXXXXXX",
    ),
    "no drafter": ({"drafter.init_from": "{place}/none"}, None, "init_from={place}/none", "an exported drafter's"),
    "a drafter that is none": (
        {"drafter.init_from": "{place}/empty"},
        None,
        "no config.json in it",
        "exported drafter's",
    ),
    "queue above the memory": ({"stream.hs_queue_bytes": 10**15}, None, "hs_queue_bytes=1000000000000000", "lower it"),
    "target above the memory": (
        {"target.name": "{place}/large"},
        None,
        "target.name={place}/large: 1 x",
        "smaller target",
    ),
    "target on the CPU because there is no GPU": (
        {"target.name": "{place}/large", "target.devices": ["auto"]},
        0,
        "target.name={place}/large",
        "smaller target",
    ),
    "torn weights": ({"target.name": "{place}/torn"}, None, "{place}/torn/model.safetensors", "whole?"),
    "weights without a header": ({"target.name": "{place}/no-header"}, None, "{place}/no-header/model", "whole?"),
    "checkpoints above the disk": ({"drafter.intermediate_size": HUGE}, None, "2 checkpoints x", "make room"),
    "too many layers": ({"target.captured_layers": 9}, None, "target.captured_layers=9", "lower it"),
    "heads that do not divide": ({"drafter.heads": 4, "drafter.kv_heads": 3}, None, "kv_heads=3", "change one"),
}
FINE: dict[str, tuple[dict[str, Any], int | None]] = {
    "the least": ({}, None),
    "without a GPU": ({}, 0),
    "GPUs that are there": ({"target.devices": ["cuda:0", "cuda:1"], "drafter.device": "cuda:2"}, 3),
    "GPUs that nobody knows": ({"target.devices": ["cuda:7"], "drafter.device": "cuda"}, None),
    "auto": ({"target.devices": ["auto"], "drafter.device": "auto"}, 0),
    "a hub name, which is not asked for": ({"target.name": "nobody/none", "drafter.intermediate_size": HUGE}, 0),
    "a large target on GPUs": ({"target.name": "{place}/large", "target.devices": ["cuda:0"]}, 1),
    "prompts": ({"regenerate.prompts": "{place}/prompts.jsonl", "evaluate.prompts": ["{place}/prompts.jsonl"]}, None),
}


def filled(changes: dict[str, Any], place: Path) -> dict[str, Any]:
    return json.loads(json.dumps(changes).replace("{place}", str(place)))


@pytest.mark.parametrize("row", REFUSALS)
def test_what_the_machine_cannot_hold_is_refused_in_one_line_with_value_and_remedy(place, row):
    changes, gpu_count, value, remedy = REFUSALS[row]
    with pytest.raises(ValueError, match=re.escape(remedy)) as refusal:
        check_machine(config(place, filled(changes, place)), gpu_count=gpu_count, run_root=place / "runs")
    message = str(refusal.value)
    assert "\n" not in message
    assert value.format(place=place) in message


@pytest.mark.parametrize("row", FINE)
def test_what_the_machine_can_hold_passes_and_nothing_is_written(place, row):
    changes, gpu_count = FINE[row]
    before = sorted(place.rglob("*"))
    check_machine(config(place, filled(changes, place)), gpu_count=gpu_count, run_root=place / "not" / "yet" / "runs")
    assert sorted(place.rglob("*")) == before


def test_too_few_open_files_are_refused(place):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with pytest.raises(ValueError, match="may open 200 files.*ulimit -n"):
            check_machine(config(place, {}), gpu_count=None, run_root=place)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_copies_on_the_cpu_count_and_a_second_layout_of_the_weights_does_not(place, tmp_path):
    target = shutil.copytree(place / "target", tmp_path / "target")
    fits = int(free_memory_bytes() * 0.6) // 4  # float32 values: one copy fits, two do not
    header = json.dumps({"w": {"dtype": "BF16", "shape": [fits], "data_offsets": [0, 0]}}).encode()
    for name in ("model.safetensors", "consolidated.safetensors"):
        (target / name).write_bytes(len(header).to_bytes(8, "little") + header)
    named = {"target.name": str(target)}
    check_machine(config(place, named), gpu_count=0, run_root=place)
    two = named | {"target.devices": ["cpu", "cpu"]}
    with pytest.raises(ValueError, match=f"2 x {fits} weights"):
        check_machine(config(place, two), gpu_count=0, run_root=place)
    check_machine(config(place, two | {"target.dtype": "bfloat16"}), gpu_count=0, run_root=place)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_drafters_size_is_that_of_the_trainers_set_up(place, tmp_path, family):
    target = tiny_target(tmp_path / "target", family, hidden=32)
    settings = config(place, {"target.name": str(target), "run.root": str(tmp_path)})
    ours = drafter_shape(settings, target)
    assert ours is not None
    drafter = set_up(settings, create_run(settings)).drafter
    assert parameter_count(ours) == sum(parameter.numel() for parameter in drafter.parameters())
    assert parameter_count(ours) == parameter_count(Drafter(ours).shape)


def test_a_text_config_inside_another_is_found_and_one_that_leaves_out_a_size_is_left_to_the_set_up(place, tmp_path):
    values = json.loads((place / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": values, "vision_config": {}}))
    settings = config(place, {})
    assert drafter_shape(settings, tmp_path) == drafter_shape(settings, place / "target")
    del values["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert drafter_shape(settings, tmp_path) is None


@pytest.mark.parametrize(
    ("changes", "samples", "count"),
    [
        ({}, None, 2),  # nobody knows: the new one is complete before the old one goes
        ({"checkpoint.every_steps": 0}, None, 1),
        ({"run.max_steps": 10, "checkpoint.every_steps": 3}, None, 4),
        ({"run.max_steps": 0, "checkpoint.every_steps": 3}, None, 1),
        ({"checkpoint.keep": 3}, None, 4),
        ({"checkpoint.keep": 3, "evaluate.during_training": 1}, None, 5),
        ({"checkpoint.keep": 3, "run.max_steps": 10, "checkpoint.every_steps": 9}, None, 2),
        ({"run.epochs": 2, "optim.samples_per_step": 4, "checkpoint.every_steps": 2}, 10, 4),  # 2 x 3 steps
        ({"run.epochs": 2, "optim.samples_per_step": 4, "checkpoint.every_steps": 2, "run.max_steps": 3}, 10, 2),
        ({"checkpoint.keep": 3, "run.epochs": 1}, 8, 1),
    ],
)
def test_checkpoints_that_are_kept_are_counted(place, changes, samples, count):
    assert kept_checkpoints(config(place, changes), samples) == count


def test_the_disk_is_that_of_the_directory_that_will_hold_the_runs(place):
    settings = config(place, {})
    shape = drafter_shape(settings, place / "target")
    assert shape is not None
    each = CHECKPOINT_BYTES * parameter_count(shape)
    huge = config(place, {"checkpoint.every_steps": 1, "run.max_steps": 10**15})
    with pytest.raises(ValueError, match=f"{place}/not/yet: {10**15 + 1} checkpoints x {each} bytes"):
        check_disk(huge, shape, place / "not" / "yet", samples=None)
    check_disk(huge, shape, place / "not" / "yet", samples=8)


def test_free_memory_is_a_positive_part_of_the_machines():
    assert 0 < free_memory_bytes() < 1 << 50


def test_it_is_asked_without_torch():
    code = "import dflash.machine, dflash.run_dir, dflash.data, sys; print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
