"""Checkpoints: complete or absent, written beside training, safetensors and JSON only.

checkpoints/step-00001000/
  drafter.safetensors     float32 weights, z-lab's names
  optimizer.safetensors   <parameter>.<exp_avg | exp_avg_sq | step>
  state.json              step, epoch, seed, trained samples, shape, target, data
  manifest.json           size and sha256 of each file above; written last
"""

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dflash.files import flush, sha256_of

FILES = ("drafter.safetensors", "optimizer.safetensors", "state.json")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory, on the CPU."""

    drafter: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: dict[str, Any]


def directory_of(run_dir: Path, step: int) -> Path:
    """Where a run keeps its checkpoint of a step."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """A run's complete checkpoints by name and size, oldest first; one that is torn or being written is not listed."""
    found = [path for path in (run_dir / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted((path for path in found if _damage(path, read_all=False) is None), key=step_of)


def newest(run_dir: Path) -> Path | None:
    """A run's newest checkpoint of which every byte is as its manifest says."""
    return next((path for path in reversed(list_checkpoints(run_dir)) if _damage(path) is None), None)


def step_of(directory: Path) -> int:
    """The step in a checkpoint's name."""
    return int(directory.name.removeprefix("step-"))


def load(directory: str | Path) -> Checkpoint:
    """A checkpoint that its manifest vouches for. Raises ValueError, one line, when it is missing, torn or altered."""
    directory = Path(directory)
    damage = _damage(directory)
    if damage is not None:
        raise ValueError(f"checkpoint {directory} cannot be used: {damage}; name a complete step-XXXXXXXX directory")
    drafter, optimizer, state = (directory / name for name in FILES)
    return Checkpoint(load_file(drafter), load_file(optimizer), json.loads(state.read_text()))


def _damage(directory: Path, *, read_all: bool = True) -> str | None:
    """Why a directory is no complete checkpoint, or None; without `read_all` judged by sizes alone."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
        for name in FILES:
            entry, path = manifest[name], directory / name
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes, its manifest says {entry['bytes']}"
            if read_all and sha256_of(path) != entry["sha256"]:
                return f"{name} does not have the sha256 of its manifest"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except OSError as error:
        return f"unreadable ({error.strerror})"
    except (ValueError, KeyError, TypeError) as error:
        return f"its manifest is unreadable ({error})"
    return None


def write(directory: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint beside its place, flushes it to the disk and renames it. Never over an existing one."""
    for left in directory.parent.glob(".step-*.partial"):  # by a process of this run that was killed while it wrote
        shutil.rmtree(left)
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        _write_files(partial, checkpoint)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk must have room for the words that name it
        raise
    if directory.exists():
        # only ever a torn one of this run, which went on from an earlier checkpoint; kept for whoever looks into it
        assert _damage(directory) is not None, directory
        os.rename(directory, directory.with_name(f".{directory.name}.torn-{time.time_ns()}"))
    os.rename(partial, directory)
    flush(directory.parent)


def _write_files(directory: Path, checkpoint: Checkpoint) -> None:
    directory.mkdir(parents=True)
    save_file(checkpoint.drafter, directory / FILES[0])
    save_file(checkpoint.optimizer, directory / FILES[1])
    (directory / FILES[2]).write_text(json.dumps(checkpoint.state, allow_nan=False))
    manifest = {
        name: {"bytes": (directory / name).stat().st_size, "sha256": sha256_of(directory / name)} for name in FILES
    }
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=2))
    for path in (*directory.iterdir(), directory):
        flush(path)


class Saver:
    """Saves beside training: `save` returns after one copy of the state into host memory, a thread writes it.

    `with Saver(run_dir, keep=None) as saver:` waits for the last write at the end. A write that failed raises at the next
    `check`, `save` or at the end: a run that cannot save must stop looking alive.
    """

    def __init__(self, run_dir: Path, *, keep: int | None):
        self._run_dir, self._keep = run_dir, keep
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        drafter: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, torch.Tensor],
        state: dict[str, Any],
        *,
        spare: int | None = None,
    ) -> None:
        """Takes the state of `step`. Waits for the write before this one, so that two copies never exist.

        `spare` is the step of a checkpoint that stays however old it is: the best one.
        """
        self.wait()
        copy = Checkpoint(_on_host(drafter), _on_host(optimizer), state)
        self._writing = threading.Thread(
            target=self._write, args=(directory_of(self._run_dir, step), copy, spare), name="saver"
        )
        self._writing.start()

    def _write(self, directory: Path, copy: Checkpoint, spare: int | None) -> None:
        try:
            write(directory, copy)
            if self._keep is not None:
                # one of a later step was damaged when this run began, or it would have gone on from there: it does not count
                ours = [path for path in list_checkpoints(self._run_dir) if step_of(path) <= step_of(directory)]
                for old in ours[: -self._keep]:
                    if step_of(old) != spare:
                        shutil.rmtree(old)
        except BaseException as error:  # raised again by whoever waits
            self._error = error

    def wait(self) -> None:
        """Until the last save is on the disk; raises what went wrong with it."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        self.check()

    def check(self) -> None:
        """Raises what went wrong with a write, without waiting for one."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.wait()
        elif self._writing is not None:  # an error is on its way already: finish the write, keep that error
            self._writing.join()


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
