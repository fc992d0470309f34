"""Whole runs on tiny targets: nothing is lost, nothing hangs, nothing that is not finite gets through.

A run that must be a process of its own is forked (forks.py); the others are trained here.
"""

import hashlib
import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import PARTIAL, TESTS, Child, Forks, count_rows, until
from safetensors.torch import load_file, save_file
from tiny import conversations, tiny_target, write_jsonl
from transformers import AutoTokenizer

from dflash import checkpoint, evaluate, train
from dflash import config as configuration
from dflash.batches import anchors_of, make_batch
from dflash.config import OptimConfig
from dflash.data import prepare
from dflash.hs_queue import Sample, production_order
from dflash.job import embed, samples_of
from dflash.objective import head_loss
from dflash.run_dir import create_run, declare_crashed, read_config, read_status, trainer_of, write_status
from dflash.setup import set_up

SAMPLES = 40
ENDLESS = {"run__epochs": 100_000, "checkpoint__keep": 2}  # longer than any test
HANG_SECONDS = 10  # that a process may take to end after a failure

# of a metrics row: what depends on the clock, and what is counted since the process began
TIMES_AND_WAITS = {
    "time",
    "seconds",
    "tokens_per_second",
    "seconds_remaining",
    "drafter_wait_share",
    "target_wait_share",
    "hs_gate_seconds",
    "hs_blocked_seconds",
}
SINCE_THE_PROCESS_BEGAN = {"hs_in", "hs_out", "hs_dropped", "hs_age_mean", "hs_age_max", "skipped_nonfinite"}


class World:
    """A tiny target and its data, prepared once."""

    def __init__(self, root: Path):
        self.target = tiny_target(root / "target", hidden=32)
        self.data = write_jsonl(root / "data.jsonl", conversations(SAMPLES, longest_reply=20))
        self.heldout = write_jsonl(root / "heldout.jsonl", conversations(6, seed=1, longest_reply=20))
        self.prompts = write_jsonl(root / "prompts.jsonl", [{"prompt": "How many bridges?"}, {"prompt": "The sea."}])
        self.prepared = root / "prepared"

    def run(self, root: Path, **changes: Any) -> Path:
        """A new run directory under `root`; changes are section__field=value."""
        values: dict[str, dict[str, Any]] = {
            "target": {"name": str(self.target), "captured_layers": 2},
            "data": {"path": str(self.data), "prepared_dir": str(self.prepared)},
            "drafter": {
                "layers": 2,
                "block_size": 4,
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 24,
            },
            "objective": {"anchors": 6},
            "optim": {"samples_per_step": 3, "lr": 1e-3},
            "stream": {"engine": "lockstep", "hs_min_ready": 5, "hs_queue_depth": 10, "bucket_edges": [90, 160]},
            "checkpoint": {"every_steps": 2},
            "run": {"root": str(root), "epochs": 2},
        }
        for name, value in changes.items():
            section, field = name.split("__")
            values.setdefault(section, {})[field] = value
        return create_run(configuration.parse(values))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def forks():
    with Forks() as server:
        yield server


@pytest.fixture(scope="module")
def unbroken(world, forks, tmp_path_factory) -> Path:
    """A finished lockstep run; every other lockstep run with the same configuration must end the same."""
    run_dir = world.run(tmp_path_factory.mktemp("unbroken"), run__epochs=6)
    assert forks.train(run_dir).wait() == train.FINISHED
    return run_dir


@pytest.fixture(autouse=True)
def signal_handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def lasting(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without the fields of one process."""
    return [{k: v for k, v in row.items() if k not in TIMES_AND_WAITS | SINCE_THE_PROCESS_BEGAN} for row in rows]


def final(run_dir: Path) -> Path:
    """The checkpoint of a run's last step."""
    return checkpoint.directory_of(run_dir, rows_of(run_dir)[-1]["step"])


def assert_same_end(run_dir: Path, other: Path) -> None:
    """Every byte of both last checkpoints is the same."""
    one, two = checkpoint.load(final(run_dir)), checkpoint.load(final(other))
    assert one.state == two.state
    for tensors, others in ((one.drafter, two.drafter), (one.optimizer, two.optimizer)):
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, others[name]), name
    assert (final(run_dir) / "manifest.json").read_bytes() == (final(other) / "manifest.json").read_bytes()


def assert_each_sample_once_an_epoch(run_dir: Path, *, epochs: int, samples: int = SAMPLES) -> None:
    rows, trained = rows_of(run_dir), defaultdict(list)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    for row in rows:
        trained[row["epoch"]] += row["samples"]
    assert {epoch: sorted(indices) for epoch, indices in trained.items()} == {
        epoch: list(range(samples)) for epoch in range(epochs)
    }


