import os
import subprocess
import sys
import tempfile
import time

import pytest

from tasks.slot import Busy, machine_slot

HOLD = """
import subprocess, sys, time
from tasks.slot import machine_slot
with machine_slot(wait=False) as slot:
    trainer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[slot])
    print(trainer.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """The slot of a machine of the test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_one_that_is_not_to_wait_is_told_who_has_the_machine():
    with machine_slot(wait=False):
        with pytest.raises(Busy, match="busy with the flow run"), machine_slot(wait=False):
            pass
    with machine_slot(wait=False):
        pass


def test_the_slot_is_free_when_holder_and_trainer_are_both_dead_however_they_died():
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    trainer = int(holder.stdout.readline())
    holder.kill()
    holder.wait()
    with pytest.raises(Busy), machine_slot(wait=False):  # the trainer is still saving
        pass
    os.kill(trainer, 9)
    deadline = time.monotonic() + 10
    while True:
        try:
            with machine_slot(wait=False):
                break
        except Busy:
            assert time.monotonic() < deadline
            time.sleep(0.05)
