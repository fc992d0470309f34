import json
import os
import random
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faulty_proxy import DROPPED, FaultyProxy
from tracked_run import PROVENANCE, add_rows, in_files, in_mlflow, new_run, row, without_speed

from dflash.metrics import MetricsFile
from dflash.run_dir import only_trainer, read_status, write_status
from tasks import registry, tracking
from tasks.child import JobFailed
from tasks.tracking import Tracker, connect, mlflow_needed, reconcile, tracking_uri

LOG_BATCH = "/api/2.0/mlflow/runs/log-batch"
SECONDS = 60  # for what takes one


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(tracking, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(tracking, "OUTAGE_SECONDS", 1)


@pytest.fixture
def nobody(tmp_path, monkeypatch):
    """Nobody listens where MLflow should be."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free.getsockname()[1]}")


def until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def record_of(run_dir):
    return json.loads((run_dir / "tracking.json").read_text())


def run_of(run_dir):
    return connect().get_run(record_of(run_dir)["run_id"])


def arrived(run_dir):
    return record_of(run_dir)["read"].get("metrics.jsonl", {"step": 0})["step"]


# ---------------------------------------------------------------- what is in MLflow


def test_a_run_is_readable_in_mlflow_as_it_is_in_its_directory(mlflow_store, tmp_path):
    run_dir = new_run(tmp_path / "runs", steps=40)
    with MetricsFile(run_dir / "heldout.jsonl", after_step=-1) as heldout:
        heldout.write({"step": 0, "loss": 7.0, "tau": 1.0, "slot_accuracy": [0.1, 0.2], "blocks": 5})
        heldout.write({"step": 40, "loss": 6.0, "tau": 1.1, "slot_accuracy": [0.2, 0.3], "blocks": 5})
    with Tracker(run_dir, tags={"prefect.flow_run_id": "1234"}) as tracker:
        tracker.sample_gpus(7)
        assert tracker.end("finished", None, SECONDS)
        assert tracker.run_id is not None
        client = connect()
        run = client.get_run(tracker.run_id)
        assert without_speed(in_mlflow(tracker.run_id)) == in_files(run_dir)
        server = mlflow_store if mlflow_store.startswith("http") else "http://127.0.0.1:5000"  # mlflow server's default
        expected_url = f"{server}/#/experiments/{run.info.experiment_id}/runs/{tracker.run_id}"
        assert tracker.run_url() == expected_url
    assert (run.info.status, run.info.run_name) == ("FINISHED", run_dir.name)
    config = json.loads((run_dir / "config.json").read_text())
    assert len(run.data.params) == sum(map(len, config.values()))
    assert run.data.params["stream.bucket_edges"] == "[8, 16]"
    assert run.data.params["target.name"] == "org/tiny"
    expected = {
        "prefect.flow_run_id": "1234",
        "git.commit": "c" * 40,
        "git.dirty": "false",
        "data.sha256": "d" * 64,
        "heldout.sha256": "e" * 64,
        "target.name": "org/tiny",
        "target.revision": "main",
        "target.sha256": "a" * 64,
        "target.template_sha256": "7" * 64,
        "layer_ids": "[0, 2]",
        "dflash.state": "finished",
        "end.reason": "finished",
        "dflash.run_dir": str(run_dir),
    }
    assert {name: run.data.tags.get(name) for name in expected} == expected
    sets = {used.tags[0].value: used.dataset for used in run.inputs.dataset_inputs}
    assert (sets["training"].name, sets["training"].digest) == ("train.jsonl", "d" * 36)
    assert json.loads(sets["training"].profile) == {"samples": 12, "tokens": 345}
    assert json.loads(sets["evaluation"].source) == {"uri": "/data/heldout.jsonl"}
    loss = client.get_metric_history(run.info.run_id, "train/loss")
    assert [metric.timestamp for metric in loss] == [int(row(step)["time"] * 1000) for step in range(1, 41)]
    assert run.data.metrics["speed/target_tokens_per_second"] == pytest.approx(60)


@pytest.mark.parametrize(
    "state, status",
    [
        ("finished", "FINISHED"),
        ("stopped", "KILLED"),
        ("failed", "FAILED"),
        ("refused", "FAILED"),
        ("crashed", "FAILED"),
    ],
)
def test_an_end_has_its_status_and_its_reason(state, status, tmp_path, mlflow_file):
    run_dir = new_run(tmp_path / "runs")
    with Tracker(run_dir) as tracker:
        assert tracker.end(state, "the disk is full", SECONDS)
    run = run_of(run_dir)
    assert run.info.status == status
    assert (run.data.tags["dflash.state"], run.data.tags["end.reason"]) == (state, "the disk is full")


def test_what_is_known_later_is_added_later(tmp_path, mlflow_file):
    run_dir = new_run(tmp_path / "runs")
    (run_dir / "provenance.json").unlink()
    with Tracker(run_dir) as tracker:
        until(lambda: tracker.run_id and "config.json" in record_of(run_dir)["described"])
        assert "data.sha256" not in run_of(run_dir).data.tags
        (run_dir / "provenance.json").write_text(json.dumps(PROVENANCE))
        until(lambda: "provenance.json" in record_of(run_dir)["described"])
    run = run_of(run_dir)
    assert run.data.tags["data.sha256"] == "d" * 64
    assert run.info.status == "RUNNING"


def test_gpus_are_followed_while_the_trainer_is_still_loading(mlflow_file, tmp_path):
    run_dir = new_run(tmp_path / "runs", steps=0)
    (run_dir / "provenance.json").unlink()
    with Tracker(run_dir) as tracker:
        tracker.sample_gpus(0)
        assert tracker.end("stopped", "before its first step", SECONDS)
        assert tracker.run_id is not None
        assert ("gpu/devices", 0) in in_mlflow(tracker.run_id)


def test_one_directory_is_one_mlflow_run_also_after_its_end_and_when_its_id_was_not_saved(tmp_path, mlflow_file):
    run_dir = new_run(tmp_path / "runs", steps=5)
    with Tracker(run_dir) as tracker:
        assert tracker.end("crashed", "killed by signal 9", SECONDS)
        first = tracker.run_id
    record = record_of(run_dir)
    (run_dir / "tracking.json").write_text(json.dumps(record | {"run_id": None}))
    add_rows(run_dir, range(6, 8))
    with Tracker(run_dir) as tracker:
        until(lambda: arrived(run_dir) == 7)
        assert tracker.run_id == first
    resumed = PROVENANCE | {"code": {"commit": "f" * 40, "dirty": True}, "started_from": 5}
    (run_dir / "provenance.json").write_text(json.dumps(resumed))
    with Tracker(run_dir) as tracker:
        until(lambda: run_of(run_dir).info.status == "RUNNING" and "end.reason" not in run_of(run_dir).data.tags)
        assert tracker.end("finished", None, SECONDS)
        assert tracker.run_id == first
    assert run_of(run_dir).info.status == "FINISHED"
    assert without_speed(in_mlflow(first)) == in_files(run_dir)
    assert run_of(run_dir).data.tags["git.commit"] == "f" * 40
    assert len(run_of(run_dir).inputs.dataset_inputs) == 2
    assert len(connect().search_runs([record["experiment_id"]])) == 1


def test_files_are_logged_also_after_the_end_and_a_missing_one_holds_nothing_up(mlflow_store, tmp_path):
    run_dir = new_run(tmp_path / "runs")
    (tmp_path / "loss.png").write_bytes(b"a picture")
    with Tracker(run_dir) as tracker:
        tracker.log_file(tmp_path / "gone.png", "plots")
        assert tracker.end("finished", None, SECONDS)
        tracker.log_file(tmp_path / "loss.png", "plots")
        until(lambda: connect().list_artifacts(tracker.run_id, "plots"))
    assert [file.path for file in connect().list_artifacts(record_of(run_dir)["run_id"], "plots")] == ["plots/loss.png"]


def test_without_nvml_there_is_a_tag_and_a_zero_and_nothing_else_changes(tmp_path, mlflow_file):
    if tracking.gpus() is not None:
        pytest.skip("this machine has NVML")
    run_dir = new_run(tmp_path / "runs")
    with Tracker(run_dir) as tracker:
        for step in (3, 4, 5):
            tracker.sample_gpus(step)
        assert tracker.end("finished", None, SECONDS)
    run = run_of(run_dir)
    assert run.data.tags["gpu.telemetry"] == "off"
    assert {key: value for key, value in in_mlflow(run.info.run_id).items()} == {("gpu/devices", 3): [0]}


def test_no_secret_gets_into_mlflow_or_tracking_json_or_the_log(tmp_path, monkeypatch, mlflow_server, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.url.replace("//", "//user:PASSWORD@"))
    run_dir = new_run(
        tmp_path / "runs", provenance=PROVENANCE | {"data": {"path": "https://PASSWORD@h/x", "digest": "d"}}
    )
    config = json.loads((run_dir / "config.json").read_text())
    config["regenerate"]["endpoint"] = "http://user:PASSWORD@host/v1?api_key=PASSWORD"
    config["evaluate"]["prompts"] = ["https://user:PASSWORD@host/prompts.jsonl"]
    (run_dir / "config.json").write_text(json.dumps(config))
    with Tracker(run_dir, tags={"link": "https://user:PASSWORD@host/"}) as tracker:
        assert tracker.end("failed", "http://user:PASSWORD@host does not answer", SECONDS)
        assert tracker.run_url().startswith(mlflow_server.url)
    run = run_of(run_dir)
    assert "PASSWORD" not in json.dumps([run.data.params, run.data.tags, str(run.inputs)])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:PASSWORD@127.0.0.1:1")
    with Tracker(run_dir):
        until(lambda: "fails" in caplog.text)
    assert "PASSWORD" not in caplog.text + (run_dir / "tracking.json").read_text()


# ---------------------------------------------------------------- every row once, whatever happens


def test_all_rows_arrive_once_when_mlflow_is_down_for_the_middle_third(tmp_path, monkeypatch, mlflow_server, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.url)
    caplog.set_level("INFO", "dflash.tracking")
    run_dir = new_run(tmp_path / "runs")
    with Tracker(run_dir) as tracker:
        for third in range(3):
            for step in range(third * 100 + 1, third * 100 + 101):
                add_rows(run_dir, range(step, step + 1))
                time.sleep(0.005)
            if third == 0:
                until(lambda: arrived(run_dir) > 0)
                mlflow_server.kill()
            elif third == 1:
                until(lambda: "fails" in caplog.text)
                tracker.log_file(run_dir / "config.json", "files")
                mlflow_server.start()
        assert tracker.end("finished", None, SECONDS)
    run_id = record_of(run_dir)["run_id"]
    assert without_speed(in_mlflow(run_id)) == in_files(run_dir)
    assert len(connect().list_artifacts(run_id, "files")) == 1
    assert caplog.text.count("fails; it will be caught up") == 1
    assert caplog.text.count("MLflow is back") == 1


def test_rows_whose_answer_was_lost_are_not_sent_again_although_the_trainer_has_cut_its_file(
    tmp_path, monkeypatch, mlflow_server
):
    run_dir = new_run(tmp_path / "runs", steps=20)
    before = in_files(run_dir)
    lost = []

    def plan(path, body, tries):
        if path != LOG_BATCH or not any(metric["step"] == 20 for metric in body.get("metrics", [])):
            return None
        lost.append(tries)
        # the trainer has crashed meanwhile, and goes on from its checkpoint of step 10
        add_rows(run_dir, range(11, 31), after_step=10, loss=5.0)
        return DROPPED

    with FaultyProxy(mlflow_server.url, plan) as proxy:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.url)
        with Tracker(run_dir) as tracker:
            assert tracker.end("finished", None, SECONDS)
            run_id = tracker.run_id
    assert lost == [0]
    after = {key: of for key, of in in_files(run_dir).items() if key[1] > 20}
    assert without_speed(in_mlflow(run_id)) == before | after


def test_a_resumed_trainers_cut_file_gives_no_step_twice(tmp_path, mlflow_file):
    run_dir = new_run(tmp_path / "runs", steps=20)
    before = in_files(run_dir)
    with Tracker(run_dir) as tracker:
        until(lambda: arrived(run_dir) == 20)
        add_rows(run_dir, range(11, 26), after_step=10, loss=5.0)
        until(lambda: arrived(run_dir) == 25)
        assert tracker.end("finished", None, SECONDS)
        after = {key: of for key, of in in_files(run_dir).items() if key[1] > 20}
        assert without_speed(in_mlflow(tracker.run_id)) == before | after


SUPERVISOR = """
import sys
from pathlib import Path
from tasks import tracking
tracking.POLL_SECONDS = 0.001
tracking.METRICS_PER_CALL = 60  # one row a call
with tracking.Tracker(Path(sys.argv[1])) as tracker:
    print("started", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_all_rows_arrive_once_over_supervisors_killed_at_any_point(kills, tmp_path, monkeypatch, mlflow_server):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.url)
    run_dir = new_run(tmp_path / "runs", steps=100 * kills)
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(kills):
        supervisor = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(run_dir)],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert supervisor.stdout.readline() == b"started\n"
        done = arrived(run_dir)
        until(lambda done=done: arrived(run_dir) > done or done == 100 * kills)
        time.sleep(dice.random() / 5)
        supervisor.kill()
        supervisor.communicate()
    assert arrived(run_dir) > 0
    (line,) = reconcile(tmp_path / "runs")
    assert "crashed: trainer and supervisor are gone" in line
    run = run_of(run_dir)
    assert run.info.status == "FAILED"
    assert without_speed(in_mlflow(run.info.run_id)) == in_files(run_dir)
    assert len(connect().search_runs([run.info.experiment_id], f"tags.`dflash.run_dir` = '{run_dir}'")) == 1


