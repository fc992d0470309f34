"""Conversations -> samples: a file of them, tokenised once with loss masks, kept on disk and found again by content.

    python -m dflash.data --config FILE [--SECTION.FIELD VALUE ...] [--rebuild] [--report FILE.json]

does it ahead of a training, which then finds it. Exit codes: 0 done, 1 failed, 2 refused, 3 stopped.

On disk, under `directory/<first 16 hex digits of the digest>/`:
    shard-00000.safetensors   tokens int32 and loss_mask bool of whole samples, one after the other
    index.safetensors         per sample: length, shard, start in the shard, id, line; and the supervised token ids
    dropped.jsonl             every conversation that could not be used: line, id, reason, detail
    report.json               counts
    manifest.json             size and sha256 of the files above
"""

import argparse
import fcntl
import json
import shutil
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from dflash import config as configuration
from dflash.command import FINISHED, Parser, run
from dflash.config import Config
from dflash.conversation import (
    DROP_REASONS,
    NO_ANCHOR,
    SYNTHETIC,
    Rendered,
    Template,
    Unusable,
    conversation,
    prove,
    turns_of,
)
from dflash.files import check_writable, sha256_of, sha256_of_json, write_json
from dflash.progress import print_summary

CODE_VERSION = 1
"""Raise when the same file would give other tokens or another mask, so that no older result is found."""
SHARD_TOKENS = 4_000_000
"""Tokens after which a shard is closed: 20 MB, so that writing holds about 60 MB however large the data is."""
BATCH_CHARACTERS = 400_000
"""Characters that are tokenised in one call: some hundred conversations, enough for every core, about 50 MB."""
PROVEN_CONVERSATIONS = 8
"""Conversations of the file that the start-up proof decodes, beside the synthetic one: milliseconds."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A tokenised data set on disk; opening it reads the index, `sample` maps only what it returns."""

    directory: Path
    digest: str
    """sha256, in hex, of everything that the result depends on."""
    lengths: np.ndarray
    """[samples] int32: tokens of every sample."""
    seen: np.ndarray
    """Sorted int64 token ids that are supervised anywhere."""
    report: dict[str, Any]
    """Counts: conversations, samples, tokens, supervised_tokens, truncated, renamed_ids, and dropped by reason;
    in tokens: longest_reply, longest_sample."""

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, index: int) -> tuple[str, np.ndarray, np.ndarray]:
        """(id, tokens int32 [S], loss_mask bool [S]) of one sample; True marks the tokens of a reply."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        with safe_open(self.directory / "index.safetensors", "np") as file:
            shard, start, id_start, id_end = (
                int(file.get_slice(name)[at : at + 1][0])
                for name, at in (("shards", index), ("starts", index), ("id_bounds", index), ("id_bounds", index + 1))
            )
            sample_id = file.get_slice("ids")[id_start:id_end].tobytes().decode()
        end = start + int(self.lengths[index])
        with safe_open(self.directory / _shard_name(shard), "np") as file:
            return sample_id, file.get_slice("tokens")[start:end], file.get_slice("loss_mask")[start:end]


def prepare(
    path: str | Path,
    *,
    tokenizer: Any,
    max_tokens: int,
    block_size: int,
    template_kwargs: dict[str, Any],
    directory: Path,
    rebuild: bool = False,
) -> Prepared:
    """The samples of a JSONL file of conversations, tokenised once and found again by content.

    A line is `{"id"?, "messages": [{"role", "content", ...}], "tools"?}` or
    `{"id"?, "conversations": [{"from", "value"}]}`. Samples longer than `max_tokens` lose their end. An id that was
    used before gets `#<line>` appended; a conversation without one is named by a hash of its content.
    `rebuild` makes them anew where they are there already.
    Memory grows by about 200 bytes a conversation while writing and 4 while reading, never by tokens.
    Raises ValueError, in one line, for what a user can mend: the file, a line of it, tokenizer, template, sizes.
    """
    path, directory = Path(path), Path(directory)
    if not 2 <= block_size <= max_tokens:
        raise ValueError(
            f"drafter.block_size={block_size} must be at least 2 and at most data.max_tokens={max_tokens}; change one"
        )
    data_sha256 = _sha256_of_data(path)
    template = Template(tokenizer, template_kwargs)
    digest = sha256_of_json([CODE_VERSION, data_sha256, template.identity, max_tokens])
    prepared = None if rebuild else _open(directory / digest[:16], digest)
    if prepared is None:
        try:
            prepared = _build(path, data_sha256, template, max_tokens, directory, digest, rebuild=rebuild)
        except OSError as error:
            raise ValueError(
                f"data.prepared_dir={directory}: cannot keep the tokenised data there ({error.strerror}); "
                "give a directory that can be written, with room"
            ) from error
    longest = prepared.report["longest_reply"]
    if block_size > longest:
        raise ValueError(
            f"drafter.block_size={block_size} is larger than the longest reply in {path}, {longest} tokens with its "
            "end-of-turn token; lower it, raise data.max_tokens or give longer replies"
        )
    return prepared


def prepare_configured(config: Config, tokenizer: Any, *, rebuild: bool = False) -> tuple[Prepared, Prepared | None]:
    """The data and the held-out data of a configuration, for the target's tokenizer. Raises ValueError."""

    def prepared(path: str) -> Prepared:
        return prepare(
            path,
            tokenizer=tokenizer,
            max_tokens=config.data.max_tokens,
            block_size=config.drafter.block_size,
            template_kwargs=config.data.template_kwargs,
            directory=Path(config.data.prepared_dir),
            rebuild=rebuild,
        )

    data = prepared(config.data.path)
    if config.data.heldout_path is None:
        return data, None
    try:
        return data, prepared(config.data.heldout_path)
    except ValueError as error:  # `prepare` names the knob of the other file
        raise ValueError(str(error).replace("data.path=", "data.heldout_path=")) from error


