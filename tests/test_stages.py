"""A stage is done once for the same inputs: by content, by one run at a time, and again when what it made is gone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from orchestra import ROOT, PrefectServer
from prefect import flow, task
from prefect.events.worker import EventsWorker
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_LOCAL_STORAGE_PATH,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from tiny import conversations, write_jsonl
from tiny_flow import parsed, tiny_flow

from dflash.config import Config
from tasks import evaluate, prepare, regenerate
from tasks.child import JobFailed
from tasks.stages import STAGE, altered, record_of, run_stage

STAGE_PROCESS = """
import sys, time
from pathlib import Path
from prefect import flow, task
from tasks.stages import STAGE, record_of, run_stage

@task(name="slow", **STAGE)
def slow(key, out):
    with (out / "calls").open("a") as calls:
        calls.write("called\\n")
    while not (out / "go on").exists():
        time.sleep(0.02)
    (out / "made").write_text("made")
    return record_of("slow", [out / "made"])

@flow(name="stages")
def stages(out):
    return run_stage(slow, {"input": str(out)}, refresh=False, out=out)

print("made by", stages(Path(sys.argv[1]))["flow_run"], flush=True)
"""


# ---------------------------------------------------------------- what is in a key, without running anything


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A configuration that uses every stage."""
    root = tmp_path_factory.mktemp("stages")
    values = tiny_flow(root)
    write_jsonl(root / "prompts.jsonl", [{"messages": row["messages"][:-1]} for row in conversations(4)])
    drafter = root / "drafter"
    drafter.mkdir()
    for name in ("config.json", "model.safetensors"):
        (drafter / name).write_text("{}")
    return values | {"regenerate": {"prompts": str(root / "prompts.jsonl"), "out": str(root / "answers")}}


def inputs_of(config: Config) -> dict[str, dict[str, Any]]:
    root = Path(config.run.root).parent
    return {
        "regenerate": regenerate.inputs_of(config),
        "prepare": prepare.inputs_of(config),
        "evaluate": evaluate.inputs_of(config, root / "drafter", None),
    }


def changed_by(values: dict[str, Any], field: str, value: Any) -> set[str]:
    """The stages whose inputs are others with another value of a field."""
    section, name = field.split(".")
    before = inputs_of(parsed(values))
    after = inputs_of(parsed(values | {section: values.get(section, {}) | {name: value}}))
    return {stage for stage in before if before[stage] != after[stage]}


@pytest.mark.parametrize(
    ("field", "value", "stages"),
    [
        ("data.max_tokens", 255, {"prepare"}),
        ("drafter.block_size", 5, {"prepare"}),
        ("data.heldout_path", None, {"prepare"}),
        ("data.template_kwargs", {"enable_thinking": False}, {"regenerate", "prepare", "evaluate"}),
        ("regenerate.temperature", 0.5, {"regenerate"}),
        ("regenerate.seed", 1, {"regenerate"}),
        ("regenerate.endpoint", "http://127.0.0.1:1/v1", {"regenerate"}),
        ("evaluate.max_new_tokens", 13, {"evaluate"}),
        ("target.dtype", "bfloat16", {"regenerate", "evaluate"}),
        # what decides none of them
        ("optim.lr", 1e-2, set()),
        ("run.epochs", 9, set()),
        ("run.name", "other", set()),
        ("stream.hs_min_ready", 3, set()),
        ("objective.anchors", 3, set()),
        ("checkpoint.every_steps", 1, set()),
        ("supervise.max_restarts", 0, set()),
        ("evaluate.during_training", 1, set()),
        ("regenerate.batch_rows", 3, set()),
        ("regenerate.requests_in_flight", 3, set()),
    ],
)
def test_a_field_changes_the_key_of_the_stages_that_it_decides_and_of_no_other(values, field, value, stages):
    assert changed_by(values, field, value) == stages


def one_character(path: Path) -> None:
    text = path.read_text()
    at = text.index("boats") if "boats" in text else len(text) // 2
    path.write_text(text[:at] + ("x" if text[at] != "x" else "y") + text[at + 1 :])


def template(path: Path) -> None:
    path.write_text(path.read_text().replace("<|im_end|>", "<|im_end|> ", 1))


def only_the_time(path: Path) -> None:
    os.utime(path, (1, 1))


def unrelated(path: Path) -> None:
    path.write_text("# what these files are\n")


