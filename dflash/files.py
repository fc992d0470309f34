"""Files that are whole or not there, and hashes of what is in them."""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TextIO


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[TextIO]:
    """A file that takes its place once it is whole, also where processes that write the same do so at once."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with beside.open("w", encoding="utf-8", errors="surrogatepass") as file:
        yield file
    beside.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file atomically."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with replaced(path) as file:
        file.write(text)


def check_writable(path: Path) -> None:
    """Raises ValueError where no file can be written at `path`: now, not after an hour."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path}: cannot be written; give a file in a directory that is there")


def flush(path: Path) -> None:
    """Has a file, or the names in a directory, on the disk when it returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def taken(lock: IO, kind: int = fcntl.LOCK_EX, *, seconds: float = 0.0) -> bool:
    """Whether an open file's lock is this process' now, tried for so long; the kernel lets go when its holder dies."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)


def sha256_of(path: Path) -> str:
    """Of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_json(value: Any) -> str:
    """Of a value as JSON, in hex; what JSON has not counts as its text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
