"""Decoding held-out prompts with and without a drafter: figures, intervals, comparison, files, refusals."""

import dataclasses
import json
import random
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from refused import assert_refused
from safetensors.torch import save_file
from tiny import CHATML, WORDS, conversations, tiny_model, tiny_target, tiny_tokenizer, write_jsonl

from dflash import checkpoint
from dflash import config as configuration
from dflash.command import FAILED, FINISHED
from dflash.config import DrafterConfig, EvaluateConfig
from dflash.conversation import Template
from dflash.decode import Decoded, decode_plain
from dflash.drafter import Drafter, initialise
from dflash.evaluate import (
    Row,
    Tally,
    check_prompts,
    decode_row,
    decode_tau,
    hold_conversation,
    main,
    mean_and_interval,
    print_tables,
    read_prompts,
    summarise,
)
from dflash.export import load_drafter
from dflash.prompt_file import prompt_of
from dflash.run_dir import create_run
from dflash.shape import resolve_shape
from dflash.target import load_target, stop_tokens

BLOCK_SIZE, LETTER = 4, "a"  # the constant target says nothing but this letter
GREEDY = EvaluateConfig()
FIGURES = {
    "prompts",
    "tokens",
    "steps",
    "tau",
    "tau_interval",
    "tau_pooled",
    "acceptance",
    "tokens_per_second",
    "plain_tokens_per_second",
    "speed_up",
    "identical",
}