@pytest.mark.parametrize(
    ("file", "touch", "stages"),
    [
        ("data.jsonl", one_character, {"prepare"}),
        ("heldout.jsonl", one_character, {"prepare"}),
        ("prompts.jsonl", one_character, {"regenerate"}),
        ("asked.jsonl", one_character, {"evaluate"}),
        ("target/chat_template.jinja", template, {"regenerate", "prepare", "evaluate"}),
        ("target/tokenizer.json", one_character, {"regenerate", "prepare", "evaluate"}),
        ("target/generation_config.json", one_character, {"regenerate", "evaluate"}),
        ("drafter/model.safetensors", one_character, {"evaluate"}),
        ("data.jsonl", only_the_time, set()),
        ("target/tokenizer.json", only_the_time, set()),
        ("README.md", unrelated, set()),
        ("target/README.md", unrelated, set()),
    ],
)
def test_one_character_of_a_file_changes_the_key_of_its_stages_and_anything_else_does_not(values, file, touch, stages):
    config = parsed(values)
    path = Path(config.run.root).parent / file
    before, content = inputs_of(config), path.read_bytes() if path.exists() else None
    touch(path)
    after = inputs_of(config)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert {stage for stage in before if before[stage] != after[stage]} == stages
    assert inputs_of(config) == before


# ---------------------------------------------------------------- one stage, one server


@pytest.fixture(scope="module")
def server(prefect_server: PrefectServer) -> Iterator[PrefectServer]:
    """Flows of this process run against it."""
    settings = {
        PREFECT_API_URL: prefect_server.environment["PREFECT_API_URL"],
        PREFECT_HOME: prefect_server.home,
        PREFECT_LOCAL_STORAGE_PATH: prefect_server.home / "storage",
        PREFECT_LOGGING_TO_API_ENABLED: False,
    }
    with temporary_settings(settings):
        yield prefect_server
        EventsWorker.drain_all()  # or this process waits for the server when it ends, long after that has ended


def in_flow(server: PrefectServer, body: Callable[[], Any]) -> SimpleNamespace:
    """What a flow with this body came to: its result, the states of its tasks, its artifacts."""

    @flow(name="stages")
    def stages() -> Any:
        from prefect.runtime import flow_run

        ids.append(str(flow_run.id))
        return body()

    ids = list[str]()
    state = stages(return_state=True)
    return SimpleNamespace(
        id=ids[0], state=state, tasks=server.task_runs(ids[0]), artifacts=server.artifacts(ids[0]), result=state.result
    )


@task(name="count", **STAGE)
def count(key: str, out: Path) -> dict[str, Any]:
    calls = out / "calls"
    calls.write_text(f"{int(calls.read_text()) + 1 if calls.exists() else 1}")
    (out / "made").write_text("made")
    if (out / "broken").exists():
        raise JobFailed("it broke after it had written its file")
    return record_of("count", [out / "made"])


def counted(server: PrefectServer, out: Path, *, refresh: bool = False) -> SimpleNamespace:
    return in_flow(server, lambda: run_stage(count, {"of": str(out)}, refresh=refresh, out=out))


def calls(out: Path) -> int:
    return int((out / "calls").read_text())


def test_a_second_run_takes_the_result_and_says_which_run_made_it(server, tmp_path):
    first, second = counted(server, tmp_path), counted(server, tmp_path)
    assert calls(tmp_path) == 1
    assert (first.tasks["count"], second.tasks["count"]) == (["Completed"], ["Cached"])
    assert second.result() == first.result()
    name = server.api("GET", f"flow_runs/{first.id}")["name"]
    assert first.result()["flow_run"] == name
    assert "count-from-cache" not in first.artifacts
    said = second.artifacts["count-from-cache"]["data"]
    assert name in said
    assert str(tmp_path / "made") in said


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_text("Made")], ids=["deleted", "altered"])
def test_a_file_that_is_gone_or_altered_is_made_again_and_then_found(server, tmp_path, harm):
    counted(server, tmp_path)
    harm(tmp_path / "made")
    again = counted(server, tmp_path)
    assert again.tasks["count"] == ["Cached", "Completed"]
    assert (tmp_path / "made").read_text() == "made"
    assert counted(server, tmp_path).tasks["count"] == ["Cached"]
    assert calls(tmp_path) == 2


def test_refresh_does_it_again_and_its_result_is_the_one_that_counts(server, tmp_path):
    first, refreshed = counted(server, tmp_path), counted(server, tmp_path, refresh=True)
    assert calls(tmp_path) == 2
    assert refreshed.tasks["count"] == ["Completed"]
    assert counted(server, tmp_path).result()["flow_run"] == refreshed.result()["flow_run"]
    assert first.result()["flow_run"] != refreshed.result()["flow_run"]


