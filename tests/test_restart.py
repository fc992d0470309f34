"""dflash/restart: an operator's order stops a run with a checkpoint and starts a fresh one; a mistake stops nothing."""

import json
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from orchestra import PrefectServer, worker
from tiny_flow import config_file, parsed, tiny_flow

from dflash import run_dir as runs
from dflash.files import sha256_of
from dflash.metrics import read_rows
from tasks.restart import find_run, fresh
from tasks.tracking import connect

ENDLESS = 100_000  # epochs


# ---------------------------------------------------------------- which run, and what starts afresh


@pytest.mark.parametrize(
    "name", ["../other-0001", "tiny-0001/checkpoints", "/tiny-0001", "..", ".", "", ".tiny.number"]
)
def test_a_name_that_is_no_runs_own_is_refused_and_the_runs_that_there_are_are_named(tmp_path, name):
    root = tmp_path / "runs"
    for run_dir in (root / "tiny-0001", root / "tiny-0002", tmp_path / "other-0001"):
        run_dir.mkdir(parents=True)
        (run_dir / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no such run under .*; there are tiny-0001, tiny-0002"):
        find_run(root, name)
    assert find_run(root, "tiny-0002") == root / "tiny-0002"


def test_where_there_is_no_run_that_is_said(tmp_path):
    with pytest.raises(ValueError, match="there is none"):
        find_run(tmp_path / "runs", "tiny-0001")


def test_a_fresh_run_goes_on_from_nothing_and_keeps_all_else(tmp_path):
    config = parsed(tiny_flow(tmp_path, checkpoint__resume_from=str(tmp_path / "step-00000004")))
    assert fresh(config).checkpoint.resume_from is None
    assert fresh(config) == parsed(tiny_flow(tmp_path))


# ---------------------------------------------------------------- the order, given to a run that trains


def until(found: Callable[[], Any], *, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def hashes(run_dir: Path) -> dict[str, str]:
    """{path: sha256} of all that is in the checkpoints of a run."""
    return {str(path): sha256_of(path) for path in sorted(run_dir.glob("checkpoints/step-*/*"))}


def without_a_change(server: PrefectServer, run_dir: Path, root: str) -> dict[str, dict[str, Any]]:
    """The ends of orders that were mistaken."""
    mistaken = {
        "wrong name": {"run": "tiny-0007"},
        "path": {"run": f"../{run_dir.parent.name}/{run_dir.name}"},
        "bad override": {"run": run_dir.name, "stream": {"hs_min_ready": 1000}},
    }
    flow_runs = {name: server.submit("restart", root=root, **given) for name, given in mistaken.items()}
    ends = {name: server.wait(flow_run) for name, flow_run in flow_runs.items()}
    assert all(server.task_runs(flow_run) == {} for flow_run in flow_runs.values())
    return ends


@pytest.fixture(scope="module")
def restarted(prefect_server, mlflow_server, tmp_path_factory):
    """An endless run, orders that were mistaken, and the one that was not."""
    server, root = prefect_server, tmp_path_factory.mktemp("restart")
    values = tiny_flow(root, run__epochs=ENDLESS, checkpoint__every_steps=20)
    old, new = root / "runs/tiny-0001", root / "runs/tiny-0002"
    with pytest.MonkeyPatch.context() as patch, worker(server, MLFLOW_TRACKING_URI=mlflow_server.url):
        patch.setenv("MLFLOW_TRACKING_URI", mlflow_server.url)
        first = server.submit("train", config=config_file(root / "tiny.yaml", values))
        until(lambda: (old / "checkpoints/step-00000020/manifest.json").exists())

        trainer = runs.trainer_of(old)
        ends = without_a_change(server, old, str(root / "runs"))
        undisturbed = trainer is not None and runs.trainer_of(old) == trainer and not new.exists()

        before = hashes(old)
        words = ["-p", f"run={old.name}", "-p", 'stream={"hs_min_ready": 4}', "-p", f"root={root / 'runs'}"]
        order = server.prefect("deployment", "run", "dflash/restart", "--flow-run-name", "the order", *words)
        assert order.returncode == 0, order.stdout + order.stderr
        (second,) = server.api("POST", "flow_runs/filter", {"flow_runs": {"name": {"any_": ["the order"]}}})
        until(lambda: "restart" in server.artifacts(second["id"]))
        trains = runs.trainer_of(new)
        seen = SimpleNamespace(
            server=server,
            old=old,
            new=new,
            mistaken=ends,
            undisturbed=undisturbed,
            before=before,
            first=first,
            second=second["id"],
            first_end=server.wait(first),
            trains=trains,
            rows=read_rows(new / "metrics.jsonl")[0],
        )
        server.api("POST", f"flow_runs/{second['id']}/set_state", {"state": {"type": "CANCELLING"}})
        server.wait(second["id"])
        yield seen


@pytest.mark.slow
def test_a_mistaken_order_is_refused_in_one_line_before_anything_is_stopped(restarted):
    ends = restarted.mistaken
    assert {end["name"] for end in ends.values()} == {"Failed"}
    for name in ("wrong name", "path"):
        assert "no such run under" in ends[name]["message"]
        assert ends[name]["message"].endswith("; there are tiny-0001")
    assert ends["bad override"]["message"].startswith("stream.hs_min_ready=1000 exceeds stream.hs_queue_depth=12")
    assert restarted.undisturbed


@pytest.mark.slow
def test_the_old_run_is_cancelled_with_the_reason_and_saved_its_last_step(restarted):
    end, status = restarted.first_end, runs.read_status(restarted.old)
    assert end["name"] == "Cancelled"
    assert end["message"].startswith("stopped by dflash/restart at ")
    assert (status["state"], status["step"] > 20) == ("stopped", True)
    assert (restarted.old / f"checkpoints/step-{status['step']:08d}/manifest.json").exists()
    (run,) = mlflow_runs(restarted.old)
    assert run.info.status == "KILLED"
    assert run.data.tags["end.reason"] == end["message"]


@pytest.mark.slow
def test_the_old_runs_checkpoints_are_byte_for_byte_what_they_were(restarted):
    assert len(restarted.before) >= 4
    assert restarted.before.items() <= hashes(restarted.old).items()


@pytest.mark.slow
def test_the_new_run_starts_from_initialisation_with_the_change_alone(restarted):
    assert restarted.trains is not None
    assert [row["step"] for row in restarted.rows[:1]] == [1]
    old, new = (json.loads((run_dir / "config.json").read_text()) for run_dir in (restarted.old, restarted.new))
    assert (old["stream"].pop("hs_min_ready"), new["stream"].pop("hs_min_ready")) == (6, 4)
    assert new == old
    provenance = json.loads((restarted.new / "provenance.json").read_text())
    assert (provenance["parent"], provenance["started_from"]) == (None, None)
    tasks = restarted.server.task_runs(restarted.second)
    assert (tasks["stop"], tasks["prepare"], tasks["launch"]) == (["Completed"], ["Cached"], ["Completed"])
    (run,) = mlflow_runs(restarted.new)
    assert run.data.tags["dflash.restart_of"] == "tiny-0001"


@pytest.mark.slow
def test_the_page_says_both_directories_and_that_steps_are_made(restarted):
    said = restarted.server.artifacts(restarted.second)["restart"]
    assert f"stopped: `{restarted.old}`" in said["data"]
    assert f"running: `{restarted.new}`" in said["data"]
    step = runs.read_status(restarted.old)["step"]
    assert said["description"].startswith(
        f"tiny-0001 stopped at step {step:,}, its checkpoints stay; tiny-0002 started"
    )
    assert said["description"].endswith("makes steps")


def mlflow_runs(run_dir: Path) -> list[Any]:
    client = connect()
    experiment = client.get_experiment_by_name("dflash")
    assert experiment is not None
    return client.search_runs([experiment.experiment_id], f"tags.`dflash.run_dir` = '{run_dir}'")


@pytest.mark.slow
def test_an_unknown_field_is_refused_at_submission(prefect_server):
    with pytest.raises(urllib.error.HTTPError) as refused:
        prefect_server.submit("restart", run="tiny-0001", stream={"hs_min_redy": 4})
    assert refused.value.code in (409, 422)
