import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasks.registry import champion, model_name, promote, register_version, set_version_tags
from tasks.tracking import connect


def new_export(directory, weight):
    """An export's files, as dflash.export writes them."""
    directory.mkdir(parents=True)
    save_file({"w": np.full((4, 4), weight, np.float32)}, directory / "model.safetensors")
    (directory / "config.json").write_text('{"block_size": 4}')
    (directory / "dflash.json").write_text(json.dumps({"weight": weight}))
    (directory / "README.md").write_text("# A drafter\n")
    write_sums(directory)
    return directory


def write_sums(directory):
    (directory / "SHA256SUMS").unlink(missing_ok=True)
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(directory.iterdir())]
    (directory / "SHA256SUMS").write_text("".join(lines))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hashes(directory):
    return {path.name: sha256(path) for path in directory.iterdir()}


@pytest.fixture
def model(request, tmp_path):
    """A name of its own for each test: the server is every test's."""
    return model_name(f"org/{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]}")


@pytest.fixture
def run_id(mlflow_store):
    client = connect()
    found = client.get_experiment_by_name("registry")
    experiment = found.experiment_id if found else client.create_experiment("registry")
    return client.create_run(experiment).info.run_id


def place_of(run_id, step, mlflow_store, request):
    """Where MLflow keeps the bytes of a step on the disk."""
    uri = connect().get_run(run_id).info.artifact_uri
    if uri.startswith("mlflow-artifacts:/"):
        kept = request.getfixturevalue("mlflow_server").directory / "artifacts" / uri.removeprefix("mlflow-artifacts:/")
    else:
        kept = Path(uri.removeprefix("file://"))
    return kept / "checkpoints" / f"step-{step:08d}"


def test_a_version_points_to_the_exports_bytes_with_their_sha256_and_latest_is_the_newest(tmp_path, model, run_id):
    exports = [new_export(tmp_path / f"step-{step}", step) for step in (1, 2)]
    versions = [
        register_version(model, export, run_id=run_id, step=step, tags={"tau": f"{step}.5"})
        for step, export in enumerate(exports, 1)
    ]
    assert versions == [1, 2]
    client = connect()
    assert int(client.get_model_version_by_alias(model, "latest").version) == 2
    first = client.get_model_version(model, "1")
    assert (first.run_id, first.source) == (run_id, f"runs:/{run_id}/checkpoints/step-00000001")
    assert first.tags == {
        "tau": "1.5",
        "step": "1",
        "sha256": sha256(exports[0] / "model.safetensors"),
        "sha256sums": sha256(exports[0] / "SHA256SUMS"),
    }
    downloaded = Path(client.download_artifacts(run_id, "checkpoints/step-00000001", str(tmp_path)))
    assert hashes(downloaded) == hashes(exports[0])
    set_version_tags(model, 1, {"lost": "tau 1.5 is not above 1.7, see https://user:PASSWORD@host"})
    assert client.get_model_version(model, "1").tags["lost"] == "tau 1.5 is not above 1.7, see https://host"


def test_the_same_export_is_one_version_and_its_bytes_are_written_once(tmp_path, model, run_id, mlflow_store, request):
    export = new_export(tmp_path / "export", 1)
    assert register_version(model, export, run_id=run_id, step=7, tags={"a": "1"}) == 1
    place = place_of(run_id, 7, mlflow_store, request)
    written = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    assert register_version(model, export, run_id=run_id, step=7, tags={"b": "2"}) == 1
    assert {path.name: path.stat().st_mtime_ns for path in place.iterdir()} == written
    assert connect().get_model_version(model, "1").tags.items() >= {"a": "1", "b": "2"}.items()


