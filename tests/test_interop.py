"""Independent clients and our decoder say the same tokens in the same number of draft-and-verify steps.

A step more or less shows what nothing else does: a norm, a layer id, a position or a mask of a drafter read in another way
leaves the tokens as they are, since the target corrects every draft.

Every client is a script of interop/ with an environment of its own, which `make test-interop` makes.
"""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from motif import motif_conversations, motif_target, train_motif_drafter
from tiny import write_jsonl

from dflash.decode import Decoded, Decoder, decode_plain
from dflash.export import export, load_drafter
from dflash.target import Target, load_target

pytestmark = pytest.mark.interop

TESTS = Path(__file__).parent
ENVIRONMENTS = TESTS.parent / ".venv-interop"
PROMPTS, NEW_TOKENS, BLOCK_SIZE = 8, 150, 8
LAYER_IDS = [0, 2]
ATTENTION = {
    "full": {},
    "sliding": {"drafter__layer_types": ["sliding_attention"] * 2, "drafter__sliding_window": 12},
}


@dataclasses.dataclass
class World:
    """A trained target, drafters for it as exported, and what our decoder does with them."""

    root: Path
    target: Target
    prompts: list[list[int]]
    drafters: dict[str, dict[str, Path]]  # by attention and format
    ours: dict[str, list[Decoded]]  # by attention, one a prompt

    def request(self, attention: str, **others: Any) -> dict[str, Any]:
        """What a client is asked."""
        return {
            "target": str(self.root / "target"),
            "drafter": str(self.drafters[attention]["zlab"]),
            "prompts": self.prompts,
            "new_tokens": NEW_TOKENS,
            "block_size": BLOCK_SIZE,
        } | others


def questions(
    target: Target, directory: Path, reply_tokens: int, *, seed: int
) -> list[tuple[dict, list[int], list[int]]]:
    """(conversation, tokens of its prompt, tokens of its reply) of replies of at least so many tokens."""
    found = []
    for row in motif_conversations(directory, 64, seed=seed):
        question, answer = row["messages"]
        prompt = target.tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False)
        reply = target.tokenizer(answer["content"])["input_ids"]
        if len(reply) >= reply_tokens:
            found.append((row, prompt, reply))
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    root = tmp_path_factory.mktemp("interop")
    directory = motif_target(root / "target")
    target = load_target(str(directory), dtype="float32", device="cpu", layer_ids=LAYER_IDS)
    data = write_jsonl(root / "data.jsonl", motif_conversations(directory, 120))
    # no end of turn: behind it comes what nobody was taught, where any two choices may be a hair apart
    prompts = [prompt for _, prompt, _ in questions(target, directory, NEW_TOKENS, seed=1)[:PROMPTS]]
    assert len(prompts) == PROMPTS
    drafters, ours = {}, {}
    for attention, changes in ATTENTION.items():
        # not trained to the end: where every block is accepted whole, a fault would have little to change
        last = train_motif_drafter(root / attention, directory, data, run__max_steps=80, **changes)
        drafters[attention] = {}
        for form in ("zlab", "speculators"):
            drafters[attention][form] = root / attention / form
            export(last, drafters[attention][form], format=form, dtype="float32")
        drafter, _ = load_drafter(drafters[attention]["zlab"], target)
        decoder = Decoder(target, drafter)
        ours[attention] = [decoder.decode(prompt, max_new_tokens=NEW_TOKENS, stop=frozenset()) for prompt in prompts]
    return World(root, target, prompts, drafters, ours)