def test_an_mlflow_that_has_lost_the_run_gets_all_of_it_again(tmp_path, mlflow_file, monkeypatch):
    run_dir = new_run(tmp_path / "runs", steps=20)
    with Tracker(run_dir) as tracker:
        assert tracker.end("finished", None, SECONDS)
        first = tracker.run_id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'other.db'}")
    with Tracker(run_dir) as tracker:
        assert tracker.end("finished", None, SECONDS)
        assert tracker.run_id != first
        assert without_speed(in_mlflow(tracker.run_id)) == in_files(run_dir)


def test_an_mlflow_that_loses_the_run_while_it_is_followed_gets_all_of_it_again(tmp_path, mlflow_file, caplog):
    run_dir = new_run(tmp_path / "runs", steps=20)
    with Tracker(run_dir) as tracker:
        until(lambda: arrived(run_dir) == 20)
        first = tracker.run_id
        connect().delete_run(first)
        with sqlite3.connect(tmp_path / "mlflow.db") as database:  # as `mlflow gc` does
            for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
                database.execute(f"DELETE FROM {table} WHERE run_uuid = ?", (first,))
        add_rows(run_dir, range(21, 23))
        until(lambda: tracker.run_id != first and arrived(run_dir) == 22)
        assert tracker.end("finished", None, SECONDS)
        assert without_speed(in_mlflow(tracker.run_id)) == in_files(run_dir)
    assert f"has no run {first} any more" in caplog.text
    assert run_of(run_dir).data.tags["data.sha256"] == "d" * 64


