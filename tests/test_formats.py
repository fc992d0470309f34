"""config.json in both forms: what engines read of it, what comes back, and what is not read alike by all of them."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file
from tiny import TINY_SHAPE
from transformers import AutoConfig, Qwen3Config

from dflash.drafter import Drafter
from dflash.formats import Scales, config_of, read_config, read_exported, read_tensors, understand
from dflash.shape import Shape

TINY = dataclasses.replace(TINY_SHAPE, rope_theta=2e5)  # no client's default
SLIDING = dataclasses.replace(TINY, layer_types=("sliding_attention",) * 3, sliding_window=7)
MIXED = dataclasses.replace(
    TINY, layer_types=("sliding_attention", "full_attention", "sliding_attention"), sliding_window=7
)
SHAPES = {"full": TINY, "sliding": SLIDING, "mixed": MIXED}
PLAIN, GEMMA = Scales(), Scales(embedding_scale=5.5, logit_softcap=30.0)
COHERE = Scales(logit_scale=0.0625)
TARGET = {"name": "someone/target", "architecture": "Qwen3ForCausalLM"}


def zlab(shape: Shape = TINY, scales: Scales = PLAIN) -> dict:
    return config_of("zlab", shape, scales, dtype="float32", target=TARGET)


def speculators(shape: Shape = TINY, scales: Scales = PLAIN) -> dict:
    return config_of("speculators", shape, scales, dtype="float32", target=TARGET)


def changed(config: dict, **changes) -> dict:
    """A copy with keys of it, or of dflash_config (own__key), set; `...` removes one."""
    config = json.loads(json.dumps(config))
    for key, value in changes.items():
        section, name = (config["dflash_config"], key[5:]) if key.startswith("own__") else (config, key)
        if value is ...:
            section.pop(name, None)
        else:
            section[name] = value
    return config


def written(directory, config: dict, shape: Shape = TINY, tensors: dict | None = None) -> dict[str, torch.Tensor]:
    """A drafter on disk with random weights; tensors that are None are left out."""
    torch.manual_seed(0)
    state = {name: torch.randn_like(tensor) for name, tensor in Drafter(shape).state_dict().items()} | (tensors or {})
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(state, directory / "model.safetensors")
    return state


# -- what is written -------------------------------------------------------------------------------------------------


def test_every_key_that_an_engine_reads_is_written():
    assert zlab() == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "block_size": 6,
        "num_target_layers": 8,
        "dflash_config": {"mask_token_id": 49, "target_layer_ids": [1, 3, 5], "block_size": 6},
        "is_causal": False,
        "layer_types": ["full_attention"] * 3,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 3,
        "rope_theta": 2e5,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2e5},
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    }


def test_sliding_layers_are_said_to_be_causal_and_a_mix_is_left_to_the_engines_defaults():
    sliding, mixed = zlab(SLIDING), zlab(MIXED)
    assert sliding["is_causal"] is True
    # for a mix the key would be wrong in some layer, whichever value it had
    assert "is_causal" not in mixed
    for config, kinds in ((sliding, SLIDING.layer_types), (mixed, MIXED.layer_types)):
        assert config["layer_types"] == list(kinds)
        assert (config["use_sliding_window"], config["sliding_window"]) == (True, 7)


def test_scales_are_written_where_the_target_has_them():
    gemma, cohere = zlab(scales=GEMMA), zlab(scales=COHERE)
    assert gemma["dflash_config"].items() >= {"input_embedding_scale": 5.5, "final_logit_softcapping": 30.0}.items()
    assert "output_multiplier" not in gemma["dflash_config"]
    assert cohere["dflash_config"]["output_multiplier"] == cohere["logit_scale"] == 0.0625  # z-lab's name, vLLM's name
    assert "input_embedding_scale" not in cohere["dflash_config"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_transformers_reads_what_was_meant(tmp_path, shape):
    (tmp_path / "config.json").write_text(json.dumps(zlab(shape)))
    read = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(read, Qwen3Config)
    assert read.rope_parameters["rope_theta"] == 2e5
    assert read.layer_types == list(shape.layer_types)
    assert read.sliding_window == shape.sliding_window
    assert (read.head_dim, read.num_key_value_heads, read.max_position_embeddings) == (8, 2, 4096)
    assert str(read.dtype) == "torch.float32"
    assert getattr(read, "is_causal", None) == {"full": False, "sliding": True}.get(
        next(name for name, each in SHAPES.items() if each == shape)
    )


def test_speculators_counts_layers_from_the_embedding_and_names_the_target():
    config = speculators()
    layers = config["transformer_layer_config"]
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "dflash"
    assert (config["block_size"], config["mask_token_id"], config["draft_vocab_size"]) == (6, 49, 50)
    assert config["sample_from_anchor"] is False
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "someone/target",
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 5}]
    assert layers["model_type"] == "qwen3"
    assert layers["rope_parameters"]["rope_theta"] == 2e5
    assert not layers.keys() & {"dflash_config", "architectures", "num_target_layers", "block_size"}


def test_speculators_says_causality_twice_so_that_vllm_cannot_take_full_layers_for_causal_ones():
    full, sliding = speculators(), speculators(SLIDING)
    assert (full["sliding_window_non_causal"], full["transformer_layer_config"]["is_causal"]) == (True, False)
    assert (sliding["sliding_window_non_causal"], sliding["transformer_layer_config"]["is_causal"]) == (False, True)


@pytest.mark.parametrize(("shape", "scales", "words"), [(MIXED, PLAIN, "mixes them"), (TINY, GEMMA, "5.5")])
def test_speculators_is_refused_what_it_cannot_say(shape, scales, words):
    with pytest.raises(ValueError, match=words) as refusal:
        speculators(shape, scales)
    assert "--format zlab" in str(refusal.value)


# -- what is read ----------------------------------------------------------------------------------------------------


SAYABLE = [(zlab, shape, scales) for shape in SHAPES.values() for scales in (PLAIN, GEMMA, COHERE)]
SAYABLE += [(speculators, shape, scales) for shape in (TINY, SLIDING) for scales in (PLAIN, COHERE)]


@pytest.mark.parametrize(("form", "shape", "scales"), SAYABLE)
def test_what_is_written_is_read_back(form, shape, scales):
    theirs = understand(json.loads(json.dumps(form(shape, scales))))
    assert theirs.form == form.__name__
    assert theirs.faults == {}
    assert theirs.shape(target_layers=8) == shape
    assert theirs.scales == scales


FOREIGN = {  # as z-lab's first checkpoints are: one spelling of rope, block size at the top, no word on causality
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 6,
    "bos_token_id": 3,
    "dflash_config": {"mask_token_id": 49, "target_layer_ids": [1, 3, 5]},
    "dtype": "bfloat16",
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_types": ["full_attention"] * 3,
    "max_position_embeddings": 4096,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_target_layers": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 2e5,
    "sliding_window": None,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 50,
}
READ_ALIKE = {
    "as it is": ({}, {}),
    "block size inside": ({"block_size": ..., "own__block_size": 6}, {}),
    "no block size": ({"block_size": ...}, {"block_size": 16}),
    "rope of transformers 5": ({"rope_theta": ..., "rope_parameters": {"rope_theta": 2e5, "rope_type": "default"}}, {}),
    "no layer types": ({"layer_types": ...}, {}),
    "no head dim": ({"head_dim": ...}, {"head_dim": 128}),
    "no key heads": ({"num_key_value_heads": ...}, {"kv_heads": 32}),
    "no target layers": ({"num_target_layers": ...}, {}),
    "target layers inside": ({"num_target_layers": ..., "own__num_target_layers": 8}, {}),
    "an unused window": ({"sliding_window": 4096}, {}),
    "no eps": ({"rms_norm_eps": ...}, {}),
    "sliding by index": (
        {"layer_types": ..., "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        {"layer_types": ("full_attention", "sliding_attention", "sliding_attention"), "sliding_window": 7},
    ),
    "sliding, causal by default": (
        {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True, "sliding_window": 7},
        {"layer_types": ("sliding_attention",) * 3, "sliding_window": 7},
    ),
    "a switched-off extra": ({"own__use_swa": False}, {}),
}


@pytest.mark.parametrize(("changes", "expected"), READ_ALIKE.values(), ids=READ_ALIKE)
def test_a_foreign_config_is_read_with_the_engines_defaults(changes, expected):
    theirs = understand(changed(FOREIGN, **changes))
    assert theirs.shape(target_layers=8) == dataclasses.replace(TINY, **expected)
    assert theirs.scales == PLAIN


def test_scales_of_a_foreign_config_are_found_at_the_top_too():
    assert understand(changed(FOREIGN, input_embedding_scale=5.5, final_logit_softcapping=30)).scales == GEMMA
    assert understand(changed(FOREIGN, own__final_logit_softcapping=0.0)).scales == PLAIN


ALL_SLIDE = {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True, "sliding_window": 7}
AMBIGUOUS = {
    "no rope": ({"rope_theta": ...}, "rope_theta", "10000"),
    "two ropes": ({"rope_parameters": {"rope_theta": 1e6}}, "rope_theta", "1000000.0"),
    "scaled rope": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling", "yarn"),
    "scaled rope of transformers 5": ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters", "yarn"),
    "interleaved rope": ({"is_neox_style": False}, "is_neox_style", "False"),
    "two block sizes": ({"own__block_size": 8}, "block_size", "8"),
    "a block of one": ({"block_size": 1}, "block_size", "1"),
    "layer ids at the top alone": (
        {"own__target_layer_ids": ..., "target_layer_ids": [1, 3, 5]},
        "dflash_config.target_layer_ids",
        "[1, 3, 5]",
    ),
    "no layer ids": ({"own__target_layer_ids": ...}, "dflash_config.target_layer_ids", "missing"),
    "layer ids of no order": ({"own__target_layer_ids": [3, 1, 5]}, "dflash_config.target_layer_ids", "ascending"),
    "a layer twice": ({"own__target_layer_ids": [1, 1, 5]}, "dflash_config.target_layer_ids", "distinct"),
    "no mask token": ({"own__mask_token_id": ...}, "dflash_config.mask_token_id", "missing"),
    "a mask word": ({"own__mask_token_id": "<mask>"}, "dflash_config.mask_token_id", "<mask>"),
    "causal full layers": ({"is_causal": True}, "is_causal", "True"),
    "bidirectional sliding layers": ({**ALL_SLIDE, "is_causal": False}, "is_causal", "False"),
    "causality of vLLM alone": ({"own__causal": True}, "dflash_config.causal", "True"),
    "window switched off": ({**ALL_SLIDE, "use_sliding_window": False}, "use_sliding_window", "not true"),
    "no window": ({**ALL_SLIDE, "sliding_window": None}, "sliding_window", "3 layers slide"),
    "too few layer types": ({"layer_types": ["full_attention"]}, "layer_types", "3 layers"),
    "unknown layer type": ({"layer_types": ["full_attention", "linear", "full_attention"]}, "layer_types", "linear"),
    "no width": ({"hidden_size": ...}, "hidden_size", "missing"),
    "other epsilon": ({"rms_norm_eps": 1e-5}, "rms_norm_eps", "1e-05"),
    "other activation": ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
    "biases": ({"attention_bias": True}, "attention_bias", "True"),
    "convolutions of DFlash 2": ({"own__conv_kernel_size": 2}, "dflash_config.conv_kernel_size", "2"),
    "attention sinks": ({"own__attention_sink_bias": True}, "dflash_config.attention_sink_bias", "True"),
    "a scale of nothing": ({"own__input_embedding_scale": 0}, "dflash_config.input_embedding_scale", "0"),
}


@pytest.mark.parametrize(("changes", "key", "word"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_engines_read_differently_is_a_fault_of_its_key(changes, key, word):
    theirs = understand(changed(FOREIGN, **changes))
    assert list(theirs.faults) == [key]
    assert word in theirs.faults[key]
    with pytest.raises(ValueError, match=key):
        theirs.shape(target_layers=8)


def test_a_fault_in_speculators_form_is_named_by_its_own_keys():
    config = speculators()
    config["aux_hidden_state_layer_ids"] = None
    config["transformer_layer_config"] |= {"rope_theta": None, "rope_parameters": None}
    theirs = understand(config)
    assert {theirs.name(key) for key in theirs.faults} == {
        "aux_hidden_state_layer_ids",
        "transformer_layer_config.rope_theta",
    }


def test_what_speculators_predicts_from_the_anchor_is_another_network():
    assert list(understand(speculators() | {"sample_from_anchor": True}).faults) == ["sample_from_anchor"]


def test_bidirectional_sliding_layers_of_speculators_are_a_fault():
    config = speculators(SLIDING) | {"sliding_window_non_causal": True}
    del config["transformer_layer_config"]["is_causal"]
    assert list(understand(config).faults) == ["dflash_config.causal"]


JUNK = [None, True, False, 0, -1, 1.5, float("nan"), "", "4", [], [1], ["a"], [[]], {}, {"rope_theta": []}]


@pytest.mark.parametrize("config", [zlab(SLIDING, GEMMA), speculators(SLIDING)], ids=["zlab", "speculators"])
def test_no_value_of_any_key_breaks_the_reading(config):
    sections = [("dflash_config",), ("transformer_layer_config",), ("rope_parameters",), ()]
    for section in sections:
        for key in config.get(*section, {}) if section else config:
            if key in ("dflash_config", "transformer_layer_config") and not section:
                continue  # `read_config` refuses
            for junk in JUNK:
                spoilt = json.loads(json.dumps(config))
                (spoilt[section[0]] if section else spoilt)[key] = junk
                theirs = understand(spoilt)
                if not theirs.faults:
                    assert isinstance(theirs.shape(target_layers=8), Shape)


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "no dflash_config"),
        ("{}", "no dflash_config"),
        ('{"dflash_config": 3}', "no dflash_config"),
        ('{"speculators_model_type": "dflash"}', "no transformer_layer_config"),
    ],
)
def test_a_config_that_is_no_drafters_is_refused_with_the_cause(tmp_path, text, cause):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=cause):
        read_config(tmp_path)


def test_tensors_that_cannot_be_read_are_refused_with_the_cause(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_tensors(tmp_path)
    written(tmp_path, zlab())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged"):
        read_tensors(tmp_path)


# -- warm start ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "shape"), [(form, shape) for form, shape, scales in SAYABLE if scales is PLAIN])
def test_an_exported_drafter_is_read_to_the_bit(tmp_path, form, shape):
    state = written(tmp_path, form(shape), shape)
    read = read_exported(tmp_path, shape)
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())
    Drafter(shape).load_state_dict(read)


def test_an_exported_drafter_of_another_block_size_starts_this_one(tmp_path):
    state = written(tmp_path, zlab())
    read = read_exported(tmp_path, dataclasses.replace(TINY, block_size=16))
    assert torch.equal(read["fc.weight"], state["fc.weight"])


OTHER = {
    "mask token": ({"own__mask_token_id": 4}, ["mask_token_id", "4", "49"]),
    "layer ids": ({"own__target_layer_ids": [1, 3, 6]}, ["target_layer_ids", "(1, 3, 6)", "(1, 3, 5)"]),
    "rope theta": ({"rope_theta": 1e6, "rope_parameters": ...}, ["rope_theta", "1000000.0", "200000.0"]),
    "width": ({"hidden_size": 64}, ["hidden_size", "64", "32"]),
    "vocabulary": ({"vocab_size": 51}, ["vocab_size", "51", "50"]),
    "target": ({"num_target_layers": 9}, ["num_target_layers", "9", "8"]),
    "unsaid target": ({"num_target_layers": ...}, ["num_target_layers", "None", "8"]),
    "depth": ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, ["num_hidden_layers", "2", "3"]),
    "heads": ({"num_attention_heads": 2}, ["num_attention_heads"]),
    "key heads": ({"num_key_value_heads": 4}, ["num_key_value_heads"]),
    "head width": ({"head_dim": 4}, ["head_dim"]),
    "MLP": ({"intermediate_size": 49}, ["intermediate_size"]),
    "layer types": ({**ALL_SLIDE, "is_causal": True}, ["layer_types", "sliding_attention"]),
    "causality": ({"is_causal": True}, ["is_causal", "True"]),
}


@pytest.mark.parametrize(("changes", "words"), OTHER.values(), ids=OTHER)
def test_an_exported_drafter_that_does_not_fit_is_refused_by_name(tmp_path, changes, words):
    written(tmp_path, changed(zlab(), **changes))
    with pytest.raises(ValueError, match=r"^drafter\.init_from=") as refusal:
        read_exported(tmp_path, TINY)
    message = str(refusal.value)
    assert message.startswith(f"drafter.init_from={tmp_path}: ")
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_sliding_drafter_refuses_another_window(tmp_path):
    written(tmp_path, zlab(dataclasses.replace(SLIDING, sliding_window=8)), SLIDING)
    with pytest.raises(ValueError, match="sliding_window is 8, this run's is 7"):
        read_exported(tmp_path, SLIDING)


def test_a_warm_start_checks_the_tensors(tmp_path):
    written(tmp_path, zlab(), tensors={"norm.weight": None})
    with pytest.raises(ValueError, match=r"norm\.weight is missing"):
        read_exported(tmp_path, TINY)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_what_is_not_an_exported_drafter_starts_nothing(tmp_path, missing):
    written(tmp_path, zlab())
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=f"is not an exported drafter .{missing}") as refusal:
        read_exported(tmp_path, TINY)
    assert str(refusal.value).startswith(f"drafter.init_from={tmp_path} ")
