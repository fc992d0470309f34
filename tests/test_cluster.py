"""The roles on Ray: what they compute, what they refuse, and what is left when some of them are lost.

Machines are network namespaces with addresses of their own (machines.py), where this host lets us make them.
"""

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from forks import count_rows, until
from machines import Machines, machines_impossible
from refused import assert_refused
from tiny import conversations, tiny_target, write_jsonl
from tiny_flow import config_file, tiny_flow

from dflash import checkpoint, cluster
from dflash import config as configuration
from dflash.command import FAILED, FINISHED, STOPPED
from dflash.hs_queue import Closed, HiddenStateQueue, StreamFailed
from dflash.run_dir import create_run, read_status

SAMPLES = 40
PER_STEP = 3
ROLES = ("TargetWorker", "DrafterWorker", "QueueActor")
# a machine without power is noticed after about 5 s instead of a minute
NOTICES_SOON = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}

needs_machines = pytest.mark.skipif(bool(machines_impossible()), reason=machines_impossible() or "possible")


class World:
    """A tiny target and its data."""

    def __init__(self, root: Path):
        self.target = tiny_target(root / "target", hidden=32)
        self.data = write_jsonl(root / "data.jsonl", conversations(SAMPLES, longest_reply=20))
        self.heldout = write_jsonl(root / "heldout.jsonl", conversations(7, seed=1, longest_reply=20))
        self.prompts = write_jsonl(root / "prompts.jsonl", [{"prompt": "How many bridges?"}, {"prompt": "The sea."}])
        self.prepared = root / "prepared"

    def values(self, root: Path, **changes: Any) -> dict[str, dict[str, Any]]:
        values: dict[str, dict[str, Any]] = {
            "target": {"name": str(self.target), "captured_layers": 2},
            "data": {"path": str(self.data), "prepared_dir": str(self.prepared)},
            "drafter": {"layers": 2, "block_size": 4},
            "objective": {"anchors": 6},
            "optim": {"samples_per_step": PER_STEP, "lr": 1e-3},
            "stream": {
                "engine": "ray",
                "hs_min_ready": 5,
                "hs_queue_depth": 10,
                "bucket_edges": [90, 160],
                "hs_queue_bytes": 20_000_000,
            },
            "cluster": {"start_seconds": 120},
            "checkpoint": {"every_steps": 10, "keep": 3},
            "run": {"root": str(root), "epochs": 2},
        }
        for name, value in changes.items():
            section, field = name.split("__")
            values.setdefault(section, {})[field] = value
        return values

    def run(self, root: Path, **changes: Any) -> Path:
        """A new run directory under `root`; changes are section__field=value."""
        return create_run(configuration.parse(self.values(root, **changes)))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("world"))


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def train_command(run_dir: Path) -> list[str]:
    return [sys.executable, "-m", "dflash.train", str(run_dir)]


