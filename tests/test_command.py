"""What every command shares. Each test is a real process with a pipe for its standard input."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.command import FINISHED, STOPPED

COMMAND = """
import sys, time
from dflash.command import FINISHED, Parser, run

def body():
    parsed = Parser(prog="it", allow_abbrev=False).parse_args(sys.argv[2:])
    print(vars(parsed), flush=True)
    time.sleep(float(sys.argv[1]))
    return FINISHED

sys.exit(run(body, stopped="stopped; all is well"))
"""
LONG = "60"


def start(seconds: str, *flags: str, stdin: int = subprocess.PIPE) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, seconds, *flags],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def assert_stopped(process: subprocess.Popen) -> None:
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (STOPPED, "dflash: stopped; all is well\n")
    assert out.strip() in ("", "{}")  # nothing where it was stopped before it said what its settings are


def test_a_command_stops_when_its_standard_input_ends_and_the_flag_is_no_setting():
    process = start(LONG, "--stop-with-stdin")
    assert process.stdin is not None
    process.stdin.write("what is written there\nmeans nothing\n")
    process.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    assert_stopped(process)


def test_a_standard_input_that_has_ended_before_the_start_is_seen():
    assert_stopped(start(LONG, "--stop-with-stdin", stdin=subprocess.DEVNULL))


def test_a_closed_standard_input_has_ended():
    script = '"$0" "$@" <&-'
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = ["sh", "-c", script, sys.executable, "-c", COMMAND, LONG, "--stop-with-stdin"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == STOPPED, done.stderr


def test_without_the_flag_the_end_of_standard_input_means_nothing():
    process = start("0.5")
    assert process.communicate(timeout=30)[0] == "{}\n"
    assert process.returncode == FINISHED


def test_a_command_that_ends_by_itself_does_not_wait_for_its_standard_input():
    process = start("0", "--stop-with-stdin")
    assert process.wait(timeout=30) == FINISHED
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_a_command_stops_when_whoever_holds_its_standard_input_is_killed(tmp_path):
    """The holder is a process of its own, which is killed; the command's exit code is what it leaves in a file."""
    holder = """
import subprocess, sys, time
script = '"$0" "$@"; echo $? >' + sys.argv[1]
process = subprocess.Popen(["sh", "-c", script, *sys.argv[2:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
process.stdout.readline()
print("running", flush=True)
time.sleep(60)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    code, words = tmp_path / "code", [sys.executable, "-c", COMMAND, LONG, "--stop-with-stdin"]
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(code), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,  # shared with the command: it ends when both have
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGKILL)
    assert "stopped; all is well" in process.communicate(timeout=30)[1]
    assert code.read_text() == f"{STOPPED}\n"