def ask(client: str, script: str, request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """What a client's script answers; skips where the client is not installed."""
    if not (ENVIRONMENTS / client / ".installed").exists():
        pytest.skip(f"{client} is not installed; `make .venv-interop/{client}/.installed` does it")
    asked, answer = scratch / "request.json", scratch / "result.json"
    asked.write_text(json.dumps(request))
    ran = subprocess.run(
        # -P: the directory of the scripts is no place to import from
        [ENVIRONMENTS / client / "bin/python", "-P", TESTS / "interop" / script, asked, answer],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=1800,  # the slowest takes a minute; this is for one that hangs
    )
    assert ran.returncode == 0, f"{ran.stdout[-4000:]}\n{ran.stderr[-8000:]}"
    return json.loads(answer.read_text())


def assert_same_decoding(world: World, attention: str, result: dict[str, Any]) -> None:
    """The client's tokens and steps are ours, prompt by prompt."""
    ours = world.ours[attention]
    assert result["tokens"] == [decoded.tokens for decoded in ours]
    assert result["steps"] == [decoded.steps for decoded in ours]
    assert (result["missing"], result["unexpected"]) == ([], [])


@pytest.mark.parametrize("attention", ATTENTION)
def test_our_decoder_says_what_the_target_says_alone_and_the_drafters_are_neither_perfect_nor_useless(world, attention):
    for prompt, decoded in zip(world.prompts, world.ours[attention], strict=True):
        assert decoded.tokens == decode_plain(world.target, prompt, max_new_tokens=NEW_TOKENS, stop=frozenset()).tokens
    steps = sum(decoded.steps for decoded in world.ours[attention])
    assert 1.3 < PROMPTS * (NEW_TOKENS - 1) / steps < BLOCK_SIZE - 1


@pytest.mark.parametrize("attention", ATTENTION)
def test_z_labs_client_decodes_as_we_do(world, attention, tmp_path):
    assert_same_decoding(world, attention, ask("zlab", "zlab.py", world.request(attention), tmp_path))


def test_transformers_decodes_as_we_do(world, tmp_path):
    # its sliding layers look ahead in the block, ours and everyone else's do not
    result = ask("transformers", "transformers_native.py", world.request("full"), tmp_path)
    assert_same_decoding(world, "full", result)


@pytest.mark.parametrize("attention", ATTENTION)
def test_llama_cpp_decodes_as_we_do(world, attention, tmp_path):
    assert_same_decoding(world, attention, ask("llamacpp", "llamacpp.py", world.request(attention), tmp_path))


@pytest.mark.parametrize("form", ["zlab", "speculators"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_vllm_decodes_as_we_do(world, attention, form, tmp_path):
    request = world.request(attention, drafter=str(world.drafters[attention][form]))
    assert_same_decoding(world, attention, ask("vllm", "vllm_cpu.py", request, tmp_path))


@pytest.mark.parametrize("attention", ATTENTION)
def test_speculators_loads_our_export_and_converts_the_other_into_one_that_vllm_serves(world, attention, tmp_path):
    converted = tmp_path / "converted"
    exported = world.drafters[attention]["speculators"]
    request = world.request(attention, exported=str(exported), converted=str(converted))
    result = ask("speculators", "speculators_library.py", request, tmp_path)
    assert (result["missing"], result["unexpected"], result["differ"]) == ([], [], [])
    assert all(ours == theirs for ours, theirs in result["keys"].values()), result["keys"]
    request = world.request(attention, drafter=str(converted))
    assert_same_decoding(world, attention, ask("vllm", "vllm_cpu.py", request, tmp_path))


def test_a_drafter_overfitted_on_one_sample_has_every_block_accepted_whole(world, tmp_path):
    blocks, directory = 8, world.root / "target"
    new_tokens = 1 + blocks * BLOCK_SIZE  # the first one comes with the prompt
    row, prompt, reply = questions(world.target, directory, new_tokens, seed=3)[0]
    data = write_jsonl(tmp_path / "one.jsonl", [row])
    last = train_motif_drafter(
        tmp_path, directory, data, run__epochs=150, optim__samples_per_step=1, stream__hs_min_ready=1
    )
    export(last, tmp_path / "drafter", format="zlab", dtype="float32")
    drafter, _ = load_drafter(tmp_path / "drafter", world.target)
    decoded = Decoder(world.target, drafter).decode(prompt, max_new_tokens=new_tokens, stop=frozenset())
    assert decoded.tokens == reply[:new_tokens]
    assert (decoded.steps, decoded.tau) == (blocks, BLOCK_SIZE)
    request = world.request("full", drafter=str(tmp_path / "drafter"), prompts=[prompt], new_tokens=new_tokens)
    result = ask("zlab", "zlab.py", request, tmp_path)
    assert (result["tokens"], result["steps"]) == ([decoded.tokens], [blocks])
