"""dflash/nightly on a target that has learnt a language, so that data and training make a drafter better or worse.

The nights are `python -m flows.nightly`, as cron would have it; what skips one is shown through the deployment.
"""

import fcntl
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from motif import WORDS, motif_conversations, motif_prompts, motif_target, one_thread
from orchestra import ROOT, PrefectServer, worker
from tiny import write_jsonl
from tiny_flow import config_file, tiny_flow

from tasks.tracking import connect

pytestmark = pytest.mark.slow

TARGET_STEPS = 200  # half taught is enough: what it says has a pattern
MODEL = "dflash-motif"


def values_of(root: Path) -> dict[str, Any]:
    """A configuration whose drafter learns some of the language in 40 steps, more in 160. Lockstep: the same bytes every time."""
    return {
        "target": {"name": str(root / "motif"), "layer_ids": [0, 2], "devices": ["cpu"]},
        "data": {"path": str(root / "good.jsonl"), "prepared_dir": str(root / "prepared"), "max_tokens": 256},
        "drafter": {"layers": 2, "block_size": 8, "device": "cpu"},
        "objective": {"anchors": 32},
        "optim": {"samples_per_step": 4, "lr": 3e-3},
        "stream": {
            "engine": "lockstep",
            "hs_min_ready": 8,
            "hs_queue_depth": 16,
            "bucket_edges": [64, 128, 192],
        },
        "checkpoint": {"every_steps": 0},
        "evaluate": {"prompts": [str(root / "asked.jsonl")], "max_new_tokens": 40},
        "run": {"root": str(root / "runs"), "name": "night", "epochs": 9},
    }


@dataclass
class Night:
    """What a night left in MLflow."""

    run: str
    version: int
    gate: str
    compared_with: str
    tau: float
    champion: int | None
    """The version that has the alias after it."""


