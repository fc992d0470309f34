import json
import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from forks import Forks, save_for_ever, until
from safetensors.torch import load_file

from dflash.checkpoint import Checkpoint, Saver, directory_of, list_checkpoints, load, newest, write


@pytest.fixture(scope="module")
def forks():
    with Forks() as server:
        yield server


def checkpoint(step: int, size: int = 100) -> Checkpoint:
    return Checkpoint({"weight": torch.full((size,), float(step))}, {"weight.step": torch.tensor(1.0)}, {"step": step})


def written(run_dir: Path, *steps: int) -> list[Path]:
    for step in steps:
        write(directory_of(run_dir, step), checkpoint(step))
    return [directory_of(run_dir, step) for step in steps]


def steps_listed(run_dir: Path) -> list[int]:
    return [load(path).state["step"] for path in list_checkpoints(run_dir)]


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


TEARS = {
    "no_manifest": lambda at: (at / "manifest.json").unlink(),
    "empty_manifest": lambda at: (at / "manifest.json").write_text(""),
    "half_a_manifest": lambda at: (at / "manifest.json").write_text((at / "manifest.json").read_text()[:80]),
    "manifest_of_binary": lambda at: (at / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "manifest_of_a_list": lambda at: (at / "manifest.json").write_text("[1, 2]"),
    "manifest_of_null": lambda at: (at / "manifest.json").write_text("null"),
    "manifest_of_numbers": lambda at: (at / "manifest.json").write_text('{"drafter.safetensors": 3}'),
    "manifest_without_a_file": lambda at: (at / "manifest.json").write_text("{}"),
    "manifest_is_a_directory": lambda at: ((at / "manifest.json").unlink(), (at / "manifest.json").mkdir()),
    "truncated_drafter": lambda at: os.truncate(at / "drafter.safetensors", 100),
    "truncated_optimizer": lambda at: os.truncate(at / "optimizer.safetensors", 0),
    "missing_drafter": lambda at: (at / "drafter.safetensors").unlink(),
    "garbage_state": lambda at: (at / "state.json").write_text("{"),
    "longer_state": lambda at: (at / "state.json").write_text((at / "state.json").read_text() + "\n"),
    "only_a_manifest": lambda at: [(at / name).unlink() for name in os.listdir(at) if name != "manifest.json"],
    "empty_directory": lambda at: [(at / name).unlink() for name in os.listdir(at)],
    "a_file": lambda at: (shutil.rmtree(at), at.write_text("")),
    "a_dangling_link": lambda at: (shutil.rmtree(at), at.symlink_to(at.parent / "gone")),
}
ALTERED = {
    "byte_of_drafter": lambda at: flip_byte(at / "drafter.safetensors"),
    "byte_of_optimizer": lambda at: flip_byte(at / "optimizer.safetensors"),
    "byte_of_state": lambda at: flip_byte(at / "state.json"),
}


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).to(torch.bfloat16)}
    state = {"step": 12, "trained": [3, 1], "shape": {"layers": 2}}
    write(directory_of(tmp_path, 12), Checkpoint(tensors, {"a.step": torch.tensor(12.0)}, state))
    read = load(directory_of(tmp_path, 12))
    assert read.state == state
    assert read.drafter.keys() == tensors.keys()
    assert all(torch.equal(read.drafter[name], tensors[name]) for name in tensors)
    assert torch.equal(read.optimizer["a.step"], torch.tensor(12.0))


def test_a_checkpoint_holds_safetensors_and_json_alone(tmp_path):
    (at,) = written(tmp_path, 5)
    assert sorted(os.listdir(at)) == ["drafter.safetensors", "manifest.json", "optimizer.safetensors", "state.json"]
    assert load_file(at / "drafter.safetensors").keys() == {"weight"}
    manifest = json.loads((at / "manifest.json").read_text())
    assert sorted(manifest) == ["drafter.safetensors", "optimizer.safetensors", "state.json"]


