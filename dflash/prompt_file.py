"""Prompts: conversations whose replies are to be made, from JSONL rows of several forms or a text file of one prompt a line.

A JSONL row is `{"messages": [...]}` or `{"conversations": [...]}` as for training, `{"turns": [user text, ...]}` or
`{"prompt": text}`.
Replies that it brings are only places: each will be answered anew, in turn. `id` and `tools` are kept.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.conversation import BAD_MESSAGE, EMPTY, NOT_TEXT, Unusable, messages_of, turns_of
from dflash.files import sha256_of_json

TOOL_TURN = "tool_turn"
NO_USER_TURN = "no_user_turn"
PROMPT_DROP_REASONS = {
    TOOL_TURN: "a call of a tool or its result, which a new reply would not fit",
    NO_USER_TURN: "no user turn to reply to",
}
TEXT_SUFFIX = ".txt"  # anything else is JSONL, or its rows would become prompts without a word


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One conversation without its replies."""

    id: str
    key: str
    """Names the prompt by its content alone."""
    stages: list[list[dict[str, Any]]]
    """The messages that come before each reply, after the one before it."""
    tools: list[Any] | None

    @property
    def characters(self) -> int:
        return sum(len(message["content"]) for stage in self.stages for message in stage)


@dataclass(frozen=True)
class Line:
    """Where one prompt is in its file."""

    number: int
    """Counted from 1."""
    offset: int
    """In bytes."""


def rows(path: str | Path, *, knob: str) -> Iterator[tuple[Line, Any]]:
    """(place, row) of every line that is not blank; `knob` is named in errors. Raises ValueError, one line."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, start=1):
                place, offset = Line(number, offset), offset + len(line)
                if line.strip():
                    yield place, _row(path, place, line, knob)
    except OSError as error:
        raise ValueError(f"{knob}={path}: {error.strerror}; give a JSONL or text file of prompts") from None


def row_at(path: Path, place: Line, *, knob: str) -> Any:
    """The row of one line."""
    with path.open("rb") as file:
        file.seek(place.offset)
        return _row(path, place, file.readline(), knob)


def _row(path: Path, place: Line, line: bytes, knob: str) -> Any:
    try:
        if path.suffix == TEXT_SUFFIX:
            return {"prompt": line.decode().strip()}
        row = json.loads(line)
    except ValueError as error:
        kind = "one prompt in UTF-8" if path.suffix == TEXT_SUFFIX else "one JSON conversation"
        raise ValueError(f"{knob}={path}:{place.number}: {error}; give {kind} a line") from None
    if not isinstance(row, dict) or not (turns_of(row) is not None or {"turns", "prompt"} & row.keys()):
        raise ValueError(
            f"{knob}={path}:{place.number}: not a prompt; "
            'give {"messages": [{"role": ..., "content": ...}, ...]}, {"turns": [...]} or {"prompt": ...} on every line'
        )
    return row


def id_of(row: dict[str, Any]) -> str | None:
    """The row's own name, if it has one."""
    return str(row["id"]) if isinstance(row.get("id"), str | int) and row["id"] != "" else None


def prompt_of(row: dict[str, Any], *, system: str | None = None) -> Prompt:
    """The prompt of a row, with `system` as its system message where it brings none; raises Unusable.

    Replies before the first user turn are left out: they answer nothing.
    """
    messages = _messages(row)
    if system is not None and not any(message["role"] in ("system", "developer") for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    stages: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        role = message["role"]
        if role == "tool" or message.get("tool_calls"):
            raise Unusable(TOOL_TURN)
        answered = any(asked["role"] == "user" for asked in stages[-1])
        if role != "assistant":
            stages[-1].append(message)
        elif answered:
            stages.append([])
    if not any(message["role"] == "user" for message in stages[-1]):
        stages.pop()  # what stands after the last reply, without a user's turn, asks for none
    if not stages:
        raise Unusable(NO_USER_TURN)
    tools = row.get("tools") or None
    try:
        json.dumps([stages, tools], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half a character, which JSON can hold and no tokenizer takes
        raise Unusable(NOT_TEXT, str(error)) from error
    key = sha256_of_json([stages, tools])[:32]
    return Prompt(id=id_of(row) or key[:16], key=key, stages=stages, tools=tools)


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    if turns_of(row) is not None:
        return messages_of(row)
    texts = row["turns"] if "turns" in row else [row["prompt"]]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Unusable(BAD_MESSAGE, f"{texts!r:.80}")
    if not texts or not all(text.strip() for text in texts):
        raise Unusable(EMPTY)
    messages: list[dict[str, Any]] = []
    for text in texts:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]
    return messages