def hashes(directory: Path) -> dict[str, str]:
    """sha256 of every file under a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def finite(at: Path) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in checkpoint.load(at).drafter.values())


# ---------------------------------------------------------------- never loses


def test_a_lockstep_run_repeated_gives_identical_bytes_also_with_heldout_measurements(world, forks, unbroken, tmp_path):
    again = world.run(tmp_path, run__epochs=6, data__heldout_path=str(world.heldout), run__heldout_every_steps=7)
    assert forks.train(again).wait() == train.FINISHED
    assert_same_end(again, unbroken)
    assert lasting(rows_of(again)) == lasting(rows_of(unbroken))
    steps = [json.loads(line)["step"] for line in (again / "heldout.jsonl").read_text().splitlines()]
    assert steps == sorted({0, len(rows_of(again)), *range(7, len(rows_of(again)), 7)})


def test_a_run_killed_at_20_random_moments_ends_bit_identical_to_an_unbroken_one(world, forks, unbroken, tmp_path):
    run_dir, draw, in_saves = world.run(tmp_path, run__epochs=6), random.Random(7), 0
    for life in range(20):
        moments = (
            {"in_save": True, "more_rows": draw.randrange(2)},
            {"seconds": draw.random() * 0.5},  # mostly while it is set up
            {"more_rows": draw.randrange(1, 4)},
            {"more_rows": draw.randrange(1, 3), "seconds": draw.random() * 0.02},
        )
        assert forks.train(run_dir, then="kill", **moments[life % 4]).wait() == -signal.SIGKILL
        in_saves += bool(list(run_dir.glob(PARTIAL)))
        for path in checkpoint.list_checkpoints(run_dir):
            checkpoint.load(path)
    assert in_saves > 0
    assert forks.train(run_dir).wait() == train.FINISHED
    assert_same_end(run_dir, unbroken)
    assert lasting(rows_of(run_dir)) == lasting(rows_of(unbroken))
    assert_each_sample_once_an_epoch(run_dir, epochs=6)


def test_a_threaded_run_killed_at_random_moments_trains_every_sample_once_an_epoch(world, forks, tmp_path):
    run_dir, draw = world.run(tmp_path, stream__engine="local", run__epochs=6), random.Random(8)
    for _ in range(6):
        moment = {"more_rows": draw.randrange(1, 5), "seconds": draw.random() * 0.02}
        assert forks.train(run_dir, then="kill", **moment).wait() == -signal.SIGKILL
    assert forks.train(run_dir).wait() == train.FINISHED
    assert_each_sample_once_an_epoch(run_dir, epochs=6)
    assert finite(final(run_dir))


@pytest.mark.parametrize("engine", ["lockstep", "local"])
def test_every_sample_is_trained_once_an_epoch_and_only_the_epochs_last_step_is_smaller(world, tmp_path, engine):
    run_dir = world.run(tmp_path, stream__engine=engine)
    assert train.main([str(run_dir)]) == train.FINISHED
    assert_each_sample_once_an_epoch(run_dir, epochs=2)
    assert [len(row["samples"]) for row in rows_of(run_dir)] == ([3] * 13 + [1]) * 2
    assert read_status(run_dir)["state"] == "finished"
    assert read_status(run_dir)["step"] == 28


def test_a_fresh_run_changes_not_one_byte_of_the_runs_beside_it(world, tmp_path):
    first, second = world.run(tmp_path, run__max_steps=3), world.run(tmp_path, run__max_steps=3)
    for run_dir in (first, second):
        assert train.main([str(run_dir)]) == train.FINISHED
    (tmp_path / "notes.txt").write_text("mine")
    before = hashes(tmp_path)
    third = world.run(tmp_path, run__max_steps=5, checkpoint__keep=1)
    assert third.name == "dflash-0003"
    assert train.main([str(third)]) == train.FINISHED
    after = hashes(tmp_path)
    assert {name for name in before if after.get(name) != before[name]} == {".dflash.number"}
    assert rows_of(third)[0]["step"] == 1  # and starts from initialisation, whatever lies around


@pytest.mark.parametrize("engine", ["lockstep", "local"])
def test_resume_from_makes_a_new_run_that_goes_on_at_the_next_step(world, forks, unbroken, tmp_path, engine):
    parent, before = checkpoint.directory_of(unbroken, 20), hashes(unbroken)
    run_dir = world.run(tmp_path, run__epochs=6, stream__engine=engine, checkpoint__resume_from=str(parent))
    assert forks.train(run_dir).wait() == train.FINISHED
    assert hashes(unbroken) == before
    rows, whole = rows_of(run_dir), rows_of(unbroken)
    assert [row["step"] for row in rows] == list(range(21, len(whole) + 1))
    assert json.loads((run_dir / "provenance.json").read_text())["parent"] == str(parent)
    trained = sorted(index for row in whole[:20] + rows if row["epoch"] == 1 for index in row["samples"])
    assert trained == list(range(SAMPLES))  # step 20 is in the middle of epoch 1
    if engine == "lockstep":
        assert_same_end(run_dir, unbroken)
        assert lasting(rows) == lasting(whole[20:])


def test_a_resumed_run_that_crashes_goes_on_from_its_own_checkpoints(world, forks, unbroken, tmp_path):
    parent = checkpoint.directory_of(unbroken, 20)
    run_dir = world.run(tmp_path, run__epochs=6, checkpoint__resume_from=str(parent))
    for more_rows in (1, 5, 2):
        assert forks.train(run_dir, then="kill", more_rows=more_rows).wait() == -signal.SIGKILL
    assert checkpoint.newest(run_dir) is not None
    assert forks.train(run_dir).wait() == train.FINISHED
    assert [row["step"] for row in rows_of(run_dir)] == list(range(21, len(rows_of(unbroken)) + 1))
    assert_same_end(run_dir, unbroken)


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


TEARS = {
    "truncated": lambda at: os.truncate(at / "drafter.safetensors", 200),
    "altered_byte": lambda at: flip_byte(at / "optimizer.safetensors"),
    "no_manifest": lambda at: (at / "manifest.json").unlink(),
    "garbage_manifest": lambda at: (at / "manifest.json").write_bytes(b"\x00{\xff"),
    "garbage_state": lambda at: (at / "state.json").write_text("{"),
    "half_written": lambda at: [(at / name).unlink() for name in ("optimizer.safetensors", "state.json")],
    "gone": shutil.rmtree,
}


@pytest.mark.parametrize("tear", TEARS.values(), ids=TEARS)
def test_a_torn_checkpoint_in_resume_from_is_refused_in_one_line(world, unbroken, tmp_path, capfd, tear):
    torn = tmp_path / "copied" / "step-00000010"
    shutil.copytree(checkpoint.directory_of(unbroken, 10), torn)
    tear(torn)
    run_dir = world.run(tmp_path, run__epochs=6, checkpoint__resume_from=str(torn))
    assert train.main([str(run_dir)]) == train.REFUSED
    (line,) = capfd.readouterr().err.splitlines()
    assert f"checkpoint {torn} cannot be used" in line
    assert read_status(run_dir)["state"] == "refused"
    assert not (run_dir / "metrics.jsonl").exists()


def test_a_run_whose_newest_checkpoint_was_torn_goes_on_from_the_one_before(world, forks, unbroken, tmp_path):
    run_dir = world.run(tmp_path, run__epochs=6)
    assert forks.train(run_dir, then="kill", more_rows=9).wait() == -signal.SIGKILL
    newest = checkpoint.newest(run_dir)
    assert newest is not None
    flip_byte(newest / "drafter.safetensors")
    assert forks.train(run_dir).wait() == train.FINISHED
    assert_same_end(run_dir, unbroken)
    assert_each_sample_once_an_epoch(run_dir, epochs=6)


def test_keep_leaves_the_newest_checkpoints_of_the_run_itself(world, tmp_path):
    old = world.run(tmp_path, run__max_steps=4)
    assert train.main([str(old)]) == train.FINISHED
    before = hashes(old)
    run_dir = world.run(tmp_path, run__max_steps=9, checkpoint__keep=2)
    assert train.main([str(run_dir)]) == train.FINISHED
    assert [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(run_dir)] == [8, 9]
    assert hashes(old) == before


# ---------------------------------------------------------------- stops and goes on


@pytest.mark.parametrize("engine", ["lockstep", "local"])
def test_a_stopped_run_has_a_checkpoint_of_its_last_step_and_goes_on_to_the_end(
    world, forks, unbroken, tmp_path, engine, capfd
):
    run_dir = world.run(tmp_path, run__epochs=6, stream__engine=engine, checkpoint__every_steps=0)
    assert forks.train(run_dir, then="stop_often", more_rows=5).wait() == train.STOPPED
    assert read_status(run_dir)["state"] == "stopped"
    last = rows_of(run_dir)[-1]["step"]
    assert 5 <= last < len(rows_of(unbroken))
    assert [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(run_dir)] == [last]
    assert checkpoint.newest(run_dir) == final(run_dir)

    assert forks.train(run_dir).wait() == train.FINISHED
    assert_each_sample_once_an_epoch(run_dir, epochs=6)
    if engine == "lockstep":
        assert_same_end(run_dir, unbroken)

    assert train.main([str(run_dir)]) == train.REFUSED
    assert "is finished; start a new run" in capfd.readouterr().err


def test_the_command_stops_on_sigterm_with_exit_code_3(world, tmp_path):
    run_dir = world.run(tmp_path, **ENDLESS, stream__engine="local")
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash.train", str(run_dir)], env=environment, stderr=subprocess.PIPE, text=True
    )
    until(lambda: count_rows(run_dir) >= 3 or process.poll() is not None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == train.STOPPED, stderr
    assert "Traceback" not in stderr
    assert read_status(run_dir)["state"] == "stopped"
    assert checkpoint.newest(run_dir) == final(run_dir)


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_supervised_training_stops_with_a_checkpoint_when_its_supervisor_closes_its_input_or_is_killed(
    world, tmp_path, end
):
    run_dir, code = world.run(tmp_path, **ENDLESS, stream__engine="local"), tmp_path / "code"
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    supervisor = """
import subprocess, sys
process = subprocess.Popen(["sh", "-c", '"$0" "$@"; echo $? >' + sys.argv[1], *sys.argv[2:]], stdin=subprocess.PIPE)
sys.stdin.readline()
process.stdin.close()
process.wait()
"""
    command = [sys.executable, "-m", "dflash.train", str(run_dir), "--stop-with-stdin"]
    process = subprocess.Popen(
        [sys.executable, "-c", supervisor, str(code), *command],
        env=environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: count_rows(run_dir) >= 3 or process.poll() is not None)
    trainer = trainer_of(run_dir)
    assert trainer not in (None, process.pid)
    if end == "killed":
        process.kill()
    _, stderr = process.communicate("\n" if end == "closed" else None, timeout=60)  # until the trainer has ended too
    until(code.exists)
    assert code.read_text() == f"{train.STOPPED}\n", stderr
    assert "Traceback" not in stderr
    status = read_status(run_dir)
    assert (status["state"], status["pid"]) == ("stopped", trainer)
    assert checkpoint.newest(run_dir) == final(run_dir)
    assert trainer_of(run_dir) is None


def test_a_run_that_was_declared_crashed_goes_on_to_the_same_end(world, forks, unbroken, tmp_path):
    run_dir = world.run(tmp_path, run__epochs=6)
    child = forks.train(run_dir, then="kill", more_rows=5)
    assert child.wait() == -signal.SIGKILL
    assert declare_crashed(run_dir, "killed by signal 9")
    status = read_status(run_dir)
    assert (status["state"], status["pid"]) == ("crashed", child.pid)
    assert forks.train(run_dir).wait() == train.FINISHED
    assert read_status(run_dir)["state"] == "finished"
    assert_same_end(run_dir, unbroken)


@pytest.mark.parametrize("more_rows", [0, 3], ids=["from_the_set_up_on", "from_the_third_step_on"])
def test_signals_that_never_cease_still_end_in_exit_code_3(world, forks, tmp_path, more_rows):
    run_dir = world.run(tmp_path, **ENDLESS)
    child = forks.train(run_dir, then="bombard", more_rows=more_rows)
    assert child.wait() == train.STOPPED
    assert "Traceback" not in child.stderr.read_text()
    assert read_status(run_dir)["state"] == "stopped"
    if more_rows:
        assert checkpoint.newest(run_dir) == final(run_dir)
        assert "stop requested" in read_status(run_dir)["reason"]


def test_a_second_trainer_in_the_same_run_directory_is_refused(world, forks, tmp_path, capfd):
    run_dir = world.run(tmp_path, **ENDLESS)
    child = forks.train(run_dir)
    child.until(lambda: count_rows(run_dir) >= 1)
    assert train.main([str(run_dir)]) == train.REFUSED
    assert f"is being trained by process {child.pid}" in capfd.readouterr().err
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait() == train.STOPPED


# ---------------------------------------------------------------- one weighted mean


@pytest.mark.parametrize("clip", [10.0, 0.01])
def test_a_steps_loss_and_gradient_are_the_weighted_mean_of_its_samples_taken_one_by_one(world, tmp_path, clip):
    run_dir = world.run(tmp_path, run__max_steps=1, optim__samples_per_step=7, optim__clip=clip)
    assert train.main([str(run_dir)]) == train.FINISHED
    (row,) = rows_of(run_dir)
    moments = load_file(final(run_dir) / "optimizer.safetensors")

    fresh = world.run(tmp_path, run__max_steps=1, optim__samples_per_step=7)
    config = read_config(fresh)
    job = set_up(config, fresh)
    loss = weight = tau = blocks = 0.0
    for index, (name, tokens, mask) in zip(row["samples"], samples_of(job.data, np.array(row["samples"])), strict=True):
        sample = Sample(index, name, 0, 0, tokens, mask, job.targets.features([tokens])[0])
        batch = make_batch(job, [sample], [anchors_of(job, sample)])
        hidden = job.drafter(batch.features, embed(job, batch.blocks.ids), batch.blocks.anchors)
        numerator, sums = head_loss(hidden, batch.blocks, job.loss_head, config.objective)
        numerator.backward()
        loss, weight = loss + float(sums["loss"].sum()), weight + float(sums["weight"])
        tau, blocks = tau + float(sums["tau"]), blocks + float(sums["blocks"])
    gradients = {name: parameter.grad / weight for name, parameter in job.drafter.named_parameters()}
    norm = float(torch.nn.utils.get_total_norm(gradients.values()))
    assert row["loss"] == pytest.approx(loss / weight, rel=1e-5)
    assert row["tau"] == pytest.approx(tau / blocks, rel=1e-6)
    assert row["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert (norm > clip) == (clip < 1)
    for name, gradient in gradients.items():  # Adam's steps do not show the size of a gradient, its first moment does
        expected = (1 - config.optim.betas[0]) * gradient * min(1.0, clip / norm)
        torch.testing.assert_close(
            moments[f"{name}.exp_avg"], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())
        )


def test_the_size_of_micro_batches_changes_neither_losses_nor_weights(world, tmp_path):
    rows, weights = [], []
    for tokens in (1, 400, 100_000):  # one sample each, some together, all at once
        run_dir = world.run(tmp_path, run__max_steps=6, optim__samples_per_step=8, optim__micro_batch_tokens=tokens)
        assert train.main([str(run_dir)]) == train.FINISHED
        rows.append(rows_of(run_dir))
        weights.append(load_file(final(run_dir) / "drafter.safetensors"))
    for other in rows[1:]:
        for one, two in zip(rows[0], other, strict=True):
            assert sorted(one["samples"]) == sorted(two["samples"])
            assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
            assert one["gradient_norm"] == pytest.approx(two["gradient_norm"], rel=1e-4)
    for other in weights[1:]:
        for name, tensor in weights[0].items():
            # Adam's first steps are the sign of the gradient: where that is rounding alone, it may be either
            assert float((tensor - other[name]).abs().mean()) < 1e-3 * 1e-3, name


def test_the_learning_rate_warms_up_then_follows_its_schedule():
    cosine = OptimConfig(lr=1.0, warmup_fraction=0.1, min_lr_fraction=0.1)
    wsd = OptimConfig(lr=1.0, warmup_fraction=0.1, min_lr_fraction=0.1, schedule="wsd", decay_fraction=0.2)
    for optim in (cosine, wsd):
        assert [train.lr_at(step, total=100, optim=optim) for step in range(10)] == pytest.approx(
            [(step + 1) / 10 for step in range(10)]
        )
    assert train.lr_at(10, total=100, optim=cosine) == pytest.approx(1.0)
    assert train.lr_at(55, total=100, optim=cosine) == pytest.approx(0.55)
    assert train.lr_at(99, total=100, optim=cosine) == pytest.approx(0.1, abs=1e-3)
    assert [train.lr_at(step, total=100, optim=wsd) for step in (10, 50, 80)] == pytest.approx([1.0] * 3)
    assert train.lr_at(90, total=100, optim=wsd) == pytest.approx(0.55)
    assert train.lr_at(0, total=1, optim=cosine) == 1.0


def test_the_target_runs_each_later_epoch_whole_wherever_the_drafter_is_by_then(world, tmp_path):
    run_dir = world.run(tmp_path)
    job = set_up(read_config(run_dir), run_dir)
    source, indices = train.groups_to_run(job.config, job.data.lengths, job.epoch, job.trained), []
    while len(indices) < SAMPLES:
        group = next(source)
        assert group.epoch == 0
        indices += group.indices[group.wanted].tolist()
    job.epoch, job.trained[:] = 1, True  # the drafter, about to begin the next epoch, between two of its statements
    rest = [group for group in source if group.epoch == 1]
    assert sorted(np.concatenate([group.indices[group.wanted] for group in rest])) == list(range(SAMPLES))


# ---------------------------------------------------------------- never hangs


def assert_fails(child: Child, run_dir: Path, cause: str, newest_is_good: bool = True) -> None:
    assert child.wait(HANG_SECONDS) == train.FAILED
    assert cause in child.last_line(), child.stderr.read_text()
    status = read_status(run_dir)
    assert status["state"] == "failed"
    assert cause in status["reason"]
    newest = checkpoint.newest(run_dir)
    if newest_is_good:
        assert newest is not None
        assert finite(newest)


def acted(run_dir: Path) -> bool:
    return Path(f"{run_dir}.acted").exists()


def replace_file(path: Path, content: bytes) -> None:
    """As a new file: one that is mapped now keeps its content."""
    path.with_suffix(".new").write_bytes(content)
    os.replace(path.with_suffix(".new"), path)


@pytest.mark.parametrize("engine", ["lockstep", "local"])
def test_data_that_breaks_while_the_target_reads_it_ends_the_run_with_the_cause(world, forks, tmp_path, engine):
    prepared = tmp_path / "prepared"
    run_dir = world.run(tmp_path, **ENDLESS, stream__engine=engine, data__prepared_dir=str(prepared))
    child = forks.train(run_dir)
    child.until(lambda: count_rows(run_dir) >= 3)
    (shard,) = prepared.glob("*/shard-00000.safetensors")
    replace_file(shard, shard.read_bytes()[:500])
    assert_fails(child, run_dir, "SafetensorError")


@pytest.mark.parametrize("engine", ["lockstep", "local"])
def test_data_that_breaks_while_the_drafter_reads_it_ends_the_run_with_the_cause(world, forks, tmp_path, engine):
    prepared = tmp_path / "prepared"
    run_dir = world.run(
        tmp_path,
        **ENDLESS,
        stream__engine=engine,
        data__prepared_dir=str(prepared),
        data__heldout_path=str(world.heldout),
        run__heldout_every_steps=1,
    )
    child = forks.train(run_dir)
    child.until(lambda: count_rows(run_dir) >= 3)
    for index in prepared.glob("*/index.safetensors"):
        tensors = load_file(index)
        if len(tensors["lengths"]) < SAMPLES:  # of the held-out data: ids that are not UTF-8, so a ValueError
            tensors["ids"].fill_(255)
            save_file(tensors, tmp_path / "index")
            replace_file(index, (tmp_path / "index").read_bytes())
    assert_fails(child, run_dir, "UnicodeDecodeError")


@pytest.mark.parametrize("then", ["exit_worker", "exit_drafter"])
def test_a_thread_that_is_made_to_exit_ends_the_run(world, forks, tmp_path, then):
    run_dir = world.run(tmp_path, **ENDLESS, stream__engine="local")
    child = forks.train(run_dir, then=then, more_rows=3)
    child.until(lambda: acted(run_dir))
    assert_fails(child, run_dir, "SystemExit")


@pytest.mark.parametrize("engine", ["lockstep", "local"])
def test_a_checkpoint_that_cannot_be_written_ends_the_run(world, forks, tmp_path, engine):
    run_dir = world.run(tmp_path, **ENDLESS, stream__engine=engine, drafter__intermediate_size=512)
    child = forks.train(run_dir, then="limit_file_size", more_rows=3)
    child.until(lambda: acted(run_dir))
    assert_fails(child, run_dir, "File too large")
    assert "saver" in (run_dir / "trainer.log").read_text() or "save_file" in (run_dir / "trainer.log").read_text()


ENDINGS = {
    "the_end_of_the_data": (SAMPLES, {}),
    "fewer_samples_than_hs_min_ready": (7, {"stream__hs_min_ready": 30, "stream__hs_queue_depth": 90}),
    "one_sample": (1, {}),
    "one_sample_and_the_defaults": (1, {"stream__hs_min_ready": 30, "stream__hs_queue_depth": 90}),
    "a_step_larger_than_the_queue": (SAMPLES, {"optim__samples_per_step": 25}),
    "a_step_larger_than_the_data": (7, {"optim__samples_per_step": 64}),
    "a_queue_of_one": (7, {"stream__hs_min_ready": 1, "stream__hs_queue_depth": 1}),
}


@pytest.mark.parametrize("engine", ["lockstep", "local"])
@pytest.mark.parametrize("samples, changes", ENDINGS.values(), ids=ENDINGS)
def test_a_run_finishes_at(world, forks, tmp_path, engine, samples, changes):
    data = write_jsonl(tmp_path / "data.jsonl", conversations(SAMPLES, longest_reply=20)[:samples])
    run_dir = world.run(tmp_path, stream__engine=engine, run__epochs=3, data__path=str(data), **changes)
    assert forks.train(run_dir).wait() == train.FINISHED
    assert_each_sample_once_an_epoch(run_dir, epochs=3, samples=samples)


# ---------------------------------------------------------------- not finite


class BrokenWorld(World):
    """A target with NaN in the embedding of one token, and data in which one conversation holds it."""

    def __init__(self, root: Path, *, late: bool):
        super().__init__(root)
        tokenizer = AutoTokenizer.from_pretrained(self.target)
        token = tokenizer("~")["input_ids"][0]
        weights = load_file(self.target / "model.safetensors")
        weights["model.embed_tokens.weight"][token] = math.nan
        save_file(weights, self.target / "model.safetensors", metadata={"format": "pt"})

        rows = conversations(SAMPLES, longest_reply=20)
        order = self.order(tokenizer, rows)
        self.index = int(order[30 if late else 3])
        self.id = rows[self.index]["id"]
        rows[self.index]["messages"][-1]["content"] += " ~"
        self.place = self.order(tokenizer, rows).tolist().index(self.index)

    def order(self, tokenizer: Any, rows: list[dict]) -> np.ndarray:
        """The first epoch's samples in the order in which the target runs them."""
        write_jsonl(self.data, rows)
        data = prepare(
            self.data, tokenizer=tokenizer, max_tokens=3072, block_size=4, template_kwargs={}, directory=self.prepared
        )
        order = production_order(data.lengths, edges=(90, 160), group_tokens=8192, seed=0, epoch=0)
        return np.concatenate(order)


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> BrokenWorld:
    world = BrokenWorld(tmp_path_factory.mktemp("broken"), late=True)
    assert world.place >= 16  # after those that the initialisation is fitted to
    return world


