"""Everything that can break under a run, broken for real: whoever looks afterwards finds the same end everywhere, and nothing lost.

Prefect's server, a worker, MLflow's server and the trainers are real processes; so are the kills, stops and the full disk.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow_server import MlflowServer
from orchestra import ROOT, PrefectServer, Worker, processes_with
from tiny import conversations, tiny_target, write_jsonl
from tracked_run import EDGES, in_mlflow

from dflash import checkpoint
from dflash import run_dir as runs
from dflash.files import sha256_of
from dflash.metrics import read_rows
from tasks.tracking import connect

pytestmark = pytest.mark.slow

PREFECT_AND_MLFLOW = {
    "finished": ("COMPLETED", "FINISHED"),
    "failed": ("FAILED", "FAILED"),
    "stopped": ("CANCELLED", "KILLED"),
    "crashed": ("CRASHED", "FAILED"),
}
TOLD_SECONDS = 120  # from a fault to the last one who is told
ENDLESS = 100_000  # steps


# ---------------------------------------------------------------- a place to train in, and runs in it


class Site:
    """Servers, a worker, a tiny target, data and a configuration."""

    def __init__(self, root: Path, prefect: PrefectServer, mlflow: MlflowServer):
        self.root, self.prefect, self.mlflow = root, prefect, mlflow
        target = tiny_target(root / "target", hidden=32)
        data = write_jsonl(root / "data.jsonl", conversations(24, longest_reply=20))
        prompts = write_jsonl(root / "prompts.jsonl", [{"id": str(at), "prompt": "How many boats?"} for at in range(2)])
        self.config = root / "config.yaml"
        self.config.write_text(
            yaml.safe_dump(
                {
                    "target": {"name": str(target), "captured_layers": 2, "devices": ["cpu"]},
                    "data": {"path": str(data), "prepared_dir": str(root / "prepared")},
                    "drafter": {"layers": 1, "block_size": 4, "device": "cpu"},
                    "objective": {"anchors": 6},
                    "optim": {"samples_per_step": 2},
                    # lockstep: a step that is done again gives the same numbers
                    "stream": {
                        "engine": "lockstep",
                        "hs_min_ready": 4,
                        "hs_queue_depth": 8,
                        "bucket_edges": list(EDGES),
                    },
                    "checkpoint": {"every_steps": 20, "keep": 1000},  # keep: the disk is not asked to hold endless ones
                    "evaluate": {"prompts": [str(prompts)], "max_new_tokens": 4},
                    "run": {"root": str(root / "runs"), "epochs": ENDLESS, "max_steps": ENDLESS},
                }
            )
        )
        self.environment = {"MLFLOW_TRACKING_URI": mlflow.url, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.worker = Worker(prefect, self.environment)

    def run(self, name: str, **sections: dict[str, Any]) -> "Run":
        """A flow run of dflash/train in the worker."""
        sections["run"] = {"name": name} | sections.get("run", {})
        flow_run = self.prefect.submit("train", config=str(self.config), **sections)
        return Run(self, flow_run, Path(sections["run"].get("root", self.root / "runs")) / f"{name}-0001")


@pytest.fixture(scope="module")
def site(tmp_path_factory, prefect_server: PrefectServer, mlflow_server: MlflowServer) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", mlflow_server.url)
        made = Site(tmp_path_factory.mktemp("faults"), prefect_server, mlflow_server)
        yield made
        made.worker.stop()


class Run:
    """A run that is watched from outside."""

    def __init__(self, site: Site, flow_run: str, run_dir: Path):
        self.site, self.flow_run, self.run_dir = site, flow_run, run_dir
        self.saved: dict[Path, str] = {}

    def step(self) -> int:
        """Of the newest whole row."""
        path = self.run_dir / "metrics.jsonl"
        rows = read_rows(path)[0] if path.exists() else []
        return rows[-1]["step"] if rows else 0

    def trainer(self, *, instead_of: int | None = None) -> int:
        """The pid of the living trainer, as soon as there is one, and another than this."""
        return self.until(lambda: pid if (pid := runs.trainer_of(self.run_dir)) != instead_of else None, "a trainer")

    def processes(self) -> dict[int, str]:
        """{pid: command line} of all that the flow run has started, and of its own process."""
        return _processes_in(f"PREFECT__FLOW_RUN_ID={self.flow_run}") | processes_with(str(self.run_dir))

    def flow_process(self) -> int:
        (pid,) = (pid for pid, command in self.processes().items() if " -m prefect.engine " in f"{command} ")
        return pid

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 180) -> Any:
        """What the condition gave as soon as it was true."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s; {self.told()}"
            time.sleep(0.05)
        return value

    def reach(self, step: int) -> None:
        """Waits for a step, and remembers every checkpoint that is there by then."""
        self.until(lambda: self.step() >= step, f"step {step}")
        self.remember()

    def until_step_without_prefect(self, step: int) -> None:
        """Waits for a step while there is no server that could be asked why it does not come."""
        deadline = time.monotonic() + 180
        while self.step() < step:
            assert time.monotonic() < deadline, runs.read_status(self.run_dir)
            time.sleep(0.05)

    def remember(self) -> None:
        self.saved |= {
            file: sha256_of(file) for path in checkpoint.list_checkpoints(self.run_dir) for file in path.iterdir()
        }

    def told(self) -> str:
        """All that helps whoever reads a failure."""
        status, console = runs.read_status(self.run_dir), self.run_dir / "console.log"
        state = self.site.prefect.state(self.flow_run)
        said = console.read_text()[-1500:] if console.exists() else ""
        worker = self.site.worker.log.read_text()[-3000:]
        return f"Prefect {state['type']} {state['message']!r}; status {status}; console: {said}; worker: {worker}"

    def assert_ended(self, state: str, *, prefect: str, reason: str, since: float, status_reason: str = "") -> None:
        """One story, told in time: `prefect` in the words of Prefect's state, `reason` in those of MLflow and status.json.

        No process of the run is left, the machine is free, no checkpoint is lost, and MLflow has every row once.
        """
        prefect_type, mlflow_status = PREFECT_AND_MLFLOW[state]
        final = self.site.prefect.wait(self.flow_run)
        assert (final["type"], prefect in (final["message"] or "")) == (prefect_type, True), self.told()
        record = json.loads((self.run_dir / "tracking.json").read_text())
        client = connect()

        def told() -> bool:
            return client.get_run(record["run_id"]).data.tags.get("dflash.state") == state

        self.until(told, "MLflow is told", TOLD_SECONDS)
        self.until(lambda: not self.processes(), "no process is left", 60)
        assert time.monotonic() - since < TOLD_SECONDS, self.told()
        run = client.get_run(record["run_id"])
        assert run.info.status == mlflow_status
        assert reason in run.data.tags["end.reason"]
        status = runs.read_status(self.run_dir)
        assert status["state"] == state, status
        assert (status_reason or reason) in (status["reason"] or "finished"), status
        with (self.site.prefect.home / "dflash-machine.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert {file: sha256_of(file) for file in self.saved} == self.saved
        assert_rows_once(self.run_dir, record["run_id"])


def assert_rows_once(run_dir: Path, run_id: str) -> None:
    """metrics.jsonl has each step once; MLflow has each row once, with the same loss."""
    complete = read_rows(run_dir / "metrics.jsonl")[0]
    rows = {row["step"]: row["loss"] for row in complete}
    assert [row["step"] for row in complete] == list(range(1, len(complete) + 1))
    stored = in_mlflow(run_id)
    assert {key: values for key, values in stored.items() if len(values) != 1} == {}
    loss = {step: values[0] for (key, step), values in stored.items() if key == "train/loss"}
    assert loss == {step: value for step, value in rows.items() if value is not None}
    assert {step for key, step in stored if key == "train/learning_rate"} == set(rows)


def _processes_in(mark: str) -> dict[int, str]:
    """{pid: command line} of all living processes with this in their environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


# ---------------------------------------------------------------- the trainer


def test_a_trainer_killed_in_a_step_and_in_a_save_goes_on_from_its_newest_checkpoint_to_the_end(site: Site) -> None:
    run = site.run("killed", run={"max_steps": 600})
    run.reach(30)
    first = run.trainer()
    os.kill(first, signal.SIGKILL)
    second = run.trainer(instead_of=first)

    saves = run.run_dir / "checkpoints"
    while True:  # frozen first, so that what is seen is what is there when it is killed
        run.until(lambda: list(saves.glob(".step-*.partial")), "a save")
        os.kill(second, signal.SIGSTOP)
        if list(saves.glob(".step-*.partial")):
            break
        os.kill(second, signal.SIGCONT)
    run.remember()
    newest = checkpoint.newest(run.run_dir)
    os.kill(second, signal.SIGKILL)
    assert newest is not None

    since = time.monotonic()
    run.assert_ended("finished", prefect="", reason="finished", since=since)
    console = (run.run_dir / "console.log").read_text()
    assert console.count("killed by SIGKILL") == 2
    assert f"step {checkpoint.step_of(newest)}" in console.rpartition("restart 2")[2]
    assert site.prefect.task_runs(run.flow_run)["restart"] == ["Completed"] * 2


def test_a_trainer_that_hangs_is_killed_and_the_run_ends_with_that_reason(site: Site) -> None:
    run = site.run("hangs", supervise={"stall_seconds": 20, "stop_seconds": 2, "max_restarts": 0})
    run.reach(30)
    os.kill(run.trainer(), signal.SIGSTOP)  # it does not even notice a SIGTERM
    run.assert_ended("crashed", prefect="hung: no sign of life", reason="hung: no sign of life", since=time.monotonic())


def test_a_loss_that_is_not_finite_fails_the_run_at_once(site: Site) -> None:
    since = time.monotonic()
    run = site.run("diverges", optim={"lr": 1e30, "warmup_fraction": 0.0}, checkpoint={"every_steps": 1})
    run.assert_ended("failed", prefect="NonFinite: step 2:", reason="NonFinite: step 2:", since=since)
    assert "restart" not in site.prefect.task_runs(run.flow_run)
    assert checkpoint.newest(run.run_dir) is not None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"this user may not mount a file system of its own: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_disk_that_is_full_at_a_checkpoint_fails_the_run_and_is_named(site: Site, small_disk: Path) -> None:
    run = site.run("full", run={"root": str(small_disk)}, checkpoint={"every_steps": 50, "keep": 40})
    run.reach(60)
    with (small_disk / "somebody-elses").open("wb") as file:  # leaves less than a checkpoint
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free - 100_000)
    words = "No space left on device"
    run.assert_ended("failed", prefect=words, reason=words, since=time.monotonic())
    assert not list((run.run_dir / "checkpoints").glob(".step-*.partial"))
    assert "restart" not in site.prefect.task_runs(run.flow_run)


# ---------------------------------------------------------------- the supervisor


def test_a_killed_flow_process_leaves_a_saved_checkpoint_and_a_run_that_is_crashed_everywhere(site: Site) -> None:
    run = site.run("orphaned")
    run.reach(30)
    since = time.monotonic()
    os.kill(run.flow_process(), signal.SIGKILL)
    run.assert_ended("crashed", prefect="SIGKILL", reason="its supervisor was killed", since=since)
    assert_saved_last_step(run)


def test_a_worker_that_is_told_to_end_leaves_a_saved_checkpoint_and_a_run_that_is_crashed_everywhere(
    site: Site,
) -> None:
    run = site.run("workerless")
    run.reach(30)
    since = time.monotonic()
    site.worker.process.terminate()
    try:
        run.assert_ended(
            "crashed", prefect="its supervisor was killed", reason="its supervisor was killed", since=since
        )
        assert_saved_last_step(run)
    finally:
        site.worker.stop()
        site.worker = Worker(site.prefect, site.environment)


def test_a_worker_that_is_told_to_end_while_prompts_are_decoded_leaves_a_finished_run_and_a_crashed_flow(
    site: Site,
) -> None:
    run = site.run("undecided", run={"max_steps": 4}, evaluate={"max_new_tokens": 2000})
    run.until(lambda: any(" dflash.evaluate " in command for command in run.processes().values()), "real decoding")
    site.worker.process.terminate()
    try:
        assert site.prefect.wait(run.flow_run)["type"] == "CRASHED"
        run.until(lambda: not run.processes(), "no process is left", 60)
        record = json.loads((run.run_dir / "tracking.json").read_text())
        assert connect().get_run(record["run_id"]).info.status == "FINISHED"
        assert runs.read_status(run.run_dir)["state"] == "finished"
    finally:
        site.worker.stop()
        site.worker = Worker(site.prefect, site.environment)


def test_a_cancelled_run_saves_its_last_step_and_is_cancelled_everywhere(site: Site) -> None:
    run = site.run("cancelled")
    run.reach(30)
    since = time.monotonic()
    state = {"type": "CANCELLING", "name": "Cancelling"}
    site.prefect.api("POST", f"flow_runs/{run.flow_run}/set_state", {"state": state})
    run.assert_ended(
        "stopped", prefect="was cancelled", reason="cancelled in Prefect", status_reason="stop requested", since=since
    )
    assert_saved_last_step(run)


def assert_saved_last_step(run: Run) -> None:
    newest = checkpoint.newest(run.run_dir)
    assert newest is not None
    assert checkpoint.step_of(newest) == runs.read_status(run.run_dir)["step"] == run.step()


# ---------------------------------------------------------------- the servers


def test_a_run_whose_servers_are_away_for_its_middle_third_goes_on_and_ends_as_if_nothing_had_been(site: Site) -> None:
    steps = 900
    run = site.run("serverless", run={"max_steps": steps})
    run.reach(steps // 3)
    site.mlflow.stop()
    site.prefect.kill()
    run.until_step_without_prefect(steps * 2 // 3)
    trainer = run.trainer()
    os.kill(trainer, signal.SIGSTOP)  # servers take their time to start, whatever the machine
    starting = threading.Thread(target=site.prefect.start)
    starting.start()
    site.mlflow.start()  # here: it ends with the thread that has started it
    starting.join()
    assert run.step() < steps
    os.kill(trainer, signal.SIGCONT)
    run.assert_ended("finished", prefect="", reason="finished", since=time.monotonic())


# ---------------------------------------------------------------- without a server


class HereAndNow:
    """`python -m flows.train` with Prefect embedded, in a session of its own as a terminal has it."""

    def __init__(self, site: Site, home: Path, name: str):
        self.home, self.run_dir = home, site.root / "runs" / f"{name}-0001"
        self.mark = f"DFLASH_TEST={name}-{os.getpid()}"
        away = ("PREFECT_API_URL", "PREFECT_HOME", "TMPDIR")
        environment = {name: value for name, value in site.prefect.environment.items() if name not in away}
        mark, _, value = self.mark.partition("=")
        environment |= site.environment | {
            mark: value,
            "PREFECT_HOME": str(home),
            "TMPDIR": str(home),
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        }
        self.output = home / f"{name}.log"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.train", "--config", str(site.config), "--run.name", name],
                env=environment,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # tests that run in the background of a script have it ignored, and would hand that on
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def reach(self, step: int) -> None:
        deadline = time.monotonic() + 180
        while not (path := self.run_dir / "metrics.jsonl").exists() or len(path.read_text().splitlines()) < step:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()[-3000:]  # noqa: PT018
            time.sleep(0.1)

    def assert_no_process_is_left(self) -> None:
        deadline = time.monotonic() + TOLD_SECONDS
        while left := _processes_in(self.mark):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)

    def assert_ended(self, state: str, prefect: str, reason: str) -> None:
        prefect_type, mlflow_status = PREFECT_AND_MLFLOW[state]
        with contextlib.closing(sqlite3.connect(self.home / "prefect.db")) as database:
            query = "select state.type, state.message from flow_run_state state join flow_run on flow_run.state_id = state.id"
            told, message = database.execute(query + " order by flow_run.created desc").fetchone()
        assert (told, prefect in message) == (prefect_type, True), (told, message, self.output.read_text()[-3000:])
        record = json.loads((self.run_dir / "tracking.json").read_text())
        run = connect().get_run(record["run_id"])
        assert (run.info.status, run.data.tags["dflash.state"]) == (mlflow_status, state)
        assert reason in run.data.tags["end.reason"]
        status = runs.read_status(self.run_dir)
        newest = checkpoint.newest(self.run_dir)
        assert newest is not None
        assert (status["state"], status["step"]) == (state, checkpoint.step_of(newest))
        assert_rows_once(self.run_dir, record["run_id"])


@pytest.fixture(scope="module")
def home(site: Site, tmp_path_factory) -> Path:
    """A home of an embedded server, which has its tables: making them takes half a minute."""
    made = tmp_path_factory.mktemp("home")
    with contextlib.closing(sqlite3.connect(site.prefect.home / "prefect.db")) as full:
        with contextlib.closing(sqlite3.connect(made / "prefect.db")) as copy:
            full.backup(copy)
    return made


def test_ctrl_c_stops_a_run_without_servers_and_everything_that_it_started(site: Site, home: Path) -> None:
    run = HereAndNow(site, home, "ctrl-c")
    run.reach(30)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.process.wait(90) == 3, run.output.read_text()[-3000:]
    run.assert_no_process_is_left()
    run.assert_ended("stopped", prefect="told to end", reason="told to end")


def test_a_killed_run_without_servers_leaves_nothing_behind_and_is_crashed(site: Site, home: Path) -> None:
    run = HereAndNow(site, home, "killed-here")
    run.reach(30)
    run.process.kill()
    run.process.wait()
    run.assert_no_process_is_left()
    run.assert_ended("crashed", prefect="its supervisor was killed", reason="its supervisor was killed")