def save_constant_target(directory: Path) -> None:
    """A target that answers anything with one letter for ever: only its embedding, final norm and head do something."""
    model = tiny_model("llama")
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    state = model.state_dict()
    with torch.no_grad():
        for name, weight in state.items():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        state["model.embed_tokens.weight"] += 1.0  # a direction that all tokens share
        state["lm_head.weight"][tiny_tokenizer().convert_tokens_to_ids(LETTER)] = 2.0  # and that says the letter
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def save_drafter(
    directory: Path,
    target_dir: Path,
    *,
    seed: int = 0,
    silent: float | None = None,
    layer_ids: Sequence[int] = (0, 2),
    block_size: int = BLOCK_SIZE,
) -> None:
    """A checkpoint of an untrained drafter; `silent` leaves it its input alone, times that number."""
    target = load_target(str(target_dir), layer_ids=layer_ids)
    shape = resolve_shape(
        DrafterConfig(layers=1, block_size=block_size),
        target_config=target.model.config,
        width=target.width,
        vocabulary=target.vocabulary,
        target_layers=target.num_layers,
        target_layer_ids=target.layer_ids,
        mask_token_id=target.vocabulary - 1,
    )
    drafter = Drafter(shape)
    initialise(drafter, seed=seed, features=None)
    if silent is not None:
        with torch.no_grad():
            drafter.norm.weight.fill_(silent)
            for layer in drafter.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
    state = {
        "step": 7,
        "epoch": 0,
        "seed": seed,
        "trained": [],
        "shape": dataclasses.asdict(shape),
        "target": target.identity(),
        "data": "0" * 64,
    }
    checkpoint.write(directory, checkpoint.Checkpoint(drafter.state_dict(), {"step": torch.zeros(1)}, state))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two targets, drafters for them, prompts, and what a user could take for these."""
    at = tmp_path_factory.mktemp("evaluate")
    random_target = tiny_target(at / "target")
    save_constant_target(at / "constant")
    save_drafter(at / "drafter", random_target)
    save_drafter(at / "other", random_target, seed=1)
    save_drafter(at / "good", at / "constant", silent=1.0)
    save_drafter(at / "bad", at / "constant", silent=-1.0)
    write_jsonl(at / "prompts.jsonl", [{"id": f"p{n}", "turns": [text]} for n, text in enumerate(texts(4))])
    write_jsonl(at / "chats.jsonl", [{"id": f"c{n}", "turns": texts(2, seed=n + 1)} for n in range(3)])
    return at


def texts(count: int, *, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 12))) for _ in range(count)]


def evaluated(place: Path, words: str, *, code: int = FINISHED) -> dict:
    """What the command wrote with these words behind it."""
    out = place / "out.json"
    out.unlink(missing_ok=True)
    assert main([*shlex.split(words.format(place=place)), "--out", str(out)]) == code
    return json.loads(out.read_text())


RANDOM = "{place}/drafter --target {place}/target --prompts {place}/prompts.jsonl {place}/chats.jsonl --evaluate.max_new_tokens 9"
CONSTANT = "{place}/good --target {place}/constant --prompts {place}/prompts.jsonl {place}/chats.jsonl --evaluate.max_new_tokens 9"


@pytest.fixture(scope="module")
def constant(place):
    return evaluated(place, CONSTANT)


@pytest.fixture(scope="module")
def random_pair(place):
    return evaluated(place, RANDOM + " --against {place}/other --plot {place}/taus.png")


# ---------------------------------------------------------------- what is measured


def test_a_drafter_that_is_always_right_has_a_tau_of_its_block_size_and_is_always_accepted(constant):
    for scope in (*constant["sets"].values(), constant["overall"]):
        assert scope["tau"] == scope["tau_pooled"] == BLOCK_SIZE
        assert scope["tau_interval"] == [BLOCK_SIZE, BLOCK_SIZE]
        assert scope["acceptance"] == [1.0] * (BLOCK_SIZE - 1)
        assert scope["identical"] == 1.0


def test_a_drafter_that_is_always_wrong_has_a_tau_of_one_and_is_never_accepted(place):
    overall = evaluated(place, CONSTANT.replace("/good", "/bad"))["overall"]
    assert overall["tau"] == 1.0
    assert overall["acceptance"] == [0.0] * (BLOCK_SIZE - 1)
    assert overall["identical"] == 1.0


def test_prompts_replies_tokens_and_steps_are_counted(constant):
    # 9 tokens: one of the prefill and two whole blocks; a chat of two turns has two replies
    assert {name: (of["prompts"], of["tokens"], of["steps"]) for name, of in constant["sets"].items()} == {
        "prompts": (4, 36, 8),
        "chats": (3, 54, 12),
    }
    assert (constant["overall"]["prompts"], constant["overall"]["steps"]) == (7, 20)
    assert [(row["id"], row["set"], row["tokens"], row["steps"], row["tau"]) for row in constant["prompts"][3:5]] == [
        ("p3", "prompts", 9, 2, 4.0),
        ("c0", "chats", 18, 4, 4.0),
    ]


def test_tokens_per_second_are_all_tokens_over_the_seconds_of_all_prompts(random_pair):
    rows, overall = random_pair["prompts"], random_pair["overall"]
    for tokens, seconds, rate in (
        ("tokens", "seconds", "tokens_per_second"),
        ("plain_tokens", "plain_seconds", "plain_tokens_per_second"),
    ):
        assert sum(row[tokens] for row in rows) / sum(row[seconds] for row in rows) == pytest.approx(overall[rate])
    assert overall["speed_up"] == pytest.approx(overall["tokens_per_second"] / overall["plain_tokens_per_second"])


def test_greedy_output_of_a_random_target_is_the_same_with_an_untrained_drafter_on_the_shipped_prompts(place):
    words = "{place}/drafter --target {place}/target --evaluate.max_new_tokens 8 --evaluate.prompts_per_set 2"
    result = evaluated(place, words)
    assert list(result["sets"]) == ["chat", "code", "mathematics"]
    assert [row["id"] for row in result["prompts"]][:3] == ["chat-01", "chat-02", "code-01"]
    assert result["overall"]["identical"] == 1.0


def other_in_a_block(module, _, output):
    """A kernel that answers otherwise when a whole block is read at once."""
    state = getattr(output, "last_hidden_state", None)
    if state is not None and state.shape[1] == BLOCK_SIZE:
        output.last_hidden_state = -state


@pytest.fixture
def broken_kernel():
    hook = torch.nn.modules.module.register_module_forward_hook(other_in_a_block)
    yield
    hook.remove()


@pytest.mark.usefixtures("broken_kernel")
def test_a_float32_output_that_is_not_the_targets_own_fails_and_names_the_first_prompt_and_token(place, capsys):
    result = evaluated(place, CONSTANT, code=FAILED)
    assert result["overall"]["identical"] == 0.0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("dflash: good changes the greedy output")
    letter = tiny_tokenizer().convert_tokens_to_ids(LETTER)
    assert "prompt p0 of prompts, reply 1, token 2: " in last
    assert f"instead of {letter}; 7 of 7 outputs differ" in last


@pytest.mark.usefixtures("broken_kernel")
def test_a_bfloat16_output_may_differ_and_the_share_that_does_not_is_told(place):
    result = evaluated(place, CONSTANT + " --target.dtype bfloat16 --evaluate.prompts_per_set 1")
    assert result["target"]["dtype"] == "bfloat16"
    assert result["overall"]["identical"] == 0.0


def test_a_bfloat16_target_and_drafter_decode(place):
    result = evaluated(place, CONSTANT + " --target.dtype bfloat16 --evaluate.prompts_per_set 1")
    assert result["target"]["dtype"] == result["settings"]["drafter_dtype"] == "bfloat16"
    assert result["overall"]["tau"] == BLOCK_SIZE
    assert result["overall"]["identical"] == 1.0


def test_sampled_replies_are_not_compared_and_repeat_with_their_seed(place):
    words = RANDOM.replace("_tokens 9", "_tokens 16") + " --evaluate.temperature 0.5 --prompts {place}/prompts.jsonl"
    one, again, another = (
        evaluated(place, f"{words} --evaluate.prompts_per_set 3 --evaluate.seed {seed}") for seed in (3, 3, 4)
    )
    assert one["overall"]["identical"] is None

    def outcome(result):
        return [(row["tokens"], row["steps"]) for row in result["prompts"]]

    assert outcome(one) == outcome(again)
    assert outcome(one) != outcome(another)


def test_the_first_prompts_of_each_set_are_taken(place):
    result = evaluated(place, RANDOM + " --evaluate.prompts_per_set 2")
    assert [row["id"] for row in result["prompts"]] == ["p0", "p1", "c0", "c1"]


def test_a_second_turn_is_asked_after_the_targets_own_first_reply(place):
    target = load_target(str(place / "target"), layer_ids=[0, 2])
    template = Template(target.tokenizer, {})
    asked: list[list[int]] = []

    def reply(tokens: list[int]) -> str:
        asked.append(tokens)
        said = decode_plain(target, tokens, max_new_tokens=6, stop=stop_tokens(target)).tokens
        return target.tokenizer.decode(said, skip_special_tokens=True)

    prompt = prompt_of({"turns": ["How many bridges?", "And who built the first of them?"]})
    hold_conversation(prompt, template, reply)
    first, second = (target.tokenizer.decode(tokens) for tokens in asked)
    answer = second.removeprefix(first).partition("<|im_end|>")[0]
    assert second.startswith(first)
    assert len(answer) > 0
    assert second.endswith("<|im_start|>user\nAnd who built the first of them?<|im_end|>\n<|im_start|>assistant\n")


def test_every_way_is_asked_the_same_with_one_seed_and_is_first_in_its_turn():
    template = Template(tiny_tokenizer(), {})
    asked: list[tuple[str, str, int]] = []

    def saying(word: str):
        def way(tokens: list[int], *, seed: int) -> Decoded:
            asked.append((word, template.tokenizer.decode(tokens), seed))
            said = [*template.tokenizer(word)["input_ids"], 2]
            return Decoded(said, "stop", [1] * (len(said) - 1), [0] * (len(said) - 1), 0.0, 0.0)

        return way

    ways = [saying("plain"), saying("drafted")]
    prompt = prompt_of({"turns": ["How many?", "Why?"]})
    rows = [decode_row("set", prompt, number, ways, template, GREEDY) for number in (0, 1)]
    assert [word for word, _, _ in asked] == ["plain", "drafted"] * 2 + ["drafted", "plain"] * 2
    for one, other in zip(asked[::2], asked[1::2], strict=True):
        assert one[1:] == other[1:]
    assert len({seed for _, _, seed in asked}) == 4  # each reply of each prompt has its own
    assert all("plain<|im_end|>" in text and "drafted" not in text for _, text, _ in asked[2:4])
    ids = [template.tokenizer(word)["input_ids"] for word in ("drafted", "plain")]
    assert rows[0].ways[1].difference == f"reply 1, token 1: {ids[0][0]} instead of {ids[1][0]}"


def test_system_messages_and_replies_of_a_conversation_file_are_places_for_new_ones(place):
    write_jsonl(place / "whole.jsonl", conversations(3))
    result = evaluated(place, RANDOM.replace("{place}/prompts.jsonl {place}/chats.jsonl", "{place}/whole.jsonl"))
    assert result["sets"]["whole"]["prompts"] == 3


# ---------------------------------------------------------------- two drafters


def test_a_planted_difference_of_two_drafters_is_found(place):
    result = evaluated(place, CONSTANT + " --against {place}/bad")
    for scope in (*result["sets"].values(), result["overall"]):
        assert scope["difference"] == BLOCK_SIZE - 1
        assert scope["difference_interval"] == [BLOCK_SIZE - 1, BLOCK_SIZE - 1]
        assert scope["against"]["tau"] == 1.0
    assert result["drafter"]["path"].endswith("/good")
    assert result["against"]["path"].endswith("/bad")
    assert {row["against"]["steps"] for row in result["prompts"]} == {8, 16}


def test_a_drafter_differs_from_itself_by_exactly_nothing(place):
    overall = evaluated(place, RANDOM + " --against {place}/drafter --prompts {place}/prompts.jsonl")["overall"]
    assert overall["difference"] == 0.0
    assert overall["difference_interval"] == [0.0, 0.0]


def test_drafters_of_other_layers_and_block_sizes_are_compared_on_one_target(place):
    save_drafter(place / "wide", place / "target", layer_ids=[1], block_size=8)
    result = evaluated(place, RANDOM + " --against {place}/wide --evaluate.prompts_per_set 2")
    assert result["settings"]["block_sizes"] == [4, 8]
    assert len(result["overall"]["acceptance"]) == 3
    assert len(result["overall"]["against"]["acceptance"]) == 7
    assert result["overall"]["identical"] == result["overall"]["against"]["identical"] == 1.0


def rows_of(taus: list[list[float]], name: str = "set") -> list[Row]:
    """Prompts whose taus, one a drafter, are these."""
    plain = Tally(tokens=100, seconds=1.0, committed=[1], accepted=[0])

    def tally(tau: float) -> Tally:
        steps = 100
        more = round((tau - 1) * steps)
        accepted = [more // steps + (step < more % steps) for step in range(steps)]
        return Tally(100, 1.0, [count + 1 for count in accepted], accepted)

    return [
        Row(name, f"{name}-{number}", [plain, *map(tally, pair)]) for number, pair in enumerate(zip(*taus, strict=True))
    ]


def test_a_small_steady_gain_is_found_where_prompts_differ_far_more_than_drafters():
    draw = np.random.default_rng(5)
    base = draw.uniform(1.5, 4.0, 24)
    better = base + 0.1 + draw.normal(0, 0.05, 24)
    overall = summarise(rows_of([better.tolist(), base.tolist()]), [8, 8], GREEDY)["overall"]
    assert overall["tau_interval"][0] < overall["against"]["tau"]  # not to be told apart one by one
    low, high = overall["difference_interval"]
    assert 0 < low < high < 0.2


# ---------------------------------------------------------------- figures


def test_tau_of_a_set_is_the_mean_over_prompts_and_the_pooled_one_over_steps():
    long, short = Tally(300, 1.0, [1] * 300, [0] * 300), Tally(8, 1.0, [4, 4], [3, 3])
    rows = [Row("set", name, [Tally(9, 1.0), tally]) for name, tally in (("long", long), ("short", short))]
    figures = summarise(rows, [4], GREEDY)["overall"]
    assert figures["tau"] == 2.5
    assert figures["tau_pooled"] == pytest.approx(308 / 302)
    assert figures["acceptance"] == pytest.approx([2 / 302] * 3)


def test_acceptance_of_a_slot_is_the_share_of_steps_that_went_at_least_so_far():
    row = Row("set", "a", [Tally(9, 1.0), Tally(10, 1.0, [1, 2, 3, 4], [0, 1, 2, 3])])
    assert summarise([row], [4], GREEDY)["overall"]["acceptance"] == [0.75, 0.5, 0.25]


def test_a_prompt_whose_reply_is_one_token_has_no_tau_and_counts_in_no_mean():
    rows = [*rows_of([[2.0, 3.0]]), Row("set", "short", [Tally(1, 1.0), Tally(1, 1.0)])]
    figures = summarise(rows, [4], GREEDY)["sets"]["set"]
    assert (figures["prompts"], figures["tau"]) == (3, 2.5)


def test_replies_of_one_token_alone_are_refused():
    with pytest.raises(ValueError, match=r"prompts of set: every reply ends with its first token, .*template_kwargs"):
        summarise([Row("set", "short", [Tally(1, 1.0), Tally(1, 1.0)])], [4], GREEDY)


def test_the_interval_holds_the_true_mean_about_as_often_as_it_says():
    draw, held, trials = np.random.default_rng(0), 0, 400
    for trial in range(trials):
        _, interval = mean_and_interval([(1 + draw.gamma(2.0, 1.0, 24)).tolist()], seed=trial)
        assert interval is not None
        held += interval[0] <= 3.0 <= interval[1]
    # 24 skewed values: the percentile bootstrap is known to hold somewhat less than 95 %
    assert 0.88 <= held / trials <= 0.98


def test_the_interval_agrees_with_the_normal_one_where_values_are_many():
    values = np.random.default_rng(1).normal(3.0, 0.7, 500)
    mean, interval = mean_and_interval([values.tolist()], seed=0)
    assert mean == pytest.approx(values.mean())
    half = 1.96 * values.std() / np.sqrt(500)
    assert interval == pytest.approx([mean - half, mean + half], abs=0.1 * half)


def test_sets_that_lie_far_apart_do_not_widen_the_interval_over_all():
    low, high = [[base + 0.1 * number for number in range(10)] for base in (1.0, 9.0)]
    mean, interval = mean_and_interval([low, high], seed=0)
    assert interval is not None
    assert mean == pytest.approx(5.45)
    assert interval[1] - interval[0] < 0.5


def test_the_interval_is_the_same_for_a_seed():
    values = [np.random.default_rng(0).uniform(1.0, 4.0, 30).tolist()]
    assert mean_and_interval(values, seed=1) == mean_and_interval(values, seed=1)
    assert mean_and_interval(values, seed=1) != mean_and_interval(values, seed=2)


@pytest.mark.parametrize("groups, mean", [([], None), ([[]], None), ([[2.0]], 2.0), ([[2.0], [4.0, 6.0]], 4.0)])
def test_a_single_prompt_has_no_interval(groups, mean):
    assert mean_and_interval(groups, seed=0) == (mean, None)


# ---------------------------------------------------------------- what is told


def test_the_json_file_holds_what_it_promises(place):
    result = evaluated(place, RANDOM)
    assert set(result) == {"command", "target", "drafter", "settings", "packages", "sets", "overall", "prompts"}
    assert result["command"].startswith(f"python -m dflash.evaluate {place}/drafter --target {place}/target --prompts")
    assert result["target"] == load_target(str(place / "target"), layer_ids=[1]).identity()
    assert (result["drafter"]["kind"], result["drafter"]["step"]) == ("checkpoint", 7)
    assert set(result["overall"]) == set(result["sets"]["chats"]) == FIGURES
    assert result["settings"]["max_new_tokens"] == 9
    assert result["settings"]["device"] == "cpu"
    assert set(result["settings"]["files"]) == {"prompts", "chats"}
    row = {"id", "set", "tokens", "steps", "tau", "seconds", "difference", "plain_tokens", "plain_seconds"}
    assert all(set(values) == row for values in result["prompts"])


def test_the_json_file_of_two_drafters_adds_the_second_and_the_difference(place, random_pair):
    result = random_pair
    assert result["against"]["path"] == f"{place}/other"
    assert set(result["overall"]) == FIGURES | {"against", "difference", "difference_interval"}
    assert set(result["overall"]["against"]) == FIGURES


def test_the_table_shows_every_set_and_the_difference(capsys):
    rows = [*rows_of([[2.0, 3.0], [1.0, 1.5]], "code"), *rows_of([[1.5, 1.75], [1.0, 1.5]], "a set with a long name")]
    result = {"target": {"name": "models/some-target"}, "drafter": {"note": "as far as is known"}, "against": {}}
    print_tables(result | summarise(rows, [8, 8], GREEDY), ["A (run-0001 step-00000100)", "B (export)"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "A (run-0001 step-00000100) on models/some-target" in lines
    assert "as far as is known" in lines
    assert "set prompts tau 95 % interval tokens/s without identical" in lines
    assert "code 2 2.500 2.000 to 3.000 100.0 100.0 100.0%" in lines
    assert "set 1 2 3 4 5 6 7" in lines
    assert "code 100 50 0 0 0 0 0" in lines
    assert "code 2 1.250 1.000 to 1.500 100.0 100.0 100.0%" in lines
    assert "code +1.250 +1.000 to +1.500" in lines
    assert [line.split()[0] for line in lines if line].count("overall") == 5
    assert max(map(len, lines)) <= 80


def test_a_block_of_any_size_fits_the_table(capsys):
    result = {"target": {"name": "t"}, "drafter": {}} | summarise(rows_of([[2.0, 3.0]]), [64], GREEDY)
    print_tables(result, ["run"])
    out = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert "…" not in out
    assert len(result["overall"]["acceptance"]) == 63


def test_progress_and_result_go_to_different_streams_and_a_picture_is_written(place, capsys, random_pair):
    assert set(random_pair) > {"drafter", "against"}
    evaluated(place, RANDOM + " --plot {place}/tau.png")
    captured = capsys.readouterr()
    assert "95 % interval" in captured.out
    assert "prompt 7/7  tau 1." in captured.err
    assert "prompt 7/7" not in captured.out
    assert (place / "tau.png").read_bytes()[:4] == (place / "taus.png").read_bytes()[:4] == b"\x89PNG"
    assert (place / "tau.png").read_bytes() != (place / "taus.png").read_bytes()


# ---------------------------------------------------------------- a checkpoint inside its run


@pytest.fixture(scope="module")
def run_dir(place):
    values = {
        "target": {"name": str(place / "target"), "devices": ["cpu"]},
        "data": {"path": str(place / "data.jsonl"), "template_kwargs": {"enable_thinking": False}},
        "evaluate": {"prompts": [str(place / "chats.jsonl")], "max_new_tokens": 6},
        "run": {"root": str(place / "runs"), "name": "tiny"},
    }
    run = create_run(configuration.parse(values))
    shutil.copytree(place / "drafter", run / "checkpoints" / "step-00000007")
    return run


def test_a_supervised_evaluation_records_the_command_that_a_person_can_repeat(run_dir, tmp_path):
    drafter, out = f"{run_dir}/checkpoints/step-00000007", f"{tmp_path}/out.json"
    command = ["-m", "dflash.evaluate", drafter, "--stop-with-stdin", "--evaluate.prompts_per_set", "1", "--out", out]
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    errors = process.stderr.read()  # its standard input is open until it has ended
    assert process.wait(timeout=60) == FINISHED, errors
    repeat = f"python -m dflash.evaluate {drafter} --evaluate.prompts_per_set 1 --out {out}"
    assert json.loads(Path(out).read_text())["command"] == repeat


def test_a_checkpoint_inside_its_run_needs_no_other_word(place, run_dir, capsys):
    result = evaluated(place, f"{run_dir}/checkpoints/step-00000007")
    assert result["target"]["name"] == str(place / "target")
    assert result["settings"]["template_kwargs"] == {"enable_thinking": False}
    assert result["settings"]["max_new_tokens"] == 6
    assert list(result["sets"]) == ["chats"]
    assert "tiny-0001 step-00000007 on " in capsys.readouterr().out


def test_flags_go_over_the_runs_own_configuration(place, run_dir):
    words = (
        "--prompts {place}/prompts.jsonl --evaluate.max_new_tokens 5 --data.template_kwargs '{{enable_thinking: true}}'"
    )
    result = evaluated(place, f"{run_dir}/checkpoints/step-00000007 " + words)
    assert list(result["sets"]) == ["prompts"]
    assert result["settings"]["max_new_tokens"] == 5
    assert result["settings"]["template_kwargs"] == {"enable_thinking": True}


def test_a_named_configuration_stands_in_for_the_runs_own(place, run_dir):
    file = place / "own.yaml"
    file.write_text(
        f"target: {{name: {place}/target}}\nevaluate: {{max_new_tokens: 4, prompts: [{place}/prompts.jsonl]}}\n"
    )
    result = evaluated(place, f"{run_dir}/checkpoints/step-00000007 --config {file}")
    assert result["settings"]["max_new_tokens"] == 4
    assert result["settings"]["template_kwargs"] == {}


# ---------------------------------------------------------------- for the trainer


def tau_while_training(place: Path, target: str, drafter: str, *, per_set: int | None = None, stop: bool = False):
    loaded, stopping = load_target(str(place / target), layer_ids=[0, 2]), threading.Event()
    if stop:
        stopping.set()
    files = (str(place / "prompts.jsonl"), str(place / "chats.jsonl"))
    config = EvaluateConfig(prompts=files, max_new_tokens=9)
    return decode_tau(
        loaded,
        load_drafter(place / drafter, loaded)[0],
        read_prompts(config, per_set=per_set),
        config=config,
        template_kwargs={},
        stopping=stopping,
    )


def test_tau_during_training_is_that_of_the_command(place, constant, random_pair):
    for target, drafter, result in (("target", "drafter", random_pair), ("constant", "good", constant)):
        overall = result["overall"]
        result = tau_while_training(place, target, drafter)
        assert result is not None
        assert {name: result[name] for name in ("tau", "tau_interval", "prompts", "tokens", "steps")} == {
            name: overall[name] for name in ("tau", "tau_interval", "prompts", "tokens", "steps")
        }


def test_tau_during_training_takes_a_few_prompts_and_tells_them_by_set(place):
    result = tau_while_training(place, "constant", "bad", per_set=1)
    assert result is not None
    assert result["prompts"] == 2
    assert result["sets"] == {"prompts": 1.0, "chats": 1.0}


def test_tau_during_training_is_given_up_on_a_stop(place):
    assert tau_while_training(place, "constant", "good", stop=True) is None


# ---------------------------------------------------------------- what a user can get wrong

FILES = {
    "empty.jsonl": "",
    "blank.txt": "\n  \n",
    "broken.jsonl": '{"turns": ["a"]}\n{"turns": [\n',
    "rows.jsonl": '{"question": "why?"}\n',
    "no-user.jsonl": '{"messages": [{"role": "assistant", "content": "a"}]}\n',
    "picture.jsonl": '{"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}\n',
    "not-text.jsonl": '{"turns": [3]}\n',
    "long.jsonl": json.dumps({"id": "endless", "turns": ["word " * 9000]}) + "\n",
    "list.yaml": "- target\n",
    "typo.yaml": "evaluate: {max_tokens: 3}\n",
}

# case: all words of the command, what the line names, the remedy
WORDS_REFUSED = {
    "no word": ("", "drafter", "--help"),
    "no target": ("{place}/drafter", "target.name is not set", "--target.name VALUE"),
    "no drafter there": (
        "{place}/none --target {place}/target",
        "{place}/none: no such directory",
        "give a checkpoint",
    ),
    "a file as drafter": (
        "{place}/prompts.jsonl --target {place}/target",
        "prompts.jsonl: no such",
        "give a checkpoint",
    ),
    "directory of no drafter": (
        "{place}/runs --target {place}/target",
        "{place}/runs is not a drafter",
        "give a checkpoint",
    ),
    "a target as drafter": ("{place}/target --target {place}/target", "{place}/target", "drafter"),
    "drafter as target": (
        "{place}/drafter --target {place}/drafter",
        "{place}/drafter: no config.json",
        "save_pretrained",
    ),
    "torn checkpoint": ("{place}/torn --target {place}/target", "{place}/torn", "sha256"),
    "a run as drafter": ("{place}/runs/tiny-0001 --target {place}/target", "tiny-0001", "step-"),
    "other target": ("{place}/drafter --target {place}/constant", "{place}/drafter", "target"),
    "wider target": ("{place}/drafter --target {place}/wider", "{place}/drafter", "target"),
    "no such target": ("{place}/drafter --target {place}/none", "target.name={place}/none", "save_pretrained"),
    "target without template": (
        "{place}/drafter --target {place}/mute",
        "target.name={place}/mute",
        "chat_template.jinja",
    ),
    "template refuses a prompt": ("{place}/drafter --target {place}/strict", "prompt chat-01 of chat", "no long words"),
}
# the same, but the words come behind those of an evaluation that is fine
FLAGS_REFUSED = {
    "other target of the second": ("--against {place}/good", "{place}/good", "target"),
    "no second drafter there": ("--against {place}/none", "{place}/none: no such directory", "give a checkpoint"),
    "no prompts file": ("--prompts {place}/none.jsonl", "evaluate.prompts={place}/none.jsonl: No such", "give a"),
    "a directory as prompts": ("--prompts {place}", "evaluate.prompts={place}: Is a directory", "give a JSONL"),
    "empty prompts": ("--prompts {place}/empty.jsonl", "empty.jsonl: holds no prompt", "give a JSONL"),
    "blank prompts": ("--prompts {place}/blank.txt", "blank.txt: holds no prompt", "give a JSONL"),
    "broken line": ("--prompts {place}/broken.jsonl", "broken.jsonl:2", "one JSON conversation a line"),
    "rows of another kind": ("--prompts {place}/rows.jsonl", "rows.jsonl:1: not a prompt", '{{"prompt": ...}}'),
    "nobody asks": ("--prompts {place}/no-user.jsonl", "no-user.jsonl:1: no user turn", "mend or remove"),
    "a picture": ("--prompts {place}/picture.jsonl", "picture.jsonl:1: content that is not text", "mend or"),
    "turns of no text": ("--prompts {place}/not-text.jsonl", "not-text.jsonl:1", "mend or remove it"),
    "two files of one name": (
        "--prompts {place}/prompts.jsonl {place}/runs/../prompts.jsonl",
        "named prompts",
        "rename",
    ),
    "prompt longer than the context": ("--prompts {place}/long.jsonl", "prompt endless of long", "shorten"),
    "reply longer than the context": ("--evaluate.max_new_tokens 8190", "max_new_tokens=8190", "lower it"),
    "reply of nothing": ("--evaluate.max_new_tokens 0", "evaluate.max_new_tokens=0", "greater than or equal to 1"),
    "reply of one token": ("--evaluate.max_new_tokens 1", "evaluate.max_new_tokens=1", "raise it"),
    "no number": ("--evaluate.max_new_tokens many", 'evaluate.max_new_tokens="many"', "valid integer"),
    "no prompt of each": ("--evaluate.prompts_per_set 0", "evaluate.prompts_per_set=0", "greater than or equal"),
    "negative temperature": ("--evaluate.temperature -1", "evaluate.temperature=-1", "greater than or equal to 0"),
    "share above one": ("--evaluate.top_p 1.5", "evaluate.top_p=1.5", "less than or equal to 1"),
    "unknown flag": ("--block-size 8", "--block-size", "--help"),
    "flag of the trainer": ("--optim.lr 1e-3", "--optim.lr", "--help"),
    "out in no directory": ("--out {place}/none/a.json", "{place}/none/a.json", "in a directory that is there"),
    "out is a directory": ("--out {place}", "{place}: cannot be written", "give a file"),
    "plot in no directory": ("--plot {place}/none/a.png", "{place}/none/a.png", "in a directory that is there"),
    "no configuration there": ("--config {place}/none.yaml", "--config {place}/none.yaml", "give a YAML file"),
    "configuration of no sections": ("--config {place}/list.yaml", "list.yaml holds no mapping", "evaluate"),
    "unknown knob": ("--config {place}/typo.yaml", "unknown key evaluate.max_tokens", "max_new_tokens"),
    "kwargs of no template": ("--data.template_kwargs 3", "data.template_kwargs=3", "mapping"),
    "kwargs of the tokenizer": (
        "--data.template_kwargs '{{tokenize: true}}'",
        "tokenize cannot be set",
        "own variables",
    ),
    "no such device": ("--target.devices cuda:9", "cuda:9: not a device", "use auto, cpu"),
}
REFUSALS = WORDS_REFUSED | {name: (f"{RANDOM} {words}", *rest) for name, (words, *rest) in FLAGS_REFUSED.items()}


@pytest.fixture(scope="module")
def mistakes(place, run_dir):
    for name, content in FILES.items():
        (place / name).write_text(content)
    tiny_target(place / "wider", hidden=128)
    for name, template in (
        ("mute", None),
        (
            "strict",
            "{% if messages[0]['content'] | length > 200 %}{{ raise_exception('no long words') }}{% endif %}" + CHATML,
        ),
    ):
        tiny_model().save_pretrained(place / name)
        tiny_tokenizer(chat_template=template).save_pretrained(place / name)
    shutil.copytree(place / "drafter", place / "torn")
    with open(place / "torn" / "drafter.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    return place


@pytest.mark.parametrize("words, value, remedy", REFUSALS.values(), ids=REFUSALS)
def test_a_mistake_is_refused_in_one_line_that_names_value_and_remedy(mistakes, capsys, words, value, remedy):
    code = main(shlex.split(words.format(place=mistakes)))
    captured = capsys.readouterr()
    assert_refused(code, captured.err, value.format(place=mistakes), remedy.replace("{{", "{").replace("}}", "}"))
    assert "Traceback" not in captured.err
    assert "prompt 1/" not in captured.err  # before anything was decoded
    assert captured.out == ""


@pytest.mark.parametrize("turns", [1, 2])
def test_replies_that_just_fit_the_context_are_taken_and_a_token_more_is_not(place, turns):
    target = load_target(str(place / "target"), layer_ids=[0, 2])
    template, drafter = Template(target.tokenizer, {}), load_drafter(place / "drafter", target)[0]
    prompt, lengths = prompt_of({"turns": ["How many bridges cross the river?"] * turns}), list[int]()
    hold_conversation(prompt, template, lambda tokens: lengths.append(len(tokens)) or "")
    most = (drafter.shape.max_positions - lengths[-1]) // turns
    check_prompts({"set": [prompt]}, template, EvaluateConfig(max_new_tokens=most), target, [drafter])
    with pytest.raises(ValueError, match=rf"prompt .* of set: .* {turns} replies .* exceed the 8192 positions"):
        check_prompts({"set": [prompt]}, template, EvaluateConfig(max_new_tokens=most + 1), target, [drafter])