@pytest.mark.parametrize("engine", ["lockstep", "local"])
def test_a_loss_that_is_not_finite_fails_the_run_with_the_samples_id_and_keeps_the_last_good_checkpoint(
    broken, forks, tmp_path, engine
):
    run_dir = broken.run(tmp_path, stream__engine=engine)
    assert_fails(child := forks.train(run_dir), run_dir, f"the loss of {broken.id} is not finite")
    assert broken.id in child.last_line()
    row = rows_of(run_dir)[-1]
    assert broken.index in row["samples"]
    assert row["loss"] is None
    kept = hashes(run_dir / "checkpoints")
    newest = checkpoint.newest(run_dir)
    assert newest is not None
    assert checkpoint.step_of(newest) < row["step"]

    if engine == "lockstep":  # it goes on from there, and fails at the same step
        assert_fails(forks.train(run_dir), run_dir, broken.id)
        assert rows_of(run_dir)[-1]["step"] == row["step"]
        assert hashes(run_dir / "checkpoints") == kept


def test_a_step_that_is_not_finite_is_skipped_and_counted_where_that_is_allowed(broken, forks, tmp_path):
    run_dir = broken.run(tmp_path, run__epochs=1, optim__skip_nonfinite=1)
    assert forks.train(run_dir).wait() == train.FINISHED
    rows = rows_of(run_dir)
    (bad,) = [row for row in rows if row["loss"] is None]
    assert broken.index in bad["samples"]
    assert rows[-1]["skipped_nonfinite"] == 1
    assert all(finite(path) for path in checkpoint.list_checkpoints(run_dir))
    assert all(bool(t.isfinite().all()) for t in load_file(final(run_dir) / "optimizer.safetensors").values())
    assert_each_sample_once_an_epoch(run_dir, epochs=1)

    # the same where the bad step is the last one, whose numbers the status shows
    last = broken.run(tmp_path, run__epochs=1, optim__skip_nonfinite=1, run__max_steps=bad["step"])
    child = forks.train(last)
    assert child.wait() == train.FINISHED, child.stderr.read_text()
    assert read_status(last)["state"] == "finished"
    assert read_status(last)["loss"] is None
    assert finite(final(last))


