"""Is this directory the drafter that it says it is, and one for this target? Every fault by name.

Engines load a wrong drafter without a word: a layer id that is off by one, a missing tensor, a rope base or a mask token left out
cost acceptance, and never raise an error. Three witnesses are asked, as far as they are there:

config.json and the tensors   what no engine could serve, or two would read differently
dflash.json, SHA256SUMS       what the export wrote, key by key and byte by byte
the target                    whose widths, layers, tokens and scales these must be
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash.drafter import Drafter
from dflash.files import sha256_of
from dflash.formats import (
    ARCHITECTURE,
    CLIENTS_BLOCK_SIZE,
    FULL,
    KEYS,
    SLIDING,
    Scales,
    Understood,
    config_of,
    read_config,
    read_tensors,
    shape_of,
    understand,
)
from dflash.shape import Shape
from dflash.target import Target, resolve_mask_token, tokenizer_hashes

RECORD, SUMS, CARD = "dflash.json", "SHA256SUMS", "README.md"
# relative: a scale measured on a bfloat16 target, against one on the same target in float32
SCALE_TOLERANCE = 0.005
NAMED_TENSORS = 6  # of one fault, before they are only counted

Fault = tuple[str, str]
"""z-lab's key, and what is wrong with its value."""


@dataclass
class Findings:
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be checked, and what is right but not for every engine."""


def verify(directory: str | Path, target: Target) -> list[str]:
    """The problems of an exported drafter for this target, each by name; [] where there is none."""
    return examine(Path(directory), target).problems


def config_at(directory: Path) -> dict[str, Any]:
    """config.json of an exported drafter. Raises ValueError, one line, for what is none."""
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory; give one that python -m dflash.export wrote")
    if (directory / "manifest.json").exists():
        raise ValueError(f"{directory} is a checkpoint; python -m dflash.export makes what engines serve of it")
    try:
        return read_config(directory)
    except ValueError as error:
        raise ValueError(
            f"{directory} is not an exported drafter ({error}); give a directory that python -m dflash.export wrote"
        ) from None


def examine(directory: Path, target: Target) -> Findings:
    """Problems and notes of an exported drafter. Raises ValueError, one line, for what is no exported drafter at all."""
    config = config_at(directory)
    found = Findings()
    _check_files(directory, found)
    theirs = understand(config)
    faults = dict(theirs.faults)
    for key, fault in (*_engine_faults(theirs, config), *target_faults(theirs, target), *_use_faults(theirs, target)):
        faults.setdefault(key, fault)
    found.problems += [f"config.json: {theirs.name(key)} {fault}" for key, fault in faults.items()]
    try:
        record = read_record(directory)
    except ValueError as error:
        found.problems.append(str(error))
        record = None
    if record is None:
        found.problems += _ordinary_mask(theirs, target)
        found.notes.append(
            f"no {RECORD} that could be read: whether layers, mask token, block size and causality are those of the training, "
            "and the target's weights too, was not checked"
        )
    else:
        found.problems += _against_record(config, record, {theirs.name(key) for key in faults})
        problem, note = other_target(record["target"], target)
        found.problems += [] if problem is None else [problem]
        found.notes += [] if note is None else [note]
        if record["tokenizer"] is None:
            found.notes.append("the tokenizer of the training is not recorded, and was not compared")
        else:
            said = [other(record["tokenizer"], target) for other in (other_tokenizer, other_template)]
            found.problems += [problem for problem in said if problem is not None]
    _check_tensors(directory, theirs, found)
    found.notes += serving_notes(theirs.fields["layer_types"] or (), theirs.scales)
    return found


def serving_notes(layer_types: tuple[str, ...], scales: Scales) -> list[str]:
    """What not every engine can do for such a drafter, one line each."""
    notes = []
    if set(layer_types) == {FULL, SLIDING}:
        notes.append(
            "sliding and full layers are mixed: z-lab's client and SGLang serve that, vLLM with its V2 runner alone (a GPU; "
            "VLLM_USE_V2_MODEL_RUNNER=1), llama.cpp and transformers not (one causality for all layers)"
        )
    if scales.embedding_scale != 1:
        notes.append(
            f"the target multiplies its embedding by {scales.embedding_scale:g}, and so must the drafter: z-lab's client reads "
            "input_embedding_scale, SGLang takes the target's own; vLLM (0.33) does neither, so compare its acceptance first"
        )
    return notes


# ---------------------------------------------------------------- files


def read_record(directory: Path) -> dict[str, Any] | None:
    """dflash.json of an export; None where there is none. Raises ValueError, one line, for a damaged one."""
    path = directory / RECORD
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
        shape_of(record["drafter"])
        Scales(**(record["scales"] or {}))
        for key in ("format", "dtype", "tokenizer", "data"):
            record[key]
        record["checkpoint"]["files"]["drafter.safetensors"]["sha256"]
        for key in ("name", "architecture", "layers", "width", "vocabulary", "dtype", "sha256"):
            record["target"][key]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{RECORD} is damaged ({type(error).__name__}: {error}); export the drafter again") from None
    return record


def _check_files(directory: Path, found: Findings) -> None:
    listed = {}
    if (directory / SUMS).exists():
        for line in (directory / SUMS).read_text(errors="replace").splitlines():
            digest, _, name = line.partition("  ")
            listed[name] = digest
    else:
        found.notes.append(f"no {SUMS}: whether the files are those that were exported was not checked")
    for name, digest in listed.items():
        path = directory / Path(name).name
        if not path.is_file():
            found.problems.append(f"{name} is missing ({SUMS} lists it)")
        elif sha256_of(path) != digest:
            text = f"{name} is not the file that was exported (its sha256 is not that of {SUMS})"
            (found.notes if name == CARD else found.problems).append(text)  # the card is there to be edited
    for path in sorted(directory.iterdir()):
        if path.name in (SUMS, "model.safetensors") or path.name in listed:
            continue
        if path.name == "mask_embedding.pt":
            found.problems.append(
                f"{path.name}: vLLM, SGLang and llama.cpp use it in place of the target's own embedding"
            )
        elif path.suffix == ".safetensors":
            found.problems.append(f"{path.name}: vLLM reads every .safetensors file of the directory")
        elif listed:
            found.notes.append(f"{path.name} is not part of the export")


# ---------------------------------------------------------------- config.json


def _engine_faults(theirs: Understood, config: dict[str, Any]) -> Iterator[Fault]:
    """Clear in meaning, and still not served everywhere."""
    zlab, kinds = theirs.zlab, set(theirs.fields["layer_types"] or ())
    if theirs.form == "speculators":
        yield from _speculators_faults(theirs, config)
    else:
        if zlab.get("architectures") != [ARCHITECTURE]:
            yield "architectures", f"is {zlab.get('architectures')!r}; engines know {ARCHITECTURE}"
        if theirs.fields["target_layers"] is None:
            yield "num_target_layers", "is missing: z-lab's client fails without it"
        if zlab.get("rope_theta") is None:
            yield "rope_theta", "is missing: transformers 4 reads it alone and takes 10000 instead"
        if kinds == {SLIDING} and zlab.get("is_causal") is None:
            yield "is_causal", "is missing: llama.cpp and transformers then run the sliding layers bidirectional"
    if zlab.get("model_type") != "qwen3":
        yield "model_type", f"is {zlab.get('model_type')!r}: the drafter is a qwen3 stack, whatever its target"
    if zlab.get("block_size") is None and zlab["dflash_config"].get("block_size") is None:
        yield "block_size", f"is missing: engines take {CLIENTS_BLOCK_SIZE}"


def _speculators_faults(theirs: Understood, config: dict[str, Any]) -> Iterator[Fault]:
    vocabulary, block_size, kinds = (theirs.fields[name] for name in ("vocabulary", "block_size", "layer_types"))
    if config["speculators_model_type"] != "dflash":
        yield "speculators_model_type", f"is {config['speculators_model_type']!r}, not dflash"
    if config.get("draft_vocab_size") != vocabulary:
        yield "draft_vocab_size", f"is {config.get('draft_vocab_size')!r}, the layers' is {vocabulary}"
    bidirectional = config.get("sliding_window_non_causal") is True
    if theirs.zlab.get("is_causal") is None and not bidirectional and FULL in (kinds or ()):
        yield (
            "is_causal",
            "is missing, and sliding_window_non_causal not true: vLLM (0.33) then runs full layers causal",
        )
    section = config.get("speculators_config")
    section = section if isinstance(section, dict) else {}
    if not (isinstance(section.get("verifier"), dict) and section["verifier"].get("name_or_path")):
        yield "speculators_config.verifier", "names no target: vLLM and speculators load it from there"
    methods = section.get("proposal_methods")
    method = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    tokens = method.get("speculative_tokens")
    if block_size is not None and tokens != block_size - 1:
        yield (
            "speculators_config.proposal_methods",
            f"asks for {tokens!r} drafted tokens, the block has {block_size - 1}",
        )


def target_faults(theirs: Understood, target: Target) -> Iterator[Fault]:
    """What does not fit this target."""
    fields, mask, ids = theirs.fields, theirs.fields["mask_token_id"], theirs.fields["target_layer_ids"]
    sizes = {"width": target.width, "vocabulary": target.vocabulary, "target_layers": target.num_layers}
    for name, ours in sizes.items():
        if fields[name] is not None and fields[name] != ours:
            yield KEYS[name], f"is {fields[name]}, this target's is {ours}"
    last = target.num_layers - 1
    if ids is not None and (ids[0] < 0 or ids[-1] >= last):
        yield (
            KEYS["target_layer_ids"],
            f"is {list(ids)}: engines can capture 0 to {last - 1} of this target's {last + 1} layers",
        )
    if mask is not None and not 0 <= mask < target.vocabulary:
        yield KEYS["mask_token_id"], f"is {mask}, this target's embedding has rows 0 to {target.vocabulary - 1}"
    for key, written, ours in (
        ("input_embedding_scale", theirs.scales.embedding_scale, target.embedding_scale),
        ("output_multiplier", theirs.scales.logit_scale, target.logit_scale),
        # inf: no cap
        ("final_logit_softcapping", theirs.scales.logit_softcap or math.inf, target.logit_softcap or math.inf),
    ):
        unsaid = theirs.form == "speculators" and key == "final_logit_softcapping"  # that form has no word for it
        if not unsaid and not math.isclose(written, ours, rel_tol=SCALE_TOLERANCE):
            yield f"dflash_config.{key}", f"is {written:g}, this target's is {ours:g}"


def _use_faults(theirs: Understood, target: Target) -> Iterator[Fault]:
    """What fits this target, and serves it badly."""
    mask, positions = theirs.fields["mask_token_id"], theirs.fields["max_positions"]
    if mask is not None:
        try:
            resolve_mask_token(target, mask)
        except ValueError as error:  # it names the knob of training
            yield KEYS["mask_token_id"], f"is {mask}: {str(error).partition(': ')[2].partition(';')[0]}"
    longest = target.model.config.get_text_config().max_position_embeddings
    if positions is not None and positions < longest:
        yield KEYS["max_positions"], f"is {positions}, this target's is {longest}"


def _ordinary_mask(theirs: Understood, target: Target) -> Iterator[str]:
    """A mask token that text is made of, where nothing says that the drafter was trained with it."""
    mask, tokenizer = theirs.fields["mask_token_id"], target.tokenizer
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    if mask is not None and 0 <= mask < len(tokenizer) and mask not in special:
        key = theirs.name(KEYS["mask_token_id"])
        yield f"config.json: {key} is {mask}: an ordinary token of this target's text, {tokenizer.decode([mask])!r}"


# ---------------------------------------------------------------- the record


def _against_record(config: dict[str, Any], record: dict[str, Any], named: set[str]) -> Iterator[str]:
    """Keys of config.json that the export did not write so, but for those that are named already."""
    scales = Scales(**record["scales"]) if record["scales"] is not None else Scales()
    wrote = _flat(
        config_of(record["format"], shape_of(record["drafter"]), scales, dtype=record["dtype"], target=record["target"])
    )
    reads = _flat(config)
    for key in sorted(wrote.keys() | reads.keys()):
        if key in named or any(key.startswith(f"{name}.") for name in named):
            continue
        if key not in reads:
            yield f"config.json: {key} is missing; the export wrote {wrote[key]!r} ({RECORD})"
        elif key not in wrote:
            yield f"config.json: {key} is {reads[key]!r}; the export did not write it ({RECORD})"
        elif reads[key] != wrote[key]:
            yield f"config.json: {key} is {reads[key]!r}; the drafter was exported with {wrote[key]!r} ({RECORD})"


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    flat = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def other_target(recorded: dict[str, Any], target: Target) -> tuple[str | None, str | None]:
    """(problem, note): why `target` is not the one of a recorded identity; what could not be compared."""
    ours = target.identity()
    for key in ("architecture", "layers", "width", "vocabulary"):
        if recorded[key] != ours[key]:
            return (
                f"the drafter is for {recorded['name']} with {key} {recorded[key]}; {ours['name']} has {ours[key]}",
                None,
            )
    if recorded["sha256"] == ours["sha256"]:
        return None, None
    if recorded["dtype"] == ours["dtype"]:
        return f"the drafter is for {recorded['name']}; {ours['name']} has other weights (sha256 of the target)", None
    return None, (
        f"the drafter's target was read in {recorded['dtype']}, {ours['name']} is in {ours['dtype']}, so that their weights "
        "cannot be compared: architecture, layers, width and vocabulary agree"
    )


def other_tokenizer(recorded: dict[str, str], target: Target) -> str | None:
    """Why the target's tokenizer makes other ids of a text than that of the training."""
    if recorded["vocabulary_sha256"] != tokenizer_hashes(target.tokenizer)["vocabulary_sha256"]:
        return f"the tokenizer of {target.name} has other tokens than the one of the training"
    return None