@contextlib.contextmanager
def trainer_here(run_dir: Path) -> Iterator[subprocess.Popen]:
    """`python -m dflash.train RUN_DIR` with a cluster of its own; whatever is left of it at the end is killed."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | ENVIRONMENT
    with open(run_dir / "console.log", "ab") as output:
        process = subprocess.Popen(train_command(run_dir), env=environment, stdout=output, stderr=output)
    try:
        yield process
    finally:
        kill_tree(process)


def kill_tree(process: subprocess.Popen) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def at_least(run_dir: Path, rows: int, process: subprocess.Popen) -> None:
    """Returns once the run has so many rows."""
    until(lambda: count_rows(run_dir) >= rows or process.poll() is not None, seconds=180)
    assert process.poll() is None, console(run_dir)


def console(run_dir: Path) -> str:
    return (run_dir / "console.log").read_text()[-6000:]


def assert_each_sample_once_an_epoch(run_dir: Path, *, epochs: int, per_step: int = PER_STEP) -> None:
    rows, trained = rows_of(run_dir), defaultdict(list)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    for row in rows:
        trained[row["epoch"]] += row["samples"]
    assert {epoch: sorted(indices) for epoch, indices in trained.items()} == {
        epoch: list(range(SAMPLES)) for epoch in range(epochs)
    }
    assert len(rows) == epochs * -(-SAMPLES // per_step)


def assert_same_end(run_dir: Path, other: Path) -> None:
    """Every byte of both last checkpoints, and every number of their rows that does not tell of time, is the same."""
    step = rows_of(run_dir)[-1]["step"]
    for name in checkpoint.FILES:
        ours, theirs = (checkpoint.directory_of(each, step) / name for each in (run_dir, other))
        assert ours.read_bytes() == theirs.read_bytes(), name
    timeless = (
        "loss",
        "tau",
        "gradient_norm",
        "samples",
        "epoch",
        "hs_samples",
        "hs_bytes",
        "hs_mix",
        "hs_in",
        "hs_out",
    )
    for ours, theirs in zip(rows_of(run_dir), rows_of(other), strict=True):
        assert {name: ours[name] for name in timeless} == {name: theirs[name] for name in timeless}


# ---------------------------------------------------------------- the same


LOCKSTEP: dict[str, Any] = {
    "evaluate__during_training": 1,
    "evaluate__max_new_tokens": 8,
    "run__heldout_every_steps": 9,
}


def test_one_drafter_on_ray_in_lockstep_equals_the_local_engine_bit_for_bit(world, tmp_path):
    changes = LOCKSTEP | {"data__heldout_path": str(world.heldout), "evaluate__prompts": [str(world.prompts)]}
    local = world.run(tmp_path, **changes, stream__engine="lockstep")
    run_dir = world.run(tmp_path, **changes, cluster__lockstep=True)
    for each in (local, run_dir):
        with trainer_here(each) as process:
            assert process.wait(180) == FINISHED, console(each)
    assert_same_end(run_dir, local)
    for name in ("heldout.jsonl", "evaluation.jsonl"):
        ours, theirs = (
            [
                {k: v for k, v in json.loads(line).items() if "second" not in k}
                for line in (each / name).read_text().splitlines()
            ]
            for each in (run_dir, local)
        )
        assert ours == theirs
        assert ours
    assert json.loads((run_dir / "provenance.json").read_text())["packages"]["ray"]


# ---------------------------------------------------------------- the queue's actor, in this process


def queue_actor(
    config: configuration.Config, *, workers: int, min_ready: int = 4, depth: int = 8
) -> cluster.QueueActor:
    """The actor's own class over a real queue that holds 20 of 20 samples' records, let in as there is room."""
    lengths, nothing = np.full(20, 10), np.zeros(20, dtype=bool)
    actor = cluster.QueueActor(config, lengths, 0, nothing, drafter_workers=workers)
    queue = HiddenStateQueue(
        corpus=[20], min_ready=min_ready, depth=depth, max_bytes=10**6, stopping=actor._stopping.is_set
    )
    actor._queue, actor._draw_step = queue, queue.draw_step

    def fill() -> None:
        with contextlib.suppress(Closed, StreamFailed):
            for index in range(20):
                queue.put(cluster.Record(index, 0, 0, 100, object()))  # pyright: ignore[reportArgumentType]
            queue.end()

    threading.Thread(target=fill, daemon=True).start()
    return actor


@pytest.fixture(scope="module")
def config(world, tmp_path_factory) -> configuration.Config:
    return configuration.parse(world.values(tmp_path_factory.mktemp("runs")))


def step_of(actor: cluster.QueueActor, rank: int, step: int, n: int) -> list[list[int]]:
    """The parts of a step's draw as one drafter worker gets them; every call is repeated, as after a broken connection."""
    parts: list[list[int]] = []
    while True:
        part, again = actor.draw(rank, step, len(parts), n), actor.draw(rank, step, len(parts), n)
        assert again is part
        if part is None:
            return parts
        parts.append([record.index for record in part])