def test_a_skipped_step_changes_neither_weights_nor_moments(broken, forks, tmp_path):
    run_dir = broken.run(tmp_path, run__epochs=1, optim__skip_nonfinite=1, checkpoint__every_steps=1)
    assert forks.train(run_dir).wait() == train.FINISHED
    (bad,) = [row["step"] for row in rows_of(run_dir) if row["loss"] is None]
    before, after = (checkpoint.load(checkpoint.directory_of(run_dir, step)) for step in (bad - 1, bad))
    assert all(torch.equal(tensor, after.drafter[name]) for name, tensor in before.drafter.items())
    assert all(torch.equal(tensor, after.optimizer[name]) for name, tensor in before.optimizer.items())


def test_features_that_are_not_finite_are_refused_with_the_samples_id_when_the_initialisation_needs_them(
    forks, tmp_path
):
    broken = BrokenWorld(tmp_path / "broken", late=False)
    assert broken.place < 16
    run_dir = broken.run(tmp_path)
    child = forks.train(run_dir)
    assert child.wait() == train.REFUSED
    assert f"features of {broken.id} are not finite" in child.last_line()


def test_logging_is_left_as_it_was(world, tmp_path):
    handlers = list(logging.getLogger("dflash").handlers)
    assert train.main([str(world.run(tmp_path, run__max_steps=1))]) == train.FINISHED
    assert logging.getLogger("dflash").handlers == handlers