def other_template(recorded: dict[str, str], target: Target) -> str | None:
    """Why conversations look different to the drafter than in its training."""
    if recorded["chat_template_sha256"] != tokenizer_hashes(target.tokenizer)["chat_template_sha256"]:
        return f"the chat template of {target.name} is not the one of the training, so conversations look different to the drafter"
    return None


# ---------------------------------------------------------------- tensors


def _check_tensors(directory: Path, theirs: Understood, found: Findings) -> None:
    try:
        tensors = read_tensors(directory)
    except ValueError as error:
        found.problems.append(str(error))
        return
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    if dtypes != [theirs.zlab.get("dtype", theirs.zlab.get("torch_dtype"))]:
        found.problems.append(
            f"model.safetensors: the tensors are {', '.join(dtypes)}, config.json says {theirs.zlab.get('dtype')}"
        )
    values = {
        "is not finite": [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())],
        "is zero everywhere": [name for name, tensor in tensors.items() if not bool(tensor.any())],
    }
    for fault, names in values.items():
        found.problems += _named(names, fault)
    expected = _expected_shapes(theirs)
    if expected is None:
        found.notes.append("config.json does not tell the shapes of the tensors, so they were not compared")
        return
    missing, stray = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if stray and all(name.startswith("model.") for name in tensors):
        found.problems.append("model.safetensors: every name begins with model., which vLLM refuses")
        return
    for name in missing.copy():
        renamed = [other for other in stray if tensors[other].shape == expected[name]]
        if len(renamed) == 1:
            found.problems.append(f"model.safetensors: {name} is missing; {renamed[0]} has its shape: was it renamed?")
            missing.remove(name)
            stray.remove(renamed[0])
    found.problems += _named(missing, "is missing: most engines fill it in and say nothing")
    found.problems += _named(stray, "is not part of this drafter: vLLM and llama.cpp refuse it, others pass over it")
    misshapen = [name for name in expected.keys() & tensors.keys() if tensors[name].shape != expected[name]]
    for name in sorted(misshapen)[:NAMED_TENSORS]:
        found.problems.append(
            f"model.safetensors: {name} is {list(tensors[name].shape)}, by config.json {list(expected[name])}"
        )
    if len(misshapen) > NAMED_TENSORS:
        found.problems.append(f"model.safetensors: {len(misshapen) - NAMED_TENSORS} more tensors of another shape")


def _named(names: list[str], fault: str) -> list[str]:
    lines = [f"model.safetensors: {name} {fault}" for name in sorted(names)[:NAMED_TENSORS]]
    unnamed = len(names) - NAMED_TENSORS
    return [*lines, f"model.safetensors: {unnamed} more tensors likewise"] if unnamed > 0 else lines


def _expected_shapes(theirs: Understood) -> dict[str, torch.Size] | None:
    """By name; None where config.json lacks what decides a shape."""
    fields = theirs.fields
    sizes = {name: fields[name] for name in ("width", "layers", "heads", "kv_heads", "head_dim", "intermediate_size")}
    if None in sizes.values() or fields["target_layer_ids"] is None:
        return None
    shape = Shape(
        **sizes,
        target_layer_ids=fields["target_layer_ids"],
        # the rest decides no shape
        vocabulary=1,
        target_layers=1,
        block_size=2,
        mask_token_id=0,
        layer_types=(FULL,) * sizes["layers"],
        sliding_window=None,
        rope_theta=1.0,
        max_positions=1,
    )
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Drafter(shape).state_dict().items()}
