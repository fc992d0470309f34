"""dflash/train as an operator starts it, on a real Prefect server, worker and MLflow server, read back through both public APIs."""

import hashlib
import json
import re
import subprocess
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from orchestra import PrefectServer, worker
from tiny_flow import PROMPTS, config_file, tiny_flow
from tracked_run import in_files, in_mlflow, without_speed

from dflash.metrics import read_rows
from dflash.run_dir import read_status
from tasks.mlflow_words import params_of
from tasks.tracking import connect

pytestmark = pytest.mark.slow

STEPS = 8  # 16 conversations, 2 a step
TASKS = ["prepare", "deploy", "launch", "monitor", "export", "evaluate", "evaluation", "register", "summary"]


@dataclass
class Place:
    server: PrefectServer
    root: Path
    config: str
    mlflow: str

    def train(self, name: str, **parameters: Any) -> "Ran":
        """`prefect deployment run dflash/train --watch`, in the checkout, to its end."""
        words = [f"{key}={json.dumps(value)}" for key, value in ({"config": self.config} | parameters).items()]
        given = [word for pair in words for word in ("-p", pair)]
        command = ["deployment", "run", "dflash/train", "--watch", "--watch-interval", "1", "--flow-run-name", name]
        done = self.server.prefect("--no-prompt", *command, *given)
        runs = self.server.api("POST", "flow_runs/filter", {"flow_runs": {"name": {"any_": [name]}}})
        assert len(runs) == 1, done.stdout + done.stderr
        return Ran(self.server, done, runs[0])


@dataclass
class Ran:
    """A flow run that is over."""

    server: PrefectServer
    command: subprocess.CompletedProcess[str]
    flow_run: dict[str, Any]

    @property
    def id(self) -> str:
        return self.flow_run["id"]

    @property
    def artifacts(self) -> dict[str, dict[str, Any]]:
        return self.server.artifacts(self.id)

    @property
    def run_dir(self) -> Path:
        return Path(self.mlflow.data.tags["dflash.run_dir"])

    @property
    def mlflow(self) -> Any:
        """Its MLflow run, found as anybody would: by the flow run's name."""
        client = connect()
        experiment = client.get_experiment_by_name("dflash")
        assert experiment is not None
        named = f"tags.`prefect.flow_run` = '{self.flow_run['name']}'"
        (run,) = client.search_runs([experiment.experiment_id], named)
        return run

    def seconds_of(self, task: str) -> float:
        rows = self.server.api("POST", "task_runs/filter", {"flow_runs": {"id": {"any_": [self.id]}}})
        return sum(row["total_run_time"] for row in rows if row["name"].startswith(f"{task}-"))


