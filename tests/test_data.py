"""Conversations -> samples: masks on chat templates of ten families, drops, refusals, the directory."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refused import assert_refused
from tiny import conversations, tiny_target, write_jsonl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from dflash import conversation, data, train
from dflash.command import FINISHED, STOPPED
from dflash.data import Prepared, main, prepare

TEXT = """The baker opens at six and sells rye bread, rolls and plain cake until noon.
Is the bridge open? Yes, it opens every morning; the guard has the key.
Old maps show the river further east. New maps do not, because the river moved.
Think first: seven times six is forty two. Then answer with the number only.
assistant user system model tool yes no hi bye (so: it is)"""


# ------------------------------------------------------------------------------------------------ chat templates
def turns(body: str, *, before: str = "", after: str = "", prompt: str = "") -> str:
    loop = before + "{% for m in messages %}" + body + "{% endfor %}" + after
    return loop + "{% if add_generation_prompt %}" + prompt + "{% endif %}"


CHATML = turns(
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}", prompt="{{ '<|im_start|>assistant\n' }}"
)
# Qwen3: reasoning in its own field or inline, dropped from turns before the last question, an empty block otherwise
QWEN3 = turns(
    "{% set c = m.content %}{% set r = m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' and not r and '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1] %}{% set c = c.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}"
    "{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or r) %}"
    "{{ '<think>\n' + r.strip('\n') + '\n</think>\n\n' + c.lstrip('\n') }}{% else %}{{ c }}{% endif %}"
    "{% for t in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + t.function.name + \'", "arguments": \' }}{{ t.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}",
    before="{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}{{ '<|im_start|>system\nTools: ' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{% endif %}",
    prompt="{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)
LLAMA3 = turns(
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}",
    before="{{ bos_token }}",
    prompt="{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
)
GEMMA = turns(
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}",
    before="{{ bos_token }}",
    prompt="{{ '<start_of_turn>model\n' }}",
)
MISTRAL = turns(
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}",
    before="{{ bos_token }}",
)
ZEPHYR = turns(
    "{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}",
    prompt="{{ '<|assistant|>\n' }}",
)
DEEPSEEK = turns(
    "{% if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end_of_sentence|>' }}{% endif %}",
    before="{{ bos_token }}",
    prompt="{{ '<|Assistant|><think>\n' }}",
)
PHI3 = turns("{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}", prompt="{{ '<|assistant|>\n' }}")
HARMONY = turns(
    "{% if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% else %}"
    "{% if m.thinking and loop.last %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
    "{% endif %}{% for t in m.tool_calls or [] %}"
    "{{ '<|start|>assistant to=' + t.function.name + '<|channel|>commentary json<|message|>' }}"
    "{{ t.function.arguments | tojson }}{{ '<|call|>' }}{% endfor %}"
    "{% if m.content %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% endif %}",
    prompt="{{ '<|start|>assistant' }}",
)
PLAIN_HEADER = turns("{{ m.role + ': ' + m.content + eos_token }}", prompt="{{ 'assistant: ' }}")


@dataclass(frozen=True)
class Family:
    """A chat template with the tokenizer that models of its family have."""

    template: str | None
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    adds_bos: bool = False
    pieces: bool = False
    rstrip: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Byte-level BPE whose offsets are trimmed, as Llama-3 has it, or SentencePiece-like pieces with ▁."""
        special = [AddedToken(token, special=True, normalized=False, rstrip=self.rstrip) for token in self.special]
        bpe = Tokenizer(models.BPE(unk_token="<unk>" if self.pieces else None))
        alphabet = [chr(code) for code in range(10, 127)] + ["▁"]
        if not self.pieces:
            bpe.post_processor = processors.ByteLevel(trim_offsets=True)
            alphabet = pre_tokenizers.ByteLevel.alphabet()
        bpe.pre_tokenizer = (
            pre_tokenizers.Metaspace(prepend_scheme="first")
            if self.pieces
            else pre_tokenizers.ByteLevel(add_prefix_space=False)
        )
        bpe.decoder = decoders.Metaspace(prepend_scheme="first") if self.pieces else decoders.ByteLevel()
        first = ["<unk>"] if self.pieces else []
        trainer = trainers.BpeTrainer(
            vocab_size=420, special_tokens=[*first, *special], initial_alphabet=alphabet, show_progress=False
        )
        bpe.train_from_iterator(TEXT.splitlines(), trainer)
        if self.adds_bos and self.bos is not None:
            template = processors.TemplateProcessing(
                single=f"{self.bos} $A", special_tokens=[(self.bos, bpe.token_to_id(self.bos))]
            )
            bpe.post_processor = processors.Sequence([bpe.post_processor or processors.ByteLevel(), template])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bpe,
            bos_token=self.bos,
            eos_token=self.eos,
            unk_token="<unk>" if self.pieces else None,
            clean_up_tokenization_spaces=False,
        )
        tokenizer.chat_template = self.template
        return tokenizer


