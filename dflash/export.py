"""From a checkpoint to a directory that vLLM, SGLang and others serve.

  python -m dflash.export runs/NAME-0001/checkpoints/step-00001000
  python -m dflash.export --describe DIRECTORY --evaluation FILE
  python -m dflash.export --verify DIRECTORY --target T

runs/NAME-0001/export/step-00001000/
  config.json         what engines read of the architecture (formats.py)
  model.safetensors   the weights, under z-lab's names
  dflash.json         what the drafter was trained for and from: target, data, checkpoint, code, configuration
  README.md           the model card
  SHA256SUMS          of the files above: sha256sum -c SHA256SUMS

It is written beside its place and renamed: a directory of that name is complete.
"""

import argparse
import dataclasses
import json
import logging
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from dflash import checkpoint as checkpoints
from dflash import config as configuration
from dflash import run_dir as runs
from dflash.command import FAILED, FINISHED, Parser, run
from dflash.drafter import Drafter, check_tensors
from dflash.files import flush, replaced, sha256_of
from dflash.formats import Scales, config_of, read_config, read_tensors, shape_of, understand
from dflash.progress import print_summary
from dflash.shape import Shape, parameter_count
from dflash.target import Target, load_configured, load_target, tokenizer_hashes
from dflash.verify import (
    CARD,
    RECORD,
    SUMS,
    config_at,
    examine,
    other_target,
    other_template,
    other_tokenizer,
    read_record,
    serving_notes,
    target_faults,
    verify,
)

__all__ = ["export", "load_drafter", "main", "verify"]

Form = Literal["zlab", "speculators"]
Dtype = Literal["bfloat16", "float32"]
FORMS: tuple[Form, ...] = ("zlab", "speculators")
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")
RECIPE = ("target", "data", "drafter", "objective", "optim", "stream", "run")  # sections that decide what was trained
UNKNOWN = "unknown"

log = logging.getLogger("dflash")


