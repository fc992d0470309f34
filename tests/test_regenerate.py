"""The command that has prompts answered: what it keeps, what it does again, what it says, what it refuses.

The target is a tiny one whose tokens are single characters, so that a reply is the same tokens when it is read again. What it must
say is taken from transformers' own `generate`, turn by turn. Commands that are killed are processes of their own, forked as the
trainer's tests do; they note every text that the target reads.
"""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forks as forking
import pytest
import torch
import transformers
from faulty_proxy import CHAT, FaultyProxy
from forks import LONG, TESTS, Child, Forks, until
from llama_server import LlamaServer, to_gguf
from refused import assert_refused
from safetensors.torch import load_file, save_file
from tiny import CHATML, tiny_target, tiny_tokenizer, write_jsonl
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM, AutoTokenizer, MambaConfig, MambaForCausalLM

from dflash import data, regenerate
from dflash.answers import LENGTH, STOP, Answer, Request
from dflash.command import FAILED, FINISHED, REFUSED, STOPPED
from dflash.conversation import Template
from dflash.plots import histogram
from dflash.regenerate import main, message_of

NEW = 12  # max_new_tokens
ROWS = 3  # batch_rows
END_OF_TURN = 2
FORBIDS = CHATML.replace(
    "{{ '<|im_start|>'",
    "{% if 'forbidden' in message['content'] %}{{ raise_exception('not in the mood') }}{% endif %}{{ '<|im_start|>'",
)
TONED = "{{ tone | default('') }}" + CHATML
TOPICS = [
    "bread",
    "boats",
    "geese",
    "rivers",
    "bridges",
    "lists",
    "maps",
    "rain",
    "harbour",
    "winter",
    "paper",
    "storms",
]


# ---------------------------------------------------------------- targets, prompts, results