@pytest.fixture(scope="module")
def nights(prefect_server, mlflow_server, tmp_path_factory) -> Iterator[dict[str, Night]]:
    """Replies of chance, the target's own, more steps on those, replies of chance again, and the same as before that."""
    root = tmp_path_factory.mktemp("nights")
    target = motif_target(root / "motif", steps=TARGET_STEPS)
    with one_thread():
        good = motif_conversations(target, 96, max_new_tokens=100)
    draw = random.Random(3)
    write_jsonl(root / "good.jsonl", good)
    for row in good:
        row["messages"][-1]["content"] = "".join(draw.choices(WORDS, k=60))
    write_jsonl(root / "bad.jsonl", good)
    write_jsonl(root / "asked.jsonl", motif_prompts(12, seed=5))
    config = config_file(root / "night.yaml", values_of(root))
    plans = {
        "first": ["--run.max_steps", "40", "--data.path", str(root / "bad.jsonl")],
        "good": ["--run.max_steps", "40"],
        "better": ["--run.max_steps", "160"],
        "worse": ["--run.max_steps", "40", "--data.path", str(root / "bad.jsonl")],
        "equal": ["--run.max_steps", "160"],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", mlflow_server.url)
        yield {name: night(prefect_server, mlflow_server.url, config, words) for name, words in plans.items()}


def night(server: PrefectServer, mlflow: str, config: str, words: list[str]) -> Night:
    """`python -m flows.nightly` to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.nightly", "--config", config, *words],
        env=server.environment | {"MLFLOW_TRACKING_URI": mlflow},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    client = connect()
    newest = max(client.search_model_versions(f"name='{MODEL}'"), key=lambda version: int(version.version))
    tags = newest.tags
    champion = client.get_registered_model(MODEL).aliases.get("champion")
    return Night(
        run=tags["run"],
        version=int(newest.version),
        gate=tags["gate"],
        compared_with=tags["compared_with"],
        tau=float(tags["tau"]),
        champion=None if champion is None else int(champion),
    )


def test_a_first_version_that_does_not_beat_plain_decoding_is_not_champion(nights):
    first = nights["first"]
    assert (first.version, first.champion, first.compared_with) == (1, None, "plain decoding")
    assert "not shown to be better than plain decoding" in first.gate


def test_one_that_beats_plain_decoding_becomes_champion(nights):
    good = nights["good"]
    assert (good.version, good.champion, good.compared_with) == (2, 2, "plain decoding")
    assert ": better than plain decoding" in good.gate


def test_the_champion_moves_to_a_better_one(nights):
    better = nights["better"]
    assert (better.version, better.champion, better.compared_with) == (3, 3, "version 2")
    assert ": better than the champion, version 2, on the same 12 prompts" in better.gate
    assert better.tau > nights["good"].tau


def test_the_champion_stays_before_a_worse_one_which_keeps_its_version_and_the_reason(nights):
    worse = nights["worse"]
    assert (worse.version, worse.champion, worse.compared_with) == (4, 3, "version 3")
    assert "difference -" in worse.gate
    assert "not shown to be better than the champion, version 3, on the same 12 prompts" in worse.gate
    assert worse.tau < nights["better"].tau


def test_the_champion_stays_before_its_equal(nights):
    equal = nights["equal"]
    assert (equal.version, equal.champion, equal.compared_with) == (5, 3, "version 3")
    assert "difference +0.000 (95 % interval +0.000 to +0.000): not shown to be better" in equal.gate
    assert equal.tau == nights["better"].tau


def test_every_version_still_points_to_its_own_run(nights):
    versions = connect().search_model_versions(f"name='{MODEL}'")
    assert {int(version.version): version.tags["run"] for version in versions} == {
        number: f"night-{number:04d}" for number in range(1, 6)
    }
    assert len({version.run_id for version in versions}) == 5
    sha256 = {int(version.version): version.tags["sha256"] for version in versions}
    assert (sha256[1], sha256[3]) == (sha256[4], sha256[5])  # lockstep: the same data and steps
    assert len(set(sha256.values())) == 3


# ---------------------------------------------------------------- nights that are skipped


def test_a_night_that_is_off_or_finds_the_machine_busy_is_skipped_in_words_and_a_training_waits(
    prefect_server, mlflow_server, tmp_path
):
    config = config_file(tmp_path / "tiny.yaml", tiny_flow(tmp_path, run__max_steps=2, evaluate__prompts_per_set=1))
    slot = prefect_server.home / "dflash-machine.lock"  # its flows' TMPDIR
    with worker(prefect_server, MLFLOW_TRACKING_URI=mlflow_server.url):
        with slot.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.truncate(0)
            lock.write("a long run")
            lock.flush()
            off = prefect_server.submit("nightly", config=config, enabled=False)
            busy = prefect_server.submit("nightly", config=config, enabled=True)
            waiting = prefect_server.submit("train", config=config)
            ends = {name: prefect_server.wait(flow_run) for name, flow_run in (("off", off), ("busy", busy))}
            assert {name: (end["type"], end["name"]) for name, end in ends.items()} == {
                "off": ("COMPLETED", "Skipped"),
                "busy": ("COMPLETED", "Skipped"),
            }
            assert ends["off"]["message"] == "nightly is off: enabled=false"
            assert ends["busy"]["message"] == "this machine is busy with a long run"
            assert prefect_server.task_runs(off) == prefect_server.task_runs(busy) == {}
            deadline = time.monotonic() + 120
            while "wait for this machine" not in prefect_server.task_runs(waiting):
                assert time.monotonic() < deadline
                time.sleep(0.5)
            assert list(prefect_server.task_runs(waiting)) == ["wait for this machine"]
        assert prefect_server.wait(waiting)["name"] == "Completed"
    assert prefect_server.task_runs(waiting)["wait for this machine"] == ["Completed"]
    assert json.loads((tmp_path / "runs/tiny-0001/status.json").read_text())["state"] == "finished"