def test_checkpoints_are_listed_by_step(tmp_path):
    written(tmp_path, 9, 100_000_000, 10)
    assert steps_listed(tmp_path) == [9, 10, 100_000_000]
    assert newest(tmp_path) == directory_of(tmp_path, 100_000_000)


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert list_checkpoints(tmp_path) == []
    assert newest(tmp_path) is None


def test_what_is_no_checkpoint_is_not_listed(tmp_path):
    written(tmp_path, 3)
    for name in (
        ".step-00000004.partial",
        ".step-00000004.torn-17",
        "step-4",
        "step-abc",
        "step-00000005.bak",
        "notes",
    ):
        shutil.copytree(directory_of(tmp_path, 3), tmp_path / "checkpoints" / name)
    assert steps_listed(tmp_path) == [3]


@pytest.mark.parametrize("tear", TEARS.values(), ids=TEARS)
def test_a_torn_checkpoint_is_neither_listed_nor_chosen_nor_loaded(tmp_path, tear):
    good, torn = written(tmp_path, 1, 2)
    tear(torn)
    assert list_checkpoints(tmp_path) == [good]
    assert newest(tmp_path) == good
    with pytest.raises(ValueError, match=r"checkpoint .*step-00000002 cannot be used: .*; name a complete") as refusal:
        load(torn)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("alter", ALTERED.values(), ids=ALTERED)
def test_a_checkpoint_with_an_altered_byte_is_never_chosen(tmp_path, alter):
    good, altered = written(tmp_path, 1, 2)
    alter(altered)
    assert newest(tmp_path) == good
    with pytest.raises(ValueError, match="does not have the sha256 of its manifest"):
        load(altered)


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"manifest\.json is missing"):
        load(tmp_path / "nowhere")


def test_a_complete_checkpoint_is_never_written_over(tmp_path):
    (at,) = written(tmp_path, 4)
    with pytest.raises(AssertionError):
        write(at, checkpoint(5))
    assert load(at).state == {"step": 4}


def test_a_torn_checkpoint_is_kept_aside_when_its_step_is_saved_again(tmp_path):
    (at,) = written(tmp_path, 4)
    os.truncate(at / "drafter.safetensors", 10)
    written(tmp_path, 4)
    assert steps_listed(tmp_path) == [4]
    (torn,) = (tmp_path / "checkpoints").glob(".step-00000004.torn-*")
    assert (torn / "drafter.safetensors").stat().st_size == 10


def test_what_a_killed_save_left_is_cleared_away_by_the_next_save_of_any_step(tmp_path):
    for left in (".step-00000003.partial", ".step-00000004.partial"):
        (tmp_path / "checkpoints" / left).mkdir(parents=True)
        (tmp_path / "checkpoints" / left / "drafter.safetensors").write_text("half")
    written(tmp_path, 4)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000004"]


def test_a_process_killed_in_the_middle_of_a_save_leaves_only_complete_checkpoints(tmp_path, forks):
    draw, inside = random.Random(0), 0
    for life in range(25):
        before = len(list_checkpoints(tmp_path))
        child = forks.start(save_for_ever, stderr=tmp_path / "stderr", run_dir=str(tmp_path))
        until(lambda before=before: len(list_checkpoints(tmp_path)) > before)
        until(lambda: list(tmp_path.glob("checkpoints/.step-*.partial/*")))
        time.sleep(draw.random() * 0.01)
        os.kill(child.pid, 9)
        assert child.wait() == -9
        inside += bool(list(tmp_path.glob("checkpoints/.step-*.partial")))
        found = list_checkpoints(tmp_path)
        assert len(found) > life
        assert sorted(tmp_path.glob("checkpoints/step-*")) == found
        assert load(found[-1]).state["step"] == len(found)
        assert newest(tmp_path) == found[-1]
    assert inside > 5


# ---------------------------------------------------------------- Saver