# ---------------------------------------------------------------- nobody waits


def test_a_caller_never_waits_for_an_mlflow_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1000")
    monkeypatch.setattr(tracking, "LEAVE_SECONDS", 0.1)
    run_dir = new_run(tmp_path / "runs", steps=5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with Tracker(run_dir) as tracker:
            connection, _ = silent.accept()  # it asks, and gets no answer: all that follows returns nevertheless
            with connection:
                tracker.log_file(run_dir / "config.json", "files")
                tracker.sample_gpus(5)
                assert (tracker.run_id, tracker.run_url()) == (None, None)
                assert not tracker.end("finished", None, wait_seconds=0.1)
                with pytest.raises(ValueError, match="supervised by another process"), Tracker(run_dir):
                    pass
        assert record_of(run_dir)["end"]["state"] == "finished"


def test_a_run_that_began_and_ended_without_mlflow_is_caught_up_afterwards(
    tmp_path, nobody, mlflow_server, monkeypatch
):
    run_dir = new_run(tmp_path / "runs", steps=20)
    with Tracker(run_dir) as tracker:
        write_status(run_dir, state="stopped", step=20, reason="cancelled")
        assert not tracker.end("stopped", "cancelled by the operator", wait_seconds=0.5)
        assert tracker.run_id is None
    (line,) = reconcile(tmp_path / "runs")
    assert "later then" in line
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.url)
    (line,) = reconcile(tmp_path / "runs")
    assert "stopped: cancelled by the operator" in line
    run = run_of(run_dir)
    assert (run.info.status, run.data.tags["end.reason"]) == ("KILLED", "cancelled by the operator")
    assert run.info.end_time == int(record_of(run_dir)["end"]["time"] * 1000)
    assert without_speed(in_mlflow(run.info.run_id)) == in_files(run_dir)
    assert reconcile(tmp_path / "runs") == []