def test_every_drafter_worker_gets_every_part_of_a_step_also_when_it_asks_twice_or_late(config):
    actor, drawn = queue_actor(config, workers=3), list[int]()
    for step, n in enumerate((3, 12, 5)):  # 12: more than the queue holds, in parts
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(step_of, [actor] * 3, range(3), [step] * 3, [n] * 3))
        assert results[0] == results[1] == results[2]
        assert sum(map(len, results[0])) == n
        drawn += [index for part in results[0] for index in part]
    assert sorted(drawn) == list(range(20))
    assert actor.draw(0, 3, 0, 4) is None  # the end of the data


def test_a_part_is_kept_until_every_worker_has_asked_for_the_next_and_no_longer(config):
    actor = queue_actor(config, workers=2)
    first = actor.draw(0, 0, 0, 12)
    actor.draw(0, 0, 1, 12)
    assert actor.draw(1, 0, 0, 12) is first
    assert actor._dealt[0] is first
    actor.draw(1, 0, 1, 12)
    assert actor._dealt[0] is None


def test_a_stop_reaches_every_worker_in_the_same_step(config):
    actor = queue_actor(config, workers=2)
    part = actor.draw(0, 0, 0, 4)
    actor.stop()
    assert actor.draw(1, 0, 0, 4) is part  # dealt before: both can finish the step
    assert actor.draw(0, 0, 1, 4) is actor.draw(1, 0, 1, 4) is None
    for rank in (0, 1):
        with pytest.raises(Closed):
            actor.draw(rank, 1, 0, 4)


def test_a_step_is_reported_once_however_often_it_is_asked_for(config):
    actor = queue_actor(config, workers=1)
    records = actor.draw(0, 0, 0, 4)
    assert records is not None
    assert actor.report(1, records) == actor.report(1, records)
    assert actor._queue._steps == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_features_are_the_same_bits_after_the_object_store(dtype):
    features = torch.randn(7, 12).to(dtype)
    assert torch.equal(cluster.features_from(cluster.bytes_of(features), 7, dtype), features)


def test_the_interface_of_an_address_is_found():
    assert cluster.interface_of("127.0.0.1") == "lo"


# ---------------------------------------------------------------- what is refused


def refused(arguments: list[str], **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT | environment,
        timeout=120,
    )
    return done.returncode, done.stderr


def test_a_client_address_is_refused_with_what_to_do(world, tmp_path):
    run_dir = world.run(tmp_path)
    assert_refused(
        *refused(train_command(run_dir)[1:], RAY_ADDRESS="ray://head:10001"),
        "ray://head:10001",
        "RAY_ADDRESS=HEAD:6379",
    )
    assert read_status(run_dir)["state"] == "refused"


def test_a_cluster_that_does_not_answer_and_a_missing_token_are_refused(world, tmp_path):
    command = train_command(world.run(tmp_path, cluster__start_seconds=2))[1:]
    assert_refused(*refused(command, RAY_ADDRESS="127.0.0.1:1"), "RAY_ADDRESS=127.0.0.1:1", "ray start")
    with socket.create_server(("127.0.0.1", 0)) as head:  # Ray asks for the token before it says a word
        address = f"127.0.0.1:{head.getsockname()[1]}"
        answer = refused(command, RAY_ADDRESS=address, RAY_AUTH_MODE="token", HOME=str(tmp_path))
        assert_refused(*answer, f"RAY_ADDRESS={address}", "RAY_AUTH_TOKEN")


def test_an_installation_without_ray_is_refused_with_what_to_install(world, tmp_path):
    run_dir = world.run(tmp_path)
    words = f"import sys; sys.modules['ray'] = None; from dflash.train import main; sys.exit(main(['{run_dir}']))"
    assert_refused(*refused(["-c", words]), "stream.engine=ray", "dflash-stream[cluster]")


def test_the_check_of_a_cluster_is_for_runs_on_one(world, tmp_path):
    settings = tmp_path / "local.json"
    settings.write_text(json.dumps(world.values(tmp_path, stream__engine="local")))
    assert_refused(*refused(["-m", "dflash.cluster", "--config", str(settings)]), "stream.engine=local", "ray")


