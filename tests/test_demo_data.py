"""Facts about the prompts and conversations that ship with the demo."""

import json
import runpy
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "demo"
SPLITS = {"train": "conversations.jsonl", "heldout": "heldout.jsonl"}


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


def test_prompts_file_is_what_make_prompts_writes():
    assert read("prompts.jsonl") == runpy.run_path(str(DEMO / "make_prompts.py"))["make"]()


def test_no_prompt_occurs_twice():
    prompts = read("prompts.jsonl")
    assert len({row["id"] for row in prompts}) == len(prompts)
    assert len({tuple(row["turns"]) for row in prompts}) == len(prompts)


def test_no_held_out_topic_occurs_in_a_training_prompt():
    training = " / ".join(" / ".join(row["turns"]).lower() for row in read("prompts.jsonl") if row["split"] == "train")
    kinds = runpy.run_path(str(DEMO / "make_prompts.py"))["KINDS"]
    for _, topics in kinds.values():
        for topic in topics.split("|")[1].split(";"):
            assert " ".join(topic.split()).lower() not in training


@pytest.mark.parametrize("split", SPLITS)
def test_every_conversation_answers_its_own_prompt_of_its_own_split(split):
    prompts = {row["id"]: row for row in read("prompts.jsonl") if row["split"] == split}
    conversations = read(SPLITS[split])
    assert len({row["id"] for row in conversations}) == len(conversations)
    for row in conversations:
        assert set(row) == {"id", "messages"}
        assert [message["content"] for message in row["messages"][::2]] == prompts[row["id"]]["turns"]


def test_no_held_out_reply_occurs_in_training():
    replies = {
        split: {m["content"] for row in read(name) for m in row["messages"][1::2]} for split, name in SPLITS.items()
    }
    assert not replies["train"] & replies["heldout"]


@pytest.mark.parametrize("split", SPLITS)
def test_turns_alternate_and_every_reply_is_plain_text(split):
    for row in read(SPLITS[split]):
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(set(message) == {"role", "content"} for message in row["messages"])
        assert all(message["content"].strip() and "<|im_" not in message["content"] for message in row["messages"])


def test_there_is_enough_to_train_and_to_measure_on():
    assert len(read("conversations.jsonl")) >= 400
    held_out = read("heldout.jsonl")
    assert len(held_out) >= 48
    kinds = {row["kind"] for row in read("prompts.jsonl")}
    assert {row["id"].split("-")[0] for row in held_out} == kinds


def test_shipped_files_stay_small():
    assert sum(path.stat().st_size for path in DEMO.glob("*.jsonl")) < 1_500_000  # bytes
