"""The store of answers: nothing lost, nothing twice, whatever dies and whoever works beside. Other processes are real ones."""

import hashlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dflash.answer_store import AnswerStore, set_aside

KEY: dict[str, Any] = {"target": {"name": "tiny", "layers": 2}, "temperature": 0.0, "system_prompt": None}
TEXTS = ["plain", "Zwölf\nZeilen\r\n", "\u2028\x00\x7f", "京🚲", "\ud800 alone", '"\\"', "", "x" * 5000]


def key_of(index: int) -> str:
    return hashlib.sha256(str(index).encode()).hexdigest()[:32]


def record_of(index: int) -> dict[str, Any]:
    return {"key": key_of(index), "index": index, "messages": [{"role": "user", "content": TEXTS[index % len(TEXTS)]}]}


def filled(root: Path, indices: range) -> Path:
    """A store's directory with the records of `indices` in a shard of its own."""
    with AnswerStore(root, KEY) as store:
        for index in indices:
            assert store.claim(key_of(index))
            store.write(record_of(index))
    return store.directory


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("shard-*.jsonl"))


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for shard in shards(directory) for line in shard.read_bytes().splitlines()]


# ---------------------------------------------------------------- other processes


def hold(root: str, index: str) -> None:
    """Claims a prompt and keeps the claim until killed."""
    with AnswerStore(Path(root), KEY) as store:
        print(store.claim(key_of(int(index))), flush=True)
        signal.pause()


def write_until_full(root: str, size: str) -> None:
    """Writes records until the disk is full: no file grows beyond `size` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), resource.RLIM_INFINITY))
    with AnswerStore(Path(root), KEY) as store:
        for index in range(1000):
            if key_of(index) not in store and store.claim(key_of(index)):
                store.write(record_of(index))
                print(index, flush=True)


def answer_all(root: str, count: str, seed: str) -> None:
    """Answers what nobody else does, as regenerate does: claim, look again, write; at a random pace."""
    draw = random.Random(int(seed))
    with AnswerStore(Path(root), KEY) as store:
        for index in range(int(count)):
            if not store.claim(key_of(index)):
                continue
            store.refresh()
            if key_of(index) in store:
                store.release(key_of(index))
            else:
                time.sleep(draw.random() / 500)
                store.write(record_of(index))


def enter_often(root: str, begin: str) -> None:
    """Opens the store again and again, from a common moment on."""
    time.sleep(max(0.0, float(begin) - time.time()))
    for _ in range(200):
        with AnswerStore(Path(root), KEY):
            pass


def idle_in(root: str) -> None:
    """Has the store open and answers nothing, until killed."""
    with AnswerStore(Path(root), KEY):
        print("open", flush=True)
        signal.pause()


def write_and_look(root: str) -> None:
    """Opens the store again and again; what it writes must lie in the store's directory for as long as it is open."""
    for index in range(60):
        with AnswerStore(Path(root), KEY) as store:
            if store.claim(key_of(index)):
                store.write(record_of(index))
                assert record_of(index)["index"] in [line["index"] for line in lines_of(store.directory)]