def test_a_registration_that_was_killed_halfway_is_completed(tmp_path, model, run_id):
    export = new_export(tmp_path / "export", 1)
    torn = tmp_path / "torn" / "model.safetensors"
    torn.parent.mkdir()
    torn.write_bytes((export / "model.safetensors").read_bytes()[:10])
    client = connect()
    client.log_artifact(run_id, str(torn), "checkpoints/step-00000007")
    assert register_version(model, export, run_id=run_id, step=7, tags={}) == 1
    assert hashes(Path(client.download_artifacts(run_id, "checkpoints/step-00000007", str(tmp_path)))) == hashes(export)


def test_another_export_of_the_same_step_is_refused_and_changes_nothing(tmp_path, model, run_id):
    first, second = new_export(tmp_path / "first", 1), new_export(tmp_path / "second", 2)
    register_version(model, first, run_id=run_id, step=7, tags={})
    with pytest.raises(ValueError, match="has another export under checkpoints/step-00000007"):
        register_version(model, second, run_id=run_id, step=7, tags={})
    client = connect()
    assert len(client.search_model_versions(f"name='{model}'")) == 1
    assert hashes(Path(client.download_artifacts(run_id, "checkpoints/step-00000007", str(tmp_path)))) == hashes(first)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_an_altered_export_and_one_with_a_pickle_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")  # never asked
    altered, pickled, more = (new_export(tmp_path / name, 1) for name in ("altered", "pickled", "more"))
    (altered / "config.json").write_text('{"block_size": 8}')
    (pickled / "optimizer.pt").write_bytes(b"\x80\x05")
    write_sums(pickled)
    (more / "extra.json").write_text("{}")
    for export, fault in (
        (altered, "sha256 of config.json"),
        (pickled, "optimizer.pt"),
        (more, "altered"),
        (tmp_path, "no export"),
    ):
        with pytest.raises(ValueError, match=fault):
            register_version("dflash-x", export, run_id="0", step=1, tags={})


def test_the_champion_moves_only_if_it_is_still_the_one_that_was_beaten(tmp_path, model, run_id):
    assert champion(model, tmp_path / "champions") is None  # no such model
    exports = [new_export(tmp_path / f"step-{step}", step) for step in (1, 2)]
    for step, export in enumerate(exports, 1):
        register_version(model, export, run_id=run_id, step=step, tags={"tau": str(step)})
    assert champion(model, tmp_path / "champions") is None  # no champion yet
    assert not promote(model, 2, instead_of=1)
    assert promote(model, 1, instead_of=None)
    best = champion(model, tmp_path / "champions")
    assert (best.version, best.run_id, best.tags["tau"]) == (1, run_id, "1")
    assert hashes(best.directory) == hashes(exports[0])
    assert not promote(model, 2, instead_of=None)
    assert promote(model, 2, instead_of=1)
    assert champion(model, tmp_path / "champions").version == 2
    assert sorted(path.name for path in (tmp_path / "champions").iterdir()) == [f"{model}-v1", f"{model}-v2"]


def test_a_champion_whose_bytes_were_altered_is_refused(tmp_path, model, run_id, mlflow_store, request):
    export = new_export(tmp_path / "export", 1)
    register_version(model, export, run_id=run_id, step=1, tags={})
    promote(model, 1, instead_of=None)
    best = champion(model, tmp_path / "champions")
    (best.directory / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"version 1, the champion, in .* was altered: the sha256 of config.json"):
        champion(model, tmp_path / "champions")
    shutil.rmtree(best.directory)
    place = place_of(run_id, 1, mlflow_store, request)
    shutil.rmtree(place)
    shutil.copytree(new_export(tmp_path / "another", 2), place)  # whole in itself, but not what was registered
    with pytest.raises(ValueError, match="is not the export that was registered"):
        champion(model, tmp_path / "champions")
    assert list((tmp_path / "champions").iterdir()) == []


@pytest.mark.parametrize(
    "target, name",
    [("Qwen/Qwen3-8B", "dflash-Qwen3-8B"), ("/models/my target/", "dflash-my-target"), ("org/a:b'c", "dflash-a-b-c")],
)
def test_a_target_has_one_model(target, name):
    assert model_name(target) == name
