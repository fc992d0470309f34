"""The two forms in which serving engines read a drafter, and the way back: a directory with config.json and model.safetensors.

zlab          z-lab's own form: SGLang, vLLM, llama.cpp's converter and z-lab's client read it
speculators   the form of the vLLM project's library; vLLM reads it

The tensors are the same in both, and their names are those of `Drafter`. config.json decides how a drafter computes, and an engine
fills in what is missing, or ignores what it does not know, without a word. Hence every key here that any engine reads.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dflash.drafter import INITIALIZER_RANGE, RMS_NORM_EPS, check_tensors
from dflash.shape import Shape

ARCHITECTURE = "DFlashDraftModel"  # the only name that SGLang, vLLM, llama.cpp and speculators all know
FULL, SLIDING = "full_attention", "sliding_attention"
CLIENTS_BLOCK_SIZE = 16  # of z-lab and SGLang, where a config names none
TRANSFORMERS_MAX_WINDOW_LAYERS = 28  # Qwen3Config's: layers from here on slide, where layer_types are not written

KEYS = {
    "width": "hidden_size",
    "vocabulary": "vocab_size",
    "target_layers": "num_target_layers",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "layer_types": "layer_types",
    "sliding_window": "sliding_window",
    "target_layer_ids": "dflash_config.target_layer_ids",
    "mask_token_id": "dflash_config.mask_token_id",
    "block_size": "block_size",
}
"""Field of a `Shape`: its key in z-lab's config."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """What the target does to its embedding and its logits, and a drafter that borrows both must do too."""

    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None


# ---------------------------------------------------------------- from a shape to config.json


def zlab_config(shape: Shape, scales: Scales, *, dtype: str) -> dict[str, Any]:
    """config.json of z-lab's form; `dtype` names that of the tensors."""
    sliding = SLIDING in shape.layer_types
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",  # the drafter's own, whatever the target's
        "dtype": dtype,
        "block_size": shape.block_size,  # the older clients read it here, the newer ones below
        "num_target_layers": shape.target_layers,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),  # outputs of these layers, counted from 0
            "block_size": shape.block_size,
        }
        | _written_scales(scales),
        "layer_types": list(shape.layer_types),
        "use_sliding_window": sliding,  # without it Qwen3Config forgets the window
        "sliding_window": shape.sliding_window,
        "max_window_layers": shape.layers,
        "rope_theta": shape.rope_theta,  # transformers 4 reads these two
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},  # transformers 5
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": RMS_NORM_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": shape.max_positions,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": False,
    }
    causal = causality(shape.layer_types)
    if causal is not None:
        config["is_causal"] = causal
    if scales.logit_scale != 1:
        config["logit_scale"] = scales.logit_scale  # vLLM's name of output_multiplier
    return config


def causality(layer_types: tuple[str, ...]) -> bool | None:
    """`is_causal` for these layers; None where one value cannot say it.

    Sliding layers are causal inside the block, full ones are not. z-lab, vLLM and SGLang run it so when nothing is written;
    llama.cpp then runs every layer bidirectional. So the key is written where it can be. A mixed drafter must do without it,
    because it would hold for all layers, and llama.cpp cannot serve that drafter.
    """
    kinds = set(layer_types)
    return kinds == {SLIDING} if len(kinds) == 1 else None


def _written_scales(scales: Scales) -> dict[str, float]:
    written = {
        "input_embedding_scale": scales.embedding_scale if scales.embedding_scale != 1 else None,
        "output_multiplier": scales.logit_scale if scales.logit_scale != 1 else None,
        "final_logit_softcapping": scales.logit_softcap,
    }
    return {key: value for key, value in written.items() if value is not None}


NOT_OF_THE_LAYERS = ("architectures", "block_size", "dflash_config", "num_target_layers")


def speculators_config(shape: Shape, scales: Scales, *, dtype: str, target: dict[str, Any]) -> dict[str, Any]:
    """config.json of speculators' form; `target` is a target's identity. Raises ValueError for what that form cannot say."""
    causal = causality(shape.layer_types)
    if causal is None:
        raise ValueError(
            "--format speculators: vLLM reads that form's one word on causality for sliding and full layers alike, and this "
            "drafter mixes them; use --format zlab"
        )
    if scales.embedding_scale != 1:
        raise ValueError(
            f"--format speculators: that form cannot say that this target multiplies its embedding by {scales.embedding_scale}; "
            "use --format zlab"
        )
    layers = zlab_config(shape, scales, dtype=dtype)
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": "dflash",
        "dtype": dtype,
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in shape.target_layer_ids],  # 0 is the embedding
        "draft_vocab_size": shape.vocabulary,
        "sample_from_anchor": False,
        # without `is_causal` in the layers, vLLM (0.33) would take a false one to mean causal in full layers too
        "sliding_window_non_causal": not causal,
        "tie_word_embeddings": False,
        "transformer_layer_config": {key: value for key, value in layers.items() if key not in NOT_OF_THE_LAYERS},
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": shape.block_size - 1}],
            "verifier": {"name_or_path": target["name"], "architectures": [target["architecture"]]},
        },
    }


