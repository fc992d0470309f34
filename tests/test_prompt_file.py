"""Prompt files: four forms of a JSONL row and plain text, read into the messages that come before each reply."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tiny import write_jsonl

from dflash.conversation import BAD_MESSAGE, DROP_REASONS, EMPTY, NOT_TEXT, UNKNOWN_ROLE, Unusable
from dflash.prompt_file import NO_USER_TURN, PROMPT_DROP_REASONS, TOOL_TURN, Prompt, prompt_of, row_at, rows

KNOB = "regenerate.prompts"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def chat(*messages: dict[str, Any], **more: Any) -> Prompt:
    return prompt_of({"messages": list(messages), **more})


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# ---------------------------------------------------------------- forms


def test_all_forms_of_the_same_prompts_give_the_same_stages_and_keys(tmp_path):
    wanted = [["Who is it?"], ["Sort the list.", "Now backwards."]]
    forms = {
        "messages": [{"messages": [m for text in texts for m in (user(text), assistant("old"))]} for texts in wanted],
        "unanswered": [
            {"messages": [m for text in texts for m in (assistant("old"), user(text))][1:]} for texts in wanted
        ],
        "conversations": [
            {"conversations": [m for t in texts for m in ({"from": "human", "value": t}, {"from": "gpt", "value": ""})]}
            for texts in wanted
        ],
        "turns": [{"turns": texts} for texts in wanted],
        "parts": [
            {"messages": [m for t in texts for m in (user([{"type": "text", "text": t}]), assistant("old"))]}  # type: ignore
            for texts in wanted
        ],
    }
    for name, form in forms.items():
        read = [prompt_of(row) for _, row in rows(write_jsonl(tmp_path / f"{name}.jsonl", form), knob=KNOB)]
        assert [prompt.stages for prompt in read] == [[[user(text)] for text in texts] for texts in wanted], name
        assert [prompt.key for prompt in read] == [chat(*map(user, wanted[0])).key, read[1].key]
        assert [prompt.characters for prompt in read] == [10, 28]
    turns, messages = (prompt_of(forms[name][1]).key for name in ("turns", "messages"))
    assert turns == messages
    single = [{"prompt": wanted[0][0]}]
    for path in (write_jsonl(tmp_path / "p.jsonl", single), written(tmp_path / "p.txt", b"  Who is it? \n")):
        assert [prompt_of(row) for _, row in rows(path, knob=KNOB)] == [prompt_of({"turns": wanted[0]})]


def test_a_text_file_has_one_prompt_a_line_whatever_its_line_ends(tmp_path):
    path = written(tmp_path / "prompts.txt", 'Zwölf Äpfel?\r\n\r\n  \n{"prompt": 1}\n京 \\n "'.encode())
    assert [(place.number, row["prompt"]) for place, row in rows(path, knob=KNOB)] == [
        (1, "Zwölf Äpfel?"),
        (4, '{"prompt": 1}'),
        (5, '京 \\n "'),
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_a_row_is_found_again_by_its_place(tmp_path, suffix):
    draw = random.Random(0)
    lines = ["" if draw.random() < 0.2 else "".join(draw.choices("aé京🚲 \t\\", k=20)) for _ in range(60)]
    if suffix == "jsonl":
        lines = [line and json.dumps({"prompt": line}, ensure_ascii=draw.random() < 0.5) for line in lines]
    path = written(tmp_path / f"p.{suffix}", "\r\n".join(lines).encode())
    places = list(rows(path, knob=KNOB))
    assert [place.number for place, _ in places] == [n for n, line in enumerate(lines, start=1) if line.strip()]
    draw.shuffle(places)
    for place, row in places:
        assert row_at(path, place, knob=KNOB) == row


def test_any_character_may_be_in_a_prompt(tmp_path):
    texts = ["?", "\U0001f6b2", "\x00", "a\u2028b", "a\rb", "\ufeff", "\uffff"]
    path = written(tmp_path / "p.jsonl", b"".join(json.dumps({"prompt": text}).encode() + b"\n" for text in texts))
    read = [prompt_of(row) for _, row in rows(path, knob=KNOB)]
    assert [prompt.stages for prompt in read] == [[[user(text)]] for text in texts]
    assert len({prompt.key for prompt in read}) == len(texts)


# ---------------------------------------------------------------- what a prompt is


def test_replies_are_only_places():
    stages = [[system("Be brief."), user("a")], [user("b"), user("c")]]
    given = chat(system("Be brief."), user("a"), assistant("1"), user("b"), user("c"), assistant("2"))
    assert given.stages == stages
    for first, last in (("", []), ("another", [assistant("")]), ("x" * 99, [assistant("y"), system("later")])):
        other = chat(system("Be brief."), user("a"), assistant(first), user("b"), user("c"), *last)
        assert (other.stages, other.key) == (stages, given.key)


def test_a_reply_to_nobody_is_left_out():
    plain = chat(user("a"), user("b"))
    assert plain.stages == [[user("a"), user("b")]]
    assert chat(assistant("Hello!"), user("a"), user("b")) == plain
    assert chat(user("a"), assistant("1"), assistant("2"), user("b")) == chat(user("a"), assistant(""), user("b"))
    greeted = chat(system("s"), assistant("Hello!"), user("a"))
    assert greeted.stages == [[system("s"), user("a")]]


def test_a_reply_is_wanted_after_every_user_turn_and_nowhere_else():
    draw = random.Random(1)
    for _ in range(300):
        messages = [
            {"role": draw.choice(["user", "assistant", "system"]), "content": str(n)} for n in range(draw.randint(1, 9))
        ]
        roles = [message["role"] for message in messages]
        if "user" not in roles:
            with pytest.raises(Unusable):
                chat(*messages)
            continue
        prompt = chat(*messages)
        asked = [message for message in messages if message["role"] != "assistant"]
        said = [message for stage in prompt.stages for message in stage]
        assert said == asked[: len(said)]
        assert user("") not in asked[len(said) :]
        assert {message["role"] for message in asked[len(said) :]} <= {"system"}
        assert all(any(message["role"] == "user" for message in stage) for stage in prompt.stages)
        replies, waiting = 0, False
        for role in [*roles, "assistant"]:
            replies, waiting = (
                replies + (waiting and role == "assistant"),
                role == "user" or (waiting and role != "assistant"),
            )
        assert len(prompt.stages) == replies


def test_the_system_prompt_is_given_only_where_there_is_none():
    def with_system(*messages: dict[str, Any]) -> Prompt:
        return prompt_of({"messages": list(messages)}, system="Be kind.")

    assert with_system(user("a"), assistant("b"), user("c")).stages == [[system("Be kind."), user("a")], [user("c")]]
    assert with_system(user("a")).key == chat(system("Be kind."), user("a")).key != chat(user("a")).key
    assert with_system(assistant("Hello!"), user("a")).stages == [[system("Be kind."), user("a")]]
    for own in (system("Be rude."), {"role": "developer", "content": "Be rude."}, system("")):
        assert with_system(own, user("a")) == chat(own, user("a"))
        assert with_system(user("a"), own, user("b")) == chat(user("a"), own, user("b"))
    assert prompt_of({"prompt": "a"}, system="Be kind.") == with_system(user("a"))
    assert prompt_of({"turns": ["a"]}, system="") == chat(system(""), user("a"))


def test_the_key_is_of_the_content_alone():
    content = {"messages": [system("s"), user("a"), assistant(""), user("b")], "tools": TOOLS}
    key = prompt_of(content).key
    assert prompt_of(content | {"id": "x", "source": "somewhere"}).key == key
    others = [
        content | {"tools": []},
        content | {"tools": [TOOLS[0] | {"type": "other"}]},
        content | {"messages": [system("s"), user("a"), user("b")]},
        content | {"messages": [system("s"), user("a"), assistant(""), user("b ")]},
        content | {"messages": [system("s"), user("b"), assistant(""), user("a")]},
        content | {"messages": [user("s"), user("a"), assistant(""), user("b")]},
        content | {"messages": [user("a"), assistant(""), system("s"), user("b")]},
        content | {"messages": [system("s"), {**user("a"), "name": "Ada"}, assistant(""), user("b")]},
        content | {"messages": [system("s"), user("a")]},
    ]
    assert len({key, *(prompt_of(row).key for row in others)}) == len(others) + 1


def test_tools_and_further_fields_of_a_message_are_kept():
    prompt = chat({**user("a"), "name": "Ada"}, tools=TOOLS)
    assert prompt.tools == TOOLS
    assert prompt.stages == [[{**user("a"), "name": "Ada"}]]
    assert chat(user("a"), tools=[]).tools is None


def test_a_prompt_is_called_by_its_own_id_or_its_content():
    named = [({"id": "chat-1"}, "chat-1"), ({"id": 7}, "7"), ({"id": 0}, "0")]
    for row, name in named:
        assert prompt_of({"prompt": "a", **row}).id == name
    for row in ({}, {"id": ""}, {"id": None}, {"id": ["x"]}):
        assert prompt_of({"prompt": "a", **row}).id == chat(user("a")).key[:16]


# ---------------------------------------------------------------- what is no prompt


UNUSABLE = {
    "unknown role": ({"messages": [user("a"), {"role": "critic", "content": "b"}]}, UNKNOWN_ROLE, "'critic'"),
    "no role": ({"messages": [{"content": "b"}]}, BAD_MESSAGE, "None"),
    "no object": ({"messages": ["a"]}, BAD_MESSAGE, "'a'"),
    "no content": ({"messages": [{"role": "user"}]}, BAD_MESSAGE, "None"),
    "an image": ({"messages": [user([{"type": "image"}])]}, NOT_TEXT, "image"),  # type: ignore
    "half a character": ({"prompt": "\ud83d?"}, NOT_TEXT, "surrogates not allowed"),
    "half a character in tools": ({"prompt": "a", "tools": [{"name": "\udfff"}]}, NOT_TEXT, "surrogates not allowed"),
    "no messages": ({"messages": []}, EMPTY, ""),
    "no turns": ({"turns": []}, EMPTY, ""),
    "an empty turn": ({"turns": ["a", " \n"]}, EMPTY, ""),
    "an empty prompt": ({"prompt": ""}, EMPTY, ""),
    "turns of no text": ({"turns": ["a", 1]}, BAD_MESSAGE, "['a', 1]"),
    "turns no list": ({"turns": "abc"}, BAD_MESSAGE, "'abc'"),
    "a prompt of no text": ({"prompt": {"text": "a"}}, BAD_MESSAGE, "'text'"),
    "only a reply": ({"messages": [assistant("a")]}, NO_USER_TURN, ""),
    "only a system message": ({"messages": [system("a"), assistant("b")]}, NO_USER_TURN, ""),
    "a result of a tool": ({"messages": [user("a"), {"role": "tool", "content": "3"}]}, TOOL_TURN, ""),
    "a call": (
        {"messages": [user("a"), {"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}]},
        TOOL_TURN,
        "",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_row_that_is_no_prompt_says_why(name):
    row, reason, detail = UNUSABLE[name]
    with pytest.raises(Unusable) as error:
        prompt_of(row)
    assert error.value.reason == reason
    assert detail in error.value.detail
    assert reason in DROP_REASONS | PROMPT_DROP_REASONS


REFUSED = {
    "broken": (b'{"prompt": "a"}\n\n{"prompt": \n', "jsonl", ":3: ", "one JSON conversation a line"),
    "torn": (b'{"prompt": "a"}\n{"prompt": "b', "jsonl", ":2: ", "one JSON conversation a line"),
    "no UTF-8": (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "jsonl", ":2: ", "one JSON conversation a line"),
    "no UTF-8 text": (b"a\n\xff\n", "txt", ":2: ", "one prompt in UTF-8 a line"),
    "a list": (b"[]\n", "jsonl", ":1: not a prompt", '{"turns": [...]}'),
    "a pretty JSON file": (b'[\n  {"prompt": "a"}\n]\n', "json", ":1: ", "one JSON conversation a line"),
    "another row": (b'{"prompt": "a"}\n{"text": "b"}\n', "jsonl", ":2: not a prompt", '{"prompt": ...}'),
    "messages no list": (b'{"messages": "a"}\n', "jsonl", ":1: not a prompt", '{"messages": ['),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_line_that_is_no_row_is_refused_in_one_line_with_its_number_and_the_remedy(tmp_path, name):
    content, suffix, place, remedy = REFUSED[name]
    path = written(tmp_path / f"prompts.{suffix}", content)
    with pytest.raises(ValueError, match="^" + re.escape(f"{KNOB}={path}{place}") + ".*" + re.escape(remedy)):
        list(rows(path, knob=KNOB))


@pytest.mark.parametrize("name, cause", [("none.jsonl", "No such file"), ("folder.jsonl", "Is a directory")])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, name, cause):
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ValueError, match=f"{KNOB}={tmp_path / name}: {cause}.*; give a JSONL or text file of prompts"):
        list(rows(tmp_path / name, knob=KNOB))