# ---------------------------------------------------------------- from a file to conversations


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of every line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"data.path={path}:{number}: not valid JSON ({error}); give one conversation a line"
                ) from error
            if turns_of(row) is None:
                raise ValueError(
                    f"data.path={path}:{number}: not a conversation; "
                    'give {"messages": [{"role": ..., "content": ...}, ...]} on every line'
                )
            yield number, row


def _prove_template(template: Template, path: Path) -> None:
    """Shows on a synthetic conversation and the first usable ones of the file that the masked tokens are the replies.

    Raises ValueError with the turn where the tokens decode to anything but reply and end-of-turn token.
    """
    prove(template, SYNTHETIC, None, "a plain conversation")
    proven = 0
    for line, row in islice(_rows(path), 8 * PROVEN_CONVERSATIONS):
        if proven == PROVEN_CONVERSATIONS:
            break
        try:
            prove(template, *conversation(row), f"{path}:{line}")
        except Unusable:
            continue
        proven += 1


# ---------------------------------------------------------------- on disk


def _shard_name(number: int) -> str:
    return f"shard-{number:05}.safetensors"


def _sha256_of_data(path: Path) -> str:
    try:
        return sha256_of(path)
    except FileNotFoundError as error:
        raise ValueError(f"data.path={path}: no such file; give a JSONL file of conversations") from error
    except IsADirectoryError as error:
        raise ValueError(f"data.path={path}: is a directory; give a JSONL file of conversations") from error
    except OSError as error:
        raise ValueError(f"data.path={path}: cannot be read ({error.strerror}); give a readable JSONL file") from error


