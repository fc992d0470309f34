import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash import config as configuration
from dflash.config import Config
from dflash.files import write_json
from dflash.run_dir import (
    create_run,
    declare_crashed,
    only_trainer,
    read_config,
    read_status,
    trainer_of,
    write_status,
)

CREATE_MANY = """
import sys, time
from pathlib import Path
from dflash import config as configuration
from dflash.run_dir import create_run
values = {"target": {"name": "t"}, "data": {"path": "d"}, "run": {"root": sys.argv[1], "name": "race"}}
config = configuration.parse(values)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[2])):
    print(create_run(config).name, flush=True)
"""
HOLD = """
import sys
from pathlib import Path
from dflash.run_dir import only_trainer, write_status
with only_trainer(Path(sys.argv[1])):
    write_status(Path(sys.argv[1]), state="running", step=3)
    print("held", flush=True)
    sys.stdin.readline()
"""


HOLD_IN_SILENCE = """
import sys
from pathlib import Path
from dflash.run_dir import only_trainer
with only_trainer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""
LOOK = """
import sys
from pathlib import Path
from dflash.run_dir import declare_crashed, trainer_of
print("ready", flush=True)
while True:
    trainer_of(Path(sys.argv[1]))
    declare_crashed(Path(sys.argv[1]), "never")
"""


def config(root: Path, **run) -> Config:
    return configuration.parse({"target": {"name": "t"}, "data": {"path": "d"}, "run": {"root": str(root), **run}})


def python(code: str, *arguments: str) -> subprocess.Popen:
    """A process at its first output line, waiting for a line on stdin."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() in ("ready", "held")
    return process


def test_a_new_run_has_the_next_number_and_its_frozen_configuration(tmp_path):
    first, second = create_run(config(tmp_path, seed=3)), create_run(config(tmp_path, name="other"))
    assert (first.name, second.name) == ("dflash-0001", "other-0001")
    assert create_run(config(tmp_path)).name == "dflash-0002"
    assert read_config(first).run.seed == 3
    assert read_status(first)["state"] == "created"


def test_a_name_that_begins_with_another_name_counts_for_itself(tmp_path):
    create_run(config(tmp_path, name="a"))
    assert create_run(config(tmp_path, name="a-0001")).name == "a-0001-0001"
    assert create_run(config(tmp_path, name="a")).name == "a-0002"


