import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, tiny_target, tiny_tokenizer
from transformers import (
    ByT5Tokenizer,
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from dflash.target import Target, load_target, resolve_mask_token, tokenizer_hashes

# models round inside whatever the dtype: norms to float32, and gemma2's eager softmax, which padding then moves
FLOAT64_TOLERANCE = {"llama": 1e-12, "qwen3": 1e-12, "gemma3": 1e-12, "gemma2": 1e-6}
TARGETS = [(family, tied) for family in FAMILIES for tied in (False, True)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> Callable[[str, bool], Path]:
    made = {}

    def directory(family: str, tied: bool) -> Path:
        if (family, tied) not in made:
            made[family, tied] = tiny_target(tmp_path_factory.mktemp(family), family, tied=tied)
        return made[family, tied]

    return directory


@pytest.fixture(scope="module")
def llama(directories) -> Target:
    return load_target(str(directories("llama", False)), captured_layers=2)


def samples(*lengths: int, vocabulary: int = 512, seed: int = 3) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=draw) for length in lengths]


def full_forward(target: Target, tokens: torch.Tensor):
    with torch.no_grad():
        return target.model(input_ids=tokens[None], use_cache=False, output_hidden_states=True)


def edited_copy(directory: Path, to: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a saved target with its weights changed by `edit`."""
    shutil.copytree(directory, to)
    weights = load_file(to / "model.safetensors")
    edit(weights)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


# --- which layers ---


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        ([1, 3], "3 is the last layer"),
        ([0, 4], "no layer 4"),
        ([-1, 2], "no layer -1"),
        ([1, 1], "not ascending or not distinct"),
        ([2, 0], "not ascending or not distinct"),
    ],
)
def test_layer_ids_that_cannot_be_captured_are_refused_with_the_range(directories, ids, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        load_target(str(directories("llama", False)), layer_ids=ids)
    assert "within 0 to 2" in str(refusal.value)
    assert "\n" not in str(refusal.value)


# --- features ---


@pytest.mark.parametrize(("family", "tied"), TARGETS)
def test_features_are_the_outputs_of_the_named_layers_in_the_lists_order(directories, family, tied):
    target = load_target(str(directories(family, tied)), layer_ids=[0, 2])
    (tokens,) = samples(40)
    states = full_forward(target, tokens).hidden_states
    (features,) = target.features([tokens])
    assert torch.equal(features, torch.cat([states[1][0], states[3][0]], dim=-1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_padding_and_grouping_never_change_a_feature(directories, family, dtype):
    target = load_target(str(directories(family, False)), layer_ids=[0, 1, 2], dtype=dtype)
    tokens = samples(50, 1, 17, 33)
    alone = [target.features([row])[0] for row in tokens]
    tolerance = 1e-5 if dtype == "float32" else FLOAT64_TOLERANCE[family]
    for group in ([0, 1, 2, 3], [3, 2], [1, 0], [2, 2, 2]):
        for row, features in zip(group, target.features([tokens[i] for i in group]), strict=True):
            assert features.shape == (len(tokens[row]), 3 * target.width)
            torch.testing.assert_close(features, alone[row], rtol=tolerance, atol=tolerance)


def test_nothing_after_the_highest_captured_layer_runs(directories):
    target = load_target(str(directories("gemma3", False)), layer_ids=[0, 1])
    ran = []
    parts: dict[str, Any] = {f"layer {i}": layer for i, layer in enumerate(target.layers)}
    parts |= {"norm": target.decoder.norm, "head": target.model.lm_head}
    for name, part in parts.items():
        part.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    target.features(samples(9, 5))
    assert ran == ["layer 0", "layer 1"]
    full_forward(target, samples(9)[0])
    assert ran[2:] == ["layer 0", "layer 1", "layer 2", "layer 3", "norm", "head"]


def test_features_are_constants_that_a_drafter_can_be_trained_on(llama):
    (features,) = llama.features(samples(12))
    assert not features.requires_grad
    fc = torch.nn.Linear(features.shape[1], 4)
    fc(features).square().sum().backward()
    assert fc.weight.grad is not None
    assert features.untyped_storage().nbytes() == features.nbytes  # no padding is kept alive by a record


def test_threads_capture_and_run_full_forwards_at_once_without_mixing(llama):
    groups = [samples(30 + i, 20, 25, seed=i) for i in range(8)]
    expected = [llama.features(group) for group in groups]
    logits = full_forward(llama, groups[0][0]).logits
    together = threading.Barrier(3)

    def capture(order):
        together.wait()
        for i in order:
            for ours, theirs in zip(llama.features(groups[i]), expected[i], strict=True):
                assert torch.equal(ours, theirs)

    def forward():
        together.wait()
        for _ in range(24):
            assert torch.equal(full_forward(llama, groups[0][0]).logits, logits)

    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(capture, list(range(8)) * 5), threads.submit(capture, list(range(7, -1, -1)) * 5)]
        for job in [*jobs, threads.submit(forward)]:
            job.result(timeout=30)


def test_a_forward_that_fails_leaves_the_target_usable(llama):
    with pytest.raises(IndexError):
        llama.features([torch.tensor([llama.vocabulary])])
    assert full_forward(llama, samples(5)[0]).logits.shape == (1, 5, llama.vocabulary)


# --- embedding and head ---


@pytest.mark.parametrize(("family", "tied"), TARGETS)
def test_embedding_and_head_reproduce_the_targets_own_input_and_logits(directories, family, tied):
    target = load_target(str(directories(family, tied)), captured_layers=2)
    (tokens,) = samples(24)
    output = full_forward(target, tokens)
    torch.testing.assert_close(target.embedding_weight[tokens] * target.embedding_scale, output.hidden_states[0][0])
    torch.testing.assert_close(target.logits(output.hidden_states[-1][0]), output.logits[0])
    assert target.embedding_scale == (8.0 if family.startswith("gemma") else 1.0)  # sqrt(64)
    assert target.logit_softcap == (5.0 if family == "gemma2" else None)
    assert target.logit_scale == 1.0
    assert (target.embedding_weight.data_ptr() == target.head_weight.data_ptr()) == tied
    assert (target.width, target.vocabulary, target.num_layers) == (64, 512, 4)
    assert not any(weight.requires_grad for weight in target.model.parameters())
    assert not target.model.training


SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "eos_token_id": 2,
}
SMALL |= {"bos_token_id": None, "pad_token_id": 0, "initializer_range": 0.125}
OTHER_FAMILIES = {
    "granite": lambda: GraniteForCausalLM(
        GraniteConfig(**SMALL, intermediate_size=128, embedding_multiplier=12.0, logits_scaling=13.0)
    ),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SMALL, intermediate_size=128, logit_scale=0.0625)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SMALL)),
}


@pytest.mark.parametrize(
    ("family", "embedding_scale", "logit_scale"),
    [("granite", 12.0, 1 / 13), ("cohere", 1.0, 0.0625), ("gpt2", 1.0, 1.0)],  # gpt2 adds positions, and scales nothing
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales_are_measured_whatever_the_family_calls_them(tmp_path, family, embedding_scale, logit_scale, dtype):
    torch.manual_seed(0)
    OTHER_FAMILIES[family]().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load_target(str(tmp_path), captured_layers=2, dtype=dtype)
    assert (target.embedding_scale, target.logit_scale) == (embedding_scale, logit_scale)
    target.prove()


# --- the proof ---


@pytest.mark.parametrize(("family", "tied"), TARGETS)
def test_the_proof_holds_on_sound_targets(directories, family, tied):
    for dtype in ("float32", "bfloat16"):
        load_target(str(directories(family, tied)), captured_layers=3, dtype=dtype).prove()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit_scale": 1.1}, "does not give its own logits"),
        ({"logit_softcap": 5.0}, "does not give its own logits"),
        ({"layer_ids": [1, 2]}, "not the output of layer 1"),
        ({"layer_ids": [0, 1]}, "1 layers above the highest captured one"),
    ],
)
def test_the_proof_refuses_a_wrong_scale_cap_or_layer(llama, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(llama, **change).prove()


def test_the_proof_refuses_a_head_that_is_not_the_targets(llama):
    with pytest.raises(ValueError, match="does not give its own logits"):
        dataclasses.replace(llama, head_weight=llama.embedding_weight).prove()


def _nothing_added(weights):
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.2.{name}.weight"].zero_()


def _all_tokens_alike(weights):
    weights["model.embed_tokens.weight"][:] = weights["model.embed_tokens.weight"][0].clone()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda weights: weights["model.layers.1.mlp.up_proj.weight"].fill_(float("nan")), "layer 2 is not finite"),
        (_nothing_added, "layer 2 equals that of layer 1"),
        (_all_tokens_alike, "layer 0 is the same for every token"),
    ],
)
def test_the_proof_refuses_damaged_weights(directories, tmp_path, edit, message):
    damaged = edited_copy(directories("llama", False), tmp_path / "damaged", edit)
    ids = [0, 2] if "finite" in message else [0, 1, 2]
    with pytest.raises(ValueError, match=message):
        load_target(str(damaged), layer_ids=ids).prove()


def test_the_proof_refuses_a_target_whose_tokens_see_what_follows_them(directories):
    target = load_target(str(directories("llama", False)), captured_layers=2)
    layers: Any = target.layers
    for layer in layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match="depends on the padding"):
        target.prove()


# --- identity and mask token ---


def test_identity_is_equal_on_reload_and_in_a_wider_dtype(directories):
    directory = str(directories("qwen3", False))
    first, again = load_target(directory, captured_layers=2), load_target(directory, captured_layers=3)
    wide = load_target(directory, captured_layers=2, dtype="float64").identity()
    assert first.identity() == again.identity() == json.loads(json.dumps(first.identity()))
    assert wide["sha256"] == first.identity()["sha256"]
    assert wide["dtype"] == "float64"
    assert first.identity() | {"sha256": ""} == {
        "name": directory,
        "revision": None,
        "architecture": "Qwen3ForCausalLM",
        "layers": 4,
        "width": 64,
        "vocabulary": 512,
        "dtype": "float32",
        "sha256": "",
        "embedding_scale": 1.0,
        "logit_scale": 1.0,
        "logit_softcap": None,
        "tokenizer": tokenizer_hashes(first.tokenizer),
    }


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.3.mlp.down_proj.weight", "lm_head.weight"])
def test_identity_differs_when_one_tensor_differs(directories, tmp_path, name):
    directory = directories("qwen3", False)
    changed = edited_copy(directory, tmp_path / "changed", lambda weights: weights[name].mul_(1.001))
    hashes = [load_target(str(d), captured_layers=2).identity()["sha256"] for d in (directory, changed)]
    assert hashes[0] != hashes[1]


def test_identity_differs_when_one_value_of_a_small_tensor_differs(directories, tmp_path):
    directory = directories("qwen3", False)
    changed = edited_copy(directory, tmp_path / "changed", lambda w: w["model.norm.weight"][5].add_(1e-3))
    hashes = [load_target(str(d), captured_layers=2).identity()["sha256"] for d in (directory, changed)]
    assert hashes[0] != hashes[1]


def test_mask_token_is_the_explicit_one_else_the_tokenizers_else_the_first_spare_row(directories):
    target = load_target(str(directories("qwen3", False)), captured_layers=2)
    assert resolve_mask_token(target, 77) == 77
    assert resolve_mask_token(target, None) == len(target.tokenizer) < target.vocabulary
    target.tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    assert resolve_mask_token(target, None) == target.tokenizer.convert_tokens_to_ids("<|mask|>")


@pytest.mark.parametrize(
    ("explicit", "message"),
    [
        (0, "pad token"),
        (2, "eos token"),
        (9, "eos token"),  # only the generation config names it
        (512, "use 0 to 511"),
        (-1, "use 0 to 511"),
    ],
)
def test_a_mask_token_that_means_something_or_has_no_row_is_refused(directories, explicit, message):
    target = load_target(str(directories("qwen3", False)), captured_layers=2)
    target.model.generation_config.eos_token_id = [2, 9]
    with pytest.raises(ValueError, match=message) as refusal:
        resolve_mask_token(target, explicit)
    assert f"drafter.mask_token_id={explicit}" in str(refusal.value)


def test_a_target_without_mask_token_or_spare_row_asks_for_one(directories):
    target = load_target(str(directories("qwen3", False)), captured_layers=2)
    target.tokenizer.add_tokens([f"<|spare {i}|>" for i in range(512 - len(target.tokenizer))])
    with pytest.raises(ValueError, match=r"drafter\.mask_token_id is not set"):
        resolve_mask_token(target, None)


# --- refusals ---


def _encoder_decoder(directory: Path) -> None:
    config = T5Config(vocab_size=512, d_model=16, num_layers=1, num_heads=1, d_kv=16, d_ff=16)
    T5ForConditionalGeneration(config).save_pretrained(directory)


def _no_weights_of_layer_2(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "layers.2." not in name}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def _cut_short(directory: Path) -> None:
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(10_000)


def _own_code(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "homemade.Config"}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "homemade.py").write_text("raise RuntimeError('ran')\n")


def _model_type(name: str) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"model_type": name}))

    return edit


def _no_tokenizer(directory: Path) -> None:
    for file in [*directory.glob("tokenizer*"), *directory.glob("*template*")]:
        file.unlink()


def _slow_tokenizer(directory: Path) -> None:
    _no_tokenizer(directory)
    ByT5Tokenizer().save_pretrained(directory)


@pytest.mark.parametrize(
    ("edit", "arguments", "message"),
    [
        (_encoder_decoder, {}, "encoder-decoder"),
        (_model_type("clip_vision_model"), {}, "cannot be loaded as a causal LM"),
        (_model_type("no_such_family"), {}, "no_such_family"),
        (_own_code, {}, "set target.trust_remote_code"),
        (_no_weights_of_layer_2, {}, "weights are not in the checkpoint, e.g. model.layers.2."),
        (_cut_short, {}, "cannot be loaded"),
        (
            lambda directory: (directory / "model.safetensors").rename(directory / "pytorch_model.bin"),
            {},
            "no file named",
        ),
        (lambda directory: (directory / "config.json").unlink(), {}, "no config.json"),
        (lambda directory: (directory / "config.json").write_text("{"), {}, "not a valid JSON file"),
        (shutil.rmtree, {}, "no such directory"),
        (_no_tokenizer, {}, "no usable tokenizer"),
        (_slow_tokenizer, {}, "not a fast one"),
        (None, {"attention": "no_such_kernel"}, "target.attention=no_such_kernel: cannot"),
        (None, {"device": "nowhere"}, "target.devices=nowhere"),
        (None, {"device": "cuda:99"}, "target.devices=cuda:99"),
        (None, {"captured_layers": 5}, "target.captured_layers=5"),
    ],
)
def test_a_target_that_cannot_be_used_is_refused_in_one_line(tmp_path, edit, arguments, message):
    directory = tiny_target(tmp_path / "target", "llama")
    if edit is not None:
        edit(directory)
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        load_target(str(directory), **({"captured_layers": 2} | arguments))
    assert "\n" not in str(refusal.value)


def test_a_one_layer_target_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ValueError, match="before or after the final norm"):
        load_target(str(tiny_target(tmp_path, "llama", layers=1)), captured_layers=1)


def test_a_hub_name_that_cannot_be_fetched_is_refused_in_one_line():
    code = """
from dflash.target import load_target
try:
    load_target("nobody/no-such-model")
except ValueError as refusal:
    print(refusal)
"""
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    root = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", code], env=offline, cwd=root, capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("target.name=nobody/no-such-model: its config cannot be read")
    assert "give a directory" in run.stdout
    assert run.stdout.count("\n") == 1