# ---------------------------------------------------------------- the command


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code. The last line on stderr is the cause when it is not 0."""
    words = sys.argv[1:] if arguments is None else arguments
    return run(lambda: _command(words), stopped="stopped; nothing was exported")


def _command(arguments: list[str]) -> int:
    parsed = _parse(arguments)
    if parsed.verify is not None:
        return _verify(parsed)
    if parsed.describe is not None:
        return _describe(parsed.describe, parsed.evaluation)
    if parsed.checkpoint is None:
        raise ValueError(
            "no checkpoint is named; give a run's step-XXXXXXXX directory, or --verify DIRECTORY --target T"
        )
    checkpoint = checkpoint_at(parsed.checkpoint)
    out = parsed.out or _place_in_run(checkpoint, parsed.format)
    record = export(checkpoint, out, format=parsed.format, dtype=parsed.dtype, evaluation=parsed.evaluation)
    shape = shape_of(record["drafter"])
    for note in notes_of(record):
        print(f"note: {note}", file=sys.stderr)
    summary = {
        "drafter": f"step {record['checkpoint']['step']}, {parameter_count(shape):,} parameters in {parsed.dtype}, "
        f"blocks of {shape.block_size}",
        "target": record["target"]["name"],
        "card": f"{CARD}: choose a licence there before you publish it",
        "check": shlex.join(
            ["python", "-m", "dflash.export", "--verify", str(out), "--target", record["target"]["name"]]
        ),
    }
    print_summary(out, summary)
    for engine, command in serving_commands(record, str(out.absolute())).items():
        print(f"\n# {engine}\n{command}")
    return FINISHED


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m dflash.export",
        usage="%(prog)s CHECKPOINT [--out DIR] [--format zlab|speculators] [--dtype bfloat16|float32] [--evaluation FILE]\n"
        "       %(prog)s --describe DIR --evaluation FILE\n"
        "       %(prog)s --verify DIR --target T [--target.FIELD VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint", type=Path, nargs="?", help="a run's checkpoint: runs/NAME/checkpoints/step-XXXXXXXX"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to export to (default: RUN/export/step-XXXXXXXX)"
    )
    parser.add_argument("--format", choices=FORMS, default="zlab", help="zlab (default): for vLLM, SGLang and others")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights; engines run bfloat16")
    parser.add_argument(
        "--evaluation", type=Path, metavar="FILE", help="JSON of python -m dflash.evaluate, for the model card"
    )
    parser.add_argument(
        "--describe",
        type=Path,
        metavar="DIR",
        help="put what was measured into the model card of an export that has none",
    )
    parser.add_argument("--verify", type=Path, metavar="DIR", help="check an exported drafter instead")
    configuration.add_arguments(parser, flat={"--target": "target.name"}, sections=("target",))
    parsed = parser.parse_args(arguments)
    named = {"checkpoint": parsed.checkpoint, "--describe": parsed.describe, "--verify": parsed.verify}
    given = [f"{name} {path}" for name, path in named.items() if path is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: give one of them")
    if parsed.describe is not None and parsed.evaluation is None:
        raise ValueError("--evaluation is not set; give the JSON of python -m dflash.evaluate on that export")
    return parsed


def _verify(parsed: argparse.Namespace) -> int:
    directory = parsed.verify
    config_at(directory)  # before the target is loaded
    section = configuration.from_arguments(parsed, trains=False).target
    found = examine(directory, _target_to_compare(section, directory))
    for problem in found.problems:
        print(f"problem: {problem}")
    for note in found.notes:
        print(f"note: {note}")
    if found.problems:
        count = f"{len(found.problems)} problem{'s' if len(found.problems) > 1 else ''}"
        print(f"dflash: {count} in {directory}", file=sys.stderr)
        return FAILED
    print(f"{directory}: no problem found")
    return FINISHED


def _describe(directory: Path, evaluation: Path) -> int:
    """A card that has figures keeps them: the export may be registered, with the checksum of its card."""
    directory = directory.absolute()
    config_at(directory)
    record = read_record(directory)
    if record is None:
        raise ValueError(f"{directory}: {RECORD} is missing; export the checkpoint anew")
    measured = read_evaluation(evaluation)
    _check_measured(measured, record, evaluation)
    if (directory / CARD).read_text(encoding="utf-8") == card(record, None):
        with replaced(directory / CARD) as file:
            file.write(card(record, measured))
        with replaced(directory / SUMS) as file:
            file.write(_sums_of(directory))
        flush(directory)
    print(f"{directory}: {CARD} has what was measured")
    return FINISHED


def _target_to_compare(section: configuration.TargetConfig, directory: Path) -> Target:
    """The target, by default in the dtype of the training: in another one its weights could not be compared."""
    try:
        record = read_record(directory)
    except ValueError:  # `examine` will say so
        record = None
    if record is not None and section.dtype == "auto":
        section = dataclasses.replace(section, dtype=record["target"]["dtype"])
    return load_configured(section, captures=False)


# ---------------------------------------------------------------- exporting


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    format: Form = "zlab",
    dtype: Dtype = "bfloat16",
    evaluation: str | Path | None = None,
) -> dict[str, Any]:
    """Writes a drafter to `out`, which must not be there or be empty; returns its record (dflash.json).

    Raises ValueError, one line, for what a user can mend; then, and after any other error, `out` is as it was.
    """
    checkpoint, out = checkpoint_at(Path(checkpoint)), Path(out).absolute()
    _check_free(out)
    measured = None if evaluation is None else read_evaluation(Path(evaluation))
    start = checkpoints.load(checkpoint)
    shape = _shape_in(start.state, checkpoint)
    check_tensors(start.drafter, shape, what=f"checkpoint {checkpoint}")
    record = _record(checkpoint, start.state, shape, format, dtype)
    if measured is not None:
        _check_measured(measured, record, Path(evaluation or ""))
    scales = Scales() if record["scales"] is None else Scales(**record["scales"])
    config = config_of(format, shape, scales, dtype=dtype, target=record["target"])
    tensors = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in start.drafter.items()}

    partial = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists():  # of an export that was killed
            shutil.rmtree(partial)
        partial.mkdir()
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}; name a directory that can be written") from None
    try:
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})  # transformers asks for the format
        for name, value in (("config.json", config), (RECORD, record)):
            (partial / name).write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
        (partial / CARD).write_text(card(record, measured), encoding="utf-8")
        (partial / SUMS).write_text(_sums_of(partial))
        for path in (*partial.iterdir(), partial):
            flush(path)
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush(out.parent)
    return record


def _sums_of(directory: Path) -> str:
    """What SHA256SUMS says of all other files."""
    files = [path for path in sorted(directory.iterdir()) if path.name != SUMS and not path.name.startswith(".")]
    return "".join(f"{sha256_of(path)}  {path.name}\n" for path in files)


def checkpoint_at(path: Path) -> Path:
    """`path`, absolute, if it may be a checkpoint. Raises ValueError with what to name instead."""
    path = path.absolute()
    if (path / "manifest.json").exists():
        return path
    if not path.exists():
        raise ValueError(f"{path}: no such directory; name a run's checkpoint (step-XXXXXXXX)")
    if not path.is_dir():
        raise ValueError(f"{path} is a file; name the checkpoint directory (step-XXXXXXXX)")
    run_dir = path.parent if path.name == "checkpoints" else path
    if (run_dir / "checkpoints").is_dir():
        newest = checkpoints.newest(run_dir)
        remedy = f"name one, e.g. {newest}" if newest is not None else "and none of them is complete"
        raise ValueError(f"{path} holds the checkpoints of a run; {remedy}")
    if (path / SUMS).exists():
        raise ValueError(f"{path} is an exported drafter; name the checkpoint (step-XXXXXXXX) that it was made from")
    raise ValueError(f"{path} is no checkpoint (manifest.json is missing); name a complete step-XXXXXXXX directory")


def _run_of(checkpoint: Path) -> Path | None:
    """The run directory around a checkpoint; None for one that was copied out of its run."""
    run_dir = checkpoint.parent.parent
    return run_dir if checkpoint.parent.name == "checkpoints" and (run_dir / "config.json").exists() else None


def _place_in_run(checkpoint: Path, form: Form) -> Path:
    run_dir = _run_of(checkpoint)
    if run_dir is None:
        raise ValueError(f"--out is not set, and {checkpoint} is in no run directory; name a directory to export to")
    return run_dir / "export" / (checkpoint.name if form == "zlab" else f"{checkpoint.name}-{form}")


def _check_free(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a new directory")
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty; name a new directory, or remove that one")


def _shape_in(state: dict[str, Any], checkpoint: Path) -> Shape:
    try:
        return shape_of(state["shape"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"checkpoint {checkpoint} was written by another version of this project ({error}); export it with that one"
        ) from None


# ---------------------------------------------------------------- the record


def _record(checkpoint: Path, state: dict[str, Any], shape: Shape, form: Form, dtype: Dtype) -> dict[str, Any]:
    """dflash.json."""
    run_dir = _run_of(checkpoint)
    config, provenance = (_json_of(run_dir, name) for name in ("config.json", "provenance.json"))
    scales, tokenizer = _facts_of_target(state["target"], shape, (config or {}).get("target", {}))
    return {
        "format": form,
        "dtype": dtype,
        "drafter": dataclasses.asdict(shape),
        "scales": None if scales is None else dataclasses.asdict(scales),
        "target": state["target"],
        "tokenizer": tokenizer,
        "checkpoint": {
            "path": str(checkpoint),
            "step": state["step"],
            "epoch": state["epoch"],
            "files": json.loads((checkpoint / "manifest.json").read_text()),
        },
        "data": (provenance or {}).get("data") or {"digest": state["data"]},
        "code": (provenance or {}).get("code"),
        "packages": (provenance or {}).get("packages"),
        "exported_by": {"code": runs.code_version(), "packages": runs.package_versions()},
        "config": None if config is None else {section: config[section] for section in RECIPE if section in config},
    }


def _json_of(run_dir: Path | None, name: str) -> dict[str, Any] | None:
    """A file of the run as it is, whatever version wrote it; None where the checkpoint has left its run."""
    if run_dir is None or not (run_dir / name).exists():
        return None
    try:
        return json.loads((run_dir / name).read_text())
    except ValueError as error:
        raise ValueError(
            f"{run_dir / name} is not JSON ({error}); mend it, or copy the checkpoint out of its run"
        ) from None


def _facts_of_target(
    identity: dict[str, Any], shape: Shape, section: dict[str, Any]
) -> tuple[Scales | None, dict[str, str] | None]:
    """(scales, tokenizer hashes) of the target that a checkpoint was trained for; None each where they cannot be known any more."""
    scales = {name: identity[name] for name in Scales.__dataclass_fields__ if name in identity}
    if len(scales) == len(Scales.__dataclass_fields__):
        return Scales(**scales), identity.get("tokenizer")
    try:
        target = load_target(
            identity["name"],
            revision=identity["revision"],
            dtype=identity["dtype"],
            device_map=section.get("device_map"),
            attention=section.get("attention"),
            layer_ids=shape.target_layer_ids,
            trust_remote_code=section.get("trust_remote_code", False),
        )
    except ValueError as error:
        log.warning("the target cannot be loaded, so its scales and its tokenizer stay unknown: %s", error)
        return None, None
    problem, _ = other_target(identity, target)
    if problem is not None:
        log.warning(
            "the target is not the one of the training any more, whose scales and tokenizer stay unknown: %s", problem
        )
        return None, None
    scales = Scales(
        embedding_scale=target.embedding_scale, logit_scale=target.logit_scale, logit_softcap=target.logit_softcap
    )
    return scales, tokenizer_hashes(target.tokenizer)


def notes_of(record: dict[str, Any]) -> list[str]:
    """What whoever serves this export should know, one line each."""
    notes = []
    if record["scales"] is None:
        notes.append(
            "whether the target scales its embedding or its logits (Gemma, Granite, Cohere) is unknown, and config.json says that "
            "it does not; check with --verify where the target is"
        )
    if record["config"] is None:
        notes.append("the run of this checkpoint is not here: recipe, data path and code version are unknown")
    scales = Scales() if record["scales"] is None else Scales(**record["scales"])
    return notes + serving_notes(tuple(record["drafter"]["layer_types"]), scales)


# ---------------------------------------------------------------- evaluation, card and commands


def read_evaluation(path: Path) -> dict[str, Any]:
    """The JSON that `python -m dflash.evaluate --out` wrote. Raises ValueError, one line."""
    try:
        measured = json.loads(path.read_text())
        _acceptance(measured)
        measured["drafter"].get("weights_sha256")
    except OSError as error:
        raise ValueError(f"--evaluation {path}: {error.strerror}; give the JSON of python -m dflash.evaluate") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--evaluation {path} is not the JSON of python -m dflash.evaluate --out ({type(error).__name__}: {error})"
        ) from None
    return measured


def _check_measured(measured: dict[str, Any], record: dict[str, Any], path: Path) -> None:
    weights = record["checkpoint"]["files"]["drafter.safetensors"]["sha256"]
    other = measured["drafter"]
    if other.get("weights_sha256") != weights:
        raise ValueError(
            f"--evaluation {path} measured another drafter ({other.get('path', UNKNOWN)}, step {other.get('step', UNKNOWN)}); "
            "give the one of this checkpoint"
        )


def serving_commands(record: dict[str, Any], directory: str) -> dict[str, str]:
    """{engine: the command line that serves the drafter at `directory`}."""
    target, shape = record["target"], shape_of(record["drafter"])
    revision = ["--revision", target["revision"]] if target["revision"] else []
    own_code = ((record["config"] or {}).get("target") or {}).get("trust_remote_code")
    shared = [*revision, *(["--trust-remote-code"] if own_code else [])]
    method = {"method": "dflash", "model": directory, "num_speculative_tokens": shape.block_size - 1}
    mixed = "VLLM_USE_V2_MODEL_RUNNER=1 " if len(set(shape.layer_types)) > 1 else ""
    vllm = ["vllm", "serve", target["name"], *shared, "--speculative-config", json.dumps(method)]
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", target["name"], *shared]
    sglang += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", directory]
    sglang += ["--speculative-num-draft-tokens", str(shape.block_size)]
    commands = {"vLLM": mixed + shlex.join(vllm)}
    return commands | ({"SGLang": shlex.join(sglang)} if record["format"] == "zlab" else {})


def card(record: dict[str, Any], measured: dict[str, Any] | None) -> str:
    """README.md: the model card, with the front matter that model hubs read."""
    shape, target, checkpoint = shape_of(record["drafter"]), record["target"], record["checkpoint"]
    local = os.path.isabs(target["name"])  # a hub name is no path
    front = [
        "# base_model: the target's name on the hub" if local else f"base_model: {json.dumps(target['name'])}",
        "pipeline_tag: text-generation",
        "tags: [dflash, speculative-decoding]",
        "# license: yours to choose; mind those of the target and of the data",
    ]
    facts = {
        "target": f"`{target['name']}`" + (f", revision `{target['revision']}`" if target["revision"] else ""),
        "its weights": f"sha256 `{target['sha256']}` (a sample of every tensor, read in {target['dtype']})",
        "its tokenizer": _tokenizer_line(record),
        "captured layers": f"outputs of {list(shape.target_layer_ids)} of {shape.target_layers}, counted from 0",
        "drafter": f"{shape.layers} layers ({', '.join(sorted(set(shape.layer_types)))}"
        + (f", window {shape.sliding_window}" if shape.sliding_window else "")
        + f"), {parameter_count(shape):,} parameters in {record['dtype']}; no embedding and no head of its own",
        "block": f"{shape.block_size} tokens: the known one and {shape.block_size - 1} drafted",
        "mask token": f"id {shape.mask_token_id}",
        "checkpoint": f"step {checkpoint['step']}, epoch {checkpoint['epoch']}; drafter.safetensors sha256 "
        f"`{checkpoint['files']['drafter.safetensors']['sha256']}`",
        "data": f"sha256 `{record['data']['digest']}` of the prepared conversations",
        "code": _code_line(record["code"]),
    }
    lines = [
        "---",
        *front,
        "---",
        "",
        f"# DFlash drafter for {Path(target['name']).name if local else target['name']}",
        "",
    ]
    lines += [
        "A draft model for speculative decoding (DFlash, arXiv 2602.06036): it drafts a block of tokens at once, from hidden "
        "states of the target, which then verifies them. The output stays the target's own. It works with this target alone.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
        "",
        "## Serving",
        "",
        "```sh",
    ]
    for engine, command in serving_commands(record, "PATH/TO/THIS/DIRECTORY").items():
        lines += [f"# {engine}", command]
    lines += ["```", "", *(f"- {note}" for note in notes_of(record)), "", "## Acceptance", ""]
    lines += _acceptance(measured)
    lines += ["", "## Recipe", ""]
    if record["config"] is None:
        lines.append("Unknown: the checkpoint was exported without its run.")
    else:
        sections = {key: value for key, value in record["config"].items() if key not in ("target", "stream")}
        lines += ["```json", json.dumps(sections, indent=2), "```"]
    lines += ["", f"Everything else that is known is in `{RECORD}`; `sha256sum -c {SUMS}` checks the files.", ""]
    return "\n".join(lines)


def _tokenizer_line(record: dict[str, Any]) -> str:
    hashes = record["tokenizer"]
    if hashes is None:
        return "the target's own; which one is unknown"
    return (
        f"the target's own (tokens sha256 `{hashes['vocabulary_sha256'][:16]}`, chat template "
        f"`{hashes['chat_template_sha256'][:16]}`); not copied here"
    )


def _code_line(code: dict[str, Any] | None) -> str:
    if code is None or code["commit"] is None:
        return UNKNOWN
    return f"commit `{code['commit']}`" + (", with local changes" if code["dirty"] else "")


def _acceptance(measured: dict[str, Any] | None) -> list[str]:
    if measured is None:
        return ["Not measured. `python -m dflash.evaluate` measures it."]

    def row(name: str, of: dict[str, Any]) -> str:
        interval = "" if of["tau_interval"] is None else "{:.3f} to {:.3f}".format(*of["tau_interval"])
        tau = "" if of["tau"] is None else f"{of['tau']:.3f}"
        return f"| {name} | {of['prompts']} | {tau} | {interval} |"

    return [
        "tau: tokens per forward of the target, the target's own token included; 95 % interval over the prompts.",
        "",
        "| prompts | number | tau | interval |",
        "|---|---|---|---|",
        *(row(name, of) for name, of in measured["sets"].items()),
        row("**all**", measured["overall"]),
        "",
        "Measured with",
        "",
        "```sh",
        f"{measured['command']}",
        "```",
    ]


# ---------------------------------------------------------------- loading


def load_drafter(directory: str | Path, target: Target) -> tuple[Drafter, dict[str, Any]]:
    """(drafter, origin): a checkpoint or an export in either form, float32 on the target's device, checked against the target.

    The target must be the one of the training, as far as that is recorded; which layers the drafter looks at is its own to say
    (`drafter.shape.target_layer_ids`). origin is JSON: kind (checkpoint, zlab, speculators), path; step, data and weights_sha256
    (of the checkpoint's file), None where unknown; notes, a line for all that could not be compared. Raises ValueError, one line.
    """
    directory = Path(directory)
    exported = (directory / "config.json").exists() or not (directory / "manifest.json").exists()
    read = _read_exported if exported else _read_checkpoint
    tensors, shape, origin, trained_for = read(directory, target)
    check_tensors(tensors, shape, what=str(directory))
    if trained_for is not None:
        origin["notes"] += _check_target(directory, trained_for, target)
    drafter = Drafter(shape)
    drafter.load_state_dict(tensors)
    return drafter.to(target.device).eval().requires_grad_(False), origin


Read = tuple[dict[str, torch.Tensor], Shape, dict[str, Any], dict[str, Any] | None]
"""Tensors, shape, origin, and the identity of the target of the training."""


def _read_checkpoint(directory: Path, _target: Target) -> Read:
    start = checkpoints.load(directory)
    weights = json.loads((directory / "manifest.json").read_text())["drafter.safetensors"]["sha256"]
    origin = {
        "kind": "checkpoint",
        "path": str(directory),
        "step": start.state["step"],
        "data": start.state["data"],
        "weights_sha256": weights,
        "notes": [],
    }
    return start.drafter, _shape_in(start.state, directory), origin, start.state["target"]


def _read_exported(directory: Path, target: Target) -> Read:
    try:
        theirs = understand(read_config(directory))
        tensors, record = read_tensors(directory), read_record(directory)
    except ValueError as error:
        if (directory / "checkpoints").is_dir() or directory.name == "checkpoints":
            checkpoint_at(directory)  # says what to name instead
        raise ValueError(
            f"{directory} is not a drafter ({error}); give a checkpoint (step-XXXXXXXX) or an exported directory"
        ) from None
    for key, fault in (*theirs.faults.items(), *target_faults(theirs, target)):
        raise ValueError(f"{directory}: config.json: {theirs.name(key)} {fault}")
    origin = {
        "kind": theirs.form,
        "path": str(directory),
        "step": None,
        "data": None,
        "weights_sha256": None,
        "notes": [],
    }
    shape = theirs.shape(target_layers=target.num_layers)
    if record is None:
        origin["notes"].append(f"no {RECORD}: only layers, width and vocabulary of the target were compared")
        return tensors, shape, origin, None
    origin["step"], origin["data"] = record["checkpoint"]["step"], record["data"]["digest"]
    origin["weights_sha256"] = record["checkpoint"]["files"]["drafter.safetensors"]["sha256"]
    return tensors, shape, origin, record["target"] | {"tokenizer": record["tokenizer"]}


def _check_target(directory: Path, trained_for: dict[str, Any], target: Target) -> list[str]:
    """What could not be compared. Raises ValueError for another target, or another tokenizer, than that of the training."""
    problem, note = other_target(trained_for, target)
    tokenizer = trained_for.get("tokenizer")
    problem = problem or (tokenizer and other_tokenizer(tokenizer, target))
    if problem:
        raise ValueError(f"{directory}: {problem}; give the target that it was trained for")
    notes = [note, tokenizer and other_template(tokenizer, target)]
    return [note for note in notes if note]


if __name__ == "__main__":
    sys.exit(main())