def save(saver: Saver, step: int, *, size: int = 100) -> None:
    module = torch.nn.Linear(size, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(step)
    saver.save(step, module.state_dict(), {"weight.step": torch.tensor(float(step))}, {"step": step})


def weight_of(at: Path) -> torch.Tensor:
    return load(at).drafter["weight"]


def test_save_returns_before_the_write_ends_and_saves_the_values_it_was_given(tmp_path):
    module, moment = torch.nn.Linear(8_000_000, 1, bias=False), torch.ones(1000)
    module.weight.data.fill_(1.0)
    at = directory_of(tmp_path, 1)
    with Saver(tmp_path, keep=None) as saver:
        saver.save(1, module.state_dict(), {"moment": moment}, {"step": 1})
        returned_before = not at.exists() and "saver" in [thread.name for thread in threading.enumerate()]
        module.weight.data.fill_(2.0)  # the next step
        moment.fill_(2.0)
    assert returned_before
    assert bool((weight_of(at) == 1.0).all())
    assert bool((load(at).optimizer["moment"] == 1.0).all())


def test_every_save_is_on_the_disk_at_the_end(tmp_path):
    with Saver(tmp_path, keep=None) as saver:
        for step in (1, 2, 5):
            save(saver, step)
    assert steps_listed(tmp_path) == [1, 2, 5]


def test_wait_returns_with_the_checkpoint_complete(tmp_path):
    with Saver(tmp_path, keep=None) as saver:
        save(saver, 1, size=1_000_000)
        saver.wait()
        assert steps_listed(tmp_path) == [1]


@pytest.mark.parametrize("how", ["check", "save", "wait", "end"])
def test_a_write_that_failed_raises_at_the_next_occasion(tmp_path, how):
    (tmp_path / "checkpoints").write_text("a file where the directory should be")
    with pytest.raises(OSError, match="checkpoints"):
        with Saver(tmp_path, keep=None) as saver:
            save(saver, 1)
            if how == "check":
                until(lambda: "saver" not in [thread.name for thread in threading.enumerate()])
                saver.check()
            elif how == "save":
                save(saver, 2)
            elif how == "wait":
                saver.wait()
            if how != "end":
                pytest.fail("nothing was raised")


def test_an_error_of_the_run_is_not_hidden_by_one_of_the_saver(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the directory should be")
    with pytest.raises(KeyError, match="the cause"), Saver(tmp_path, keep=None) as saver:
        save(saver, 1)
        raise KeyError("the cause")


def test_an_error_of_the_run_does_not_cut_off_a_write(tmp_path):
    with pytest.raises(KeyError), Saver(tmp_path, keep=None) as saver:
        save(saver, 1, size=1_000_000)
        raise KeyError
    assert steps_listed(tmp_path) == [1]


def test_without_keep_nothing_is_ever_deleted(tmp_path):
    with Saver(tmp_path, keep=None) as saver:
        for step in range(1, 12):
            save(saver, step)
    assert steps_listed(tmp_path) == list(range(1, 12))


def test_keep_deletes_the_runs_own_older_checkpoints_alone(tmp_path):
    ours, theirs = tmp_path / "dflash-0002", tmp_path / "dflash-0001"
    written(theirs, 1, 2, 3)
    written(ours, 1)  # of this run's life before a crash
    (ours / "checkpoints" / "notes").mkdir()
    with Saver(ours, keep=2) as saver:
        for step in (2, 3, 4):
            save(saver, step)
            saver.wait()
            assert len(list_checkpoints(ours)) == 2
    assert steps_listed(ours) == [3, 4]
    assert (ours / "checkpoints" / "notes").exists()
    assert steps_listed(theirs) == [1, 2, 3]


@pytest.mark.parametrize("saved_again", [20, 15], ids=["the_altered_step", "a_step_before_it"])
def test_keep_never_deletes_the_newest_good_checkpoint_for_an_altered_one(tmp_path, saved_again):
    good, altered = written(tmp_path, 10, 20)
    flip_byte(altered / "drafter.safetensors")
    assert newest(tmp_path) == good
    with Saver(tmp_path, keep=1) as saver:  # the run went on from step 10
        save(saver, saved_again)
    assert newest(tmp_path) == directory_of(tmp_path, saved_again)
    assert bool((weight_of(directory_of(tmp_path, saved_again)) == saved_again).all())
    assert not good.exists()