# ---------------------------------------------------------------- what was left behind


def test_the_status_on_the_disk_and_in_mlflow_are_those_of_the_end_that_was_left_behind(tmp_path, mlflow_file):
    runs = [new_run(tmp_path / "runs", steps=3) for _ in range(3)]
    for run_dir in runs:
        with Tracker(run_dir):
            until(lambda run_dir=run_dir: arrived(run_dir) == 3)
    write_status(runs[0], state="finished", step=3)
    write_status(runs[1], state="failed", step=3, reason="step 3: the loss is not finite")
    new_run(tmp_path / "runs")  # never tracked: not ours
    lines = reconcile(tmp_path / "runs")
    assert len(lines) == 3
    assert [run_of(run_dir).info.status for run_dir in runs] == ["FINISHED", "FAILED", "FAILED"]
    assert run_of(runs[1]).data.tags["end.reason"] == "step 3: the loss is not finite"
    status = read_status(runs[2])
    assert status["state"] == "crashed"
    assert run_of(runs[2]).data.tags["end.reason"] == status["reason"]
    assert reconcile(tmp_path / "runs") == []


def test_a_run_that_is_looked_after_or_still_trains_or_is_another_machines_is_left_alone(tmp_path, mlflow_file):
    supervised, training, elsewhere = (new_run(tmp_path / "runs") for _ in range(3))
    for run_dir in (training, elsewhere):
        with Tracker(run_dir):
            until(lambda run_dir=run_dir: record_of(run_dir)["run_id"])
    (elsewhere / "tracking.json").write_text(json.dumps(record_of(elsewhere) | {"host": "another"}))
    with Tracker(supervised), only_trainer(training):
        lines = reconcile(tmp_path / "runs")
    assert [line.split(":")[0] for line in lines] == ["left alone", "left alone"]
    assert f"trained by process {os.getpid()}" in lines[1]
    assert {read_status(run_dir)["state"] for run_dir in (supervised, training, elsewhere)} == {"running"}
    assert run_of(training).info.status == "RUNNING"