def start(function: Any, *arguments: Any) -> subprocess.Popen:
    command = [sys.executable, __file__, function.__name__, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@contextmanager
def claiming(root: Path, index: int) -> Iterator[tuple[subprocess.Popen, bool]]:
    """Another process that has tried to claim a prompt, and whether it got it."""
    process = start(hold, root, index)
    try:
        assert process.stdout is not None
        yield process, {"True\n": True, "False\n": False}[process.stdout.readline()]
    finally:
        process.kill()
        process.communicate()


@contextmanager
def holder(root: Path, index: int) -> Iterator[subprocess.Popen]:
    """Another process that has claimed a prompt."""
    with claiming(root, index) as (process, has_it):
        assert has_it
        yield process


@contextmanager
def idle(root: Path) -> Iterator[subprocess.Popen]:
    """Another process that has the store open and no claim."""
    process = start(idle_in, root)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
    finally:
        process.kill()
        process.communicate()


# ---------------------------------------------------------------- what is kept


def test_records_come_back_as_they_were_in_any_order_from_any_shard(tmp_path):
    for first in (0, 20, 40):
        directory = filled(tmp_path, range(first, first + 20))
    assert len(shards(directory)) == 3
    with AnswerStore(tmp_path, KEY) as store:
        order = list(range(60))
        random.Random(0).shuffle(order)
        for index in order:
            assert key_of(index) in store
            assert store.read(key_of(index)) == record_of(index)
        assert key_of(60) not in store


def test_what_was_just_written_is_read_back_between_writes(tmp_path):
    with AnswerStore(tmp_path, KEY) as store:
        for index in range(10):
            store.write(record_of(index))
            store.refresh()
            assert [store.read(key_of(old)) for old in range(index + 1)] == [record_of(old) for old in range(index + 1)]


def test_a_store_that_answers_nothing_leaves_no_shard(tmp_path):
    directory = filled(tmp_path, range(3))
    before = {path: path.read_bytes() for path in shards(directory)}
    assert filled(tmp_path, range(0)) == directory
    assert {path: path.read_bytes() for path in shards(directory)} == before


def test_the_directory_is_named_after_everything_that_answers_depend_on(tmp_path):
    others = [
        KEY | {"temperature": 0.5},
        KEY | {"system_prompt": "Be kind."},
        KEY | {"target": {"name": "tiny", "layers": 3}},
        KEY | {"new": None},
        {name: KEY[name] for name in KEY if name != "system_prompt"},
    ]
    directories = [AnswerStore(tmp_path, key).directory for key in (KEY, *others)]
    assert len(set(directories)) == len(directories)
    reordered = {"system_prompt": None, "temperature": 0.0, "target": {"layers": 2, "name": "tiny"}}
    assert AnswerStore(tmp_path, reordered).directory == directories[0]
    filled(tmp_path, range(2))
    assert json.loads((directories[0] / "key.json").read_text()) == KEY
    with AnswerStore(tmp_path, others[0]) as store:
        assert key_of(0) not in store


# ---------------------------------------------------------------- kills


def test_a_line_torn_at_any_byte_is_no_answer_and_costs_no_other(tmp_path):
    """Also in the midst of a character."""
    directory = filled(tmp_path, range(4))
    (shard,) = shards(directory)
    whole = shard.read_bytes()
    last = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    assert "京🚲".encode() in whole[last:]
    for cut in range(last, len(whole)):
        shard.write_bytes(whole[:cut])
        with AnswerStore(tmp_path, KEY) as store:
            assert [index for index in range(5) if key_of(index) in store] == [0, 1, 2], cut
            assert store.read(key_of(2)) == record_of(2)
    shard.write_bytes(whole[: last + 40])
    filled(tmp_path, range(3, 6))  # goes on in a shard of its own, not behind the torn line
    with AnswerStore(tmp_path, KEY) as store:
        assert [store.read(key_of(index)) for index in range(6)] == [record_of(index) for index in range(6)]


def test_a_line_that_is_whole_but_damaged_is_refused_by_its_place(tmp_path):
    directory = filled(tmp_path, range(3))
    (shard,) = shards(directory)
    lines = shard.read_bytes().splitlines(keepends=True)
    for damaged in (b"\x00" * 20 + b"\n", b"[1]\n", lines[1][:30] + lines[2]):
        shard.write_bytes(lines[0] + damaged + lines[2])
        with pytest.raises(ValueError, match="^" + re.escape(f"{shard}, at byte {len(lines[0])}: ") + ".*; delete it"):
            AnswerStore(tmp_path, KEY).__enter__()


def test_a_full_disk_stops_the_writer_with_the_cause_and_the_next_one_goes_on(tmp_path):
    process = start(write_until_full, tmp_path, 20_000)
    stdout, stderr = process.communicate()
    assert process.returncode == 1
    kept = len(stdout.split())
    assert kept > 8
    cause = stderr.strip().splitlines()[-1]
    assert "disk is full" in cause or "File too large" in cause
    (shard,) = shards(next(path.parent for path in tmp_path.glob("*/key.json")))
    assert str(shard) in cause
    with AnswerStore(tmp_path, KEY) as store:
        assert [index for index in range(1000) if key_of(index) in store] == list(range(kept))
    directory = filled(tmp_path, range(kept, kept + 3))
    with AnswerStore(tmp_path, KEY) as store:
        assert [store.read(key_of(index)) for index in range(kept + 3)] == [record_of(i) for i in range(kept + 3)]
    assert len(shards(directory)) == 2


# ---------------------------------------------------------------- several processes


def test_a_claim_excludes_other_processes_until_it_is_released_or_its_holder_dies(tmp_path):
    with AnswerStore(tmp_path, KEY) as store, holder(tmp_path, 1) as other:
        assert not store.claim(key_of(1))
        assert not store.claim(key_of(1))
        assert all(store.claim(key_of(index)) for index in range(2, 50))  # of the same length and alike
        store.release(key_of(2))
        store.write(record_of(3))
        for index in (2, 3):
            with holder(tmp_path, index):
                assert not store.claim(key_of(index))
        with claiming(tmp_path, 4) as (_, has_it):
            assert not has_it
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert store.claim(key_of(1))


def test_the_same_prompt_under_another_key_is_not_excluded(tmp_path):
    with AnswerStore(tmp_path, KEY | {"seed": 1}) as store, holder(tmp_path, 1):
        assert store.claim(key_of(1))


def test_a_refresh_sees_what_others_have_written_since_and_not_what_they_are_writing(tmp_path):
    directory = filled(tmp_path, range(2))
    (shard,) = shards(directory)
    with AnswerStore(tmp_path, KEY) as store:
        line = json.dumps(record_of(2)).encode() + b"\n"
        for part in (line[:10], line[10:-1]):
            with shard.open("ab") as file:
                file.write(part)
            store.refresh()
            assert key_of(2) not in store
        with shard.open("ab") as file:
            file.write(line[-1:])
        (directory / "shard-new.jsonl").write_bytes(json.dumps(record_of(3)).encode() + b"\n")
        assert key_of(2) not in store
        store.refresh()
        assert [store.read(key_of(index)) for index in range(4)] == [record_of(index) for index in range(4)]


def test_processes_that_work_at_once_do_every_prompt_once(tmp_path):
    count = 250
    workers = [start(answer_all, tmp_path, count, seed) for seed in range(4)]
    for worker in workers:
        _, stderr = worker.communicate()
        assert worker.returncode == 0, stderr
    (directory,) = {path.parent for path in tmp_path.glob("*/shard-*")}
    assert Counter(record["index"] for record in lines_of(directory)) == Counter(range(count))
    assert len(shards(directory)) > 1


def test_processes_may_open_a_store_at_the_same_moment(tmp_path):
    begin = time.time() + 1.0  # after the slowest import; later ones only meet fewer others
    openers = [start(enter_often, tmp_path, begin) for _ in range(3)]
    for opener in openers:
        _, stderr = opener.communicate()
        assert opener.returncode == 0, stderr
    (key_file,) = tmp_path.glob("*/key.json")
    assert json.loads(key_file.read_text()) == KEY


def test_a_store_that_is_set_aside_keeps_every_record_and_a_new_one_begins_empty(tmp_path):
    assert set_aside(tmp_path, KEY) is None
    directory = filled(tmp_path, range(5))
    before = lines_of(directory)
    aside = set_aside(tmp_path, KEY)
    assert aside is not None
    assert re.fullmatch(rf"{directory.name}\.until-\d{{8}}T\d{{6}}\.\d{{6}}Z", aside.name)
    assert lines_of(aside) == before
    assert not directory.exists()
    with AnswerStore(tmp_path, KEY) as store:
        assert key_of(0) not in store
    assert set_aside(tmp_path, KEY) not in (None, aside)  # a name that is not there yet


@pytest.mark.parametrize("claims", [True, False], ids=["with_a_claim", "without_a_claim"])
def test_a_store_that_another_process_has_open_is_not_set_aside(tmp_path, claims):
    filled(tmp_path, range(2))
    with holder(tmp_path, 7) if claims else idle(tmp_path) as process:
        with pytest.raises(
            ValueError, match=rf"cannot be set aside, process {process.pid} is making answers in it; stop"
        ):
            set_aside(tmp_path, KEY)
        assert [path.name for path in tmp_path.iterdir()] == [AnswerStore(tmp_path, KEY).directory.name]
    assert set_aside(tmp_path, KEY) is not None


def test_no_store_is_set_aside_under_a_process_that_opens_it_at_that_moment(tmp_path):
    processes = [start(write_and_look, tmp_path) for _ in range(2)]
    asides = 0
    while any(process.poll() is None for process in processes):
        with suppress(ValueError):  # one of them has it open
            asides += set_aside(tmp_path, KEY) is not None
        time.sleep(0.001)
    assert [process.communicate()[1] for process in processes] == ["", ""]
    assert asides > 0


@pytest.mark.parametrize("obstacle", ["a file", "a file above", "claims no file", "key no file", "read-only"])
def test_a_directory_that_cannot_be_written_is_refused_in_one_line(tmp_path, obstacle):
    root = tmp_path / "answers"
    directory = AnswerStore(root, KEY).directory
    if obstacle == "a file":
        root.write_text("")
    elif obstacle == "a file above":
        root = root / "deeper"
        root.parent.write_text("")
    elif obstacle == "read-only":
        root = Path("/proc/answers")
    else:
        (directory / {"claims no file": "claims", "key no file": "key.json"}[obstacle]).mkdir(parents=True)
    with pytest.raises(ValueError, match=f"^regenerate.out={root}: .*; give a directory that can be written$") as error:
        AnswerStore(root, KEY).__enter__()
    assert "Errno" not in str(error.value)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
