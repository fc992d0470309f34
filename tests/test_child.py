import logging
import os
import signal
import sys
import time

import pytest

from tasks.child import Child, JobFailed, run_job

log = logging.getLogger("test")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module for `python -m job` of a few lines."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def made(source: str) -> str:
        (tmp_path / "job.py").write_text(source)
        return "job"

    return made


def test_what_a_job_says_is_passed_on_and_kept(module, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run_job(module("import sys; print('one'); print('two', file=sys.stderr)"), [], output=tmp_path / "log", log=log)
    assert sorted(caplog.messages) == ["one", "two"]
    assert sorted((tmp_path / "log").read_text().split()) == ["one", "two"]


def test_a_refusal_is_the_jobs_own_line(tmp_path):
    with pytest.raises(ValueError, match=r"^--config no\.yaml: No such file"):
        run_job("dflash.data", ["--config", "no.yaml"], output=tmp_path / "log", log=log)


def test_a_failure_is_the_last_line_and_says_where_all_of_it_is(module, tmp_path):
    source = "import sys; print('Traceback'); print('dflash: failed: OSError: the disk is gone'); sys.exit(1)"
    with pytest.raises(JobFailed, match=rf"failed: OSError: the disk is gone.*{tmp_path}/log"):
        run_job(module(source), [], output=tmp_path / "log", log=log)


def test_a_job_that_is_killed_is_named_by_its_signal(module, tmp_path):
    with pytest.raises(JobFailed, match="killed by SIGKILL"):
        run_job(module("import os; os.kill(os.getpid(), 9)"), [], output=tmp_path / "log", log=log)


def test_an_earlier_jobs_words_in_the_same_file_are_not_taken_for_this_ones(module, tmp_path, caplog):
    (tmp_path / "log").write_text("an old cause\n")
    with pytest.raises(JobFailed, match="it said nothing"):
        run_job(module("import sys; sys.exit(1)"), [], output=tmp_path / "log", log=log)
    assert "an old cause" not in caplog.text


SAVES = """
import signal, sys, time
def save(*_):
    time.sleep(0.5); print('saved', flush=True); sys.exit(3)
signal.signal(signal.SIGTERM, save)
print('ready', flush=True)
time.sleep(60)
"""


def started(child: Child) -> None:
    while "ready" not in child.output.read_text():
        time.sleep(0.05)


def test_leaving_the_block_lets_the_child_save(module, tmp_path):
    with pytest.raises(KeyboardInterrupt), Child(module(SAVES), [], output=tmp_path / "log") as child:
        started(child)
        assert os.getsid(child.pid) == child.pid  # a signal for our own group does not reach it
        raise KeyboardInterrupt
    assert (child.poll(), child.last_line()) == (3, "saved")


def test_one_that_does_not_stop_in_time_is_left_to_save_and_can_be_killed(module, tmp_path):
    source = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: None)\nprint('ready', flush=True)\ntime.sleep(60)"
    child = Child(module(source), [], output=tmp_path / "log")
    started(child)
    assert not child.stop(0.5)
    assert child.poll() is None
    child.kill()
    assert child.poll() == -signal.SIGKILL


def test_the_child_is_this_environments_python(module, tmp_path):
    with Child(module("import sys; print(sys.executable)"), [], output=tmp_path / "log") as child:
        while child.poll() is None:
            time.sleep(0.05)
    assert child.last_line() == sys.executable
