"""The gate: what is champion is shown to be better, and nothing else is."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.register import comparable, judge
from tasks.registry import Champion

CHAMPION = Champion(version=7, run_id="r", tags={}, directory=Path("champion"))
LEAST = 1e-12


def result(**overall: Any) -> dict[str, Any]:
    """What `python -m dflash.evaluate` writes, as far as the gate reads it."""
    return {"overall": {"tau": 2.5, "tau_interval": [2.0, 3.0], "prompts": 12, **overall}}


@pytest.mark.parametrize(
    ("interval", "better"),
    [([1 + LEAST, 1.2], True), ([1.0, 1.2], False), ([1.0, 1.0], False), ([2.0, 3.0], True)],
)
def test_a_first_version_has_to_beat_plain_decoding_with_its_whole_interval(interval, better):
    promoted, reason = judge(result(tau=1.1, tau_interval=interval), None)
    assert promoted == better
    words = "better than plain decoding (1 token a forward)"
    ends = "{:.3f} to {:.3f}".format(*interval)
    assert reason == f"tau 1.100 (95 % interval {ends}): {words if better else f'not shown to be {words}'}"


@pytest.mark.parametrize(
    ("difference", "interval", "better"),
    [
        (0.2, [LEAST, 0.4], True),
        (0.2, [0.0, 0.4], False),
        (0.2, [-LEAST, 0.4], False),
        (0.0, [0.0, 0.0], False),
        (-0.5, [-0.7, -0.3], False),
        (0.5, [0.3, 0.7], True),
    ],
)
def test_a_later_version_has_to_beat_the_champion_in_the_paired_difference(difference, interval, better):
    # its own interval is far above 1 in either case
    promoted, reason = judge(result(difference=difference, difference_interval=interval), CHAMPION)
    assert promoted == better
    assert f"tau 2.500, difference {difference:+.3f} (95 % interval" in reason
    assert ("not shown to be better than" in reason) != better
    assert reason.endswith("better than the champion, version 7, on the same 12 prompts")


def test_without_an_interval_nothing_is_shown():
    for overall, champion in (
        ({"tau_interval": None}, None),
        ({"difference": 1.0, "difference_interval": None}, CHAMPION),
    ):
        promoted, reason = judge(result(prompts=1, **overall), champion)
        assert not promoted
        assert reason.startswith("tau 2.500; ")
        assert "give more prompts" in reason


@pytest.mark.parametrize("champion", [None, CHAMPION])
def test_replies_of_one_token_show_nothing_and_do_not_break_the_gate(champion):
    nothing = {"tau": None, "tau_interval": None, "difference": None, "difference_interval": None}
    promoted, reason = judge(result(**nothing), champion)
    assert not promoted
    assert reason.startswith("no tau: every reply is one token")


def export(directory: Path, sha256: str, name: str = "org/target") -> Path:
    directory.mkdir()
    (directory / "dflash.json").write_text(json.dumps({"target": {"name": name, "sha256": sha256}}))
    return directory


def test_a_champion_for_the_same_weights_is_compared_whatever_they_are_called(tmp_path):
    ours, theirs = export(tmp_path / "ours", "a" * 64, "/models/target"), export(tmp_path / "theirs", "a" * 64)
    champion = Champion(version=7, run_id="r", tags={}, directory=theirs)
    assert comparable(ours, champion) == champion
    assert comparable(ours, None) is None


def test_a_champion_for_other_weights_is_not_compared_and_what_to_do_is_said(tmp_path):
    ours, theirs = export(tmp_path / "ours", "a" * 64), export(tmp_path / "theirs", "b" * 64)
    champion = Champion(version=7, run_id="r", tags={}, directory=theirs)
    with pytest.raises(ValueError, match="version 7, was trained for other weights of org/target.*delete the alias"):
        comparable(ours, champion)