FAMILIES = {
    "chatml": Family(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "smollm2": Family(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", bos="<|im_start|>"),
    "qwen3": Family(QWEN3, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "qwen3-no-thinking": Family(QWEN3, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", kwargs={"enable_thinking": False}),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
        "<|end_of_text|>",
        bos="<|begin_of_text|>",
        adds_bos=True,
    ),
    "gemma": Family(
        GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        bos="<bos>",
        adds_bos=True,
        pieces=True,
    ),
    "mistral": Family(MISTRAL, ("<s>", "</s>"), "</s>", bos="<s>", adds_bos=True, pieces=True),
    "zephyr": Family(ZEPHYR, ("<s>", "</s>"), "</s>", bos="<s>", adds_bos=True),
    "deepseek": Family(
        DEEPSEEK,
        ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>"),
        "<|end_of_sentence|>",
        bos="<|begin_of_sentence|>",
    ),
    "phi3": Family(PHI3, ("<|end|>", "<|user|>", "<|assistant|>", "<|endoftext|>"), "<|endoftext|>", rstrip=True),
    "harmony": Family(
        HARMONY,
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
        "<|return|>",
    ),
}


# ------------------------------------------------------------------------------------------------ helpers
def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


TWO_TURNS = [
    user("Is the bridge open?"),
    assistant("Yes, it opens every morning."),
    user("Who has the key?"),
    assistant("The guard (so: not the baker)."),
]
TOOLS = [{"type": "function", "function": {"name": "river_level", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "river_level", "arguments": {"place": "east"}}}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def run(
    tmp_path: Path, family: Family, *rows: Any, max_tokens: int = 4096, block_size: int = 2, name: str = "data.jsonl"
) -> Prepared:
    return prepare(
        write(tmp_path / name, *rows),
        tokenizer=family.tokenizer(),
        max_tokens=max_tokens,
        block_size=block_size,
        template_kwargs=family.kwargs,
        directory=tmp_path / "prepared",
    )


def stretches(loss_mask: np.ndarray) -> list[slice]:
    edges = np.flatnonzero(np.diff(loss_mask.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    return [slice(start, end) for start, end in edges]


def supervised(family: Family, prepared: Prepared, index: int = 0) -> list[str]:
    """What each stretch of supervised tokens says."""
    _, tokens, loss_mask = prepared.sample(index)
    return [str(family.tokenizer().decode(tokens[stretch])) for stretch in stretches(loss_mask)]


def drops(prepared: Prepared) -> list[tuple[int, str]]:
    lines = (prepared.directory / "dropped.jsonl").read_text().splitlines()
    return [(row["line"], row["reason"]) for row in map(json.loads, lines)]


def tree(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files}


# ------------------------------------------------------------------------------------------------ the mask
FIRST, SECOND = TWO_TURNS[1]["content"], TWO_TURNS[3]["content"]
REPLIES = {
    "chatml": [FIRST + "<|im_end|>", SECOND + "<|im_end|>"],
    "smollm2": [FIRST + "<|im_end|>", SECOND + "<|im_end|>"],
    "qwen3": [FIRST + "<|im_end|>", SECOND + "<|im_end|>"],
    "qwen3-no-thinking": [FIRST + "<|im_end|>", SECOND + "<|im_end|>"],
    "llama3": [FIRST + "<|eot_id|>", SECOND + "<|eot_id|>"],
    "gemma": [FIRST + "<end_of_turn>", SECOND + "<end_of_turn>"],
    "mistral": [FIRST + "</s>", SECOND + "</s>"],
    "zephyr": [FIRST + "</s>", SECOND + "</s>"],
    "deepseek": [FIRST + "<|end_of_sentence|>", SECOND + "<|end_of_sentence|>"],
    "phi3": [FIRST + "<|end|>", SECOND + "<|end|>"],
    "harmony": [f"<|channel|>final<|message|>{FIRST}<|end|>", f"<|channel|>final<|message|>{SECOND}<|return|>"],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_mask_covers_exactly_the_replies_and_their_end_of_turn(name, tmp_path):
    family = FAMILIES[name]
    prepared = run(tmp_path, family, {"messages": TWO_TURNS})
    assert supervised(family, prepared) == REPLIES[name]
    _, tokens, _ = prepared.sample(0)
    tokenizer = family.tokenizer()
    text = tokenizer.apply_chat_template(TWO_TURNS, tokenize=False, **family.kwargs)
    own = tokenizer(str(text), add_special_tokens=False)["input_ids"]
    assert tokens.tolist() in (own, [tokenizer.bos_token_id, *own])


@pytest.mark.parametrize("name", ["llama3", "gemma", "mistral"])
def test_mask_follows_a_template_that_trims_the_reply(name, tmp_path):
    family = FAMILIES[name]
    padded = [*TWO_TURNS[:1], assistant(f"\n {FIRST} \n"), *TWO_TURNS[2:]]
    assert supervised(family, run(tmp_path, family, {"messages": padded})) == REPLIES[name]


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_mask_covers_replies_of_any_script_and_shape(name, tmp_path):
    family = FAMILIES[name]
    replies = ["Über 🙂🙂 東京!", "x" * 300, "a\n\n\nb", "[INST] hi [/INST]", "assistant\n", "1"]
    if family.pieces:
        replies = replies[1:]  # its alphabet is ASCII; unknown characters are not what is asked here
    rows = [{"messages": [user("hi <|im_start|>assistant\n"), assistant(reply)]} for reply in replies]
    prepared = run(tmp_path, family, *rows)
    said = ["".join(supervised(family, prepared, index)[0].split()) for index in range(len(replies))]
    end = REPLIES[name][0][len(FIRST) :]
    assert said == ["".join((reply + end).split()) for reply in replies]


def test_reasoning_of_the_last_turn_is_supervised_and_of_older_turns_is_gone(tmp_path):
    family = FAMILIES["qwen3"]
    messages = [
        user("hi"),
        assistant("bye", reasoning_content="Think first"),
        user("Is the bridge open?"),
        assistant("yes", reasoning_content="the guard has the key\n"),
    ]
    inline = [
        user("hi"),
        assistant("<think>\nThink first\n</think>\n\nbye"),
        user("Is the bridge open?"),
        assistant("<think>\nthe guard has the key\n</think>\n\nyes"),
    ]
    prepared = run(tmp_path, family, {"messages": messages}, {"messages": inline})
    expected = ["bye<|im_end|>", "<think>\nthe guard has the key\n</think>\n\nyes<|im_end|>"]
    assert supervised(family, prepared, 0) == expected
    assert supervised(family, prepared, 1) == expected


@pytest.mark.parametrize("name", ["qwen3", "qwen3-no-thinking"])
def test_empty_think_block_is_never_supervised(name, tmp_path):
    family = FAMILIES[name]
    rows = [
        {"messages": [user("hi"), assistant("bye")]},
        {"messages": [user("hi"), assistant("<think>\n\n</think>\n\nbye")]},
        {"messages": [user("hi"), assistant("bye", reasoning_content="")]},
    ]
    prepared = run(tmp_path, family, *rows)
    for index in range(3):
        text = family.tokenizer().decode(prepared.sample(index)[1])
        assert "<think>\n\n</think>\n\nbye" in text
        assert supervised(family, prepared, index) == ["bye<|im_end|>"]


def test_inline_reasoning_that_a_template_writes_as_it_is_stays_supervised(tmp_path):
    family = FAMILIES["chatml"]
    reply = "<think>\nseven times six\n</think>\n\nforty two"
    prepared = run(tmp_path, family, {"messages": [user("hi"), assistant(reply)]})
    assert supervised(family, prepared) == [reply + "<|im_end|>"]


def test_channels_that_the_model_itself_must_open_are_supervised(tmp_path):
    family = FAMILIES["harmony"]
    prepared = run(tmp_path, family, {"messages": [user("hi"), assistant("bye", reasoning_content="so")]})
    said = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>bye<|return|>"
    assert supervised(family, prepared) == [said]


def test_tools_and_tool_calls_reach_the_template_and_calls_are_supervised(tmp_path):
    family = FAMILIES["qwen3"]
    messages = [
        user("Is the river high?"),
        assistant(None, tool_calls=[CALL]),
        {"role": "tool", "content": "no"},
        assistant("It is not."),
    ]
    prepared = run(tmp_path, family, {"messages": messages, "tools": TOOLS})
    assert "Tools: " + json.dumps(TOOLS) in family.tokenizer().decode(prepared.sample(0)[1])
    call = '<tool_call>\n{"name": "river_level", "arguments": {"place": "east"}}\n</tool_call><|im_end|>'
    assert [said.strip() for said in supervised(family, prepared)] == [call, "It is not.<|im_end|>"]


def test_call_that_ends_with_a_token_of_its_own_is_supervised_to_that_token(tmp_path):
    family = FAMILIES["harmony"]
    messages = [user("Is the river high?"), assistant("", tool_calls=[CALL]), user("no"), assistant("It is not.")]
    assert supervised(family, run(tmp_path, family, {"messages": messages})) == [
        ' to=river_level<|channel|>commentary json<|message|>{"place": "east"}<|call|>',
        "<|channel|>final<|message|>It is not.<|return|>",
    ]


def test_reply_that_brings_its_own_end_of_turn_token_is_supervised_up_to_it(tmp_path):
    family = FAMILIES["chatml"]
    prepared = run(tmp_path, family, {"messages": [user("hi"), assistant("bye<|im_end|>")]})
    assert supervised(family, prepared) == ["bye<|im_end|>"]


def test_token_that_straddles_the_start_of_a_reply_is_not_supervised(tmp_path):
    family = Family(PLAIN_HEADER, ("</s>",), "</s>")
    prepared = run(tmp_path, family, {"messages": [user("hi"), assistant("the river moved")]})
    _, tokens, loss_mask = prepared.sample(0)
    first = int(np.flatnonzero(loss_mask)[0])
    assert family.tokenizer().decode(tokens[first - 1 : first]) == " the"
    assert supervised(family, prepared) == [" river moved</s>"]


@pytest.mark.parametrize("name", ["chatml", "llama3", "zephyr"])
def test_mask_is_right_when_cut_at_every_length(name, tmp_path):
    family = FAMILIES[name]
    messages = [user("hi"), assistant("Yes, it is."), user("so"), assistant("bye")]
    _, tokens, loss_mask = run(tmp_path, family, {"messages": messages}).sample(0)
    for length in range(2, len(tokens)):
        kept = loss_mask[:length]
        if not (kept[:-1] & kept[1:]).any():
            with pytest.raises(ValueError, match="no_anchor 1"):
                run(tmp_path, family, {"messages": messages}, max_tokens=length)
            continue
        prepared = run(tmp_path, family, {"messages": messages}, max_tokens=length)
        assert np.array_equal(prepared.sample(0)[1], tokens[:length])
        assert np.array_equal(prepared.sample(0)[2], kept)
        assert prepared.report["truncated"] == 1
    assert run(tmp_path, family, {"messages": messages}, max_tokens=len(tokens)).report["truncated"] == 0


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("writes_bos", [False, True])
def test_there_is_exactly_one_bos_where_tokenizer_or_template_has_one(adds_bos, writes_bos, tmp_path):
    template = ("{{ bos_token }}" if writes_bos else "") + CHATML
    family = Family(template, ("<s>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", bos="<s>", adds_bos=adds_bos)
    prepared = run(tmp_path, family, {"messages": TWO_TURNS})
    _, tokens, _ = prepared.sample(0)
    bos = tokens == family.tokenizer().bos_token_id
    assert bos.sum() == (adds_bos or writes_bos)
    assert bos[0] == (adds_bos or writes_bos)
    assert supervised(family, prepared) == REPLIES["chatml"]


def test_truncation_and_padding_left_on_the_tokenizer_change_nothing(tmp_path):
    family, path = FAMILIES["chatml"], write(tmp_path / "data.jsonl", {"messages": TWO_TURNS})
    tokenizer = family.tokenizer()
    expected = run(tmp_path, family, {"messages": TWO_TURNS})
    tokenizer.add_special_tokens({"pad_token": "<|im_end|>"})
    plain = prepare(
        path, tokenizer=tokenizer, max_tokens=99, block_size=2, template_kwargs={}, directory=tmp_path / "a"
    )
    tokenizer("hi", truncation=True, max_length=3, padding="max_length")
    after = prepare(
        path, tokenizer=tokenizer, max_tokens=99, block_size=2, template_kwargs={}, directory=tmp_path / "b"
    )
    assert after.digest == plain.digest
    assert np.array_equal(after.sample(0)[1], expected.sample(0)[1])


# ------------------------------------------------------------------------------------------------ rows and ids
def test_both_input_forms_give_the_same_sample(tmp_path):
    family = FAMILIES["chatml"]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    system = {"role": "system", "content": "Think first"}
    rows = [
        {"messages": [system, *TWO_TURNS]},
        {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in [system, *TWO_TURNS]]},
        {"conversations": [{"from": m["role"], "value": m["content"]} for m in [system, *TWO_TURNS]]},
        {
            "messages": [
                {"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in [system, *TWO_TURNS]
            ]
        },
    ]
    prepared = run(tmp_path, family, *rows)
    assert len(prepared) == 4
    for index in range(1, 4):
        assert np.array_equal(prepared.sample(index)[1], prepared.sample(0)[1])
        assert np.array_equal(prepared.sample(index)[2], prepared.sample(0)[2])


def test_ids_are_given_or_derived_from_content_and_never_repeat(tmp_path):
    other = [user("hi"), assistant("bye")]
    rows = [
        {"id": "a", "messages": TWO_TURNS},
        {"id": 7, "messages": TWO_TURNS},
        {"id": "a", "messages": other},
        {"messages": TWO_TURNS},
        {"messages": other},
        {"messages": TWO_TURNS},
    ]
    prepared = run(tmp_path, FAMILIES["chatml"], *rows)
    ids = [prepared.sample(index)[0] for index in range(len(prepared))]
    assert ids[:3] == ["a", "7", "a#3"]
    assert ids[5] == ids[3] + "#6"
    assert len(set(ids)) == 6
    assert prepared.report["renamed_ids"] == 2
    reordered = run(tmp_path, FAMILIES["chatml"], rows[4], rows[3], name="other.jsonl")
    assert [reordered.sample(0)[0], reordered.sample(1)[0]] == [ids[4], ids[3]]


OPEN_END = CHATML.replace("'<|im_end|>\n'", "('' if m.unfinished else '<|im_end|>') + '\n'")
BARE = turns("{{ m.content + ('' if m.unfinished or m.role == 'user' else '<|im_end|>') }}")
CENSORED = CHATML.replace("m.content", "m.content | replace('secret', '***')")
TWICE = CHATML + "{{ messages[0].memory and messages[-1].content or '' }}"
FORGETFUL = CHATML.replace("in messages", "in messages[-4:]")
DROPS: list[tuple[str, Any, Any, str]] = [
    ("no messages", CHATML, {"messages": []}, conversation.EMPTY),
    ("message is text", CHATML, {"messages": ["hi"]}, conversation.BAD_MESSAGE),
    ("no role", CHATML, {"messages": [{"content": "hi"}, assistant("bye")]}, conversation.BAD_MESSAGE),
    ("no content", CHATML, {"messages": [user("hi"), assistant(None)]}, conversation.BAD_MESSAGE),
    (
        "content is a number",
        CHATML,
        {"messages": [user("hi"), {"role": "assistant", "content": 4}]},
        conversation.BAD_MESSAGE,
    ),
    ("calls are text", CHATML, {"messages": [user("hi"), assistant("a", tool_calls="b")]}, conversation.BAD_MESSAGE),
    (
        "an image",
        CHATML,
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, assistant("a")]},
        conversation.NOT_TEXT,
    ),
    (
        "half a surrogate pair",
        CHATML,
        r'{"messages": [{"role": "assistant", "content": "\ud83d no"}]}',
        conversation.NOT_TEXT,
    ),
    ("unknown role", CHATML, {"conversations": [{"from": "alien", "value": "hi"}]}, conversation.UNKNOWN_ROLE),
    ("only a question", CHATML, {"messages": [user("hi")]}, conversation.NO_REPLY),
    ("blank reply", CHATML, {"messages": [user("hi"), assistant(" ")]}, conversation.NO_REPLY),
    (
        "roles do not alternate",
        GEMMA,
        {"messages": [user("hi"), user("so"), assistant("a")]},
        conversation.TEMPLATE_REFUSED,
    ),
    ("tools are text", CHATML, {"messages": TWO_TURNS, "tools": "river"}, conversation.TEMPLATE_REFUSED),
    (
        "reply is changed",
        CENSORED,
        {"messages": [user("hi"), assistant("a secret key")]},
        conversation.TEMPLATE_REWRITES,
    ),
    (
        "reply is repeated",
        TWICE,
        {"messages": [{**user("hi"), "memory": 1}, assistant("a")]},
        conversation.TEMPLATE_REWRITES,
    ),
    ("reply is left out", FORGETFUL, {"messages": [*TWO_TURNS, *TWO_TURNS]}, conversation.TEMPLATE_REWRITES),
    (
        "call is left out",
        CHATML,
        {"messages": [user("hi"), assistant("so", tool_calls=[CALL])]},
        conversation.TEMPLATE_REWRITES,
    ),
    (
        "two think blocks",
        QWEN3,
        {"messages": [user("hi"), assistant("a</think>b</think>c")]},
        conversation.TEMPLATE_REWRITES,
    ),
    (
        "no end of turn",
        OPEN_END,
        {"messages": [user("hi"), assistant("a", unfinished=True)]},
        conversation.NO_END_OF_TURN,
    ),
    (
        "no end of an earlier turn",
        OPEN_END,
        {"messages": [user("hi"), assistant("a", unfinished=True), user("so"), assistant("b")]},
        conversation.NO_END_OF_TURN,
    ),
    (
        "no end of an earlier turn without headers",
        BARE,
        {"messages": [user("hi"), assistant("a", unfinished=True), user("so"), assistant("b")]},
        conversation.NO_END_OF_TURN,
    ),
    ("cut before the reply", CHATML, {"messages": [user("hi " * 300), assistant("bye")]}, conversation.NO_ANCHOR),
]


@pytest.mark.parametrize(("template", "row", "reason"), [case[1:] for case in DROPS], ids=[case[0] for case in DROPS])
def test_unusable_conversation_is_dropped_with_its_line_and_reason(template, row, reason, tmp_path):
    family = FAMILIES["gemma"] if template is GEMMA else Family(template, ("<|im_start|>", "<|im_end|>"), "<|im_end|>")
    good = {"messages": TWO_TURNS}
    prepared = run(tmp_path, family, good, "", row, good, max_tokens=200)
    assert drops(prepared) == [(3, reason)]
    assert prepared.report["dropped"] == {reason: 1}
    assert (prepared.report["conversations"], prepared.report["samples"], len(prepared)) == (3, 2, 2)


def test_every_drop_reason_has_a_case():
    assert {case[3] for case in DROPS} == set(conversation.DROP_REASONS)


def test_report_and_seen_agree_with_the_samples(tmp_path):
    rows = [{"messages": [user("hi"), assistant(reply)]} for reply in ("yes", "the river moved", "no (so)")]
    prepared = run(tmp_path, FAMILIES["llama3"], *rows)
    samples = [prepared.sample(index) for index in range(len(prepared))]
    report = prepared.report
    assert report["tokens"] == sum(len(tokens) for _, tokens, _ in samples) == prepared.lengths.sum()
    assert report["supervised_tokens"] == sum(mask.sum() for _, _, mask in samples)
    assert report["longest_reply"] == max(mask.sum() for _, _, mask in samples)
    assert report["longest_sample"] == prepared.lengths.max()
    assert np.array_equal(prepared.seen, np.unique(np.concatenate([tokens[mask] for _, tokens, mask in samples])))
    assert (prepared.seen.dtype, prepared.lengths.dtype) == (np.int64, np.int32)
    assert (samples[0][1].dtype, samples[0][2].dtype) == (np.int32, np.bool_)
    with pytest.raises(IndexError):
        prepared.sample(3)


# ------------------------------------------------------------------------------------------------ refusals
GOOD = json.dumps({"messages": TWO_TURNS}) + "\n"
REFUSALS: list[tuple[str, str | bytes | None, dict[str, Any], str]] = [
    ("missing file", None, {}, "no such file"),
    ("empty file", "", {}, "holds no conversation"),
    ("blank lines", "\n \n", {}, "holds no conversation"),
    ("broken JSON", GOOD + '{"messages": [\n', {}, "data.jsonl:2: not valid JSON"),
    ("not UTF-8", GOOD.encode() + b'{"messages": "\xff"}\n', {}, "data.jsonl:2: not valid JSON"),
    ("a list", GOOD + "[1]\n", {}, "data.jsonl:2: not a conversation"),
    ("other keys", GOOD + '{"text": "hi"}\n', {}, "data.jsonl:2: not a conversation"),
    ("messages is text", GOOD + '{"messages": "hi"}\n', {}, "data.jsonl:2: not a conversation"),
    ("nothing usable", '{"messages": []}\n{"messages": []}\n', {}, "none of its 2 conversations can be used (empty 2;"),
    ("block over the longest reply", GOOD, {"block_size": 64}, "block_size=64 is larger than the longest reply"),
    ("block over max_tokens", GOOD, {"block_size": 16, "max_tokens": 8}, "at most data.max_tokens=8"),
    ("block of one", GOOD, {"block_size": 1}, "block_size=1 must be at least 2"),
    ("no chat template", GOOD, {"template": None}, "no chat template"),
    ("tokenizer without offsets", GOOD, {"tokenizer": ByT5Tokenizer()}, "no character offsets"),
    (
        "no end-of-turn token",
        GOOD,
        {"template": CHATML.replace("<|im_end|>", "")},
        "writes no special token after a reply",
    ),
    (
        "template refuses all",
        GOOD,
        {"template": "{{ raise_exception('not\ntoday') }}"},
        "refuses a plain conversation of a user and an assistant (not today)",
    ),
    (
        "template writes no reply",
        GOOD,
        {"template": "{{ messages[0].content }}<|im_end|>"},
        "changes, repeats or omits",
    ),
    (
        "template writes words after the reply",
        GOOD,
        {"template": CHATML.replace("'<|im_end|>\n'", "' THE END<|im_end|>\n'")},
        "cannot be proven on a plain conversation",
    ),
    ("reserved template variable", GOOD, {"template_kwargs": {"tokenize": True}}, "tokenize cannot be set"),
]


@pytest.mark.parametrize(
    ("content", "change", "message"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_bad_input_is_refused_in_one_line(content, change, message, tmp_path):
    path, change = tmp_path / "data.jsonl", dict(change)
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    template = change.pop("template", CHATML)
    settings: dict[str, Any] = {"max_tokens": 512, "block_size": 2, "template_kwargs": {}}
    settings["tokenizer"] = Family(template, ("<|im_start|>", "<|im_end|>"), "<|im_end|>").tokenizer()
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        prepare(path, **{**settings, **change}, directory=tmp_path / "prepared")
    assert "\n" not in str(refusal.value)
    assert not list((tmp_path / "prepared").glob("*/manifest.json")) or "larger than the longest" in message


def test_unknown_character_after_a_reply_is_no_end_of_turn_token(tmp_path):
    family = Family(MISTRAL.replace("eos_token", "'ß'"), ("<s>", "</s>"), "</s>", bos="<s>", pieces=True)
    assert "<unk>" in family.tokenizer().tokenize("ß")
    with pytest.raises(ValueError, match="writes no special token after a reply"):
        run(tmp_path, family, {"messages": TWO_TURNS})


def test_directory_in_place_of_the_file_and_file_in_place_of_the_directory_are_refused(tmp_path):
    family = FAMILIES["chatml"]
    (tmp_path / "data.jsonl").mkdir()
    settings: dict[str, Any] = {
        "tokenizer": family.tokenizer(),
        "max_tokens": 99,
        "block_size": 2,
        "template_kwargs": {},
    }
    with pytest.raises(ValueError, match="is a directory; give a JSONL file"):
        prepare(tmp_path / "data.jsonl", **settings, directory=tmp_path / "prepared")
    path = write(tmp_path / "good.jsonl", {"messages": TWO_TURNS})
    with pytest.raises(ValueError, match="cannot keep the tokenised data there"):
        prepare(path, **settings, directory=path)


# ------------------------------------------------------------------------------------------------ the directory
def test_second_call_finds_the_result_and_writes_nothing(tmp_path):
    family = FAMILIES["chatml"]
    first = run(tmp_path, family, {"messages": TWO_TURNS}, {"messages": []})
    before = tree(tmp_path / "prepared")
    second = run(tmp_path, family, {"messages": TWO_TURNS}, {"messages": []}, block_size=3, name="copy.jsonl")
    assert tree(tmp_path / "prepared") == before
    assert (second.directory, second.digest, second.report) == (first.directory, first.digest, first.report)
    assert first.directory == tmp_path / "prepared" / first.digest[:16]


def test_digest_depends_on_data_template_tokenizer_and_cut(tmp_path):
    plain, row = FAMILIES["chatml"], {"messages": TWO_TURNS}
    bigger = Family(CHATML, ("<|im_start|>", "<|im_end|>", "<|more|>"), "<|im_end|>")
    digests = [
        run(tmp_path, plain, row).digest,
        run(tmp_path, plain, row, row).digest,
        run(tmp_path, plain, row, max_tokens=100).digest,
        run(tmp_path, Family(CHATML + " ", plain.special, plain.eos), row).digest,
        run(tmp_path, Family(CHATML, plain.special, plain.eos, kwargs={"unused": 1}), row).digest,
        run(tmp_path, bigger, row).digest,
    ]
    assert len(set(digests)) == len(digests)


def cut_short(directory: Path) -> None:
    os.truncate(directory / "shard-00000.safetensors", 100)


def flip_a_byte(directory: Path) -> None:
    with (directory / "shard-00000.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def lose_the_index(directory: Path) -> None:
    (directory / "index.safetensors").unlink()


def lose_the_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def scribble_on_the_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text("[]")


def leave_a_torn_attempt(directory: Path) -> None:
    torn = directory.with_name(f".{directory.name}.partial")
    directory.rename(torn)
    (torn / "shard-00007.safetensors").write_text("half")


DAMAGES = [
    cut_short,
    flip_a_byte,
    lose_the_index,
    lose_the_manifest,
    scribble_on_the_manifest,
    leave_a_torn_attempt,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_result_is_computed_again(damage: Callable[[Path], None], tmp_path):
    family, rows = FAMILIES["chatml"], [{"messages": TWO_TURNS}, {"messages": [user("hi"), assistant("bye")]}]
    whole = {name: content for name, (_, _, content) in tree(run(tmp_path, family, *rows).directory).items()}
    damage(tmp_path / "prepared" / run(tmp_path, family, *rows).digest[:16])
    again = run(tmp_path, family, *rows)
    assert {name: content for name, (_, _, content) in tree(again.directory).items()} == whole
    assert supervised(family, again) == REPLIES["chatml"]
    assert not (tmp_path / "prepared" / f".{again.digest[:16]}.partial").exists()


PREPARE_IN_A_PROCESS = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from dflash.data import prepare
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
settings = {"max_tokens": 512, "block_size": 2, "template_kwargs": {}}
prepared = prepare(sys.argv[2], tokenizer=tokenizer, **settings, directory=Path(sys.argv[3]))
total = sum(len(prepared.sample(index)[1]) for index in range(len(prepared)))
print(prepared.digest, len(prepared), total == prepared.report["tokens"])
"""


def test_two_processes_that_prepare_at_once_both_end_well(tmp_path):
    FAMILIES["chatml"].tokenizer().save_pretrained(tmp_path / "tokenizer")
    path = write(tmp_path / "data.jsonl", *({"id": number, "messages": TWO_TURNS} for number in range(500)))
    command = [sys.executable, "-c", PREPARE_IN_A_PROCESS, tmp_path / "tokenizer", path, tmp_path / "prepared"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    answers = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        answers.append(process.communicate(timeout=300)[0].split())
    assert [process.returncode for process in processes] == [0, 0]
    assert answers[0] == answers[1] == [answers[0][0], "500", "True"]
    assert sorted(path.name for path in (tmp_path / "prepared").iterdir()) == [
        f".{answers[0][0][:16]}.lock",
        answers[0][0][:16],
    ]


READ_IN_A_PROCESS = """
import sys
from pathlib import Path
from dflash.data import _open
prepared = _open(Path(sys.argv[1]), "digest")
total = sum(int(tokens.sum()) for _, tokens, _ in map(prepared.sample, range(len(prepared))))
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(len(prepared), total, int(peak.split()[1]) * 1024)
"""


def test_hundred_times_the_data_costs_no_more_memory_to_read(tmp_path):
    tokens, loss_mask = np.arange(4000, dtype=np.int32), np.ones(4000, dtype=bool)
    peaks = []
    for samples in (50, 5000):
        directory = tmp_path / str(samples)
        directory.mkdir()
        writer = data.Writer(directory, vocabulary=4000)
        for number in range(samples):
            writer.add(number, str(number), tokens, loss_mask, truncated=False)
        writer.finish(tmp_path / "data.jsonl", "digest")
        assert all(file.stat().st_size < data.SHARD_TOKENS * 5 + 4096 for file in directory.iterdir())
        command = [sys.executable, "-c", READ_IN_A_PROCESS, directory]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        assert answer[:2] == [str(samples), str(int(tokens.sum()) * samples)]
        peaks.append(int(answer[2]))
    on_disk = sum(file.stat().st_size for file in directory.iterdir())
    assert on_disk > 100_000_000
    assert peaks[1] - peaks[0] < 8_000_000, f"reading {on_disk} bytes took {peaks[1] - peaks[0]} more"


# ------------------------------------------------------------------------------------------------ the command
@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A target, data and held-out data, one conversation of which cannot be used."""
    place = tmp_path_factory.mktemp("command")
    tiny_target(place / "target", hidden=32)
    write_jsonl(place / "data.jsonl", [*conversations(12, longest_reply=20), {"messages": []}])
    write_jsonl(place / "heldout.jsonl", conversations(5, seed=1, longest_reply=20))
    return place


@pytest.fixture
def signals():
    """The command changes what signals do; the tests must not."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def config_file(place: Path, prepared: Path, **sections: dict[str, Any]) -> Path:
    values: dict[str, dict[str, Any]] = {
        "target": {"name": str(place / "target"), "captured_layers": 2, "devices": ["cpu"]},
        "data": {"path": str(place / "data.jsonl"), "prepared_dir": str(prepared), "max_tokens": 256},
        "drafter": {"layers": 1, "block_size": 4, "device": "cpu"},
        "objective": {"anchors": 4},
        "stream": {"engine": "lockstep", "hs_min_ready": 2, "hs_queue_depth": 4},
        "run": {"root": str(prepared.parent / "runs"), "max_steps": 1},
    }
    for section, fields in sections.items():
        values[section] = values.get(section, {}) | fields
    path = prepared.parent / "config.json"
    path.write_text(json.dumps(values))
    return path


@pytest.mark.usefixtures("signals")
def test_what_the_command_prepares_is_what_a_training_finds(place, tmp_path, capfd):
    report, prepared = tmp_path / "report.json", tmp_path / "prepared"
    config = config_file(place, prepared, data={"heldout_path": str(place / "heldout.jsonl")})
    assert main(["--config", str(config), "--report", str(report)]) == FINISHED
    stderr = capfd.readouterr().err
    for said in ("12 of 13 conversations", "dropped, empty", "5 samples of", "python -m dflash.train"):
        assert said in stderr
    told = json.loads(report.read_text())
    assert set(told) == {"data", "heldout"}
    for name, samples in (("data", 12), ("heldout", 5)):
        directory = Path(told[name]["directory"])
        assert directory == prepared / told[name]["digest"][:16]
        assert told[name]["report"] == json.loads((directory / "report.json").read_text())
        assert told[name]["report"]["samples"] == samples

    before = tree(prepared)
    assert train.main(["--config", str(config)]) == FINISHED
    assert tree(prepared) == before
    (run_dir,) = (tmp_path / "runs").glob("dflash-*")
    provenance = json.loads((run_dir / "provenance.json").read_text())
    assert (provenance["data"]["digest"], provenance["heldout"]["digest"]) == (
        told["data"]["digest"],
        told["heldout"]["digest"],
    )


@pytest.mark.usefixtures("signals")
def test_data_that_is_there_is_made_anew_only_where_that_is_asked_for(place, tmp_path):
    report, prepared = tmp_path / "report.json", tmp_path / "prepared"
    arguments = ["--config", str(config_file(place, prepared)), "--report", str(report)]
    assert main(arguments) == FINISHED
    first, before = json.loads(report.read_text()), tree(prepared)
    assert first["heldout"] is None
    assert main(arguments) == FINISHED
    assert tree(prepared) == before
    assert main([*arguments, "--rebuild"]) == FINISHED
    after = tree(prepared)
    assert json.loads(report.read_text()) == first
    assert {name: content for name, (_, _, content) in after.items()} == {
        name: content for name, (_, _, content) in before.items()
    }
    anew = {name for name in after if after[name][0] != before[name][0]}
    assert anew == {name for name in after if not name.endswith(".lock")}


@pytest.mark.usefixtures("signals")
def test_data_that_cannot_be_made_anew_stays_as_it_was(place, tmp_path, capfd):
    prepared, path = tmp_path / "prepared", tmp_path / "data.jsonl"
    write_jsonl(path, conversations(4))
    config = str(config_file(place, prepared, data={"path": str(path)}))
    assert main(["--config", config]) == FINISHED
    before = tree(prepared)
    assert any(len(content) > 3000 for _, _, content in before.values())
    capfd.readouterr()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))  # less than the shard takes
    try:
        code = main(["--config", config, "--rebuild"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_refused(code, capfd.readouterr().err, f"data.prepared_dir={prepared}", "with room")
    (lock,) = (name for name in before if name.endswith(".lock"))  # whose time of writing is that of its last use
    assert {**tree(prepared), lock: None} == {**before, lock: None}


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("flags", "value", "remedy"),
    [
        ("--data.path {place}/none.jsonl", "data.path={place}/none.jsonl: no such file", "give a JSONL file"),
        ("--data.heldout_path {place}/none.jsonl", "data.heldout_path={place}/none.jsonl", "give a JSONL file"),
        ("--target.name {place}/none", "target.name={place}/none: no such directory", "save_pretrained"),
        ("--drafter.block_size 60", "drafter.block_size=60 is larger than the longest reply", "lower it"),
        ("--report {place}/none/report.json", "{place}/none/report.json: cannot be written", "give a file"),
        ("--optim.lr 1", "--optim.lr", "--help"),
    ],
)
def test_what_cannot_be_prepared_is_refused_in_one_line(place, tmp_path, capfd, flags, value, remedy):
    config = config_file(place, tmp_path / "prepared")
    code = main(["--config", str(config), *flags.format(place=place).split()])
    assert_refused(code, capfd.readouterr().err, value.format(place=place), remedy)


def test_the_process_itself_stops_with_its_standard_input(place, tmp_path):
    config = config_file(place, tmp_path / "prepared")
    command = [sys.executable, "-m", "dflash.data", "--config", str(config), "--stop-with-stdin"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (STOPPED, "")
    assert done.stderr == "dflash: stopped; the same command starts again\n"