@pytest.mark.slow
def test_compiled_layers_take_the_same_steps(world, tmp_path):
    losses = []
    for compiled in (False, True):
        run_dir = world.run(tmp_path, drafter__compile=compiled, run__max_steps=6)
        assert train.train(run_dir, threading.Event()) == train.FINISHED
        losses.append([row["loss"] for row in rows_of(run_dir)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("engine", ["local", "lockstep"])
def test_a_run_whose_checkpoints_are_all_torn_is_refused_and_keeps_its_rows(world, forks, tmp_path, capfd, engine):
    run_dir = world.run(tmp_path, stream__engine=engine, run__epochs=1, checkpoint__every_steps=0)
    assert forks.train(run_dir).wait() == train.FINISHED
    write_status(run_dir, state="failed", step=0)
    (final(run_dir) / "manifest.json").unlink()
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert train.main([str(run_dir)]) == train.REFUSED
    assert "none of them is complete" in capfd.readouterr().err
    assert (run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("engine", ["local", "lockstep"])
def test_a_run_that_died_after_its_last_checkpoint_is_finished_by_a_restart(world, forks, tmp_path, engine):
    run_dir = world.run(tmp_path, stream__engine=engine, run__epochs=1)
    assert forks.train(run_dir).wait() == train.FINISHED
    before = hashes(run_dir / "checkpoints"), rows_of(run_dir)
    write_status(run_dir, state="running", step=0)
    assert train.main([str(run_dir)]) == train.FINISHED
    assert read_status(run_dir)["state"] == "finished"
    assert (hashes(run_dir / "checkpoints"), rows_of(run_dir)) == before


# ---------------------------------------------------------------- decoded at checkpoints


def decoding(world: World, **more: Any) -> dict[str, Any]:
    section = {"prompts": [str(world.prompts)], "during_training": 2, "max_new_tokens": 24}
    return {f"evaluate__{name}": value for name, value in section.items()} | more


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "evaluation.jsonl").read_text().splitlines()]


def test_prompts_are_decoded_at_every_checkpoint_and_the_best_one_is_marked(world, forks, unbroken, tmp_path):
    run_dir = world.run(tmp_path, **decoding(world, run__epochs=6, evaluate__max_new_tokens=8))
    assert forks.train(run_dir).wait() == train.FINISHED
    assert_same_end(run_dir, unbroken)  # decoding changes nothing of what is trained
    rows = evaluations(run_dir)
    assert [row["step"] for row in rows] == [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(run_dir)]
    best = max(rows, key=lambda row: row["eval/tau"])
    marked = read_status(run_dir)["best"]
    assert (marked["step"], marked["eval/tau"]) == (best["step"], best["eval/tau"])
    assert (run_dir / marked["checkpoint"] / "manifest.json").exists()


def test_what_is_decoded_while_training_is_what_the_saved_checkpoint_decodes(world, tmp_path):
    run_dir = world.run(tmp_path, **decoding(world, run__max_steps=4))
    assert train.main([str(run_dir)]) == train.FINISHED
    out = tmp_path / "evaluated.json"
    for row in evaluations(run_dir):
        directory = checkpoint.directory_of(run_dir, row["step"])
        assert evaluate.main([str(directory), "--out", str(out)]) == train.FINISHED
        measured = json.loads(out.read_text())["overall"]
        assert (measured["tau"], measured["steps"]) == (row["eval/tau"], row["eval/steps"])


def test_a_run_killed_and_restarted_has_decoded_every_checkpoint_once_and_kept_its_mark(world, forks, tmp_path):
    changes = decoding(world)
    run_dir, whole = world.run(tmp_path, **changes), world.run(tmp_path, **changes)
    for _ in range(2):
        assert forks.train(run_dir, then="kill", more_rows=5).wait() == -signal.SIGKILL
    for directory in (run_dir, whole):
        assert forks.train(directory).wait() == train.FINISHED
    ours, theirs = ([row | {"seconds": 0} for row in evaluations(each)] for each in (run_dir, whole))
    assert ours == theirs
    assert read_status(run_dir)["best"]["eval/tau"] == max(row["eval/tau"] for row in ours)


def test_keep_never_deletes_the_checkpoint_that_is_marked_best(world, tmp_path):
    run_dir = world.run(tmp_path, **decoding(world, run__max_steps=12, checkpoint__keep=1))
    assert train.main([str(run_dir)]) == train.FINISHED
    best, last = read_status(run_dir)["best"]["step"], evaluations(run_dir)[-1]["step"]
    assert {checkpoint.step_of(path) for path in checkpoint.list_checkpoints(run_dir)} == {best, last}


def test_a_stop_while_prompts_are_decoded_does_not_wait_for_them(world, forks, tmp_path):
    run_dir = world.run(tmp_path, **decoding(world, **ENDLESS, evaluate__max_new_tokens=500))
    assert forks.train(run_dir, then="stop_often", more_rows=2).wait() == train.STOPPED
    assert checkpoint.newest(run_dir) is not None


def test_a_failed_run_keeps_its_mark(world, tmp_path):
    run_dir = world.run(tmp_path, **decoding(world, run__max_steps=4))
    assert train.main([str(run_dir)]) == train.FINISHED
    best = read_status(run_dir)["best"]
    write_status(run_dir, state="failed", step=4, reason="x")
    assert read_status(run_dir)["best"] == best