def make_target(directory: Path, *, boost: float = 2.0, template: str = CHATML, **changes: Any) -> Path:
    """A tiny target that says printable ASCII, a token each, and ends its turn the more often the further `boost` is from 0."""
    tiny_target(directory, "llama", layers=2, hidden=32, vocabulary=267, seed=1)  # 3 special, 256 bytes, 8 spare
    tokenizer, weights = AutoTokenizer.from_pretrained(directory), load_file(directory / "model.safetensors")
    head = weights["lm_head.weight"]
    printable = [token for token in range(3, 259) if " " <= tokenizer.decode([token]) <= "~"]
    assert len(printable) == 95
    said = torch.zeros_like(head)  # a logit of 0 is never the highest
    said[printable], said[END_OF_TURN] = head[printable], boost * head[END_OF_TURN]
    save_file(weights | {"lm_head.weight": said}, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "chat_template.jinja").write_text(template)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def chats(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of 1 to 3 turns, every first turn another one; a third of them begin with a system message."""
    draw, rows = random.Random(seed), []
    for index in range(count):
        messages = [system("Be brief.")] if index % 3 == 0 else []
        for turn in range(1 + index % 3):
            text = f"{seed}.{index}" if turn == 0 else "More"
            text += "".join(f" {draw.choice(TOPICS)}" for _ in range(draw.randint(0, 3)))
            messages += [user(text), assistant("An old reply.")]
        rows.append({"id": f"chat-{seed}-{index:03d}", "messages": messages})
    return rows


@dataclass(frozen=True)
class World:
    """A target, a prompt file and the answers of one unbroken run."""

    place: Path
    target: Path
    prompts: Path
    rows: list[dict[str, Any]]
    out: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    place = tmp_path_factory.mktemp("world")
    rows = chats(30)
    world = World(place, make_target(place / "target"), write_jsonl(place / "p.jsonl", rows), rows, place / "out")
    assert command(world, world.out) == FINISHED
    return world


def arguments(world: World, out: Path, *flags: Any, prompts: Path | None = None, **sections: Any) -> list[str]:
    """The command line of a greedy run on few rows; flags that come later win."""
    fixed = {"regenerate.temperature": 0, "regenerate.max_new_tokens": NEW, "regenerate.batch_rows": ROWS}
    given = {"target.devices": "cpu", **fixed, **{name.replace("__", "."): value for name, value in sections.items()}}
    knobs = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    places = ["--prompts", str(prompts or world.prompts), "--target", str(world.target), "--out", str(out)]
    return [*places, *knobs, *map(str, flags)]


def command(world: World, out: Path, *flags: Any, prompts: Path | None = None, **sections: Any) -> int:
    return main(arguments(world, out, *flags, prompts=prompts, **sections))


@pytest.fixture(autouse=True)
def signals():
    """The command changes what signals do; the tests must not."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Result:
    """What a run has left under `out`, for the prompt file of that digest or the only one."""

    def __init__(self, out: Path, prompts: str = "prompts-*"):
        (self.report_file,) = out.glob(f"*/{prompts}/report.json")
        self.directory = self.report_file.parent
        self.store = self.directory.parent

    def rows(self, name: str) -> list[dict[str, Any]]:
        return read_jsonl(self.directory / name)

    @property
    def conversations(self) -> list[dict[str, Any]]:
        return self.rows("conversations.jsonl")

    @property
    def dropped(self) -> list[dict[str, Any]]:
        return self.rows("dropped.jsonl")

    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self.report_file.read_text())

    @property
    def records(self) -> list[dict[str, Any]]:
        return records_of(self.store)

    def files(self) -> dict[str, bytes]:
        return {name: (self.directory / name).read_bytes() for name in ("conversations.jsonl", "dropped.jsonl")}


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def records_of(store: Path) -> list[dict[str, Any]]:
    """Of whole lines only: a torn one is no record."""
    lines = [line for shard in sorted(store.glob("shard-*")) for line in shard.read_bytes().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


# ---------------------------------------------------------------- what the target is expected to say


class Speaker:
    """The target under transformers alone."""

    def __init__(self, target: Path):
        self.model = AutoModelForCausalLM.from_pretrained(target).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self._said: dict[tuple[int, ...], list[int]] = {}

    def prompt(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def says(self, messages: list[dict[str, Any]], new: int, **kwargs: Any) -> list[int]:
        """The greedy reply, its end-of-turn token included."""
        prompt = self.prompt(messages, **kwargs)
        if (new, *prompt) not in self._said:
            ids = torch.tensor([prompt])
            whole = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
            self._said[new, *prompt] = whole[0, len(prompt) :].tolist()
        return self._said[new, *prompt]

    def conversation(self, row: dict[str, Any], new: int = NEW, **kwargs: Any) -> list[dict[str, Any]]:
        """The row's messages with every reply replaced, the earlier ones standing before the later ones."""
        messages = []
        for message in row["messages"]:
            if message["role"] == "assistant":
                ids = self.says(messages, new, **kwargs)
                message = assistant(self.tokenizer.decode(ids[:-1] if ids[-1] == END_OF_TURN else ids))
            messages.append(message)
        return messages


@contextmanager
def read_texts(note: Callable[[list[list[int]]], None] | None = None) -> Iterator[list[list[int]]]:
    """Token ids of every row that any target reads at once inside the `with`, a prompt; also given to `note` as they come."""
    texts: list[list[int]] = []

    def look(module: torch.nn.Module, inputs: Any) -> None:
        if isinstance(module, torch.nn.Embedding) and inputs[0].shape[-1] > 1:
            rows = [unpadded(row) for row in inputs[0].tolist()]
            texts.extend(rows)
            if note:
                note(rows)

    handle = register_module_forward_pre_hook(look)
    try:
        yield texts
    finally:
        handle.remove()


def unpadded(row: list[int]) -> list[int]:
    while row and row[-1] == 0:
        row = row[:-1]
    return row


@pytest.fixture(scope="module")
def speaker(world) -> Speaker:
    return Speaker(world.target)


def first_prompt(speaker: Speaker, row: dict[str, Any]) -> tuple[int, ...]:
    """What the target reads first of a conversation."""
    messages = row["messages"]
    until_reply = next(at for at, message in enumerate(messages) if message["role"] == "assistant")
    return tuple(speaker.prompt(messages[:until_reply]))


@pytest.fixture(scope="module")
def beginnings(world, speaker) -> dict[tuple[int, ...], str]:
    """{first tokens: id} of the prompts."""
    beginnings = {first_prompt(speaker, row): row["id"] for row in world.rows}
    assert len(beginnings) == len(world.rows)
    return beginnings


def begun(texts: list[list[int]], beginnings: dict[tuple[int, ...], str]) -> list[str]:
    """Ids of the prompts that were begun, as often as they were."""
    return [beginnings[tuple(text)] for text in texts if tuple(text) in beginnings]


# ---------------------------------------------------------------- what is kept


def test_every_reply_is_the_target_s_own_to_its_own_earlier_replies(world, speaker):
    result = Result(world.out)
    assert result.conversations == [{"id": row["id"], "messages": speaker.conversation(row)} for row in world.rows]
    replies = [m["content"] for row in result.conversations for m in row["messages"] if m["role"] == "assistant"]
    assert len(replies) == 60
    assert len(set(replies)) > 50
    assert result.dropped == []


def test_the_kept_conversations_are_data_for_training_whose_supervised_tokens_are_what_the_target_said(world, speaker):
    result = Result(world.out)
    prepared = data.prepare(
        result.directory / "conversations.jsonl",
        tokenizer=speaker.tokenizer,
        max_tokens=4096,
        block_size=2,
        template_kwargs={},
        directory=world.place / "prepared",
    )
    assert len(prepared) == 30
    template = Template(speaker.tokenizer, {})
    for row in result.conversations:
        said = []
        for at, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                said += speaker.tokenizer(message["content"])["input_ids"] + [END_OF_TURN]
                assert message["content"] == speaker.tokenizer.decode(
                    speaker.says(row["messages"][:at], NEW)
                ).removesuffix("<|im_end|>")
        rendered = template.locate(row["messages"], None)
        tokens, loss_mask = template.mask(rendered, template.encode([rendered])[0])
        assert tokens[loss_mask].tolist() == said


FORMS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "messages": ("jsonl", [{"id": "a", "messages": [user("bread?"), assistant("x"), user("rain?"), assistant("y")]}]),
    "conversations": (
        "json",
        [
            {
                "id": "a",
                "conversations": [
                    {"from": "human", "value": "bread?"},
                    {"from": "gpt", "value": "x"},
                    {"from": "human", "value": "rain?"},
                ],
            }
        ],
    ),
    "turns": ("jsonl", [{"id": "a", "turns": ["bread?", "rain?"]}]),
    "prompt": ("jsonl", [{"id": "a", "prompt": "bread?"}]),
    "text": ("txt", [{"prompt": "bread?"}]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_prompt_is_answered(world, speaker, tmp_path, form):
    suffix, rows = FORMS[form]
    prompts = tmp_path / f"p.{suffix}"
    if form == "text":
        prompts.write_text("\n".join(row["prompt"] for row in rows))
    else:
        write_jsonl(prompts, rows)
    assert command(world, tmp_path / "out", prompts=prompts) == FINISHED
    (row,) = Result(tmp_path / "out").conversations
    turns = ["bread?"] if form in ("prompt", "text") else ["bread?", "rain?"]
    expected = [message for text in turns for message in (user(text), assistant("old"))]
    assert row["messages"] == speaker.conversation({"messages": expected})
    assert row["id"] == ("a" if form != "text" else row["id"])


def test_the_system_prompt_is_given_where_there_is_none_and_nowhere_else(world, speaker, tmp_path):
    own = {"id": "own", "messages": [system("Be rude."), user("bread?"), assistant("")]}
    none = {"id": "none", "messages": [user("bread?"), assistant(""), user("rain?"), assistant("")]}
    prompts = write_jsonl(tmp_path / "p.jsonl", [own, none])
    assert command(world, tmp_path / "out", prompts=prompts, regenerate__system_prompt="Be kind.") == FINISHED
    none["messages"].insert(0, system("Be kind."))
    assert Result(tmp_path / "out").conversations == [
        {"id": row["id"], "messages": speaker.conversation(row)} for row in (own, none)
    ]


def test_template_variables_reach_the_template_and_tools_are_kept(tmp_path, world):
    target = make_target(tmp_path / "target", template="{{ (tools or []) | length }}" + TONED)
    row = {"id": "a", "messages": [user("bread?"), assistant("")], "tools": [{"name": "bake"}]}
    prompts = write_jsonl(tmp_path / "p.jsonl", [row])
    for tone in ("loud", "soft"):
        out = tmp_path / tone
        with read_texts() as texts:
            flags = ("--target", target, "--data.template_kwargs", f"{{tone: {tone}}}")
            assert command(world, out, *flags, prompts=prompts) == FINISHED
        (kept,) = Result(out).conversations
        assert kept["tools"] == row["tools"]
        speaker = Speaker(target)
        assert kept["messages"] == speaker.conversation(row, tools=row["tools"], tone=tone)
        assert speaker.prompt(row["messages"][:1], tools=row["tools"], tone=tone) in texts
    assert len({next((tmp_path / tone).iterdir()).name for tone in ("loud", "soft")}) == 2


def test_sampled_replies_do_not_depend_on_what_they_are_batched_with(world, tmp_path):
    prompts = write_jsonl(tmp_path / "p.jsonl", world.rows[:5])
    results = []
    for rows, temperature in ((1, 1.0), (5, 1.0), (5, 0)):
        out = tmp_path / f"{rows} {temperature}"
        knobs = {"regenerate__batch_rows": rows, "regenerate__temperature": temperature}
        assert command(world, out, prompts=prompts, regenerate__top_k=20, **knobs) == FINISHED
        results.append(Result(out))
    assert results[0].files() == results[1].files() != results[2].files()


# ---------------------------------------------------------------- what is dropped, counted and listed


def test_what_is_no_prompt_or_refused_by_the_template_is_listed_and_the_others_go_on(world, tmp_path, capfd):
    target = make_target(tmp_path / "target", template=FORBIDS)
    rows: list[dict[str, Any]] = [
        {"id": "first", "prompt": "bread?"},
        {"id": "critic", "messages": [user("a"), {"role": "critic", "content": "b"}]},
        {"id": "refused", "prompt": "a forbidden word"},
        {"id": 7, "messages": [assistant("nobody asked")]},
        {"messages": [user("a"), {"role": "tool", "content": "3"}]},
        {"id": "later", "turns": ["boats?", "then something forbidden", "maps?"]},
        {"id": "image", "messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"id": "half a character", "prompt": "\ud83d bread?"},
        {"id": "again", "prompt": "bread?"},
        {"id": "last", "prompt": "rain?"},
    ]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n\n".join(json.dumps(row) for row in rows))  # ASCII, as JSON from Python is
    assert command(world, tmp_path / "out", "--target", target, prompts=prompts) == FINISHED
    result, speaker = Result(tmp_path / "out"), Speaker(target)
    assert result.conversations == [
        {"id": name, "messages": speaker.conversation({"messages": [user(text), assistant("")]})}
        for name, text in (("first", "bread?"), ("last", "rain?"))
    ]
    assert [(row["line"], row["id"], row["reason"]) for row in result.dropped] == [
        (3, "critic", "unknown_role"),
        (5, "refused", "template_refused"),
        (7, "7", "no_user_turn"),
        (9, None, "tool_turn"),
        (11, "later", "template_refused"),
        (13, "image", "not_text"),
        (15, "half a character", "not_text"),
    ]
    details = {row["id"]: row["detail"] for row in result.dropped}
    assert details["critic"] == "'critic'"
    assert details["refused"] == details["later"] == "not in the mood"
    assert result.report["prompts"] == 10
    assert result.report["conversations"] == 2
    assert result.report["duplicates"] == 1
    assert result.report["dropped"] == {
        "template_refused": 2,
        "not_text": 2,
        "unknown_role": 1,
        "no_user_turn": 1,
        "tool_turn": 1,
    }
    assert result.report["replies"] == 3  # of which one stands before the forbidden turn
    stderr = capfd.readouterr().err
    for text in ("2 conversations of 10 prompts", "unknown_role", "not one of", "the chat template raised an error"):
        assert text in stderr
    assert "Traceback" not in stderr


def test_a_cut_reply_is_kept_or_drops_its_conversation_and_is_counted_either_way(world, tmp_path):
    kept = Result(world.out)
    assert command(world, tmp_path, regenerate__cut_replies="drop") == FINISHED
    dropped = Result(tmp_path)
    assert dropped.store.name != kept.store.name
    cut = {record["id"] for record in kept.records if record["finish_reason"] == LENGTH}
    assert 3 < len(cut) < 25
    assert {row["id"] for row in dropped.dropped} == cut
    assert {(row["reason"], row["detail"]) for row in dropped.dropped} == {("cut", f"{NEW} tokens")}
    assert dropped.conversations == [row for row in kept.conversations if row["id"] not in cut]
    assert dropped.report["dropped"] == {"cut": len(cut)}
    assert dropped.report["finish_reasons"][LENGTH] == len(cut)  # no turn is asked for after a cut one
    lengths = [reply for record in kept.records for reply in record["replies"] if reply["finish_reason"] == LENGTH]
    assert kept.report["finish_reasons"][LENGTH] == len(lengths) >= len(cut)
    assert all(reply["tokens"] == NEW for reply in lengths)


def test_an_empty_reply_drops_its_conversation(tmp_path, world):
    target = make_target(tmp_path / "target", boost=-2.0)
    rows = [{"id": str(number), "turns": [f"{number} {topic}", "more"]} for number, topic in enumerate(TOPICS)]
    prompts = write_jsonl(tmp_path / "p.jsonl", rows)
    assert command(world, tmp_path / "out", "--target", target, prompts=prompts) == FINISHED
    result, speaker = Result(tmp_path / "out"), Speaker(target)
    empty = set()
    for row in rows:
        messages = speaker.conversation({"messages": [m for t in row["turns"] for m in (user(t), assistant(""))]})
        if not all(message["content"].strip() for message in messages):
            empty.add(row["id"])
    assert 0 < len(empty) < len(rows)
    assert {row["id"] for row in result.dropped} == empty
    assert result.report["dropped"] == {"empty_reply": len(empty)}
    first_empty = [record for record in result.records if record["replies"][0]["tokens"] == 1]
    assert first_empty
    for record in first_empty:
        assert (record["outcome"], len(record["replies"])) == ("empty_reply", 1)


def test_a_reply_that_is_other_tokens_when_it_is_read_again_is_dropped(tmp_path, world):
    target = tiny_target(tmp_path / "target", "qwen3", layers=2, hidden=32)  # random tokens, of which few are words
    rows = [{"id": str(index), "prompt": f"{index}"} for index in range(24)]
    prompts = write_jsonl(tmp_path / "p.jsonl", rows)
    assert (
        command(world, tmp_path / "out", "--target", target, prompts=prompts, regenerate__max_new_tokens=3) == FINISHED
    )
    result, speaker = Result(tmp_path / "out"), Speaker(target)
    kept = []
    for row in rows:
        ids = [token for token in speaker.says([user(row["prompt"])], 3) if token != END_OF_TURN]
        if speaker.tokenizer(speaker.tokenizer.decode(ids))["input_ids"] == ids:
            kept.append(row["id"])
    assert 0 < len(kept) < len(rows)
    assert [row["id"] for row in result.conversations] == kept
    assert result.report["dropped"] == {"tokenises_otherwise": len(rows) - len(kept)}


def test_a_prompt_longer_than_the_target_s_positions_is_listed_with_both_numbers(tmp_path, world):
    target = make_target(tmp_path / "target", max_position_embeddings=64)
    prompts = write_jsonl(
        tmp_path / "p.jsonl", [{"id": "long", "prompt": "geese " * 20}, {"id": "b", "prompt": "rain?"}]
    )
    assert command(world, tmp_path / "out", "--target", target, prompts=prompts) == FINISHED
    result = Result(tmp_path / "out")
    assert [row["id"] for row in result.conversations] == ["b"]
    length = len(Speaker(target).prompt([user("geese " * 20)]))
    detail = f"a prompt of {length} tokens; the target has 64 positions"
    assert result.dropped == [{"line": 1, "id": "long", "reason": "refused", "detail": detail}]
    assert result.report["finish_reasons"]["refused"] == 1


THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMED = CHATML.replace("message['content']", "message['content'] | trim")


@pytest.mark.parametrize(
    "template, said, fields",
    [
        (CHATML, "It is bread.", {"content": "It is bread."}),
        (CHATML, " It is\n\n bread. ", {"content": " It is\n\n bread. "}),
        (CHATML, "<think>\nso\n</think>\n\nbread", {"content": "<think>\nso\n</think>\n\nbread"}),
        (THINKING, "<think>\nso\n</think>\n\nbread", {"reasoning_content": "so", "content": "bread"}),
        (THINKING, "<think>\nso\n\nit is\n</think>\n\nbread", {"reasoning_content": "so\n\nit is", "content": "bread"}),
        (THINKING, "bread", None),
        (THINKING, "<think>so</think>bread", None),
        (TRIMMED, "bread", {"content": "bread"}),
        (TRIMMED, "  bread", None),
    ],
)
def test_a_turn_is_the_one_that_the_template_writes_as_it_was_said(template, said, fields):
    tokenizer = tiny_tokenizer(267, chat_template=template)
    template = Template(tokenizer, {})
    messages = [user("What is it?")]
    request = Request(
        key="a 0",
        messages=messages,
        tools=None,
        prompt_tokens=template.tokens(template.render(messages, None, add_generation_prompt=True)),
    )
    ids = tokenizer(said)["input_ids"]
    answer = Answer(content=said, finish_reason=STOP, completion_tokens=len(ids) + 1, token_ids=ids)
    assert message_of(request, answer, template) == (fields and {"role": "assistant", **fields})


# ---------------------------------------------------------------- the report


def test_the_report_adds_up(world):
    result = Result(world.out)
    report, replies = result.report, [reply for record in result.records for reply in record["replies"]]
    assert report["prompts"] == len(world.rows) == len(result.records)
    assert report["conversations"] == len(result.conversations)
    assert report["prompts"] == report["conversations"] + report["duplicates"] + sum(report["dropped"].values())
    assert report["replies"] == len(replies) == sum(report["finish_reasons"].values())
    assert report["finish_reasons"] == Counter(reply["finish_reason"] for reply in replies)
    assert set(report["finish_reasons"]) == {STOP, LENGTH}
    lengths = sorted(reply["tokens"] for reply in replies)
    assert report["reply_tokens"] == sum(lengths)
    assert report["prompt_tokens"] == sum(reply["prompt_tokens"] for reply in replies)
    assert (report["reply_length"]["p0"], report["reply_length"]["p100"]) == (lengths[0], lengths[-1])
    assert report["reply_length"]["p50"] == (lengths[29] + lengths[30]) / 2
    assert report["this_process"]["replies"] == len(replies)
    assert report["this_process"]["reply_tokens"] == sum(lengths)
    assert report["this_process"]["seconds"] > 0


def test_what_the_records_count_is_what_was_read_and_said(world, speaker):
    for record in Result(world.out).records:
        replies = iter(record["replies"])
        for at, message in enumerate(record["messages"]):
            if message["role"] == "assistant":
                reply = next(replies)
                assert reply["prompt_tokens"] == len(speaker.prompt(record["messages"][:at]))
                assert reply["tokens"] == len(message["content"]) + (reply["finish_reason"] == STOP)
        assert next(replies, None) is None


def test_the_histogram_is_a_picture(world):
    picture = (Result(world.out).directory / "lengths.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.endswith(b"IEND\xaeB`\x82")


def test_progress_and_summary_name_rate_remaining_time_and_the_next_command(world, tmp_path, capfd):
    assert command(world, tmp_path) == FINISHED
    stdout, stderr = capfd.readouterr()
    result = Result(tmp_path)
    assert stdout == ""
    assert re.search(r"prompt 30/30  [\d,]+ tok/s  60 replies  ETA 0 min", stderr)
    assert f"{result.store}: 30 prompts, 30 of them to answer" in stderr
    assert "30 conversations of 30 prompts" in stderr
    assert re.search(r"now +60 replies in \d+ s, [\d,]+ tokens/s", stderr)
    assert f"python -m dflash.train --config ... --data.path {result.directory}/conversations.jsonl" in stderr


# ---------------------------------------------------------------- what is done again


def test_a_second_start_reads_no_prompt_and_changes_no_answer(world, beginnings, tmp_path, capfd):
    shutil.copytree(world.out, tmp_path / "out")
    first = Result(tmp_path / "out")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in first.store.glob("shard-*")}
    files = first.files()
    with read_texts() as texts:
        assert command(world, tmp_path / "out") == FINISHED
    again = Result(tmp_path / "out")
    assert "30 prompts, 0 of them to answer" in capfd.readouterr().err
    assert begun(texts, beginnings) == []
    assert len(texts) > 0  # the proofs of the target: the texts were looked at
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in again.store.glob("shard-*")} == before
    assert again.files() == files
    assert again.report["this_process"]["replies"] == 0
    assert {**again.report, "this_process": None} == {**first.report, "this_process": None}


def test_a_refresh_makes_all_answers_anew_and_sets_the_ones_before_aside(world, beginnings, tmp_path, capfd):
    out, report = tmp_path / "out", tmp_path / "report.json"
    shutil.copytree(world.out, out)
    (before,) = out.iterdir()
    with read_texts() as texts:
        assert command(world, out, "--refresh", "--report", report) == FINISHED
    assert sorted(begun(texts, beginnings)) == sorted(row["id"] for row in world.rows)
    (aside,) = out.glob("*.until-*")
    assert aside.name.startswith(f"{before.name}.until-")
    assert f"the answers until now are set aside: {aside}" in capfd.readouterr().err
    assert records_of(aside) == Result(world.out).records
    told = json.loads(report.read_text())
    directory = Path(told["directory"])
    assert directory.parent == before
    assert directory.is_absolute()
    assert told["conversations"] == str(directory / "conversations.jsonl")
    assert told["report"] == json.loads((directory / "report.json").read_text())
    assert (directory / "conversations.jsonl").read_bytes() == Result(world.out).files()["conversations.jsonl"]


def test_answers_that_another_process_is_making_are_not_set_aside(world, forks, tmp_path, capfd):
    out = tmp_path / "out"
    other = forks.run(arguments(world, out), tmp_path / "log", then="hold", when=20)
    other.until(lambda: list(out.glob("*/key.json")))
    assert command(world, out, "--refresh") == REFUSED
    message = capfd.readouterr().err.splitlines()[-1]
    assert f"cannot be set aside, process {other.pid} is making answers in it" in message
    assert "stop that one or wait for it" in message
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert not list(out.glob("*.until-*"))


def test_only_what_is_new_in_a_prompt_file_is_answered(world, speaker, tmp_path):
    out = shutil.copytree(world.out, tmp_path / "out")
    (old,) = out.glob("*/prompts-*")
    old_files = {path: path.read_bytes() for path in old.iterdir()}
    new = chats(4, seed=1)
    rows = [new[0], *world.rows[10:], *new[1:], *({**row, "id": f"renamed-{row['id']}"} for row in world.rows[:10])]
    known = {first_prompt(speaker, row): row["id"] for row in rows}
    with read_texts() as texts:
        assert command(world, out, prompts=write_jsonl(tmp_path / "p.jsonl", rows)) == FINISHED
    assert sorted(begun(texts, known)) == [row["id"] for row in new]
    (directory,) = {path.parent for path in out.glob("*/prompts-*/report.json")} - {old}
    result = Result(out, directory.name)
    assert [row["id"] for row in result.conversations] == [row["id"] for row in rows]
    assert result.conversations[0]["messages"] == speaker.conversation(new[0])
    unchanged = {row["id"]: row["messages"] for row in Result(world.out).conversations}
    for row in result.conversations:
        name = row["id"].removeprefix("renamed-")
        assert name not in unchanged or row["messages"] == unchanged[name]
    assert result.report["this_process"]["replies"] == 1 + 2 + 3 + 1
    assert {path: path.read_bytes() for path in old.iterdir()} == old_files


def test_a_prompt_file_that_changes_meanwhile_ends_the_run_and_no_answer_gets_to_another_prompt(world, tmp_path, capfd):
    prompts, out = tmp_path / "p.txt", tmp_path / "out"
    prompts.write_text("\n".join(TOPICS))

    def change(texts: list[list[int]]) -> None:
        if out.exists():
            prompts.write_text("A new first line.\n" + "\n".join(TOPICS))

    with read_texts(change):
        assert command(world, out, prompts=prompts) == REFUSED
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        rf"dflash: regenerate.prompts={prompts}:\d+: changed since the start; start the command again", last
    )
    assert command(world, out, prompts=prompts) == FINISHED
    assert [row["messages"][0]["content"] for row in Result(out).conversations] == ["A new first line.", *TOPICS]


def test_answers_of_a_cut_off_line_are_made_again(world, beginnings, tmp_path):
    out = shutil.copytree(world.out, tmp_path / "out")
    (shard,) = out.glob("*/shard-*")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-20])
    torn = json.loads(whole.splitlines()[-1])["id"]
    with read_texts() as texts:
        assert command(world, out) == FINISHED
    assert begun(texts, beginnings) == [torn]
    assert Result(out).files() == Result(world.out).files()


INGREDIENTS: dict[str, dict[str, Any]] = {
    "temperature": {"regenerate__temperature": 0.9},
    "greedy": {"regenerate__temperature": 0},
    "top_p": {"regenerate__top_p": 0.7},
    "top_k": {"regenerate__top_k": 5},
    "seed": {"regenerate__seed": 1},
    "max_new_tokens": {"regenerate__max_new_tokens": 3},
    "system_prompt": {"regenerate__system_prompt": "Be kind."},
    "empty system_prompt": {"regenerate__system_prompt": "''"},
    "cut_replies": {"regenerate__cut_replies": "drop"},
    "template_kwargs": {"data__template_kwargs": "{tone: loud}"},
    "dtype": {"target__dtype": "bfloat16"},
    "weights": {"target__name": "{place}/other-weights"},
    "template": {"target__name": "{place}/other-template"},
    "tokenizer": {"target__name": "{place}/other-tokenizer"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "batch_rows": {"regenerate__batch_rows": 7},
    "requests_in_flight": {"regenerate__requests_in_flight": 3},
    "request_seconds": {"regenerate__request_seconds": 5.0},
    "attention": {"target__attention": "eager"},
    "max_tokens of the training": {"data__max_tokens": 99},
}


@pytest.fixture(scope="module")
def key_of(world, tmp_path_factory):
    """The name of the directory that a sampled run makes with some knobs changed; its template refuses all prompts, to be quick."""
    place = tmp_path_factory.mktemp("keys")
    prompts = write_jsonl(place / "p.jsonl", [{"prompt": "forbidden"}])
    make_target(place / "target", template=FORBIDS)
    for name in ("weights", "template", "tokenizer"):
        shutil.copytree(place / "target", place / f"other-{name}")
    weights = load_file(place / "target" / "model.safetensors")
    weights["model.norm.weight"] += 0.01
    save_file(weights, place / "other-weights" / "model.safetensors", metadata={"format": "pt"})
    (place / "other-template" / "chat_template.jinja").write_text(FORBIDS + "{# the same #}")
    tokenizer = json.loads((place / "target" / "tokenizer.json").read_text())
    tokenizer["added_tokens"][1]["lstrip"] = True
    (place / "other-tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    sampled = {"regenerate__temperature": 1.0, "regenerate__top_p": 0.9, "regenerate__top_k": 50}

    def key_of(*, prompts: Path = prompts, **changes: Any) -> str:
        out = place / f"out-{time.monotonic_ns()}"
        given = {"target__name": "{place}/target", **sampled, **changes}
        given["target__name"] = given["target__name"].format(place=place)
        # one directory for all targets, since a target's key holds the name it was asked for by
        if given["target__name"] != f"{place}/target":
            shutil.rmtree(place / "target.kept", ignore_errors=True)
            (place / "target").rename(place / "target.kept")
            shutil.copytree(given["target__name"], place / "target")
        try:
            assert command(world, out, prompts=prompts, **given | {"target__name": f"{place}/target"}) == REFUSED
        finally:
            if (place / "target.kept").exists():
                shutil.rmtree(place / "target")
                (place / "target.kept").rename(place / "target")
        (directory,) = out.iterdir()
        return directory.name

    return key_of


def test_whatever_an_answer_depends_on_gives_another_directory_and_nothing_else_does(key_of, tmp_path, monkeypatch):
    key = key_of()
    keys = {name: key_of(**changes) for name, changes in INGREDIENTS.items()}
    assert len({key, *keys.values()}) == len(keys) + 1, keys
    assert {name: key_of(**changes) for name, changes in OTHERS.items()} == dict.fromkeys(OTHERS, key)
    other_prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "also forbidden"}])
    assert key_of(prompts=other_prompts) == key
    monkeypatch.setattr(regenerate, "CODE_VERSION", regenerate.CODE_VERSION + 1)
    assert key_of() not in {key, *keys.values()}


def test_greedy_answers_do_not_depend_on_how_they_would_be_sampled(key_of):
    greedy = {"regenerate__temperature": 0}
    knobs = {"regenerate__top_p": 0.5, "regenerate__top_k": 3, "regenerate__seed": 9}
    assert key_of(**greedy, **knobs) == key_of(**greedy)


def test_a_configuration_file_is_read_and_flags_go_before_it(world, tmp_path):
    config = {
        "target": {"name": str(world.target), "devices": ["cpu"]},
        "regenerate": {
            "prompts": str(world.prompts),
            "out": str(tmp_path / "out"),
            "temperature": 0.0,
            "max_new_tokens": 999,
        },
        "optim": {"lr": 1e-3},  # the whole flow's file
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert main(["--config", f"{tmp_path}/config.yaml", "--regenerate.max_new_tokens", str(NEW)]) == FINISHED
    assert Result(tmp_path / "out").files() == Result(world.out).files()


# ---------------------------------------------------------------- processes


def run_command(arguments: list[str], log: str, then: str | None, when: int, delay_seconds: float) -> int:
    """In a process of its own: the command, which notes what the target reads in `log`.

    At the target's forward number `when` it does `then`; `delay_seconds` is how much later a kill comes, from another thread and so
    anywhere in the code.
    """
    forwards = 0
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def look(module: torch.nn.Module, inputs: Any) -> None:
        nonlocal forwards
        if not isinstance(module, torch.nn.Embedding):
            return
        forwards += 1
        if inputs[0].shape[-1] > 1 and then != "fill":
            note = {"pid": os.getpid(), "texts": [unpadded(row) for row in inputs[0].tolist()]}
            os.write(descriptor, json.dumps(note).encode() + b"\n")
        if then == "kill" and forwards >= when:
            if forwards == when:
                threading.Timer(delay_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if forwards == when + 3:
                time.sleep(LONG)  # a slow timer must not let the command end
        elif then in ("SIGTERM", "SIGINT") and forwards == when:
            os.kill(os.getpid(), signal.Signals[then])
        elif then == "hold" and forwards == when:
            time.sleep(LONG)
        elif then == "share":  # once it has an answer, it waits until the other process has one as well
            out = Path(arguments[arguments.index("--out") + 1])
            shards = [path.name for path in out.glob("*/shard-*")]
            if len(shards) == 1 and shards[0].endswith(f"-{os.getpid()}.jsonl"):
                until(lambda: len(list(out.glob("*/shard-*"))) > 1)

    if then == "fill":
        forking.resource.setrlimit(forking.resource.RLIMIT_FSIZE, (2500, forking.resource.RLIM_INFINITY))
    register_module_forward_pre_hook(look)
    return main(arguments)


class Commands(Forks):
    """Forks of this module, which can run the command."""

    def __enter__(self) -> "Commands":
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
            "OMP_NUM_THREADS": "1",  # a process that has started threads must not fork
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        return self

    def run(
        self, arguments: list[str], log: Path, then: str | None = None, when: int = 0, delay_seconds: float = 0.0
    ) -> Child:
        return self.start(
            run_command,
            stderr=log.with_name(f"stderr-{time.monotonic_ns()}"),
            arguments=arguments,
            log=str(log),
            then=then,
            when=when,
            delay_seconds=delay_seconds,
        )


@pytest.fixture(scope="module")
def forks():
    with Commands() as server:
        yield server


def texts_of(log: Path, pid: int) -> list[list[int]]:
    """What the target of a process has read."""
    lines = [json.loads(line) for line in log.read_bytes().splitlines()] if log.exists() else []
    return [text for line in lines if line["pid"] == pid for text in line["texts"]]


def stored(out: Path) -> set[str]:
    """Ids of the prompts that have an answer on disk."""
    ids = [record["id"] for store in out.glob("*") for record in records_of(store)]
    assert len(ids) == len(set(ids)), "a prompt has two answers"
    return set(ids)


def test_a_run_killed_at_ten_random_moments_does_again_only_what_was_in_flight(world, beginnings, forks, tmp_path):
    """No prompt that has an answer is ever read again, and each kill costs the rows of one batch at most."""
    draw, out, log = random.Random(3), tmp_path / "out", tmp_path / "log"
    started = 0
    for _ in range(10):
        before = stored(out)
        child = forks.run(
            arguments(world, out), log, "kill", when=draw.randint(1, 60), delay_seconds=draw.random() / 100
        )
        assert child.wait() == -signal.SIGKILL
        here = begun(texts_of(log, child.pid), beginnings)
        assert len(here) == len(set(here))
        assert not before & set(here)
        assert len(set(here) - stored(out)) <= ROWS
        started += len(here)
    before = stored(out)
    assert 0 < len(before) < len(world.rows)
    child = forks.run(arguments(world, out), log)
    assert child.wait() == FINISHED, child.stderr.read_text()
    here = begun(texts_of(log, child.pid), beginnings)
    assert sorted(here) == sorted(set(beginnings.values()) - before)
    assert started + len(here) <= len(world.rows) + 10 * ROWS
    assert stored(out) == set(beginnings.values())
    unbroken, result = Result(world.out), Result(out)
    assert result.files() == unbroken.files()
    by_key = {record["key"]: record for record in unbroken.records}
    assert {record["key"]: record for record in result.records} == by_key
    assert {**result.report, "this_process": 0} == {**unbroken.report, "this_process": 0}
    assert result.report["this_process"]["replies"] == sum(
        len(r["replies"]) for r in by_key.values() if r["id"] in here
    )


def test_no_more_conversations_are_open_than_rows(world, speaker, tmp_path):
    """Else a kill would cost first replies that have long ended, of conversations whose next turn waits behind others."""
    rows = [{"id": str(n), "turns": [f"{n} {topic}", "geese " * (5 + n % 4)]} for n, topic in enumerate(TOPICS)]
    known = {tuple(speaker.prompt([user(row["turns"][0])])): row["id"] for row in rows}
    read: list[list[int]] = []
    most_open = 0

    def look(texts: list[list[int]]) -> None:
        nonlocal most_open
        read.extend(texts)
        most_open = max(most_open, len(begun(read, known)) - len(stored(tmp_path / "out")))

    with read_texts(look):
        assert command(world, tmp_path / "out", prompts=write_jsonl(tmp_path / "p.jsonl", rows)) == FINISHED
    assert len(begun(read, known)) == len(rows)
    assert most_open == ROWS


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_stopped_run_says_so_in_one_line_and_the_same_command_goes_on(world, beginnings, forks, tmp_path, number):
    out, log = tmp_path / "out", tmp_path / "log"
    child = forks.run(arguments(world, out), log, number, when=60)
    assert child.wait() == STOPPED
    assert child.last_line() == "dflash: stopped; what is answered stays, and the same command goes on"
    assert "Traceback" not in child.stderr.read_text()
    before = stored(out)
    assert 0 < len(before) < len(world.rows)
    assert len(set(begun(texts_of(log, child.pid), beginnings)) - before) <= ROWS
    child = forks.run(arguments(world, out), log)
    assert child.wait() == FINISHED
    assert sorted(begun(texts_of(log, child.pid), beginnings)) == sorted(set(beginnings.values()) - before)
    assert Result(out).files() == Result(world.out).files()


def test_two_processes_share_the_prompts_and_end_with_the_same_result(world, beginnings, forks, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    children = [forks.run(arguments(world, out), log, "share") for _ in range(2)]
    assert [child.wait() for child in children] == [FINISHED, FINISHED]
    here = [begun(texts_of(log, child.pid), beginnings) for child in children]
    assert all(here)
    assert Counter(here[0] + here[1]) == Counter(beginnings.values())
    result = Result(out)
    assert len(list(result.store.glob("shard-*"))) == 2
    assert stored(out) == set(beginnings.values())
    assert result.files() == Result(world.out).files()
    assert {**result.report, "this_process": 0} == {**Result(world.out).report, "this_process": 0}
    assert not list(result.store.rglob("*.partial"))


def test_prompts_of_a_process_that_dies_are_taken_over_by_the_one_that_waits_for_them(
    world, beginnings, forks, tmp_path
):
    out, log = tmp_path / "out", tmp_path / "log"
    first = forks.run(arguments(world, out), log, "hold", when=20)
    first.until(lambda: begun(texts_of(log, first.pid), beginnings))
    time_to_hold = 3 * ROWS  # more than it can have before its twentieth forward
    second = forks.run(arguments(world, out), log)
    second.until(lambda: second.stderr.exists() and "answered by another process" in second.stderr.read_text())
    missing = set(beginnings.values()) - stored(out)
    assert 0 < len(missing) <= time_to_hold
    assert not missing & set(begun(texts_of(log, second.pid), beginnings))
    os.kill(first.pid, signal.SIGKILL)
    assert second.wait() == FINISHED
    assert missing <= set(begun(texts_of(log, second.pid), beginnings))
    assert Result(out).files() == Result(world.out).files()


def test_a_full_disk_ends_the_run_with_the_cause_and_the_same_command_goes_on(world, forks, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    child = forks.run(arguments(world, out), log, "fill")
    assert child.wait() == FAILED
    assert re.match(r"dflash: failed: OSError: .*/shard-.*: the disk is full", child.last_line())
    assert "Traceback" not in child.stderr.read_text()
    before = stored(out)
    assert 0 < len(before) < len(world.rows)
    assert command(world, out) == FINISHED
    assert Result(out).files() == Result(world.out).files()


# ---------------------------------------------------------------- a server as the source


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A target whose texts a server reads and writes as we do, and the file that the server takes."""
    place = tmp_path_factory.mktemp("served")
    target = tiny_target(place / "target", "llama", layers=2)
    weights, tokenizer = load_file(target / "model.safetensors"), AutoTokenizer.from_pretrained(target)
    weights["lm_head.weight"][END_OF_TURN] *= 2
    for token in range(len(tokenizer)):
        if "\ufffd" in tokenizer.decode([token]) or token < END_OF_TURN:  # a server leaves special tokens out
            weights["lm_head.weight"][token] = 0
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target, to_gguf(target, place / "target.gguf")


def test_a_server_that_dies_loses_nothing_and_the_next_start_asks_it_only_for_what_is_missing(
    world, served, tmp_path, capfd
):
    target, model_file = served
    rows = chats(12, seed=2)
    prompts, out = write_jsonl(tmp_path / "p.jsonl", rows), tmp_path / "out"
    knobs = {"regenerate__requests_in_flight": 2, "regenerate__outage_seconds": 1.0}
    with LlamaServer(model_file) as server:

        def die(path: str, body: dict[str, Any], tries: int) -> None:
            if path == CHAT and len(proxy.completions) == 12:
                server.kill()

        with FaultyProxy(server.url, die) as proxy:
            flags = ("--target", target, "--regenerate.endpoint", proxy.url + "/v1")
            assert command(world, out, *flags, prompts=prompts, **knobs) == FAILED
            last = capfd.readouterr().err.strip().splitlines()[-1]
            assert last.startswith("dflash: failed: ServerFailed: regenerate.endpoint=")
            before = stored(out)
            assert 0 < len(before) < 12
            asked = len(proxy.completions)
            with LlamaServer(model_file) as again:
                proxy.upstream, proxy.plan = again.url, lambda *_: None
                assert command(world, out, *flags, prompts=prompts, **knobs) == FINISHED
            first_turns = [
                next(m["content"] for m in body["messages"] if m["role"] == "user")
                for body in proxy.completions[asked:]
            ]
    done = {next(m["content"] for m in row["messages"] if m["role"] == "user") for row in rows if row["id"] in before}
    assert not done & set(first_turns)
    result, speaker = Result(out), Speaker(target)
    assert [row["id"] for row in result.conversations] == [row["id"] for row in rows]
    assert [row["messages"] for row in result.conversations] == [speaker.conversation(row) for row in rows]
    assert result.report["dropped"] == {}
    assert (result.directory / "lengths.png").exists()


# ---------------------------------------------------------------- what is refused

FILES = {
    "empty.jsonl": "",
    "blank.jsonl": "\n  \n\n",
    "broken.jsonl": '{"prompt": "a"}\n{"prompt": \n',
    "other.jsonl": '{"prompt": "a"}\n{"text": "b"}\n',
    "not-utf8.txt": "a\n\udcff\n",
    "unusable.jsonl": '{"messages": [{"role": "critic", "content": "a"}]}\n{"prompt": ""}\n',
    "forbidden.jsonl": '{"prompt": "forbidden"}\n{"prompt": "also forbidden"}\n',
    "list.yaml": "- target\n",
    "file": "a regular file\n",
}

# row: flags after those of a run that is fine, the value that the line names, the remedy
REFUSALS = {
    # prompts
    "no such file": ("--prompts {place}/none.jsonl", "regenerate.prompts={place}/none.jsonl: No such file", "give a"),
    "a directory": ("--prompts {place}", "regenerate.prompts={place}: Is a directory", "give a JSONL or text file"),
    "an empty file": ("--prompts {place}/empty.jsonl", "{place}/empty.jsonl: none of its 0 rows", "one prompt a line"),
    "blank lines": ("--prompts {place}/blank.jsonl", "{place}/blank.jsonl: none of its 0 rows", "one prompt a line"),
    "a broken line": ("--prompts {place}/broken.jsonl", "{place}/broken.jsonl:2:", "one JSON conversation a line"),
    "another row": ("--prompts {place}/other.jsonl", "{place}/other.jsonl:2: not a prompt", '{{"prompt": ...}}'),
    "no text": ("--prompts {place}/not-utf8.txt", "{place}/not-utf8.txt:2:", "one prompt in UTF-8 a line"),
    "no row is one": (
        "--prompts {place}/unusable.jsonl",
        "none of its 2 rows is a prompt",
        "line 1, a role that is not",
    ),
    "all refused": (
        "--prompts {place}/forbidden.jsonl --target {place}/forbids",
        "no conversation is left of 2 prompts (2 template_refused)",
        "dropped.jsonl",
    ),
    # target
    "no target": ("--target {place}/none", "target.name={place}/none: no such directory", "save_pretrained"),
    "no template": ("--target {place}/no-template", "{place}/no-template", "chat_template.jinja"),
    "a template that refuses": ("--target {place}/refuses", "not in the mood", "mend the template"),
    "no tokenizer": ("--target {place}/no-tokenizer", "{place}/no-tokenizer", "save the target's own"),
    "torn weights": ("--target {place}/torn", "target.name={place}/torn", "give a complete one"),
    "a running state": ("--target {place}/mamba", "target.name={place}/mamba: mamba cannot", "--regenerate.endpoint"),
    "no device": ("--target.devices tpu9", "target.devices=tpu9", "use auto"),
    # knobs
    "unknown flag": ("--regenerate.depth 3", "--regenerate.depth", "--help"),
    "a training flag": ("--optim.lr 1", "--optim.lr", "--help"),
    "abbreviated": ("--prompt x", "--prompt", "--help"),
    "negative temperature": ("--regenerate.temperature -1", "regenerate.temperature=-1", "greater than or equal to 0"),
    "no number": ("--regenerate.temperature warm", 'regenerate.temperature="warm"', "valid number"),
    "not finite": ("--regenerate.temperature .nan", "regenerate.temperature=NaN", "finite"),
    "top_p of 0": ("--regenerate.top_p 0", "regenerate.top_p=0", "greater than 0"),
    "top_p above 1": ("--regenerate.top_p 1.5", "regenerate.top_p=1.5", "less than or equal to 1"),
    "negative top_k": ("--regenerate.top_k -1", "regenerate.top_k=-1", "greater than or equal to 0"),
    "no tokens": ("--regenerate.max_new_tokens 0", "regenerate.max_new_tokens=0", "greater than or equal to 1"),
    "no rows": ("--regenerate.batch_rows 0", "regenerate.batch_rows=0", "greater than or equal to 1"),
    "unknown choice": ("--regenerate.cut_replies mend", 'regenerate.cut_replies="mend"', "'keep' or 'drop'"),
    "template_kwargs of tokenizer": ("--data.template_kwargs '{{tools: 1}}'", "tools cannot be set", "own variables"),
    "config a list": ("--config {place}/list.yaml", "--config {place}/list.yaml", "mapping of sections"),
    # disk
    "out is a file": ("--out {place}/file", "regenerate.out={place}/file", "that can be written"),
    "out under a file": ("--out {place}/file/out", "regenerate.out={place}/file/out", "that can be written"),
    "report in no directory": ("--report {place}/none/r.json", "{place}/none/r.json: cannot be written", "give a file"),
    "out under /proc": ("--out /proc/answers", "regenerate.out=/proc/answers", "that can be written"),
    # server
    "no server": ("--regenerate.endpoint http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1", "start"),
    "no address": ("--regenerate.endpoint nowhere", "regenerate.endpoint=nowhere", "http"),
}
COMMANDS = {
    "nothing": ("", "target.name is not set", "--target.name VALUE"),
    "no prompts": ("--target {place}/target", "regenerate.prompts is not set", "--prompts FILE"),
}


@pytest.fixture(scope="module")
def place(world, tmp_path_factory) -> Path:
    """A directory with every bad input that the rows name."""
    place = tmp_path_factory.mktemp("refusals")
    for name, text in FILES.items():
        (place / name).write_text(text, errors="surrogateescape")
    shutil.copytree(world.target, place / "target")
    for name, template in (("no-template", None), ("refuses", "{{ raise_exception('not in the mood') }}")):
        shutil.copytree(world.target, place / name, ignore=shutil.ignore_patterns("chat_template.jinja"))
        if template:
            (place / name / "chat_template.jinja").write_text(template)
    make_target(place / "forbids", template=FORBIDS)
    shutil.copytree(world.target, place / "no-tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    torn = shutil.copytree(world.target, place / "torn") / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    MambaForCausalLM(MambaConfig(vocab_size=512, hidden_size=32, state_size=8, num_hidden_layers=2)).save_pretrained(
        place / "mamba"
    )
    tiny_tokenizer().save_pretrained(place / "mamba")
    return place


@pytest.mark.parametrize("row", [*REFUSALS, *COMMANDS])
def test_bad_input_is_refused_in_one_line_with_value_and_remedy_before_any_answer(world, place, tmp_path, row, capfd):
    flags, value, remedy = (text.format(place=place) for text in (REFUSALS | COMMANDS)[row])
    fine = arguments(world, tmp_path / "out") if row in REFUSALS else []
    code = main([*fine, *shlex.split(flags)])
    stdout, stderr = capfd.readouterr()
    assert_refused(code, stderr, value, remedy)
    assert stdout == ""
    assert not [reply for store in (tmp_path / "out").glob("*") for r in records_of(store) for reply in r["replies"]]


def test_the_process_itself_exits_with_2_and_shows_no_traceback(world, place, tmp_path):
    flags = arguments(world, tmp_path / "out", "--prompts", f"{place}/broken.jsonl")
    command = [sys.executable, "-m", "dflash.regenerate", *flags]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.stdout == ""
    assert_refused(done.returncode, done.stderr, "broken.jsonl:2:", "one JSON conversation a line")
    assert len(done.stderr.splitlines()) == 1


if __name__ == "__main__":  # the process that forks
    forking.run_command = run_command  # type: ignore[attr-defined]
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as warm:  # what libraries do only once costs more than a whole run here
        AutoModelForCausalLM.from_pretrained(make_target(Path(warm) / "target"))
        histogram(Path(warm) / "lengths.png", [1, 2], title="", xlabel="")
    forking.serve()
