"""Model versions: an export's bytes under its MLflow run, a version that points to them, and the champion.

MLflow copies nothing into a version, so bytes are logged once and never written again, and every download is checked against
the sha256 that the version carries. MLflow's alias `latest` is built in: always the highest version.
"""

import contextlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash.files import sha256_of
from tasks.mlflow_words import without_secret
from tasks.tracking import connect, is_missing

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

SUMS, WEIGHTS = "SHA256SUMS", "model.safetensors"  # of an export (dflash/export.py)
KINDS = (".safetensors", ".json", ".md")  # nothing that could be a pickle


@dataclass(frozen=True)
class Champion:
    """A model's best version, downloaded and checked."""

    version: int
    run_id: str
    tags: dict[str, str]
    directory: Path


def model_name(target_name: str) -> str:
    """The registered model of all drafters of a target."""
    return "dflash-" + re.sub(r"[^\w.-]", "-", Path(target_name).name)


def register_version(model: str, export_dir: Path, *, run_id: str, step: int, tags: dict[str, str]) -> int:
    """The version of an export, made unless there is one; its bytes are in the run under checkpoints/step-XXXXXXXX.

    Raises ValueError for an altered export, and for another one than the run has of that step.
    """
    sums, sums_hash = checked(export_dir), sha256_of(export_dir / SUMS)
    client, path = connect(), f"checkpoints/step-{step:08d}"
    source = f"runs:/{run_id}/{path}"
    _log_once(client, export_dir, run_id, path, sums | {SUMS: sums_hash})
    tags = {name: without_secret(value) for name, value in tags.items()}
    tags |= {"sha256": sums[WEIGHTS], "sha256sums": sums_hash, "step": str(step)}
    if _model(client, model) is None:
        with contextlib.suppress(Exception):  # another process was faster; if not, the next call says why
            client.create_registered_model(model)
    for version in client.search_model_versions(f"name='{model}' and run_id='{run_id}'"):
        if version.source == source:
            _set_tags(client, model, int(version.version), tags)
            return int(version.version)
    return int(client.create_model_version(model, source, run_id, tags=tags).version)


def set_version_tags(model: str, version: int, tags: dict[str, str]) -> None:
    """Sets tags of a version; others stay."""
    _set_tags(connect(), model, version, {name: without_secret(value) for name, value in tags.items()})


def champion(model: str, into: Path) -> Champion | None:
    """The champion, downloaded to a directory under `into`, unless it is there; None when the model has none.

    Raises ValueError when its bytes are not those that were registered.
    """
    client = connect()
    version = _champion(client, model)
    if version is None:
        return None
    directory, name = into / f"{model}-v{version.version}", f"{model} version {version.version}, the champion,"
    assert version.run_id is not None
    assert version.source is not None
    if not directory.exists():
        into.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=into, prefix=".") as scratch:
            path = version.source.removeprefix(f"runs:/{version.run_id}/")
            downloaded = Path(client.download_artifacts(version.run_id, path, scratch))
            _check_bytes(downloaded, version, name)
            os.rename(downloaded, directory)
    _check_bytes(directory, version, name)
    return Champion(int(version.version), version.run_id, dict(version.tags), directory)


def promote(model: str, version: int, *, instead_of: int | None) -> bool:
    """Makes a version champion if the present one still is `instead_of`; False if another took its place meanwhile.

    MLflow cannot compare and set at once: of two machines that promote within the same milliseconds, the later one wins.
    """
    client = connect()
    present = _champion(client, model)
    if (None if present is None else int(present.version)) != instead_of:
        return False
    client.set_registered_model_alias(model, "champion", str(version))
    return True


def checked(directory: Path, name: str | None = None) -> dict[str, str]:
    """{file: sha256} of an export whose bytes are those of its SHA256SUMS, and of kinds that we write. Raises ValueError."""
    name = name or str(directory)
    if not (directory / SUMS).is_file():
        raise ValueError(f"{name} is no export: {SUMS} is missing; make one with python -m dflash.export")
    present = {path.name for path in directory.iterdir()} - {SUMS}
    if strange := [file for file in sorted(present) if Path(file).suffix not in KINDS]:
        raise ValueError(f"{name} holds {', '.join(strange)}: safetensors, JSON and Markdown only; export it anew")
    lines = [line.split("  ", 1) for line in (directory / SUMS).read_text(errors="replace").splitlines()]
    sums = {line[-1]: line[0] for line in lines}
    if present != sums.keys() or WEIGHTS not in sums:
        raise ValueError(f"{name} was altered: its files are not those that {SUMS} lists; export it anew")
    for file, digest in sums.items():
        if sha256_of(directory / file) != digest:
            raise ValueError(f"{name} was altered: the sha256 of {file} is not that of {SUMS}; export it anew")
    return sums


def _check_bytes(directory: Path, version: "ModelVersion", name: str) -> None:
    sums = checked(directory, f"{name} in {directory}")
    if sha256_of(directory / SUMS) != version.tags["sha256sums"] or sums[WEIGHTS] != version.tags["sha256"]:
        raise ValueError(f"{name} in {directory} is not the export that was registered: it has another sha256")


def _log_once(client: "MlflowClient", export_dir: Path, run_id: str, path: str, sums: dict[str, str]) -> None:
    """Logs the files, SHA256SUMS last: once that is there they are complete, and none of them is written again."""
    if SUMS not in {Path(file.path).name for file in client.list_artifacts(run_id, path)}:
        for file in sums:
            client.log_artifact(run_id, str(export_dir / file), path)
        return
    scratch = Path(tempfile.mkdtemp(dir=export_dir.parent, prefix="."))  # not in /tmp: an export may have gigabytes
    try:
        there = Path(client.download_artifacts(run_id, path, str(scratch)))
        if {file.name: sha256_of(file) for file in there.iterdir()} != sums:
            raise ValueError(
                f"MLflow run {run_id} has another export under {path} than {export_dir}, and a version may point to it; register "
                "an export of another step or run"
            )
    finally:
        shutil.rmtree(scratch)


def _set_tags(client: "MlflowClient", model: str, version: int, tags: dict[str, str]) -> None:
    for name, value in tags.items():
        client.set_model_version_tag(model, str(version), name, value)


def _champion(client: "MlflowClient", model: str) -> "ModelVersion | None":
    aliases = _model(client, model)
    version = (aliases or {}).get("champion")
    return None if version is None else client.get_model_version(model, str(version))


def _model(client: "MlflowClient", model: str) -> dict[str, str] | None:
    """Its {alias: version}; None as long as there is no such model."""
    try:
        return dict(client.get_registered_model(model).aliases)
    except Exception as error:
        if not is_missing(error):
            raise
        return None
