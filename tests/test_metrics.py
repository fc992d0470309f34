import json
import math
import os
import random
import sys
import threading
from pathlib import Path

import pytest

from dflash.metrics import Cursor, MetricsFile, read_rows


def write(path: Path, steps: range, *, after_step: int = 0, **more) -> None:
    with MetricsFile(path, after_step=after_step) as metrics:
        for step in steps:
            metrics.write({"step": step, **more})


def steps_of(rows: list[dict]) -> list[int]:
    return [row["step"] for row in rows]


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [{"step": step, "loss": 1 / step, "samples": [step, 7], "dropped": {"not finite": 1}} for step in (1, 2, 5)]
    with MetricsFile(tmp_path / "metrics.jsonl", after_step=0) as metrics:
        for row in rows:
            metrics.write(row)
    assert read_rows(tmp_path / "metrics.jsonl")[0] == rows


def test_a_row_is_on_its_way_to_the_reader_before_the_next_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, after_step=0) as metrics:
        for step in (1, 2, 3):
            metrics.write({"step": step})
            assert steps_of(read_rows(path)[0]) == list(range(1, step + 1))


def test_a_step_that_does_not_increase_is_our_own_mistake(tmp_path):
    write(tmp_path / "metrics.jsonl", range(1, 4))
    with MetricsFile(tmp_path / "metrics.jsonl", after_step=3) as metrics:
        for step in (3, 2):
            with pytest.raises(AssertionError):
                metrics.write({"step": step})
        metrics.write({"step": 4})
    assert steps_of(read_rows(tmp_path / "metrics.jsonl")[0]) == [1, 2, 3, 4]


def test_numbers_that_are_not_finite_become_null_at_any_depth(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 2), loss=math.nan, slots=[math.inf, 0.5, [-math.inf]], of={"head": math.nan}, count=3)
    row = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert row == {"step": 1, "loss": None, "slots": [None, 0.5, [None]], "of": {"head": None}, "count": 3}


def test_a_resumed_run_cuts_the_rows_of_steps_that_it_takes_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 11), life=1)
    write(path, range(7, 9), after_step=6, life=2)
    rows = read_rows(path)[0]
    assert steps_of(rows) == list(range(1, 9))
    assert [row["life"] for row in rows] == [1] * 6 + [2] * 2


def test_a_resumed_run_cuts_a_half_written_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    with open(path, "ab") as file:
        file.write(b'{"step": 4, "lo')
    write(path, range(4, 5), after_step=3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_half_written_row_is_not_read_until_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3))
    rows, cursor = read_rows(path)
    line = json.dumps({"step": 3, "text": "zwölf"}, ensure_ascii=False).encode() + b"\n"
    for byte in line:
        assert read_rows(path, cursor) == ([], cursor)
        with open(path, "ab") as file:
            file.write(bytes([byte]))
    rows, cursor = read_rows(path, cursor)
    assert rows == [{"step": 3, "text": "zwölf"}]
    assert cursor == Cursor(path.stat().st_size, 3)


def test_no_file_yet_is_no_rows(tmp_path):
    assert read_rows(tmp_path / "metrics.jsonl") == ([], Cursor())
    assert read_rows(tmp_path / "metrics.jsonl", Cursor(100, 3)) == ([], Cursor(100, 3))


def test_a_reader_that_failed_reads_the_same_rows_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6))
    cursor = read_rows(path)[1]
    write(path, range(6, 9), after_step=5)
    first = read_rows(path, cursor)
    assert steps_of(first[0]) == [6, 7, 8]
    assert read_rows(path, cursor) == first


@pytest.mark.parametrize("resumed_at", [0, 3, 9, 10])
@pytest.mark.parametrize("longer", [0, 37], ids=["rows_of_equal_length", "longer_rows"])
def test_a_cut_and_regrown_file_gives_no_row_twice_and_none_torn(tmp_path, resumed_at, longer):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 11), text="x")
    rows, cursor = read_rows(path)
    assert steps_of(rows) == list(range(1, 11))
    # regrown beyond the reader's offset, so that the offset alone would point into a row or between two of them
    write(path, range(resumed_at + 1, 31), after_step=resumed_at, text="x" * (1 + longer))
    assert path.stat().st_size > cursor.offset
    rows, cursor = read_rows(path, cursor)
    assert steps_of(rows) == list(range(11, 31))
    assert cursor == Cursor(path.stat().st_size, 30)
    assert read_rows(path, cursor) == ([], cursor)


def test_a_reader_whose_file_is_cut_below_its_place_waits_for_new_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 11))
    _, cursor = read_rows(path)
    write(path, range(4, 6), after_step=3)
    rows, cursor = read_rows(path, cursor)
    assert rows == []
    write(path, range(6, 13), after_step=5)
    assert steps_of(read_rows(path, cursor)[0]) == [11, 12]


def test_a_row_longer_than_the_readers_look_back_is_read_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3), text="x" * (3 << 19))
    rows, cursor = read_rows(path)
    assert steps_of(rows) == [1, 2]
    assert steps_of(read_rows(path, cursor)[0]) == []
    write(path, range(3, 4), after_step=2)
    assert steps_of(read_rows(path, cursor)[0]) == [3]


def test_a_reader_beside_runs_that_crash_and_resume_sees_only_whole_rows_in_order(tmp_path):
    path, done, draw = tmp_path / "metrics.jsonl", threading.Event(), random.Random(0)
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that the writer comes between any two actions of the reader

    def live_and_crash() -> None:
        step = 0
        for life in range(300):
            with MetricsFile(path, after_step=max(0, step - draw.randrange(8))) as metrics:
                for step in range(max(1, metrics.last_step + 1), metrics.last_step + draw.randrange(3, 12)):
                    metrics.write({"step": step, "life": life, "text": "x" * draw.randrange(60)})
            if draw.random() < 0.5:
                with open(path, "ab") as file:
                    file.write(b'{"step": 9')
        done.set()

    writer = threading.Thread(target=live_and_crash)
    writer.start()
    try:
        steps, cursor = [0], Cursor()
        while not done.is_set() or cursor.offset == 0:
            rows, cursor = read_rows(path, cursor)
            for row in rows:
                assert row["step"] > steps[-1]
                steps.append(row["step"])
    finally:
        writer.join()
        sys.setswitchinterval(switching)
    assert len(steps) > 100


def test_the_writer_replaces_the_file_at_once_when_it_cuts_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 11))
    with open(path, "rb") as old:  # a reader that has it open keeps the whole old file
        write(path, range(3, 4), after_step=2)
        assert old.read().count(b"\n") == 10
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