def _open(directory: Path, digest: str) -> Prepared | None:
    """The data set in `directory`, or None where it is not there, is another one, or is damaged.

    Reads every byte once, as the hash of the conversations does: a damaged token would be trained on in silence.
    """
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
        intact = manifest["digest"] == digest and all(
            (directory / name).stat().st_size == file["bytes"] and sha256_of(directory / name) == file["sha256"]
            for name, file in manifest["files"].items()
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    if not intact:
        return None
    with safe_open(directory / "index.safetensors", "np") as index:
        lengths, seen = index.get_tensor("lengths"), index.get_tensor("seen")
    return Prepared(directory, digest, lengths, seen, json.loads((directory / "report.json").read_text()))


def _build(
    path: Path,
    data_sha256: str,
    template: Template,
    max_tokens: int,
    directory: Path,
    digest: str,
    *,
    rebuild: bool,
) -> Prepared:
    """Writes the data set beside its place and renames it there; whoever comes second waits and takes the first's."""
    place, beside, old = (
        directory / digest[:16],
        directory / f".{digest[:16]}.partial",
        directory / f".{digest[:16]}.old",
    )
    directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory / f".{digest[:16]}.lock"):
        prepared = None if rebuild else _open(place, digest)
        if prepared is None:
            _prove_template(template, path)
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            try:
                _write(path, template, max_tokens, beside, digest)
                if _sha256_of_data(path) != data_sha256:
                    raise ValueError(f"data.path={path}: changed while it was read; start again when it is complete")
                shutil.rmtree(old, ignore_errors=True)
                if place.exists():
                    place.rename(old)  # a trainer may be reading it: it is gone for no longer than two renames
                beside.rename(place)
                shutil.rmtree(old, ignore_errors=True)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
            prepared = _open(place, digest)
    assert prepared is not None, f"{place} is damaged just after it was written"
    return prepared


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Excludes other processes and threads; the kernel lets go of it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, template: Template, max_tokens: int, directory: Path, digest: str) -> None:
    writer = Writer(directory, vocabulary=len(template.special))
    batch: list[tuple[int, str, Rendered]] = []

    def tokenise() -> None:
        encodings = template.encode([rendered for _, _, rendered in batch])
        for (line, sample_id, rendered), encoding in zip(batch, encodings, strict=True):
            try:
                tokens, loss_mask = template.mask(rendered, encoding)
                kept = loss_mask[:max_tokens]
                if not (kept[:-1] & kept[1:]).any():
                    raise Unusable(NO_ANCHOR, f"{len(tokens)} tokens, cut at {max_tokens}")
                writer.add(line, sample_id, tokens[:max_tokens], kept, truncated=len(tokens) > max_tokens)
            except Unusable as error:
                writer.drop(line, sample_id, error)
        batch.clear()

    characters = 0
    for line, row in _rows(path):
        sample_id = str(row["id"]) if isinstance(row.get("id"), str | int) and row["id"] != "" else None
        try:
            messages, tools = conversation(row)
            sample_id = sample_id or sha256_of_json([messages, tools])[:16]
            rendered = template.locate(messages, tools)
        except Unusable as error:
            writer.drop(line, sample_id, error)
            continue
        batch.append((line, sample_id, rendered))
        characters += len(rendered.text)
        if characters >= BATCH_CHARACTERS:
            tokenise()
            characters = 0
    tokenise()
    writer.finish(path, digest)


