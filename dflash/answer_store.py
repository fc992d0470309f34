"""Answers on disk: each prompt's result once, whoever makes it and however often somebody is killed on the way.

<out>/<key>/
  key.json            everything that the answers depend on
  shard-*.jsonl       one line a prompt, in the order in which they ended; one file for each process that worked here
  claims              which prompts are being answered right now, and by whom the store is in use: locked bytes, which the kernel
                      frees when their holder dies
"""

import fcntl
import json
import os
import socket
import struct
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from dflash.files import sha256_of_json, write_json

IN_USE = 1 << 60  # the byte of the claims file that every open store shares; no prompt's is that high
SYNC_SECONDS = 5  # between two flushes to the disk: what a power cut, not a kill, may cost


class AnswerStore:
    """The answers that depend on `key`, kept under `root`. `with AnswerStore(root, key) as store:`; one a process and key."""

    def __init__(self, root: Path, key: dict[str, Any]):
        self.directory = Path(root) / sha256_of_json(key)[:16]
        self._key = key
        self._places: dict[str, tuple[Path, int]] = {}
        self._read_to: dict[Path, int] = {}
        self._shard: BinaryIO | None = None
        self._synced = time.monotonic()

    def __enter__(self) -> "AnswerStore":
        try:
            self._claims = self._open_claims()
            write_json(self.directory / "key.json", self._key)
        except OSError as error:
            raise ValueError(
                f"regenerate.out={self.directory.parent}: {error.strerror}; give a directory that can be written"
            ) from None
        self.refresh()
        return self

    def _open_claims(self, tries: int = 10) -> BinaryIO:
        """The claims file, with the mark that the store is in use."""
        path = self.directory / "claims"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            claims = open(path, "a+b")  # noqa: SIM115 (closed by __exit__)
            fcntl.lockf(claims, fcntl.LOCK_SH, 1, IN_USE)
            if os.path.samestat(path.stat(), os.fstat(claims.fileno())):
                return claims
            claims.close()
        except (FileExistsError, FileNotFoundError):
            if tries <= 1:
                raise
        return self._open_claims(tries - 1)  # the store was set aside between two of these lines

    def __exit__(self, *_) -> None:
        self._claims.close()
        if self._shard is not None:
            os.fsync(self._shard.fileno())
            self._shard.close()

    def __contains__(self, prompt: str) -> bool:
        return prompt in self._places

    def refresh(self) -> None:
        """Learns of what other processes have answered since."""
        for path in sorted(self.directory.glob("shard-*.jsonl")):
            with path.open("rb") as file:
                offset = file.seek(self._read_to.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # being written, or torn by a kill: never an answer
                    self._places[_key_of(path, offset, line)] = path, offset
                    offset += len(line)
            self._read_to[path] = offset

    def read(self, prompt: str) -> dict[str, Any]:
        """The record of an answered prompt."""
        path, offset = self._places[prompt]
        with path.open("rb") as file:
            file.seek(offset)
            return json.loads(file.readline())

    def claim(self, prompt: str) -> bool:
        """Whether this process may answer the prompt now: nobody else is at it. Released by `write`, or when the process ends."""
        try:
            fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _byte_of(prompt))
        except (BlockingIOError, PermissionError):  # what POSIX lets a system say of a byte that is locked
            return False
        return True

    def release(self, prompt: str) -> None:
        """Gives up a claim."""
        fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, _byte_of(prompt))

    def write(self, record: dict[str, Any]) -> None:
        """Keeps the result of the claimed prompt `record["key"]`, and ends the claim."""
        if self._shard is None:
            name = f"shard-{time.time_ns()}-{socket.gethostname()}-{os.getpid()}.jsonl"
            self._shard = open(self.directory / name, "xb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        line = json.dumps(record, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"
        path, offset = Path(self._shard.name), self._shard.tell()
        if self._shard.write(line) != len(line):
            raise OSError(f"{path}: the disk is full")
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._shard.fileno())
            self._synced = time.monotonic()
        self._places[record["key"]] = path, offset
        self._read_to[path] = offset + len(line)
        self.release(record["key"])


def set_aside(root: Path, key: dict[str, Any]) -> Path | None:
    """Renames the store of `key` to <key>.until-<UTC time> and returns that, or None where there is none.

    Raises ValueError while another process has it open.
    """
    directory = Path(root) / sha256_of_json(key)[:16]
    if not directory.exists():
        return None
    try:
        with open(directory / "claims", "a+b") as claims:
            try:
                # every byte: nobody opens the store or claims a prompt meanwhile
                fcntl.lockf(claims, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise ValueError(
                    f"regenerate.out={root}: {directory.name} cannot be set aside, {_holder(claims)} is making answers in it; "
                    "stop that one or wait for it"
                ) from None
            aside = directory.with_name(f"{directory.name}.until-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
            return directory.rename(aside)
    except OSError as error:
        raise ValueError(
            f"regenerate.out={root}: {directory.name} cannot be set aside ({error.strerror}); give a directory that can be written"
        ) from None


def _holder(claims: BinaryIO) -> str:
    """Who holds a lock in the file."""
    layout = "hhqqi"  # struct flock
    asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    pid = struct.unpack(layout, fcntl.fcntl(claims, fcntl.F_GETLK, asked))[-1]
    return f"process {pid}" if pid else "another process"


def _key_of(path: Path, offset: int, line: bytes) -> str:
    try:
        return json.loads(line)["key"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(
            f"{path}, at byte {offset}: a damaged line; delete it, then its prompt is answered anew"
        ) from None


def _byte_of(prompt: str) -> int:
    """The byte of the claims file that stands for a prompt; the file stays empty, only its locks matter."""
    return int(prompt[:15], 16)