def test_a_number_is_not_used_again_after_its_directory_was_deleted(tmp_path):
    names = []
    for _ in range(4):
        run_dir = create_run(config(tmp_path))
        names.append(run_dir.name)
        for path in sorted(run_dir.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        run_dir.rmdir()
    assert names == ["dflash-0001", "dflash-0002", "dflash-0003", "dflash-0004"]


def test_directories_that_came_from_elsewhere_are_counted_and_never_written_to(tmp_path):
    (tmp_path / "dflash-0041").mkdir()
    (tmp_path / "dflash-0041/notes").write_text("mine")
    (tmp_path / "dflash-x").mkdir()
    assert create_run(config(tmp_path)).name == "dflash-0042"
    assert os.listdir(tmp_path / "dflash-0041") == ["notes"]


def test_a_number_above_9999_has_five_digits(tmp_path):
    (tmp_path / "dflash-9999").mkdir()
    assert [create_run(config(tmp_path)).name for _ in range(2)] == ["dflash-10000", "dflash-10001"]


def test_processes_that_create_runs_at_the_same_moment_get_different_directories(tmp_path):
    each, processes = 40, [python(CREATE_MANY, str(tmp_path), "40") for _ in range(3)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    names = [name for process in processes for name in process.communicate(timeout=120)[0].split()]
    assert sorted(names) == [f"race-{number:04d}" for number in range(1, 3 * each + 1)]
    assert all((tmp_path / name / "config.json").exists() for name in names)


def test_threads_that_create_runs_at_the_same_moment_get_different_directories(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        names = [run_dir.name for run_dir in pool.map(lambda _: create_run(config(tmp_path)), range(80))]
    assert sorted(names) == [f"dflash-{number:04d}" for number in range(1, 81)]


def test_local_paths_are_frozen_as_absolute_ones(tmp_path):
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        (tmp_path / "model").mkdir()
        values = {"target": {"name": "model"}, "data": {"path": "d.jsonl"}, "run": {"root": "runs"}}
        frozen = read_config(create_run(configuration.parse(values)))
    finally:
        os.chdir(here)
    assert frozen.target.name == str(tmp_path / "model")
    assert frozen.data.path == str(tmp_path / "d.jsonl")
    assert frozen.data.prepared_dir == str(tmp_path / "prepared")


def test_a_root_that_is_a_file_is_refused_with_its_name(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(ValueError, match=r"run\.root=.*runs: File exists; give a directory"):
        create_run(config(tmp_path / "runs"))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"target": {"name": "t"}, "dat": {}}'])
def test_a_directory_without_a_usable_configuration_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="not a run directory"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="."):
        read_config(tmp_path)


def test_a_second_trainer_in_a_run_directory_is_refused_with_the_pid_of_the_first(tmp_path):
    run_dir = create_run(config(tmp_path))
    first = python(HOLD, str(run_dir))
    try:
        with pytest.raises(ValueError, match=f"is being trained by process {first.pid}; stop"), only_trainer(run_dir):
            pass
    finally:
        first.kill()
        first.communicate()
    with only_trainer(run_dir):  # the kernel lets go of a killed process' lock
        pass


def test_a_trainer_s_pid_is_known_before_its_first_status_and_while_it_lives_only(tmp_path):
    run_dir = create_run(config(tmp_path))  # whose status names the creator
    assert trainer_of(run_dir) is None
    trainer = python(HOLD_IN_SILENCE, str(run_dir))
    try:
        assert read_status(run_dir)["pid"] == os.getpid()
        assert trainer_of(run_dir) == trainer.pid
    finally:
        trainer.kill()
        trainer.communicate()
    assert (run_dir / ".lock").read_text().strip() == str(trainer.pid)  # left behind, and not believed
    assert trainer_of(run_dir) is None
    with only_trainer(run_dir):
        assert trainer_of(run_dir) == os.getpid()
    assert trainer_of(run_dir) is None


def test_a_pid_that_a_dead_trainer_left_behind_is_never_taken_for_the_holder_of_the_lock(tmp_path):
    run_dir = create_run(config(tmp_path))
    bystander = python("print('ready', flush=True); input()")
    with only_trainer(run_dir):
        (run_dir / ".lock").write_text(str(bystander.pid))
        with pytest.raises(ValueError, match="held by a process that cannot be seen from here"):
            trainer_of(run_dir)
    bystander.kill()
    bystander.communicate()


def test_whoever_looks_at_a_run_never_keeps_a_trainer_out_of_it(tmp_path):
    run_dir = create_run(config(tmp_path))
    write_status(run_dir, state="finished", step=9)
    lookers = [python(LOOK, str(run_dir)) for _ in range(2)]
    try:
        for _ in range(300):
            with only_trainer(run_dir):
                pass
    finally:
        for looker in lookers:
            assert looker.poll() is None
            looker.kill()
            looker.communicate()


def test_a_run_whose_trainer_was_killed_is_declared_crashed_and_keeps_all_else_that_it_said(tmp_path):
    run_dir = create_run(config(tmp_path))
    trainer = python(HOLD, str(run_dir))
    assert not declare_crashed(run_dir, "it lives")
    assert read_status(run_dir)["state"] == "running"
    trainer.kill()
    trainer.communicate()
    before = read_status(run_dir)
    assert declare_crashed(run_dir, "killed by signal 9")
    after = read_status(run_dir)
    changed = {"state": "crashed", "reason": "killed by signal 9", "time": after["time"]}
    assert after == before | changed
    assert (after["step"], after["pid"]) == (3, trainer.pid)
    assert not declare_crashed(run_dir, "again")
    assert read_status(run_dir) == after


@pytest.mark.parametrize("state", ["created", "starting", "running", "finished", "stopped", "failed", "refused"])
def test_a_run_that_has_said_how_it_ended_is_not_declared_crashed(tmp_path, state):
    write_status(tmp_path, state=state, step=4, reason="its own", best=2)
    alive = state in ("created", "starting", "running")
    assert declare_crashed(tmp_path, "gone") == alive
    status = read_status(tmp_path)
    assert (status["state"], status["reason"]) == (("crashed", "gone") if alive else (state, "its own"))
    assert (status["step"], status["best"]) == (4, 2)


def test_a_status_is_replaced_as_a_whole(tmp_path):
    write_status(tmp_path, state="running", step=3, loss=0.5)
    with open(tmp_path / "status.json") as old:
        write_status(tmp_path, state="failed", step=4, reason="why")
        assert json.loads(old.read())["state"] == "running"
    status = read_status(tmp_path)
    assert (status["state"], status["step"], status["reason"], status["pid"]) == ("failed", 4, "why", os.getpid())
    assert "loss" not in status
    assert os.listdir(tmp_path) == ["status.json"]


def test_json_that_is_not_json_is_never_written(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
