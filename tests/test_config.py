"""Every knob is documented, read as it is written, and refused by name when it is wrong."""

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest

from dflash.config import (
    FLAT_FLAGS,
    SECTIONS,
    Config,
    ObjectiveConfig,
    add_arguments,
    from_arguments,
    gamma_of,
    parse,
    read_file,
    read_values,
    to_values,
    with_absolute_paths,
)

FIELDS = [(section, name) for section, cls in SECTIONS.items() for name in cls.__dataclass_fields__]


def values(**sections: dict) -> dict:
    """The least that is a run, with the fields of these sections over it."""
    least = {"target": {"name": "some/model"}, "data": {"path": "train.jsonl"}}
    return {section: least.get(section, {}) | sections.get(section, {}) for section in {**least, **sections}}


def from_command_line(*words: str) -> Config:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(words))


LEAST = ("--target.name", "some/model", "--data.path", "train.jsonl")


# -- documentation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_every_field_has_a_docstring_that_the_help_shows_with_its_default(section, name):
    description = SECTIONS[section].__pydantic_fields__[name].description
    assert description, f"{section}.{name}"
    assert description.rstrip().endswith((".", ")")), description
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    help_text = " ".join(parser.format_help().split())
    assert f"--{section}.{name} VALUE" in help_text
    # argparse breaks lines at hyphens and spaces alike
    assert "".join(description.split()) in help_text.replace(" ", "")


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_has_a_docstring_that_the_help_shows(section):
    """It is the help of a form too, beside the fields'."""
    description = SECTIONS[section].__doc__
    assert description.endswith("."), description
    assert not description.startswith(SECTIONS[section].__name__)  # what dataclass writes where there is none
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert " ".join(description.split()) in " ".join(parser.format_help().split())


def test_the_operators_flags_are_fixed_names_of_fields():
    assert FLAT_FLAGS == {
        "--hs-min-ready": "stream.hs_min_ready",
        "--hs-queue-depth": "stream.hs_queue_depth",
        "--resume-from": "checkpoint.resume_from",
    }
    config = from_command_line(*LEAST, "--hs-min-ready", "3", "--hs-queue-depth", "7", "--resume-from", "runs/a/step-1")
    assert (config.stream.hs_min_ready, config.stream.hs_queue_depth) == (3, 7)
    assert config.checkpoint.resume_from == "runs/a/step-1"


def test_the_papers_and_the_operators_defaults():
    config = parse(values())
    assert (config.stream.hs_min_ready, config.stream.hs_queue_depth, config.checkpoint.resume_from) == (30, 90, None)
    assert (config.drafter.layers, config.drafter.block_size, config.objective.anchors, config.data.max_tokens) == (
        5,
        16,
        512,
        3072,
    )
    assert (config.optim.lr, config.optim.warmup_fraction, config.optim.clip, config.run.epochs) == (6e-4, 0.04, 1.0, 6)
    assert set(to_values(config)) == set(SECTIONS)