def test_a_failed_stage_keeps_nothing_and_the_next_run_does_it(server, tmp_path):
    (tmp_path / "broken").touch()
    for _ in range(2):
        failed = counted(server, tmp_path)
        assert failed.tasks["count"] == ["Failed"]
        with pytest.raises(JobFailed, match="it broke"):
            failed.result()
    (tmp_path / "broken").unlink()
    assert counted(server, tmp_path).tasks["count"] == ["Completed"]
    assert calls(tmp_path) == 3


# ---------------------------------------------------------------- two runs at once


def start(server: PrefectServer, out: Path) -> subprocess.Popen[str]:
    """A process that runs the stage, which is done when there is a file named "go on"."""
    return subprocess.Popen(
        [sys.executable, "-c", STAGE_PROCESS, str(out)],
        env=server.environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=(out / f"log-{time.time_ns()}").open("w"),
        text=True,
    )


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def logs(out: Path) -> str:
    return "".join(path.read_text() for path in out.glob("log-*"))


def one_waits(out: Path) -> None:
    """Returns once one process is in the stage and the other waits for it."""
    until(lambda: "waiting for its result" in logs(out))
    assert (out / "calls").read_text() == "called\n"


def test_two_runs_that_need_a_stage_at_once_do_it_once(prefect_server, tmp_path):
    processes = [start(prefect_server, tmp_path) for _ in range(2)]
    one_waits(tmp_path)
    (tmp_path / "go on").touch()
    said = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0], logs(tmp_path)
    assert len(said) == 1
    assert (tmp_path / "calls").read_text() == "called\n"


def test_a_run_that_is_killed_in_a_stage_leaves_it_to_the_one_that_waits(prefect_server, tmp_path):
    killed = start(prefect_server, tmp_path)
    until(lambda: (tmp_path / "calls").exists())
    waiting = start(prefect_server, tmp_path)
    one_waits(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    (tmp_path / "go on").touch()
    said, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, logs(tmp_path)
    assert said.startswith("made by")
    assert (tmp_path / "calls").read_text() == "called\ncalled\n"


# ---------------------------------------------------------------- the real job


def prepared(server: PrefectServer, values: dict[str, Any]) -> SimpleNamespace:
    return in_flow(server, lambda: prepare.prepare(parsed(values), refresh=False))


@pytest.fixture(scope="module")
def mended(server, tmp_path_factory) -> SimpleNamespace:
    """Data that cannot be used, and the run after it was mended."""
    root = tmp_path_factory.mktemp("prepare")
    values = tiny_flow(root)
    good = (root / "data.jsonl").read_text()
    (root / "data.jsonl").write_text(good + "{broken\n")
    failed = prepared(server, values)
    left = [path.name for path in (root / "prepared").iterdir() if path.is_dir()]
    (root / "data.jsonl").write_text(good)
    return SimpleNamespace(values=values, failed=failed, left=left, first=prepared(server, values))


@pytest.mark.slow
def test_prepare_that_fails_says_why_leaves_nothing_and_is_done_once_its_data_is_mended(mended):
    assert mended.failed.tasks["prepare"] == ["Failed"]
    with pytest.raises(ValueError, match="data.jsonl:17: not valid JSON"):
        mended.failed.result()
    assert mended.left == []
    assert mended.first.tasks["prepare"] == ["Completed"]
    made = mended.first.result()
    places = [Path(made[name]["directory"]) for name in ("data", "heldout")]
    assert set(made["files"]) == {str(path) for place in places for path in place.iterdir()}


@pytest.mark.slow
def test_prepared_data_that_was_altered_is_made_again_to_the_last_byte(server, mended):
    directory = Path(mended.first.result()["data"]["directory"])
    before = {path: path.read_bytes() for path in directory.iterdir()}
    shard = directory / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    (directory / "report.json").unlink()
    again = prepared(server, mended.values | {"optim": {"lr": 1e-2}})  # the rate is not its business
    assert again.tasks["prepare"] == ["Cached", "Completed"]
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


@pytest.mark.slow
def test_a_template_with_another_character_makes_other_samples_beside_the_ones_before(server, mended):
    before = mended.first.result()
    file = Path(mended.values["target"]["name"]) / "chat_template.jinja"
    file.write_text(file.read_text().replace("'<|im_end|>' + '\n'", "'<|im_end|>' + '\n\n'"))
    other = prepared(server, mended.values)
    assert other.tasks["prepare"] == ["Completed"]
    assert other.result()["data"]["digest"] != before["data"]["digest"]
    assert altered(before["files"]) is None