def config_of(form: str, shape: Shape, scales: Scales, *, dtype: str, target: dict[str, Any]) -> dict[str, Any]:
    """config.json in either form. Raises ValueError where the form cannot say it."""
    if form == "zlab":
        return zlab_config(shape, scales, dtype=dtype)
    return speculators_config(shape, scales, dtype=dtype, target=target)


def shape_of(values: dict[str, Any]) -> Shape:
    """A `Shape` from its values as JSON keeps them."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return Shape(**fields)


# ---------------------------------------------------------------- from config.json back to a shape


@dataclasses.dataclass(frozen=True)
class Understood:
    """What a config.json says, in either form."""

    form: str
    """zlab or speculators."""
    zlab: dict[str, Any]
    """The same in z-lab's form."""
    fields: dict[str, Any]
    """Fields of a `Shape`; None for one that is missing or faulty. `target_layers` is None in speculators' form."""
    scales: Scales
    faults: dict[str, str]
    """z-lab's key: why its value cannot be used, or is not read alike by all engines."""

    def name(self, key: str) -> str:
        """Where z-lab's key stands in this form."""
        if self.form == "zlab" or key.startswith("speculators_"):
            return key
        return SPECULATORS_KEYS.get(key, f"transformer_layer_config.{key.removeprefix('dflash_config.')}")

    def shape(self, *, target_layers: int) -> Shape:
        """The architecture, for a target of so many layers. Raises ValueError with the first fault."""
        for key, fault in self.faults.items():
            raise ValueError(f"{self.name(key)} {fault}")
        fields: dict[str, Any] = self.fields | {"target_layers": self.fields["target_layers"] or target_layers}
        return Shape(**fields)