def test_a_tracking_json_that_a_power_cut_tore_is_said_and_holds_up_no_other_run(tmp_path, mlflow_file):
    torn, whole = (new_run(tmp_path / "runs") for _ in range(2))
    for run_dir in (torn, whole):
        with Tracker(run_dir):
            until(lambda run_dir=run_dir: record_of(run_dir)["run_id"])
    (torn / "tracking.json").write_text("{")
    lines = reconcile(tmp_path / "runs")
    assert "tracking.json is not JSON" in lines[0]
    assert "remove it" in lines[0]
    assert "crashed" in lines[1]
    with pytest.raises(ValueError, match="remove it"), Tracker(torn):
        pass
    with Tracker(whole):  # the lock of the refused one was let go, too
        pass


# ---------------------------------------------------------------- where MLflow is


def test_processes_that_use_a_fresh_database_at_once_all_get_it(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    use = "from tasks.tracking import connect; print(len(connect().search_experiments()))"
    together = [
        subprocess.Popen(
            [sys.executable, "-c", use],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(Path(__file__).parent.parent)},
            stdout=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    assert [process.communicate()[0] for process in together] == [b"1\n"] * 3


def test_mlflow_is_a_file_in_the_working_directory_unless_the_environment_names_a_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert tracking_uri() == "http://mlflow:5000"


def test_the_module_is_imported_without_mlflow():
    code = (
        "import sys, tasks.tracking, tasks.registry; print({'mlflow', 'pynvml', 'torch', 'prefect'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_where_nothing_can_be_done_without_mlflow_its_absence_is_one_line_with_the_remedy(monkeypatch, tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://somebody:secret@127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    with pytest.raises(JobFailed) as down, mlflow_needed("register it later"):
        registry.champion("dflash-none", tmp_path)
    assert "register it later" in str(down.value)
    assert "127.0.0.1" in str(down.value)
    assert "secret" not in str(down.value)
    with pytest.raises(ZeroDivisionError), mlflow_needed("not for any other failure"):
        raise ZeroDivisionError
