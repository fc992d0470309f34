"""Facts about the held-out prompts that ship with the package."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from dflash.config import EvaluateConfig
from dflash.evaluate import SHIPPED, read_prompts

ROOT = Path(__file__).parents[1]
SETS = ("chat", "code", "mathematics")


def read(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def test_the_prompts_that_ship_are_those_without_a_file_named():
    assert tuple(Path(path).stem for path in SHIPPED) == SETS
    prompts = read_prompts(EvaluateConfig(), per_set=None)
    assert {name: len(group) for name, group in prompts.items()} == dict.fromkeys(SETS, 24)


def test_the_package_brings_its_prompts_along():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["package-data"]["dflash"] == ["prompts/*.jsonl"]


@pytest.mark.parametrize("path", SHIPPED, ids=SETS)
def test_every_row_names_itself_and_holds_what_a_user_says(path):
    rows = read(path)
    name = Path(path).stem
    assert [row["id"] for row in rows] == [f"{name}-{number:02}" for number in range(1, len(rows) + 1)]
    for row in rows:
        assert set(row) == {"id", "turns"}
        assert 1 <= len(row["turns"]) <= 2
        assert all(text == text.strip() and len(text) >= 40 for text in row["turns"])


def test_some_chats_of_every_set_have_a_second_turn():
    for path in SHIPPED:
        assert 3 <= sum(len(row["turns"]) == 2 for row in read(path)) <= 12


def test_no_prompt_occurs_twice():
    texts = [plain(text) for path in SHIPPED for row in read(path) for text in row["turns"]]
    assert len(set(texts)) == len(texts)


def test_no_prompt_occurs_in_the_demo_that_trains():
    demo = {plain(text) for row in read(ROOT / "demo" / "prompts.jsonl") for text in row["turns"]}
    for name in ("conversations.jsonl", "heldout.jsonl"):
        demo |= {plain(message["content"]) for row in read(ROOT / "demo" / name) for message in row["messages"]}
    assert len(demo) > 1000
    shipped = {plain(text) for path in SHIPPED for row in read(path) for text in row["turns"]}
    assert not shipped & demo


@pytest.mark.parametrize("path", SHIPPED, ids=SETS)
def test_code_blocks_are_closed(path):
    for row in read(path):
        assert all(text.count("```") % 2 == 0 for text in row["turns"])


def test_shipped_prompts_stay_small():
    assert sum(Path(path).stat().st_size for path in SHIPPED) < 40_000  # bytes