class Writer:
    """Samples into shards of bounded size, then the index, the report and the manifest."""

    def __init__(self, directory: Path, vocabulary: int):
        self.directory = directory
        self.shard: list[tuple[np.ndarray, np.ndarray]] = []
        self.shard_tokens, self.shard_number = 0, 0
        self.lengths, self.shards, self.starts, self.lines = array("i"), array("i"), array("q"), array("q")
        self.ids, self.id_bounds, self.used = bytearray(), array("q", [0]), set[str]()
        self.seen = np.zeros(vocabulary, dtype=bool)
        self.counts, self.dropped = Counter[str](), Counter[str]()
        self.first_drop = ""
        self.longest_reply = 0
        (directory / "dropped.jsonl").touch()

    def add(self, line: int, sample_id: str, tokens: np.ndarray, loss_mask: np.ndarray, *, truncated: bool) -> None:
        while sample_id in self.used:
            sample_id = f"{sample_id}#{line}"
            self.counts["renamed_ids"] += 1
        self.used.add(sample_id)
        if self.shard_tokens + len(tokens) > SHARD_TOKENS and self.shard:
            self.flush()
        self.ids += sample_id.encode(errors="backslashreplace")
        self.id_bounds.append(len(self.ids))
        self.lengths.append(len(tokens))
        self.shards.append(self.shard_number)
        self.starts.append(self.shard_tokens)
        self.lines.append(line)
        self.shard.append((tokens, loss_mask))
        self.shard_tokens += len(tokens)
        self.seen[tokens[loss_mask]] = True
        stretches = np.flatnonzero(np.diff(loss_mask, prepend=False, append=False)).reshape(-1, 2)
        self.longest_reply = max(self.longest_reply, int((stretches[:, 1] - stretches[:, 0]).max()))
        self.counts.update(tokens=len(tokens), supervised_tokens=int(loss_mask.sum()), truncated=int(truncated))

    def drop(self, line: int, sample_id: str | None, error: Unusable) -> None:
        self.dropped[error.reason] += 1
        self.first_drop = self.first_drop or f"line {line}: {DROP_REASONS[error.reason]} {error.detail}".strip()
        row = {"line": line, "id": sample_id, "reason": error.reason, "detail": error.detail}
        with (self.directory / "dropped.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def flush(self) -> None:
        tokens, masks = zip(*self.shard, strict=True)
        self._save(_shard_name(self.shard_number), tokens=np.concatenate(tokens), loss_mask=np.concatenate(masks))
        self.shard, self.shard_tokens, self.shard_number = [], 0, self.shard_number + 1

    def _save(self, name: str, **tensors: np.ndarray) -> None:
        # Written by Python, not by safetensors, so that a full disk is an OSError with its reason
        (self.directory / name).write_bytes(save(tensors))

    def finish(self, path: Path, digest: str) -> None:
        """Closes the data set; raises ValueError where no conversation could be used."""
        conversations = len(self.lengths) + self.dropped.total()
        if not conversations:
            raise ValueError(f"data.path={path}: holds no conversation; give a JSONL file of conversations")
        if not self.lengths:
            counts = ", ".join(f"{reason} {count}" for reason, count in self.dropped.most_common())
            raise ValueError(
                f"data.path={path}: none of its {conversations} conversations can be used "
                f"({counts}; {self.first_drop}); mend the data, the chat template or data.max_tokens"
            )
        self.flush()
        self._save(
            "index.safetensors",
            lengths=np.array(self.lengths, dtype=np.int32),
            shards=np.array(self.shards, dtype=np.int32),
            starts=np.array(self.starts, dtype=np.int64),
            lines=np.array(self.lines, dtype=np.int64),
            ids=np.frombuffer(self.ids, dtype=np.uint8),
            id_bounds=np.array(self.id_bounds, dtype=np.int64),
            seen=np.flatnonzero(self.seen).astype(np.int64),
        )
        report = {
            "conversations": conversations,
            "samples": len(self.lengths),
            "tokens": self.counts["tokens"],
            "supervised_tokens": self.counts["supervised_tokens"],
            "longest_reply": self.longest_reply,
            "longest_sample": max(self.lengths),
            "truncated": self.counts["truncated"],
            "renamed_ids": self.counts["renamed_ids"],
            "dropped": dict(self.dropped),
        }
        (self.directory / "report.json").write_text(json.dumps(report, indent=2))
        files = {
            file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
            for file in sorted(self.directory.iterdir())
        }
        (self.directory / "manifest.json").write_text(json.dumps({"digest": digest, "files": files}, indent=2))


# ---------------------------------------------------------------- the command


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code. The last line on stderr is the cause when it is not 0."""
    return run(lambda: _command(arguments), stopped="stopped; the same command starts again")


def _command(arguments: list[str] | None) -> int:
    parser = Parser(
        prog="python -m dflash.data",
        usage="%(prog)s --config FILE [--SECTION.FIELD VALUE ...] [--rebuild] [--report FILE.json]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rebuild", action="store_true", help="make it anew although it is there")
    parser.add_argument("--report", type=Path, metavar="FILE", help="JSON file to write: where it lies, and counts")
    configuration.add_arguments(parser, flat={}, sections=("target", "data", "drafter"))
    parsed = parser.parse_args(arguments)
    if parsed.report is not None:
        check_writable(parsed.report)
    config = configuration.with_absolute_paths(configuration.from_arguments(parsed))

    from dflash.target import load_tokenizer  # here: it brings torch, which reading a data set does without

    section = config.target
    tokenizer = load_tokenizer(section.name, revision=section.revision, trust_remote_code=section.trust_remote_code)
    data, heldout = prepare_configured(config, tokenizer, rebuild=parsed.rebuild)
    if parsed.report is not None:
        sets = {"data": data, "heldout": heldout}
        write_json(parsed.report, {name: None if one is None else _place_of(one) for name, one in sets.items()})
    _tell(config, data, heldout)
    return FINISHED


def _place_of(prepared: Prepared) -> dict[str, Any]:
    return {"directory": str(prepared.directory), "digest": prepared.digest, "report": prepared.report}


def _tell(config: Config, data: Prepared, heldout: Prepared | None) -> None:
    """The one-screen summary."""
    report = data.report
    lines = {
        "data": config.data.path,
        "samples": f"{report['samples']:,} of {report['conversations']:,} conversations",
        "tokens": f"{report['tokens']:,}, of which {report['supervised_tokens']:,} are the target's replies",
        "longest": f"{report['longest_sample']:,} tokens; {report['longest_reply']:,} of one reply",
        "cut": f"{report['truncated']:,} at data.max_tokens={config.data.max_tokens:,}",
    }
    for reason, count in report["dropped"].items():
        lines[f"dropped, {reason}"] = f"{count:,}: {DROP_REASONS[reason]}"
    if report["dropped"]:
        lines["dropped"] = "line by line in dropped.jsonl"
    if heldout is not None:
        lines["held out"] = (
            f"{heldout.report['samples']:,} samples of {config.data.heldout_path}, in {heldout.directory}"
        )
    lines["next"] = "python -m dflash.train with the same configuration"
    print_summary(data.directory, lines)


if __name__ == "__main__":
    sys.exit(main())
