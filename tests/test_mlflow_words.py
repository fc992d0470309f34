import json

import pytest
from tracked_run import EDGES, PROVENANCE, TOKEN_BYTES, row

from tasks.mlflow_words import as_text, feature_bytes, metrics_of, params_of, tags_of, target_speed, without_secret


def test_every_number_of_a_step_is_a_metric_in_a_group():
    metrics = metrics_of("metrics.jsonl", row(3), EDGES)
    assert metrics == {
        "train/epoch": 0,
        "train/loss": pytest.approx(1 + 1 / 3),
        "train/tau": 1.5,
        "train/gradient_norm": 2,
        "train/learning_rate": 1e-3,
        "train/skipped_nonfinite": 0,
        "train/tokens": 20,
        "slot_accuracy/slot_01": 0.5,
        "slot_accuracy/slot_02": 0.25,
        "speed/seconds_remaining": 10,
        "speed/step_seconds": 0.5,
        "speed/tokens_per_second": 40,
        "speed/drafter_wait_share": 0,
        "speed/target_wait_share": 0.1,
        "queue/samples": 3,
        "queue/bytes": 30 * TOKEN_BYTES,
        "queue_samples/01-08": 0,
        "queue_samples/09-16": 3,
        "queue_samples/17-up": 0,
        "queue_bytes/01-08": 0,
        "queue_bytes/09-16": 30 * TOKEN_BYTES,
        "queue_bytes/17-up": 0,
        "queue/gate_seconds": 0,
        "queue/blocked_seconds": 0.5,
        "queue/age_mean": 1.5,
        "queue/age_max": 2,
        "queue_mix/01-08": 0,
        "queue_mix/09-16": 1,
        "queue_mix/17-up": 0,
        "queue/mix_distance": 0.25,
        "queue/in": 9,
        "queue/out": 6,
        "queue/dropped_too_long": 1,
        "memory/allocated_bytes": 1000,
        "memory/allocated_peak_bytes": 2000,
        "memory/allocation_retries": 0,
    }


def test_other_rows_have_their_own_groups_and_what_is_null_is_left_out():
    assert metrics_of(
        "heldout.jsonl", {"step": 0, "loss": 7.8, "tau": 1.1, "slot_accuracy": [0.1], "blocks": 9}, EDGES
    ) == {
        "heldout/loss": 7.8,
        "heldout/tau": 1.1,
        "heldout/slot_accuracy_01": 0.1,
        "heldout/blocks": 9,
    }
    measured = {
        "eval/tau": 1.3,
        "eval/tau_interval": [1.2, 1.4],
        "eval/sets": {"chat x": 1.3, "code": None},
        "eval/steps": 5,
    }
    assert metrics_of("evaluation.jsonl", {"step": 3, "seconds": 2.0, **measured}, EDGES) == {
        "eval/seconds": 2,
        "eval/tau": 1.3,
        "eval/tau_low": 1.2,
        "eval/tau_high": 1.4,
        "eval/tau_of_chat_x": 1.3,
        "eval/steps": 5,
    }
    nothing = {"eval/tau": None, "eval/tau_interval": None, "eval/sets": {}, "eval/prompts": 2}
    assert metrics_of("evaluation.jsonl", {"step": 3, **nothing}, EDGES) == {"eval/prompts": 2}
    assert metrics_of("gpu.jsonl", {"step": 3, "time": 1.0, "gpus": {"gpu_3": {"power_watts": 71.5}}}, EDGES) == {
        "gpu/devices": 1,
        "gpu_3/power_watts": 71.5,
    }


def test_the_targets_speed_is_what_was_drawn_and_by_how_much_the_queue_has_grown():
    rows = [
        row(step) for step in range(1, 31)
    ]  # a step: 20 tokens drawn, the queue grows by 10, 3 samples come in, half a second
    since, seen = None, {}
    for one in rows:
        metrics, since = target_speed(one, since, TOKEN_BYTES)
        seen |= {one["step"]: metrics} if metrics else {}
    expected = {
        "speed/target_samples_per_second": pytest.approx(6),
        "speed/target_tokens_per_second": pytest.approx(60),
    }
    assert seen == {11: expected, 21: expected}
    assert feature_bytes(PROVENANCE) == TOKEN_BYTES


def test_the_targets_speed_begins_anew_with_a_resumed_trainers_counts():
    _, since = target_speed(row(1), None, TOKEN_BYTES)
    _, since = target_speed(row(15) | {"time": row(1)["time"] + 1}, since, TOKEN_BYTES)
    resumed = row(16) | {"hs_in": 40, "hs_out": 2}
    metrics, since = target_speed(resumed, since, TOKEN_BYTES)
    assert metrics == {}
    assert since["in"] == 40


def test_the_whole_configuration_becomes_params_as_text_or_json():
    config = {"target": {"name": "org/x", "revision": None}, "stream": {"bucket_edges": [1, 2]}, "optim": {"lr": 1e-3}}
    assert params_of(config) == {
        "target.name": "org/x",
        "target.revision": "null",
        "stream.bucket_edges": "[1, 2]",
        "optim.lr": "0.001",
    }
    assert len(as_text(["x" * 10_000])) == 6000


def test_what_is_unknown_is_no_tag():
    assert "parent" not in tags_of(PROVENANCE)
    assert tags_of(PROVENANCE | {"parent": {"run": "r"}})["parent"] == json.dumps({"run": "r"})


@pytest.mark.parametrize(
    "text, shown",
    [
        ("http://user:pass@host:5000/x", "http://host:5000/x"),
        ("https://token@host/x", "https://host/x"),
        ("postgresql://user:p@ss/word@host/db", "postgresql://host/db"),
        ("https://host/x?api_key=SECRET&b=1", "https://host/x?api_key=***&b=1"),
        ('{"a": "http://u:p@h/", "b": "ftp://u:p@h2/"}', '{"a": "http://h/", "b": "ftp://h2/"}'),
        ("http://host:5000/x", "http://host:5000/x"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("an e-mail: a@b.c", "an e-mail: a@b.c"),
    ],
)
def test_no_secret_of_a_url_is_shown(text, shown):
    assert without_secret(text) == shown