# ---------------------------------------------------------------- on one machine


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["copies", "sharded"])
def test_two_target_workers_and_two_drafter_workers_train_every_sample_once_an_epoch(world, tmp_path, sharded):
    run_dir = world.run(
        tmp_path,
        cluster__target_workers=2,
        cluster__drafter_workers=2,
        cluster__shard_drafter=sharded,
        data__heldout_path=str(world.heldout),
        evaluate__during_training=1,
        evaluate__max_new_tokens=8,
        evaluate__prompts=[str(world.prompts)],
        optim__samples_per_step=13,  # more than the queue holds: drawn in parts; one sample left at the end of an epoch
    )
    with trainer_here(run_dir) as process:
        assert process.wait(240) == FINISHED, console(run_dir)
    assert_each_sample_once_an_epoch(run_dir, epochs=2, per_step=13)
    rows = rows_of(run_dir)
    assert [len(row["samples"]) for row in rows] == [13, 13, 13, 1] * 2
    assert rows[-1]["hs_in"] == rows[-1]["hs_out"] == 2 * SAMPLES
    loaded = checkpoint.load(checkpoint.directory_of(run_dir, len(rows)))
    assert all(tensor.isfinite().all() for tensor in (*loaded.drafter.values(), *loaded.optimizer.values()))
    assert len((run_dir / "heldout.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_stop_saves_a_checkpoint_from_which_the_run_goes_on_and_ends_right(world, tmp_path):
    run_dir = world.run(tmp_path, cluster__drafter_workers=2, run__epochs=12)
    with trainer_here(run_dir) as process:
        at_least(run_dir, 5, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == STOPPED, console(run_dir)
    step = rows_of(run_dir)[-1]["step"]
    assert read_status(run_dir)["state"] == "stopped"
    checkpoint.load(checkpoint.directory_of(run_dir, step))
    with trainer_here(run_dir) as process:
        assert process.wait(180) == FINISHED, console(run_dir)
    assert_each_sample_once_an_epoch(run_dir, epochs=12)


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_and_its_run_goes_on(world, tmp_path):
    run_dir = world.run(tmp_path, cluster__drafter_workers=2, run__epochs=40)
    with trainer_here(run_dir) as process:
        at_least(run_dir, 25, process)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len([each for each in family if role_of(each) in ROLES]) == 4
        process.kill()
        process.wait()
        # Ray's own agents end a minute after its other processes
        until(lambda: not [each for each in family if role_of(each) in (*ROLES, "raylet", "gcs_server")], seconds=60)
        until(lambda: not [each for each in family if each.is_running()], seconds=120)
    with trainer_here(run_dir) as process:
        assert process.wait(240) == FINISHED, console(run_dir)
    assert_each_sample_once_an_epoch(run_dir, epochs=40)


def role_of(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.Error:
        return "gone"
    return role_in(" ".join(words))


def kill_role(process: subprocess.Popen, role: str) -> None:
    """Kills the first worker of a role in the cluster that this driver started."""
    next(each for each in psutil.Process(process.pid).children(recursive=True) if role_of(each) == role).kill()


def role_in(command: str) -> str:
    if command.startswith("ray::"):
        return command.removeprefix("ray::").split(".")[0].split()[0]
    return next((name for name in ("raylet", "gcs_server") if f"/{name} " in command), "")


@pytest.mark.slow
def test_losses_are_bounded_and_the_cause_is_named(world, tmp_path):
    run_dir = world.run(tmp_path, run__epochs=100_000, cluster__max_restarts=1)
    with trainer_here(run_dir) as process:
        for rows in (12, 30):
            at_least(run_dir, rows, process)
            kill_role(process, "DrafterWorker")
        assert process.wait(90) == FAILED, console(run_dir)
    assert read_status(run_dir)["state"] == "failed"
    assert "drafter worker 0 was lost" in read_status(run_dir)["reason"]
    checkpoint.load(checkpoint.list_checkpoints(run_dir)[-1])


@pytest.mark.slow
def test_a_target_worker_that_is_lost_too_often_ends_the_run_with_its_name(world, tmp_path):
    run_dir = world.run(tmp_path, run__epochs=100_000, cluster__max_restarts=1)
    with trainer_here(run_dir) as process:
        for rows in (12, 40):
            at_least(run_dir, rows, process)
            kill_role(process, "TargetWorker")
            time.sleep(8)  # so that the second one is another process
        assert process.wait(90) == FAILED, console(run_dir)
    assert "target worker 0 was lost" in read_status(run_dir)["reason"]
    assert "cluster.max_restarts" in read_status(run_dir)["reason"]


# ---------------------------------------------------------------- on two machines


@contextlib.contextmanager
def trainer_on(machines: Machines, run_dir: Path) -> Iterator[subprocess.Popen]:
    """The driver on the first machine; afterwards no actor of it is left on any."""
    with open(run_dir / "console.log", "ab") as output:
        environment = os.environ | ENVIRONMENT
        process = machines.command(0, train_command(run_dir), env=dict(environment), stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
    no_actor_is_left(machines)


def no_actor_is_left(machines: Machines) -> None:
    until(lambda: not [found for role in ROLES for found in actors(machines, role)], seconds=60)


def actors(machines: Machines, role: str) -> list[tuple[int, int]]:
    """(machine, pid) of every process of a role."""
    return [
        (index, pid)
        for index in range(machines.count)
        for pid, command in machines.processes(index)
        if role_in(command) == role
    ]


@pytest.mark.slow
@needs_machines
def test_a_run_over_two_machines_survives_the_loss_of_each_role_in_turn(world, tmp_path):
    run_dir = world.run(tmp_path, cluster__target_workers=2, cluster__drafter_workers=2, run__epochs=60)
    with Machines(count=2, cpus=3) as machines, trainer_on(machines, run_dir) as process:
        at_least(run_dir, 15, process)
        assert {machine for role in ROLES for machine, _ in actors(machines, role)} == {0, 1}
        for role in ROLES:
            before = count_rows(run_dir)
            _, pid = actors(machines, role)[-1]
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: not Path("/proc", str(pid)).exists())
            until(lambda role=role: len(actors(machines, role)) == (1 if role == "QueueActor" else 2), seconds=90)
            at_least(run_dir, before + 25, process)
        assert process.wait(240) == FINISHED, console(run_dir)
    assert_each_sample_once_an_epoch(run_dir, epochs=60)
    said = (run_dir / "trainer.log").read_text()
    assert "was lost" in said
    assert "the queue was lost" in said
    assert said.count("the drafters start again") == 2  # a target worker's loss stops nobody


@pytest.mark.slow
@needs_machines
def test_a_link_cut_for_20_seconds_is_a_pause(world, tmp_path):
    # two CPUs each: the drafter workers are on different machines
    run_dir = world.run(tmp_path, cluster__drafter_workers=2, run__epochs=100)
    with Machines(count=2, cpus=2) as machines, trainer_on(machines, run_dir) as process:
        at_least(run_dir, 15, process)
        assert {machine for machine, _ in actors(machines, "DrafterWorker")} == {0, 1}
        machines.cut(20)
        after = count_rows(run_dir)
        assert after < 100 * 14, "the run was over before the cut"
        assert process.wait(300) == FINISHED, console(run_dir)
        assert len(rows_of(run_dir)) > after
    assert_each_sample_once_an_epoch(run_dir, epochs=100)
    assert "start again" not in (run_dir / "trainer.log").read_text()


@pytest.mark.slow
@needs_machines
def test_a_machine_that_loses_power_and_is_replaced_costs_what_came_after_the_last_checkpoint(world, tmp_path):
    run_dir = world.run(tmp_path, cluster__drafter_workers=2, run__epochs=100)
    with Machines(count=2, cpus=2, environment=NOTICES_SOON) as machines, trainer_on(machines, run_dir) as process:
        at_least(run_dir, 25, process)
        assert {machine for machine, _ in actors(machines, "DrafterWorker")} == {0, 1}
        machines.kill(1)
        time.sleep(10)
        machines.start(1)
        assert process.wait(300) == FINISHED, console(run_dir)
    assert_each_sample_once_an_epoch(run_dir, epochs=100)
    assert "start again" in (run_dir / "trainer.log").read_text()


@pytest.mark.slow
@needs_machines
def test_what_was_buffered_on_a_machine_that_is_gone_for_good_is_produced_again_elsewhere(world, tmp_path):
    run_dir = world.run(tmp_path, cluster__target_workers=2, run__epochs=100)
    with Machines(count=2, cpus=4, environment=NOTICES_SOON) as machines, trainer_on(machines, run_dir) as process:
        at_least(run_dir, 25, process)
        assert {machine for machine, _ in actors(machines, "TargetWorker")} == {0, 1}
        machines.kill(1)
        assert process.wait(300) == FINISHED, console(run_dir)
    assert_each_sample_once_an_epoch(run_dir, epochs=100)


@pytest.mark.slow
@needs_machines
def test_a_cluster_without_shared_storage_or_room_or_with_other_packages_is_refused_at_deploy(world, tmp_path):
    settings = tmp_path / "settings.json"
    with Machines(count=2, cpus=2) as machines:

        def check(**changes: Any) -> tuple[int, str]:
            settings.write_text(json.dumps(world.values(tmp_path / "runs", **changes)))
            command = [sys.executable, "-m", "dflash.cluster", "--config", str(settings)]
            process = machines.command(0, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            _, stderr = process.communicate(timeout=120)
            return process.returncode, stderr

        code, _ = check()
        assert code == FINISHED
        assert not list((tmp_path / "runs").iterdir()), "the check leaves nothing"
        assert_refused(
            *check(cluster__target_workers=9, cluster__start_seconds=3), "cluster.target_workers=9", "add machines"
        )
        assert_refused(
            *check(stream__hs_queue_bytes=10**9), "stream.hs_queue_bytes=1000000000", "--object-store-memory"
        )

        # what only the second machine sees
        (raylet,) = [pid for pid, command in machines.processes(1) if role_in(command) == "raylet"]
        there = ["nsenter", "-t", str(raylet), "-m"]
        (metadata,) = [
            file.locate() for file in importlib.metadata.files("safetensors") or () if file.name == "METADATA"
        ]
        other, version = tmp_path / "METADATA", importlib.metadata.version("safetensors")
        other.write_text(Path(metadata).read_text().replace(f"Version: {version}", "Version: 0.0.1"))
        subprocess.run([*there, "mount", "--bind", str(other), str(metadata)], check=True)
        assert_refused(*check(), f"has safetensors 0.0.1, this one {version}", "install the same everywhere")
        subprocess.run([*there, "umount", str(metadata)], check=True)
        assert check()[0] == FINISHED
        subprocess.run([*there, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "runs")], check=True)
        assert_refused(*check(), f"run.root={tmp_path / 'runs'}", "storage that all machines see")


@pytest.mark.slow
@needs_machines
def test_the_flow_trains_on_the_cluster_that_ray_address_names(world, tmp_path, mlflow_file):
    values = tiny_flow(tmp_path / "site", target__devices=["auto"], drafter__device="auto")
    values["stream"] = {"engine": "ray", "hs_min_ready": 6, "hs_queue_depth": 12, "hs_queue_bytes": 20_000_000}
    values["cluster"] = {"target_workers": 2, "drafter_workers": 2}
    config = config_file(tmp_path / "flow.json", values)
    outside = ("PREFECT_API_URL", "PREFECT_PROFILE")
    environment = {name: value for name, value in os.environ.items() if name not in outside} | ENVIRONMENT
    environment |= {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    environment |= {"MLFLOW_TRACKING_URI": mlflow_file}
    with Machines(count=2, cpus=3) as machines:
        command = [sys.executable, "-m", "flows.train", "--config", config]
        process = machines.command(
            0, command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        output, _ = process.communicate(timeout=400)
        assert process.returncode == FINISHED, output
        no_actor_is_left(machines)
    assert "Ray: 2 machines, all see" in (tmp_path / "site/runs/tiny-0001/trainer.log").read_text()
    assert read_status(tmp_path / "site/runs/tiny-0001")["state"] == "finished"
    assert "version 1" in output