def test_a_configuration_is_frozen():
    config = parse(values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim.lr = 1.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim = config.optim  # type: ignore[misc]


# -- refusals --------------------------------------------------------------------------------------------------------

REFUSALS = {
    "no target": ({"data": {"path": "x"}}, ["target.name", "--target.name VALUE"]),
    "no data": ({"target": {"name": "x"}}, ["data.path", "--data.path VALUE"]),
    "target without a name": ({"target": {"dtype": "auto"}, "data": {"path": "x"}}, ["target.name is not set"]),
    "not a mapping": (["target"], ["mapping of sections", "list"]),
    "a section that is a text": (values() | {"optim": "fast"}, ["optim", "fast"]),
    "an empty section": (values() | {"optim": None}, ["optim"]),
    "a target that is a text": ({"target": "some/model", "data": {"path": "x"}}, ["target", "some/model"]),
    "unknown section": (values(optimiser={"lr": 1.0}), ["unknown key optimiser", "optim"]),
    "unknown field": (values(optim={"learning_rate": 1.0}), ["unknown key optim.learning_rate", "lr"]),
    "text for a number": (values(drafter={"layers": "5"}), ["drafter.layers", '"5"']),
    "number for a text": (values(run={"name": 7}), ["run.name", "7"]),
    "fraction for a count": (values(drafter={"layers": 1.5}), ["drafter.layers", "1.5"]),
    "truth for a count": (values(drafter={"layers": True}), ["drafter.layers", "true"]),
    "count for a truth": (values(drafter={"compile": 1}), ["drafter.compile", "1"]),
    "text for a rate": (values(optim={"lr": "fast"}), ["optim.lr", "fast"]),
    "nothing for a number": (values(optim={"lr": None}), ["optim.lr", "null"]),
    "text for a list": (values(stream={"bucket_edges": "256"}), ["stream.bucket_edges", "256"]),
    "text in a list": (values(stream={"bucket_edges": [256, "512"]}), ["stream.bucket_edges", "512"]),
    "one beta": (values(optim={"betas": [0.9]}), ["optim.betas"]),
    "three betas": (values(optim={"betas": [0.9, 0.9, 0.9]}), ["optim.betas"]),
    "a list in the template's arguments": (values(data={"template_kwargs": {"a": [1]}}), ["data.template_kwargs"]),
    "no layers": (values(drafter={"layers": 0}), ["drafter.layers", "0"]),
    "a block of one": (values(drafter={"block_size": 1}), ["drafter.block_size", "1"]),
    "negative mask token": (values(drafter={"mask_token_id": -1}), ["drafter.mask_token_id", "-1"]),
    "no anchors": (values(objective={"anchors": 0}), ["objective.anchors", "0"]),
    "gamma of zero": (values(objective={"gamma": 0}), ["objective.gamma", "0"]),
    "alpha above one": (values(objective={"dpace_alpha": 1.1}), ["objective.dpace_alpha", "1.1"]),
    "unknown loss": (values(objective={"loss": "kl"}), ["objective.loss", "kl", "decay", "dpace"]),
    "unknown dtype": (values(target={"dtype": "fp8"}), ["target.dtype", "fp8", "bfloat16"]),
    "unknown layer type": (values(drafter={"layer_types": ["linear"] * 5}), ["drafter.layer_types", "linear"]),
    "negative rate": (values(optim={"lr": -1e-4}), ["optim.lr", "-0.0001"]),
    "rate that is not a number": (values(optim={"lr": float("nan")}), ["optim.lr"]),
    "infinite rate": (values(optim={"lr": float("inf")}), ["optim.lr"]),
    "warm-up of the whole run": (values(optim={"warmup_fraction": 1.0}), ["optim.warmup_fraction", "1.0"]),
    "beta of one": (values(optim={"betas": [0.9, 1.0]}), ["optim.betas", "1.0", "[0, 1)"]),
    "negative beta": (values(optim={"betas": [-0.1, 0.9]}), ["optim.betas", "-0.1"]),
    "no clip": (values(optim={"clip": 0}), ["optim.clip", "0"]),
    "step of nothing": (values(optim={"samples_per_step": 0}), ["optim.samples_per_step", "0"]),
    "no queue": (values(stream={"hs_queue_depth": 0}), ["stream.hs_queue_depth", "0"]),
    "negative minimum": (values(stream={"hs_min_ready": -1}), ["stream.hs_min_ready", "-1"]),
    "no device": (values(target={"devices": []}), ["target.devices"]),
    "no buckets": (values(stream={"bucket_edges": []}), ["stream.bucket_edges"]),
    "descending buckets": (
        values(stream={"bucket_edges": [512, 256]}),
        ["stream.bucket_edges", "[512, 256]", "ascending"],
    ),
    "equal buckets": (values(stream={"bucket_edges": [256, 256]}), ["stream.bucket_edges", "ascending"]),
    "bucket of nothing": (values(stream={"bucket_edges": [0, 256]}), ["stream.bucket_edges", "positive"]),
    "keep no checkpoint": (values(checkpoint={"keep": 0}), ["checkpoint.keep", "0"]),
    "name that is a path": (values(run={"name": "../other"}), ["run.name", "../other"]),
    "empty name": (values(run={"name": ""}), ["run.name"]),
    "seed of 33 bits": (values(run={"seed": 2**32}), ["run.seed", "4294967296"]),
    "no epochs": (values(run={"epochs": 0}), ["run.epochs", "0"]),
    "queue below its minimum": (
        values(stream={"hs_queue_depth": 29}),
        ["hs_min_ready=30", "hs_queue_depth=29", "lower"],
    ),
    "block longer than a sample": (
        values(data={"max_tokens": 16}, drafter={"block_size": 16}),
        ["data.max_tokens=16", "17", "drafter.block_size"],
    ),
    "layer types of another depth": (
        values(drafter={"layers": 2, "layer_types": ["full_attention"]}),
        ["drafter.layer_types", "1", "drafter.layers=2"],
    ),
    "sliding layers without a window": (
        values(drafter={"layers": 1, "layer_types": ["sliding_attention"]}),
        ["drafter.sliding_window=None", "sliding_attention"],
    ),
    "window without sliding layers": (values(drafter={"sliding_window": 128}), ["drafter.sliding_window=128"]),
    "one target here and there": (
        values(target={"device_map": "auto", "devices": ["cuda:0", "cuda:1"]}),
        ["target.device_map=auto", "target.devices", "cuda:1"],
    ),
    "no patience": (values(supervise={"stall_seconds": 0}), ["supervise.stall_seconds", "0"]),
    "restarts below none": (values(supervise={"max_restarts": -1}), ["supervise.max_restarts", "-1"]),
    "workers without a cluster": (
        values(cluster={"target_workers": 2}),
        ["cluster.target_workers=2", "stream.engine=local", "ray"],
    ),
    "devices by name on a cluster": (
        values(stream={"engine": "ray"}, target={"devices": ["cuda:0", "cuda:1"]}),
        ["target.devices=['cuda:0', 'cuda:1']", "cluster.target_workers", "auto"],
    ),
    "a drafter's device by name on a cluster": (
        values(stream={"engine": "ray"}, drafter={"device": "cuda:3"}),
        ["drafter.device=cuda:3", "cluster.drafter_gpus", "auto"],
    ),
    "a drafter worker on two GPUs": (
        values(stream={"engine": "ray"}, cluster={"drafter_gpus": 2}),
        ["cluster.drafter_gpus=2", "cluster.drafter_workers"],
    ),
    "a GPU and a half": (values(stream={"engine": "ray"}, cluster={"target_gpus": 1.5}), ["cluster.target_gpus=1.5"]),
    "by turns with two": (
        values(stream={"engine": "ray"}, cluster={"lockstep": True, "target_workers": 2}),
        ["cluster.lockstep", "cluster.target_workers=2"],
    ),
    "one drafter in parts": (
        values(stream={"engine": "ray"}, cluster={"shard_drafter": True}),
        ["cluster.shard_drafter", "cluster.drafter_workers=1"],
    ),
    "parts and compiled": (
        values(
            stream={"engine": "ray"},
            cluster={"shard_drafter": True, "drafter_workers": 2},
            drafter={"compile": True},
        ),
        ["cluster.shard_drafter", "drafter.compile"],
    ),
    "two beginnings": (
        values(checkpoint={"resume_from": "a"}, drafter={"init_from": "b"}),
        ["checkpoint.resume_from=a", "drafter.init_from=b"],
    ),
}


@pytest.mark.parametrize(("given", "words"), REFUSALS.values(), ids=REFUSALS)
def test_a_wrong_configuration_is_refused_in_one_line_with_its_value(given, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as refusal:
        parse(given)
    message = str(refusal.value)
    assert type(refusal.value) is ValueError, "pydantic's own error is a ValueError of many lines"
    assert "\n" not in message
    assert all(word in message for word in words), message


# -- files and flags -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate"), [("6e-4", 6e-4), ("6E-04", 6e-4), ("1", 1.0), ("0.1", 0.1), ("2.5e-3", 2.5e-3)]
)
def test_a_rate_is_a_number_however_it_is_written(tmp_path, text, rate):
    file = tmp_path / "run.yaml"
    file.write_text(f"target: {{name: some/model}}\ndata: {{path: train.jsonl}}\noptim: {{lr: {text}}}\n")
    assert from_command_line("--config", str(file)).optim.lr == rate
    assert from_command_line(*LEAST, "--optim.lr", text).optim.lr == rate


def test_flags_override_the_file_and_leave_the_rest_of_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        """
target:
  name: some/model
data:
  path: train.jsonl
  template_kwargs: {enable_thinking: false, level: 3, style: short}
drafter:
  layers: 2
  layer_types: [sliding_attention, full_attention]
  sliding_window: 64
optim:
  lr: 1e-3
  clip: 0.5
"""
    )
    from_file = from_command_line("--config", str(file))
    assert from_file.data.template_kwargs == {"enable_thinking": False, "level": 3, "style": "short"}
    assert from_file.drafter.layer_types == ("sliding_attention", "full_attention")
    config = from_command_line("--config", str(file), "--optim.lr", "2e-3", "--run.seed", "5")
    assert (config.optim.lr, config.optim.clip, config.run.seed, config.drafter.layers) == (2e-3, 0.5, 5, 2)
    assert dataclasses.replace(config, optim=from_file.optim, run=from_file.run) == from_file