@pytest.fixture(scope="module")
def place(prefect_server, mlflow_server, tmp_path_factory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("end-to-end")
    config = config_file(root / "tiny.yaml", tiny_flow(root))
    with pytest.MonkeyPatch.context() as patch, worker(prefect_server, MLFLOW_TRACKING_URI=mlflow_server.url):
        patch.setenv("MLFLOW_TRACKING_URI", mlflow_server.url)
        yield Place(prefect_server, root, config, mlflow_server.url)


@pytest.fixture(scope="module")
def first(place) -> Ran:
    return place.train("first")


@pytest.fixture(scope="module")
def second(place, first) -> Ran:
    """The same again, but for what decides no stage."""
    return place.train("second", run={"name": "again"})


def the_version(ran: Ran) -> Any:
    (version,) = connect().search_model_versions(f"run_id='{ran.mlflow.info.run_id}'")
    return version


# ---------------------------------------------------------------- one run


def test_prefect_deploy_all_offers_the_four_deployments_with_the_configurations_help(place):
    offered = {row["name"]: row for row in place.server.api("POST", "deployments/filter", {})}
    assert offered.keys() == {"train", "nightly", "restart", "evaluate"}
    help_of = offered["train"]["parameter_openapi_schema"]["properties"]["stream"]["properties"]["hs_min_ready"]
    assert help_of["description"].startswith("Samples that must be buffered at every draw.")


def test_a_run_ends_completed_and_every_task_of_it(place, first):
    assert first.command.returncode == 0, first.command.stdout + first.command.stderr
    assert place.server.state(first.id)["name"] == "Completed"
    tasks = place.server.task_runs(first.id)
    assert list(tasks) == TASKS
    assert all(states == ["Completed"] for states in tasks.values()), tasks
    status = read_status(first.run_dir)
    assert (status["state"], status["step"], first.mlflow.info.status) == ("finished", STEPS, "FINISHED")


def test_its_page_shows_progress_what_was_measured_and_where_everything_lies(place, first):
    artifacts, run_dir = first.artifacts, first.run_dir
    assert artifacts["training"]["data"] == 100
    assert f"step {STEPS} of {STEPS}, loss" in artifacts["training"]["description"]
    url = f"{place.mlflow}/#/experiments/{first.mlflow.info.experiment_id}/runs/{first.mlflow.info.run_id}"
    summary = artifacts["summary"]["data"]
    for shown in (f"# {run_dir.name}: finished", f"({url})", f"`{run_dir}`", f"`{run_dir}/export`", "simulated tau"):
        assert shown in summary
    assert url in artifacts["mlflow-run"]["data"]
    measured = json.loads(next((run_dir / "evaluations").glob("evaluate-*[0-9a-f].json")).read_text())
    table = artifacts["evaluation"]["data"]
    assert f"| asked | {PROMPTS} | {measured['overall']['tau']:.3f} |" in table
    assert "| 100.0% |" in table


def test_mlflow_has_the_whole_configuration_what_identifies_the_run_and_its_data(place, first):
    run, run_dir = first.mlflow, first.run_dir
    config, provenance = (json.loads((run_dir / f"{name}.json").read_text()) for name in ("config", "provenance"))
    assert run.data.params == params_of(config)
    expected = {
        "prefect.flow_run_id": first.id,
        "prefect.flow_run": "first",
        "dflash.state": "finished",
        "end.reason": "finished",
        "layer_ids": "[0, 2]",
        "data.sha256": provenance["data"]["digest"],
        "heldout.sha256": provenance["heldout"]["digest"],
        "target.sha256": provenance["target"]["sha256"],
        "target.template_sha256": provenance["target"]["tokenizer"]["chat_template_sha256"],
    }
    assert expected.items() <= run.data.tags.items()
    assert first.id in run.data.tags["prefect.link"]
    inputs = {each.tags[0].value: each.dataset for each in run.inputs.dataset_inputs}
    assert {name: of.digest for name, of in inputs.items()} == {
        "training": provenance["data"]["digest"][:36],
        "evaluation": provenance["heldout"]["digest"][:36],
    }


def test_mlflow_has_every_row_once_with_all_that_the_queue_says(place, first):
    run_dir, arrived = first.run_dir, in_mlflow(first.mlflow.info.run_id)
    assert without_speed(arrived) == in_files(run_dir)
    rows, _ = read_rows(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    names = {name for name, _ in arrived}
    assert {f"queue/{key}" for key in ("samples", "bytes", "in", "out", "age_mean", "mix_distance")} <= names
    assert {"queue_mix/01-32", "queue_mix/97-up", "train/loss", "train/tau", "slot_accuracy/slot_01"} <= names
    assert {"heldout/tau", "final/tau", "final/identical"} <= names
    files = {file.path for folder in ("plots", "evaluation") for file in connect().list_artifacts(_id(first), folder)}
    assert "plots/training.png" in files
    assert {path.rsplit(".")[-1] for path in files} == {"png", "json"}


def _id(ran: Ran) -> str:
    return ran.mlflow.info.run_id


def test_the_version_points_to_the_verified_bytes_and_says_what_was_measured(place, first, tmp_path):
    version, run_dir = the_version(first), first.run_dir
    assert (version.name, version.source) == ("dflash-target", f"runs:/{_id(first)}/checkpoints/step-{STEPS:08d}")
    (export,) = (run_dir / "export").glob("step-*")
    assert export.name == f"step-{STEPS:08d}"
    downloaded = Path(connect().download_artifacts(_id(first), f"checkpoints/{export.name}", str(tmp_path)))
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in downloaded.iterdir()}
    assert sums.keys() == {"README.md", "SHA256SUMS", "config.json", "dflash.json", "model.safetensors"}
    assert (version.tags["sha256"], version.tags["sha256sums"]) == (sums["model.safetensors"], sums["SHA256SUMS"])
    listed = dict(reversed(line.split("  ")) for line in (downloaded / "SHA256SUMS").read_text().splitlines())
    assert listed == {name: sha256 for name, sha256 in sums.items() if name != "SHA256SUMS"}
    measured = json.loads(next((run_dir / "evaluations").glob("evaluate-*[0-9a-f].json")).read_text())["overall"]
    assert f"| **all** | {PROMPTS} | {measured['tau']:.3f} |" in (downloaded / "README.md").read_text()
    assert version.tags["tau"] == f"{measured['tau']:.4f}"
    assert json.loads(version.tags["tau_interval"]) == measured["tau_interval"]
    assert version.tags["run"] == run_dir.name
    assert version.tags["data"] == first.mlflow.data.tags["data.sha256"]


def test_a_drafter_that_gains_nothing_is_latest_and_not_champion(place, first):
    client, version = connect(), the_version(first)
    assert "not shown to be better than plain decoding" in version.tags["gate"]
    assert version.tags["gate"] in first.artifacts["summary"]["data"]
    assert client.get_model_version_by_alias("dflash-target", "latest").run_id == _id(first)
    assert "champion" not in client.get_registered_model("dflash-target").aliases


# ---------------------------------------------------------------- the same again


def test_what_is_known_is_not_done_again_and_the_page_says_whose_it_is(place, first, second):
    assert second.command.returncode == 0, second.command.stdout + second.command.stderr
    tasks = place.server.task_runs(second.id)
    assert (tasks["prepare"], tasks["evaluate"]) == (["Cached"], ["Cached"])
    assert second.seconds_of("prepare") < first.seconds_of("prepare") / 4
    for stage in ("prepare", "evaluate"):
        said = second.artifacts[f"{stage}-from-cache"]["data"]
        assert f"**{stage}** came from the cache: [first](" in said
        assert first.id in said
        assert f"{stage}-from-cache" not in first.artifacts


def test_it_is_another_run_and_version_all_the_same(place, first, second):
    assert (first.run_dir.name, second.run_dir.name) == ("tiny-0001", "again-0001")
    ours, theirs = (
        (ran.run_dir / "export" / f"step-{STEPS:08d}" / "model.safetensors").read_bytes() for ran in (second, first)
    )
    assert ours == theirs  # lockstep
    assert int(the_version(second).version) == int(the_version(first).version) + 1
    assert without_speed(in_mlflow(_id(second))) == in_files(second.run_dir)


def test_dflash_evaluate_shows_a_finished_run_again_and_leaves_it_as_it_was(place, first, second):
    before, versions = first.mlflow, connect().search_model_versions("name='dflash-target'")
    flow_run = place.server.submit("evaluate", run=first.run_dir.name, root=str(first.run_dir.parent))
    assert place.server.wait(flow_run)["name"] == "Completed"
    tasks = place.server.task_runs(flow_run)
    assert tasks["evaluate"] == ["Cached"]
    assert "register" not in tasks
    assert place.server.artifacts(flow_run)["evaluation"]["data"] == first.artifacts["evaluation"]["data"]
    after = connect().get_run(_id(first))
    assert (after.info.status, after.info.end_time) == ("FINISHED", before.info.end_time)
    assert after.data.tags["end.reason"] == "finished"
    assert without_speed(in_mlflow(_id(first))) == in_files(first.run_dir)
    assert len(connect().search_model_versions("name='dflash-target'")) == len(versions)


# ---------------------------------------------------------------- refusals


def flow_runs(place: Place) -> int:
    return place.server.api("POST", "flow_runs/count", {})


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"stream": {"hs_min_redy": 4}}, "hs_min_redy"),
        ({"stream": {"hs_min_ready": "many"}}, "hs_min_ready"),
        ({"stream": {"hs_min_ready": 0}}, "hs_min_ready"),
        ({"objective": {"loss": "focal"}}, "loss"),
        ({"refresh": ["train"]}, "refresh"),
    ],
    ids=["unknown field", "wrong type", "out of range", "no such choice", "no such stage"],
)
def test_what_does_not_fit_is_refused_at_submission(place, parameters, named):
    before = flow_runs(place)
    with pytest.raises(urllib.error.HTTPError) as refused:
        place.server.submit("train", config=place.config, **parameters)
    assert refused.value.code in (409, 422)
    assert named in refused.value.read().decode()
    assert flow_runs(place) == before


