import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import conversations, tiny_target, write_jsonl

from dflash import config as configuration
from dflash.drafter import Drafter
from dflash.run_dir import create_run
from dflash.setup import set_up
from dflash.shape import parameter_count
from dflash.train import FINISHED, main


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("setup")
    write_jsonl(directory / "data.jsonl", conversations(40))
    return directory


def values(place, target, **drafter):
    return {
        "target": {"name": str(target), "captured_layers": 2, "devices": ["cpu"]},
        "data": {"path": str(place / "data.jsonl"), "prepared_dir": str(place / "prepared"), "max_tokens": 256},
        "drafter": {"layers": 1, "block_size": 4, "device": "cpu"} | drafter,
        "objective": {"anchors": 16},
        "optim": {"samples_per_step": 4},
        "stream": {"hs_min_ready": 4, "hs_queue_depth": 8},
        "run": {"root": str(place / "runs"), "epochs": 1, "max_steps": 1},
    }


def first_loss(place, target, init):
    config = configuration.parse(values(place, target, init=init))
    run_dir = create_run(config)
    assert main([str(run_dir)]) == FINISHED
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])["loss"]


def test_scaled_initialisation_starts_a_tied_target_below_knowing_nothing_and_the_plain_one_far_above(place):
    target = tiny_target(place / "tied", "llama", tied=True, hidden=192)
    state = load_file(target / "model.safetensors")
    embedding = state["model.embed_tokens.weight"]
    # rows of norm 3, as in a trained target: the mask token's own logit is then 3 * sqrt(192) = 42 times the final norm
    embedding *= 3 / embedding.norm(dim=1, keepdim=True).clamp_min(1e-6)  # the row of the pad token is zero
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    knowing_nothing = np.log(512)
    assert first_loss(place, target, "plain") > 4 * knowing_nothing
    assert first_loss(place, target, "scaled") < knowing_nothing


def test_scaled_initialisation_touches_only_fc_and_the_final_norm_and_is_the_same_every_time(place):
    target = tiny_target(place / "untied", "qwen3")
    states = []
    for init in ("plain", "scaled", "scaled"):
        config = configuration.parse(values(place, target, init=init))
        states.append(set_up(config, create_run(config)).drafter.state_dict())
    plain, scaled, again = states
    changed = {name for name, tensor in scaled.items() if not torch.equal(tensor, plain[name])}
    assert changed == {"fc.weight", "norm.weight"}
    assert all(torch.equal(tensor, again[name]) for name, tensor in scaled.items())


def test_no_gradient_is_left_over_from_setting_up(place):
    config = configuration.parse(values(place, tiny_target(place / "clean", "qwen3")))
    job = set_up(config, create_run(config))
    assert all(parameter.grad is None for parameter in job.drafter.parameters())
    assert not job.optimizer.state


def test_parameters_are_counted_without_making_them(place):
    config = configuration.parse(values(place, tiny_target(place / "count", "qwen3")))
    shape = set_up(config, create_run(config)).shape
    assert parameter_count(shape) == sum(parameter.numel() for parameter in Drafter(shape).parameters())


@pytest.mark.parametrize("path", ["smollm2-cpu.yaml", "qwen3-8b-1gpu.yaml"])
def test_every_shipped_deployment_is_a_valid_configuration(path):
    configuration.parse(configuration.read_file(f"deployments/{path}"))