def test_values_go_over_a_file_s_field_by_field_and_change_nothing_that_was_given(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("target: {name: some/model}\ndata: {path: a, max_tokens: 64}\n")
    overrides = {"data": {"path": "b"}, "run": {"seed": 3}, "supervise": {}}
    assert read_values(str(file), overrides) == {
        "target": {"name": "some/model"},
        "data": {"path": "b", "max_tokens": 64},
        "run": {"seed": 3},
        "supervise": {},
    }
    assert overrides == {"data": {"path": "b"}, "run": {"seed": 3}, "supervise": {}}
    assert read_values(None, overrides) == overrides


@pytest.mark.parametrize(
    ("content", "overrides", "words"),
    [
        ("target: {name: x}\n", {"optimiser": {"lr": 1.0}}, "unknown key optimiser; known here: target, data"),
        ("optimiser: {lr: 1.0}\n", {}, "unknown key optimiser; known here: target, data"),
        ("target: x\n", {"target": {"name": "y"}}, "target in {file} is not a mapping of fields"),
    ],
)
def test_values_of_no_section_are_refused(tmp_path, content, overrides, words):
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=re.escape(words.format(file=file))):
        read_values(str(file), overrides)


@pytest.mark.parametrize(
    ("words", "section", "name", "value"),
    [
        (["--target.devices", "cuda:0"], "target", "devices", ("cuda:0",)),
        (["--target.devices", "cuda:0,cuda:1"], "target", "devices", ("cuda:0", "cuda:1")),
        (["--target.devices", "[cuda:0, cuda:1]"], "target", "devices", ("cuda:0", "cuda:1")),
        (["--target.layer_ids", "1,8,14"], "target", "layer_ids", (1, 8, 14)),
        (["--target.layer_ids", "[3]"], "target", "layer_ids", (3,)),
        (["--target.layer_ids", "none"], "target", "layer_ids", None),
        (["--target.name", "1234"], "target", "name", "1234"),
        (["--target.name", "none"], "target", "name", "none"),
        (["--target.revision", "12e4"], "target", "revision", "12e4"),
        (["--target.revision", "null"], "target", "revision", None),
        (["--target.trust_remote_code", "true"], "target", "trust_remote_code", True),
        (["--data.template_kwargs", "{enable_thinking: false}"], "data", "template_kwargs", {"enable_thinking": False}),
        (["--optim.betas", "0.8,0.99"], "optim", "betas", (0.8, 0.99)),
        (["--stream.bucket_edges", "64, 128"], "stream", "bucket_edges", (64, 128)),
        (["--stream.hs_queue_bytes", "None"], "stream", "hs_queue_bytes", None),
        (["--run.max_steps", "20"], "run", "max_steps", 20),
        (["--objective.loss", "dpace"], "objective", "loss", "dpace"),
    ],
)
def test_a_flag_means_what_its_field_holds(words, section, name, value):
    config = from_command_line(*LEAST, *words)
    assert getattr(getattr(config, section), name) == value


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--optim.lr", "fast"], ["optim.lr", "fast"]),
        (["--drafter.layers", "2.5"], ["drafter.layers", "2.5"]),
        (["--drafter.compile", "perhaps"], ["drafter.compile", "perhaps"]),
        (["--stream.bucket_edges", "[1, 2"], ["stream.bucket_edges"]),
        (["--run.seed", "none"], ["run.seed"]),
        (["--optim.betas", "0.9"], ["optim.betas"]),
        (["--hs-min-ready", "91"], ["hs_min_ready=91", "hs_queue_depth=90"]),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(words, expected):
    with pytest.raises(ValueError, match=re.escape(expected[0])) as refusal:
        from_command_line(*LEAST, *words)
    assert type(refusal.value) is ValueError
    assert "\n" not in str(refusal.value)
    assert all(word in str(refusal.value) for word in expected), str(refusal.value)


