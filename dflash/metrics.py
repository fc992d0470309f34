"""metrics.jsonl: one JSON row per optimizer step, written by the trainer alone and followed by everyone else."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

LONGEST_ROW = 1 << 20  # bytes; a row of 10,000 sample numbers takes 80 KB


class MetricsFile:
    """The writer's side: `with MetricsFile(path, after_step=n) as metrics: metrics.write(row)`.

    A run that goes on from its checkpoint of step n gives `after_step=n`: rows of later steps belong to weights that no longer
    exist and are cut off, so that steps stay strictly increasing. A half-written last row is cut off too.
    """

    def __init__(self, path: Path, *, after_step: int):
        rows = []
        if path.exists():
            with open(path, "rb") as file:
                rows = [(line, row["step"]) for line, row in _complete_rows(file) if row["step"] <= after_step]
        beside = path.with_name(f".{path.name}.partial")
        beside.write_bytes(b"".join(line for line, _ in rows))
        os.replace(beside, path)
        self._file = open(path, "ab")  # noqa: SIM115 (closed by __exit__)
        self.last_step = rows[-1][1] if rows else -1

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row. `row["step"]` must exceed every step written before; a value that is not finite becomes null."""
        assert row["step"] > self.last_step, (row["step"], self.last_step)
        self.last_step = row["step"]
        # one write of one whole line: a reader never sees half a row unless the process dies in between
        self._file.write(json.dumps(finite_or_null(row), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()


def finite_or_null(value: Any) -> Any:
    """The value with None, which is JSON, for every number in it that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    return [finite_or_null(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Cursor:
    """How far a reader has come: bytes read, and the step of the last row, by which it finds its place in a cut-off file."""

    offset: int = 0
    step: int = -1


def read_rows(path: Path, cursor: Cursor = Cursor()) -> tuple[list[dict[str, Any]], Cursor]:
    """The complete rows after `cursor` and the cursor behind them. No file yet: no rows.

    When a resumed run has cut the file, rows of steps that were already read are left out: steps only ever increase for a
    reader too. A reader keeps its cursor where the rows were used, so that nothing is lost when using them fails.
    """
    if not path.exists():
        return [], cursor
    with open(path, "rb") as file:  # once: a resumed run may replace the file at any moment
        end = cursor.offset if _row_ends_at(file, cursor) else 0
        step, rows = cursor.step, []
        file.seek(end)
        for line, row in _complete_rows(file):
            end += len(line)
            if row["step"] > step:
                step = row["step"]
                rows.append(row)
    return rows, Cursor(end, step)


def _row_ends_at(file: BinaryIO, cursor: Cursor) -> bool:
    """Whether the row of `cursor.step` still ends at `cursor.offset`."""
    if cursor.offset == 0:
        return True
    length = min(cursor.offset, LONGEST_ROW)
    file.seek(cursor.offset - length)
    tail = file.read(length)
    last = tail.splitlines(keepends=True)[-1] if len(tail) == length else b""
    return last.endswith(b"\n") and _step_of(last) == cursor.step


def _step_of(line: bytes) -> int | None:
    try:
        return json.loads(line)["step"]
    except ValueError:  # the cut and regrown file has another row across this place
        return None


def _complete_rows(file: BinaryIO) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """(line, row) of every line from here on that ends with a newline."""
    while (line := file.readline()).endswith(b"\n"):
        yield line, json.loads(line)