@pytest.mark.parametrize("typo", ['stream={"hs_min_redy": 4}', 'streem={"hs_min_ready": 4}'])
def test_the_command_line_refuses_a_typo_with_an_exit_code(place, typo):
    before = flow_runs(place)
    done = place.server.prefect("deployment", "run", "dflash/train", "-p", typo)
    assert done.returncode != 0
    assert re.search("hs_min_redy|streem", done.stdout + done.stderr)
    assert flow_runs(place) == before


def test_a_mistake_in_the_file_ends_failed_in_one_line_and_no_traceback(place):
    values = tiny_flow(place.root, stream__hs_min_ready=13)
    flow_run = place.server.submit("train", config=config_file(place.root / "mistaken.yaml", values))
    state = place.server.wait(flow_run)
    assert state["name"] == "Failed"
    assert state["message"].startswith("stream.hs_min_ready=13 exceeds stream.hs_queue_depth=12")
    assert "\n" not in state["message"]
    assert place.server.task_runs(flow_run) == {}
    logged = logs(place, flow_run)
    assert any(state["message"] in line for line in logged), logged
    assert not any("Traceback" in line for line in logged), logged
    assert not (place.root / "runs" / "tiny-0002").exists()


def logs(place: Place, flow_run: str) -> list[str]:
    """What the flow run's page shows, once it has all arrived."""
    asked = {"logs": {"flow_run_id": {"any_": [flow_run]}}}
    deadline = time.monotonic() + 30
    while True:
        lines = [row["message"] for row in place.server.api("POST", "logs/filter", asked)]
        if any("Finished in state" in line for line in lines) or time.monotonic() > deadline:
            return lines
        time.sleep(0.5)