def test_an_unknown_flag_ends_the_command_line(capsys):
    with pytest.raises(SystemExit):
        from_command_line(*LEAST, "--optim.learning_rate", "1")
    assert "--optim.learning_rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["No such file"]),
        ("", ["no mapping of sections"]),
        ("- target\n", ["no mapping of sections"]),
        ("target: {name: [\n", ["is not YAML"]),
        ("target: {name: x}\ndata: {path: 2024-01-01}\n", ["2024-01-01"]),
        ("target: {name: x}\ndata: {path: y}\nnested: {a: 1}\n", ["unknown key nested"]),
        ("target: x\n", ["target"]),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, content, words):
    file = tmp_path / "run.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=re.escape(words[0])) as refusal:
        from_command_line("--config", str(file), "--data.heldout_path", "z")
    assert type(refusal.value) is ValueError
    assert "\n" not in str(refusal.value)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes(b"\xff\xfe\x00target")
    with pytest.raises(ValueError, match="is not YAML"):
        read_file(file)


# -- round trip and derived values -----------------------------------------------------------------------------------

EVERYTHING = values(
    target={"layer_ids": [1, 2], "devices": ["cuda:0", "cuda:1"], "revision": "abc", "trust_remote_code": True},
    data={
        "template_kwargs": {"enable_thinking": False, "depth": 2, "style": "short", "heat": 0.5},
        "heldout_path": "h",
    },
    drafter={
        "layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 9,
        "mask_token_id": 0,
    },
    objective={"gamma": 3, "loss": "dpace", "vocabulary": "seen"},
    optim={"betas": [0.5, 0.75], "lr": 1, "schedule": "wsd"},
    stream={"bucket_edges": [10], "hs_queue_bytes": 10**12, "engine": "lockstep"},
    checkpoint={"keep": 2, "every_steps": 0, "resume_from": "runs/x"},
    run={"max_steps": 3, "seed": 2**32 - 1, "name": "a.b-c_d"},
)