SPECULATORS_KEYS = {
    "block_size": "block_size",
    "dflash_config.block_size": "block_size",
    "dflash_config.mask_token_id": "mask_token_id",
    "dflash_config.target_layer_ids": "aux_hidden_state_layer_ids",
    "draft_vocab_size": "draft_vocab_size",
    "sample_from_anchor": "sample_from_anchor",
    "architectures": "architectures",
    "dtype": "dtype",
}
"""Key of z-lab's form: the same in speculators', where it is not one of the layers'."""


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of an exported drafter. Raises ValueError, the cause alone, for what is none."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except OSError as error:
        raise ValueError(f"config.json: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"config.json is not JSON: {error}") from None
    sections = ("transformer_layer_config",) if "speculators_model_type" in config else ("dflash_config",)
    for section in sections:
        if not isinstance(config, dict) or not isinstance(config.get(section), dict):
            raise ValueError(f"its config.json has no {section}")
    return config


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of an exported drafter. Raises ValueError, the cause alone."""
    try:
        return load_file(directory / "model.safetensors")
    except OSError as error:
        raise ValueError(f"model.safetensors: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ValueError(f"model.safetensors is damaged: {error}") from None


def understand(config: dict[str, Any]) -> Understood:
    """A config.json that `read_config` gave, with the values that engines take for keys that are not there."""
    form = "speculators" if "speculators_model_type" in config else "zlab"
    zlab = _as_zlab(config) if form == "speculators" else config
    fields: dict[str, Any] = {}
    faults: dict[str, str] = {}
    _understand_sizes(zlab, fields, faults)
    _understand_tokens(zlab, fields, faults)
    _understand_rope(zlab, fields, faults)
    _understand_layers(zlab, fields, faults)
    for key, (wanted, default) in FIXED.items():
        if zlab.get(key, default) != wanted:
            faults[key] = f"is {zlab[key]!r}: this drafter's network knows {wanted!r} alone"
    for key, value in zlab["dflash_config"].items():
        if key not in OWN_KEYS and value not in (None, False):
            faults[f"dflash_config.{key}"] = f"is {value!r}: it changes the network in a way that is not known here"
    return Understood(form, zlab, fields, _understood_scales(zlab, faults), faults)


QWEN3_DEFAULTS = {"kv_heads": 32, "head_dim": 128, "max_positions": 32768}
"""Field: what Qwen3Config, and with it every engine, takes where the key is missing."""
FIXED = {
    "rms_norm_eps": (RMS_NORM_EPS, RMS_NORM_EPS),
    "hidden_act": ("silu", "silu"),
    "attention_bias": (False, False),
    "is_neox_style": (True, True),
    "rope_is_neox_style": (True, True),
    "sample_from_anchor": (False, False),
}
"""Key: the only value that `Drafter` computes with, and the engines' default."""
OWN_KEYS = {
    "mask_token",  # SGLang's, for a config without an id
    "mask_token_id",
    "target_layer_ids",
    "block_size",
    "causal",
    "num_target_layers",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
}
"""Keys of dflash_config that are understood here."""


def _as_zlab(config: dict[str, Any]) -> dict[str, Any]:
    layers, ids = config["transformer_layer_config"], config.get("aux_hidden_state_layer_ids")
    own = {"mask_token_id": config.get("mask_token_id"), "block_size": config.get("block_size")}
    own["target_layer_ids"] = [layer_id - 1 for layer_id in ids] if _are_ids(ids) else ids
    kinds = layers.get("layer_types")
    sliding = isinstance(kinds, list) and SLIDING in kinds
    # the library's own reading; in the layers' config the key is vLLM's and stronger
    causal = {"causal": False} if sliding and config.get("sliding_window_non_causal") else {}
    at_the_top = {key: config[key] for key in ("dtype", "block_size", "sample_from_anchor") if key in config}
    return layers | at_the_top | {"dflash_config": own | causal}


def _draft_value(zlab: dict[str, Any], key: str, default: Any) -> Any:
    """As z-lab's client looks it up."""
    return zlab["dflash_config"].get(key, zlab.get(key, default))


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(_is_whole(each) for each in value)


def _is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _understand_sizes(zlab: dict[str, Any], fields: dict[str, Any], faults: dict[str, str]) -> None:
    needed = dict.fromkeys(("width", "vocabulary", "layers", "heads", "intermediate_size"))
    for field, default in (needed | QWEN3_DEFAULTS).items():
        key = KEYS[field]
        value = zlab.get(key, default)
        fields[field] = value if _is_whole(value) and value > 0 else None
        if fields[field] is None:
            faults[key] = "is missing" if value is None else f"is {value!r}: a whole number is needed"
    fields["target_layers"] = _draft_value(zlab, "num_target_layers", None)
    if fields["target_layers"] is not None and not _is_whole(fields["target_layers"]):
        faults["num_target_layers"] = f"is {fields['target_layers']!r}: a whole number is needed"
        fields["target_layers"] = None


def _understand_tokens(zlab: dict[str, Any], fields: dict[str, Any], faults: dict[str, str]) -> None:
    """Block size, mask token and captured layers."""
    own = zlab["dflash_config"]
    mask, ids, inner, outer = (
        own.get("mask_token_id"),
        own.get("target_layer_ids"),
        own.get("block_size"),
        zlab.get("block_size"),
    )
    for key, value in (("mask_token_id", mask), ("target_layer_ids", ids)):
        if value is None:
            where = f" and stands outside of it, as {zlab[key]}" if zlab.get(key) is not None else ""
            faults[f"dflash_config.{key}"] = f"is missing{where}: vLLM then captures other layers, or stops"
    if mask is not None and not _is_whole(mask):
        faults["dflash_config.mask_token_id"] = f"is {mask!r}, no token id"
    if ids is not None and not (_are_ids(ids) and ids == sorted(set(ids))):
        faults["dflash_config.target_layer_ids"] = f"is {ids!r}: no list of distinct, ascending layers"
    block = next((size for size in (inner, outer) if size is not None), CLIENTS_BLOCK_SIZE)
    if None not in (inner, outer) and inner != outer:
        faults["block_size"] = f"is {outer!r}, and {inner!r} in dflash_config: engines read one or the other"
    elif not (_is_whole(block) and block > 1):
        faults["block_size"] = f"is {block!r}: a block is the known token and at least one more"
    fields["mask_token_id"] = mask if "dflash_config.mask_token_id" not in faults else None
    fields["target_layer_ids"] = tuple(ids) if ids and "dflash_config.target_layer_ids" not in faults else None
    fields["block_size"] = block if "block_size" not in faults else None


def _understand_rope(zlab: dict[str, Any], fields: dict[str, Any], faults: dict[str, str]) -> None:
    places = {key: zlab.get(key) or {} for key in ("rope_parameters", "rope_scaling")}
    for key, place in places.items():
        kind = place.get("rope_type", place.get("type", "default")) if isinstance(place, dict) else None
        if kind != "default":
            faults[key] = f"is {zlab[key]!r}: the drafter's rope has one base and no scaling"
    parameters = places["rope_parameters"]
    new, old = parameters.get("rope_theta") if isinstance(parameters, dict) else None, zlab.get("rope_theta")
    theta = new if old is None else old
    fields["rope_theta"] = theta if _is_positive(theta) else None
    if theta is None:
        faults["rope_theta"] = "is missing, in rope_parameters too: engines then take 10000 without a word"
    elif not _is_positive(theta):
        faults["rope_theta"] = f"is {theta!r}: a positive number is needed"
    elif new is not None and new != theta:
        faults["rope_theta"] = f"is {old!r}, and {new!r} in rope_parameters: engines read one or the other"


def _understand_layers(zlab: dict[str, Any], fields: dict[str, Any], faults: dict[str, str]) -> None:
    """Which layers slide, over which window, and whether they are causal inside the block."""
    layers, window, kinds = fields["layers"] or 0, zlab.get("sliding_window"), zlab.get("layer_types")
    if kinds is None:
        first = zlab.get("max_window_layers", TRANSFORMERS_MAX_WINDOW_LAYERS)
        slides = window is not None and zlab.get("use_sliding_window", False) is True and _is_whole(first)
        kinds = [SLIDING if slides and index >= first else FULL for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        faults["layer_types"] = f"is {kinds!r}: {FULL} or {SLIDING} is needed for each of {layers} layers"
        fields |= {"layer_types": None, "sliding_window": None}
        return
    sliding = SLIDING in kinds
    if sliding and zlab.get("use_sliding_window", False) is not True:
        faults["use_sliding_window"] = "is not true: engines then forget the window of the sliding layers, or stop"
    if sliding and not (_is_whole(window) and window > 0):
        faults["sliding_window"] = f"is {window!r}, and {kinds.count(SLIDING)} layers slide"
    fields |= {"layer_types": tuple(kinds), "sliding_window": window if sliding else None}
    causal = {"is_causal": zlab.get("is_causal"), "dflash_config.causal": zlab["dflash_config"].get("causal")}
    for key, value in causal.items():
        if value is not None and any(value is not (kind == SLIDING) for kind in kinds):
            faults[key] = (
                f"is {value!r}, for every layer, and layer_types are {kinds}: sliding layers are causal inside the block, "
                "full ones are not"
            )


def _understood_scales(zlab: dict[str, Any], faults: dict[str, str]) -> Scales:
    written = {
        "input_embedding_scale": _draft_value(zlab, "input_embedding_scale", 1.0),
        "output_multiplier": _draft_value(zlab, "output_multiplier", zlab.get("logit_scale", 1.0)),
        "final_logit_softcapping": _draft_value(zlab, "final_logit_softcapping", None) or math.inf,  # 0: none
    }
    for key, value in written.items():
        if not (_is_positive(value) or value == math.inf):
            faults[f"dflash_config.{key}"] = f"is {value!r}: a positive number is needed"
            written[key] = 1.0
    embedding_scale, logit_scale, softcap = map(float, written.values())
    return Scales(
        embedding_scale=embedding_scale, logit_scale=logit_scale, logit_softcap=None if softcap == math.inf else softcap
    )


# ---------------------------------------------------------------- a warm start


def read_exported(directory: str | Path, shape: Shape) -> dict[str, torch.Tensor]:
    """The weights of an exported drafter, in either form, that fits `shape`, for a warm start.

    The block size may differ: no weight depends on it. Raises ValueError, one line, for anything else that does not agree.
    """
    what = f"drafter.init_from={directory}"
    try:
        config, tensors = read_config(Path(directory)), read_tensors(Path(directory))
    except ValueError as error:
        raise ValueError(
            f"{what} is not an exported drafter ({error}); give a directory with its config.json and model.safetensors"
        ) from None
    theirs = understand(config)
    for key, fault in theirs.faults.items():
        raise ValueError(f"{what}: {theirs.name(key)} {fault}; start from another drafter")
    for field, ours in dataclasses.asdict(shape).items():
        value = theirs.fields[field]
        unsaid = field == "target_layers" and theirs.form == "speculators"
        if field not in ("block_size", "max_positions") and value != ours and not unsaid:
            raise ValueError(f"{what}: {theirs.name(KEYS[field])} is {value}, this run's is {ours}; make them agree")
    check_tensors(tensors, shape, what=what)
    return tensors