@pytest.mark.parametrize("given", [values(), EVERYTHING], ids=["defaults", "everything"])
def test_a_configuration_survives_its_own_json(given):
    config = parse(given)
    written = to_values(config)
    assert parse(json.loads(json.dumps(written))) == config
    assert to_values(parse(written)) == written
    for section, name in FIELDS:
        if name in given.get(section, {}):
            assert written[section][name] == given[section][name], f"{section}.{name}"


def test_local_paths_become_absolute_and_hub_names_do_not(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    given = values(target={"name": "model"}, drafter={"init_from": "exported"}, data={"prepared_dir": "/elsewhere"})
    config = with_absolute_paths(parse(given))
    assert config.target.name == str(tmp_path / "model")
    assert config.data.path == str(tmp_path / "train.jsonl")
    assert config.drafter.init_from == str(tmp_path / "exported")
    assert config.run.root == str(tmp_path / "runs")
    assert (config.data.prepared_dir, config.data.heldout_path) == ("/elsewhere", None)
    assert with_absolute_paths(config) == config
    assert with_absolute_paths(parse(values())).target.name == "some/model"
    home = with_absolute_paths(parse(values(data={"path": "~/train.jsonl"})))
    assert home.data.path == str(Path.home() / "train.jsonl")


@pytest.mark.parametrize(
    ("block_size", "gamma"), [(8, 4.0), (10, 5.0), (16, 7.0), (4, 2.0), (9, 4.5), (13, 6.0), (32, 14.0)]
)
def test_the_decay_constant_is_the_papers_and_linear_between(block_size, gamma):
    assert gamma_of(ObjectiveConfig(), block_size) == pytest.approx(gamma)
    assert gamma_of(ObjectiveConfig(gamma=3.5), block_size) == 3.5
