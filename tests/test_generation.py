"""The target as the source of its own answers: batches that are refilled say what each prompt alone would get.

What a reply must be is taken from transformers' own `generate`, one prompt at a time. Requests carry random tokens: a source reads
no text.
"""

import heapq
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, tiny_target, tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    MambaConfig,
    MistralConfig,
    MptConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
)

from dflash.answers import LENGTH, REFUSED, STOP, Answer, Request
from dflash.generation import COLUMNS, PREFILL_TOKENS, LocalSource, Slots
from dflash.sampling import GREEDY, Sampling
from dflash.target import Target, load_target

NEW = 30  # max_new_tokens where nothing else is said: with the prompts, far past the gemmas' window of 16
END_OF_TURN = 2
LENGTHS = (3, 9, 17, 33, 60, 8, 25, 40, 12, 5)  # of the prompts, in an order that is none


def make_target(directory: Path, family: str = "qwen3", *, positions: int = 8192, ends: bool = True) -> Path:
    """A tiny target that ends some of its replies, or none."""
    tiny_target(directory, family, layers=2, hidden=32)
    weights = load_file(directory / "model.safetensors")
    # a random target seldom ends its turn; a logit of 0 is never the highest
    weights["lm_head.weight"][END_OF_TURN] = 2 * weights["lm_head.weight"][5] if ends else 0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, max_position_embeddings=positions)
    return directory


def change_config(directory: Path, file: str = "config.json", **changes) -> None:
    config = json.loads((directory / file).read_text())
    (directory / file).write_text(json.dumps(config | changes))


def load(directory: Path, dtype: str = "float32") -> Target:
    return load_target(str(directory), device="cpu", dtype=dtype, captured_layers=1)


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> dict[str, Target]:
    root = tmp_path_factory.mktemp("generation")
    return {family: load(make_target(root / family, family)) for family in FAMILIES}


@pytest.fixture
def target(targets) -> Target:
    return targets["qwen3"]


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 500, (length,), generator=draw).tolist() for length in lengths]


def request(tokens: list[int], key: str) -> Request:
    return Request(key=key, messages=[], tools=None, prompt_tokens=tokens)


def requests(*lengths: int, seed: int = 0) -> list[Request]:
    return [request(tokens, f"prompt-{index}") for index, tokens in enumerate(prompts(*lengths, seed=seed))]


class Waiting:
    """Requests in the order in which they came."""

    def __init__(self, waiting: list[Request]):
        self.waiting = list(waiting)

    def take(self, count: int) -> list[Request]:
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken


def source_of(target: Target, *, rows: int, sampling: Sampling = GREEDY, new: int = NEW, seed: int = 0) -> LocalSource:
    return LocalSource(target, sampling=sampling, max_new_tokens=new, seed=seed, rows=rows)


def answered(source: LocalSource, wanted: list[Request]) -> dict[str, Answer]:
    """{key: answer} of requests, each of which is answered once."""
    pairs = [(request.key, answer) for request, answer in source.answers(Waiting(wanted))]
    assert Counter(key for key, _ in pairs) == Counter(request.key for request in wanted)
    return dict(pairs)


GENERATED: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}


def generated(target: Target, prompt: list[int], new: int = NEW) -> list[int]:
    """What transformers itself generates greedily, the stop token included."""
    place = target.name, new, tuple(prompt)
    if place not in GENERATED:
        ids = torch.tensor([prompt])
        whole = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)  # type: ignore
        GENERATED[place] = whole[0, len(prompt) :].tolist()
    return GENERATED[place]


def said(answer: Answer) -> list[int]:
    """All tokens of a reply, the stop token included."""
    assert answer.token_ids is not None
    return answer.token_ids + [END_OF_TURN] * (answer.finish_reason == STOP)


@contextmanager
def forwards(target: Target) -> Iterator[list[tuple[int, int]]]:
    """(rows, tokens a row) of every forward of the target inside the `with`."""
    shapes: list[tuple[int, int]] = []

    def note(_, __, arguments) -> None:
        shapes.append(tuple(arguments["input_ids"].shape))

    handle = target.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield shapes
    finally:
        handle.remove()


# ---------------------------------------------------------------- greedy replies are those of each prompt alone


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_replies_of_refilled_batches_are_those_of_each_prompt_alone_and_of_transformers(targets, family):
    target, wanted = targets[family], requests(*LENGTHS, COLUMNS - 6)  # the last one outgrows its columns
    alone = answered(source_of(target, rows=1), wanted)
    for asked in wanted:
        assert said(alone[asked.key]) == generated(target, asked.prompt_tokens), asked.key
    for rows in (5, 16):
        assert answered(source_of(target, rows=rows), wanted) == alone, rows
    by_length = sorted(wanted, key=lambda asked: -len(asked.prompt_tokens))
    assert answered(source_of(target, rows=2), by_length) == alone
    endings = Counter(answer.finish_reason for answer in alone.values())
    assert endings[STOP] >= 2
    assert endings[LENGTH] >= 2
    assert len({tuple(said(answer)) for answer in alone.values()}) > 7


def test_a_row_outgrows_the_columns_that_the_cache_has(tmp_path):
    """In its steps, and with the next prompt."""
    target = load(make_target(tmp_path / "target", "llama", ends=False))
    wanted = requests(4, 2 * COLUMNS + 3)
    for asked, answer in source_of(target, rows=1, new=COLUMNS).answers(Waiting(wanted)):
        assert answer.completion_tokens == COLUMNS
        assert said(answer) == generated(target, asked.prompt_tokens, COLUMNS)


def test_a_second_call_answers_the_same(target):
    source, wanted = source_of(target, rows=3), requests(*LENGTHS)
    assert answered(source, wanted) == answered(source, wanted)


def test_an_answered_conversation_may_have_a_next_turn(target):
    """A reply's own text leads to a request that is there at the very next look."""
    pending, turns, said_so_far = Waiting(requests(20, 9, 30)), Counter(), {}
    for asked, answer in source_of(target, rows=2, new=8).answers(pending):
        chat = asked.key.partition("/")[0]
        turns[chat] += 1
        assert said(answer) == generated(target, asked.prompt_tokens, 8)
        if turns[chat] < 3:
            assert answer.token_ids is not None
            said_so_far[chat] = [*asked.prompt_tokens, *answer.token_ids, END_OF_TURN, 7, 8, 9]
            pending.waiting.append(request(said_so_far[chat], f"{chat}/{turns[chat]}"))
    assert turns == {f"prompt-{index}": 3 for index in range(3)}


# ---------------------------------------------------------------- how a reply ends


def test_an_answer_says_how_its_reply_ended_and_what_it_said(target):
    greedy = answered(source_of(target, rows=4), requests(*LENGTHS))
    wild = answered(source_of(target, rows=20, sampling=Sampling(temperature=100.0)), requests(*LENGTHS, *LENGTHS))
    assert any({0, 1} & set(answer.token_ids or []) for answer in wild.values())  # special tokens are said as well
    for answer in [*greedy.values(), *wild.values()]:
        assert answer.token_ids is not None
        assert END_OF_TURN not in answer.token_ids
        assert answer.completion_tokens == len(answer.token_ids) + (answer.finish_reason == STOP)
        assert answer.finish_reason == (STOP if answer.completion_tokens < NEW else LENGTH)
        assert answer.content == target.tokenizer.decode(answer.token_ids)
        assert (answer.reasoning, answer.detail) == (None, "")


def test_a_reply_whose_last_permitted_token_ends_the_turn_has_stopped(target):
    asked, whole = next(
        (asked, whole)
        for asked in requests(*LENGTHS)
        if (whole := generated(target, asked.prompt_tokens))[-1] == END_OF_TURN and len(whole) > 1
    )
    reasons = {
        new: answered(source_of(target, rows=1, new=new), [asked])[asked.key] for new in (len(whole) - 1, len(whole))
    }
    assert [(answer.finish_reason, said(answer)) for answer in reasons.values()] == [
        (LENGTH, whole[:-1]),
        (STOP, whole),
    ]


def test_a_reply_may_be_nothing_but_its_end(target):
    """The first token is the stop token: the row is free at once, also in the midst of others."""
    empty = [tokens for tokens in prompts(*range(4, 100), seed=5) if generated(target, tokens, 1) == [END_OF_TURN]]
    assert len(empty) >= 3
    others = requests(*LENGTHS[:4])
    wanted = [request(tokens, f"empty-{index}") for index, tokens in enumerate(empty[:3])]
    for order in ([*wanted, *others], [*others, *wanted], [wanted[0], *others, *wanted[1:]], wanted):
        for rows in (2, 8):
            answers = answered(source_of(target, rows=rows, new=6), order)
            for asked in wanted:
                assert answers[asked.key] == Answer(content="", finish_reason=STOP, completion_tokens=1, token_ids=[])
            for asked in order:
                assert said(answers[asked.key]) == generated(target, asked.prompt_tokens, 6)


def test_every_token_that_the_generation_config_names_ends_a_reply(tmp_path, target):
    plain = answered(source_of(target, rows=4), requests(*LENGTHS))
    often = Counter(token for answer in plain.values() for token in answer.token_ids or []).most_common(1)[0][0]
    directory = make_target(tmp_path / "target")
    change_config(directory, "generation_config.json", eos_token_id=[often, 500])
    other = load(directory)
    for key, answer in answered(source_of(other, rows=4), requests(*LENGTHS)).items():
        whole = said(plain[key])
        ends = [
            at for at, token in enumerate(whole) if token in (often, 500, END_OF_TURN)
        ]  # the last is the tokenizer's
        assert answer.token_ids == whole[: ends[0] if ends else None]
        assert answer.finish_reason == (STOP if ends else LENGTH)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_prompt_that_leaves_no_position_is_refused_with_both_numbers_and_the_others_go_on(tmp_path, family):
    target = load(make_target(tmp_path / "target", family, positions=64))
    wanted = requests(70, 20, 64, 63, 60, 200, 30, 5)
    for order, rows in ((wanted, 3), (wanted[::-1], 1), ([wanted[5]], 2)):
        for key, answer in answered(source_of(target, rows=rows), order).items():
            tokens = next(asked.prompt_tokens for asked in wanted if asked.key == key)
            if len(tokens) >= 64:
                detail = f"a prompt of {len(tokens)} tokens; the target has 64 positions"
                assert answer == Answer(content="", finish_reason=REFUSED, completion_tokens=0, detail=detail)
            else:
                assert said(answer) == generated(target, tokens, min(NEW, 64 - len(tokens)))


# ---------------------------------------------------------------- sampled replies


def test_a_sampled_reply_comes_from_its_key_and_the_seed_alone(target):
    sampling = Sampling(temperature=1.0, top_k=50, top_p=0.95)

    def sample(wanted: list[Request], *, rows: int, seed: int = 0) -> dict[str, Answer]:
        return answered(source_of(target, rows=rows, sampling=sampling, seed=seed), wanted)

    wanted = requests(*LENGTHS[:7])
    alone = sample(wanted, rows=1)
    for rows, order in ((16, wanted), (2, wanted[::-1]), (4, wanted[3:] + wanted[:3])):
        assert sample(order, rows=rows) == alone
    other_seed = sample(wanted, rows=4, seed=1)
    other_keys = sample([request(asked.prompt_tokens, f"{asked.key}/2") for asked in wanted], rows=4)
    for key, answer in alone.items():
        assert answer.completion_tokens < 4 or answer != other_seed[key]
        assert answer.completion_tokens < 4 or answer != other_keys[f"{key}/2"]
    same_prompt = [request(wanted[0].prompt_tokens, f"key-{index}") for index in range(8)]
    assert len({answer.content for answer in sample(same_prompt, rows=8).values()}) > 4


def test_sampled_tokens_follow_the_target_s_distribution(target):
    """Chi-square of the first two tokens over many keys: each pair as often as the target's own probabilities say."""
    count, top_k, temperature = 4000, 4, 0.6
    (tokens,) = prompts(19, seed=8)

    def chances_after(*more: int) -> dict[int, float]:
        with torch.no_grad():
            logits = target.model(torch.tensor([[*tokens, *more]])).logits[0, -1] / temperature
        best = logits.topk(top_k)
        return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

    expected = {}
    for first, chance in chances_after().items():
        after = {(): 1.0} if first == END_OF_TURN else {(second,): p for second, p in chances_after(first).items()}
        expected |= {(first, *second): count * chance * p for second, p in after.items()}
    source = source_of(target, rows=500, sampling=Sampling(temperature=temperature, top_k=top_k), new=2)
    answers = answered(source, [request(tokens, f"key-{index}") for index in range(count)])
    counts = Counter(tuple(said(answer)) for answer in answers.values())
    assert counts.keys() <= expected.keys()
    chi_square = sum((counts[pair] - wanted) ** 2 / wanted for pair, wanted in expected.items())
    freedom = len(expected) - 1
    assert min(expected.values()) > 5
    assert max(expected.values()) > 4 * min(expected.values())
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


# ---------------------------------------------------------------- rows are refilled, not waited for


def steps_of(lengths: list[int], rows: int) -> int:
    """Forwards of one token a row that take replies of these lengths, each in the row that is free first.

    The first token of a reply comes from the forward of its prompt.
    """
    free_at = [0] * rows
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length - 1)
    return max(free_at)


def plain_steps_of(lengths: list[int], rows: int) -> int:
    """The same where a batch waits for its longest reply."""
    return sum(max(lengths[at : at + rows]) - 1 for at in range(0, len(lengths), rows))


@pytest.mark.parametrize("rows", [2, 5])
def test_a_row_that_ends_is_given_to_the_next_prompt_at_once(target, rows):
    wanted = requests(*[12] * 24, seed=2)
    lengths = [len(generated(target, asked.prompt_tokens)) for asked in wanted]
    assert min(lengths) < 5
    assert max(lengths) == NEW
    with forwards(target) as shapes:
        answered(source_of(target, rows=rows), wanted)
    steps = [count for count, tokens in shapes if tokens == 1]
    assert len(steps) == steps_of(lengths, rows)
    assert sum(steps) == sum(lengths) - len(lengths)  # no row is computed for nothing
    assert max(steps) == rows
    assert len(steps) < 0.9 * plain_steps_of(lengths, rows)


def test_a_large_batch_is_refilled_in_groups_of_an_eighth(target):
    wanted = requests(*[12] * 96, seed=4)
    with forwards(target) as shapes:
        answered(source_of(target, rows=24), wanted)
    groups = [count for count, tokens in shapes if tokens > 1]
    assert sum(groups) == 96
    assert groups[0] == 24
    assert all(count >= 3 for count in groups[:-1])
    assert max(groups[1:]) < 24


def test_prompts_of_one_forward_are_bounded_with_their_padding(target):
    draw = torch.Generator().manual_seed(6)
    lengths = sorted((2 ** (3 + 8 * torch.rand(40, generator=draw))).int().tolist(), reverse=True)
    lengths = [PREFILL_TOKENS - 1, *lengths]
    with forwards(target) as shapes:
        answered(source_of(target, rows=len(lengths), new=1), requests(*lengths))
    assert sum(count for count, _ in shapes) == len(lengths)
    assert all(count * tokens <= PREFILL_TOKENS for count, tokens in shapes)
    assert shapes[0] == (1, PREFILL_TOKENS - 1)
    padded = sum(count * tokens for count, tokens in shapes[1:])
    assert padded < 2 * sum(lengths[1:])
    assert len(shapes) <= 2 + 2 * padded / PREFILL_TOKENS  # few forwards, too


def test_a_prompt_longer_than_a_forward_s_share_is_answered(target):
    (long, short) = wanted = requests(PREFILL_TOKENS - 1, 9)
    answers = answered(source_of(target, rows=2, new=1), wanted)
    for asked in (long, short):
        assert said(answers[asked.key]) == generated(target, asked.prompt_tokens, 1)


def test_no_more_prompts_are_asked_for_than_rows_are_free(target):
    class Counting(Waiting):
        """Knows how many prompts are under way."""

        under_way = most = 0

        def take(self, count: int) -> list[Request]:
            assert 1 <= count <= 5 - self.under_way
            taken = super().take(count)
            self.under_way += len(taken)
            self.most = max(self.most, self.under_way)
            return taken

    pending = Counting(requests(*LENGTHS, *LENGTHS))
    for _ in source_of(target, rows=5).answers(pending):
        pending.under_way -= 1
    assert (pending.under_way, pending.most, pending.waiting) == (0, 5, [])


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_know_nothing_of_each_other_whichever_is_dropped(targets, family):
    """Random additions, steps and drops; after each, the logits of every row are those of its tokens alone."""
    target, draw = targets[family], torch.Generator().manual_seed(7)
    slots, texts = Slots(target, 5), list[list[int]]()

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    def compare(logits: torch.Tensor, texts: list[list[int]]) -> None:
        with torch.no_grad():
            alone = [target.model(torch.tensor([text])).logits[0, -1] for text in texts]
        torch.testing.assert_close(logits, torch.stack(alone), rtol=1e-4, atol=1e-4)

    longest = COLUMNS - 4
    for turn in range(40):
        free = slots.size - slots.count
        if free and (turn % 4 == 0 or not texts):
            new = prompts(*[number(1, 30) for _ in range(number(1, free + 1))], seed=turn)
            if turn == 20:
                new[0] = prompts(longest, seed=turn)[0]  # more columns are needed soon
            compare(slots.add(new), new)
            texts += new
        elif turn % 4 == 2 and len(texts) > 1:
            at = number(0, len(texts))
            slots.drop(at)
            texts[at] = texts[-1]
            texts.pop()
        else:
            tokens = prompts(len(texts), seed=100 + turn)[0]
            texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
            compare(slots.step(tokens), texts)
            assert slots.longest == max(len(text) for text in texts)
        assert slots.count == len(texts)
        assert slots.columns[: slots.count].tolist() == [len(text) for text in texts]


# ---------------------------------------------------------------- the proof


COMMON = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": END_OF_TURN,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHERS: dict[str, PreTrainedConfig] = {
    "every layer slides": MistralConfig(sliding_window=16, **COMMON),
    "learned positions": GPT2Config(n_positions=128, n_embd=32, n_layer=2, n_head=4, **COMMON),
    "no positions": MptConfig(d_model=32, n_heads=4, n_layers=2, **COMMON),
    "sinks and experts": GptOssConfig(
        head_dim=8, sliding_window=16, num_local_experts=4, num_experts_per_tok=2, **COMMON
    ),
    "keys and values of two widths": DeepseekV3Config(
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=4,
        **COMMON | EXPERTS | {"num_key_value_heads": 4},
    ),
}
RECURRENT: dict[str, PreTrainedConfig] = {
    "mamba": MambaConfig(state_size=8, **COMMON),
    "lfm2": Lfm2Config(block_ff_dim=64, layer_types=["conv", "full_attention"], **COMMON),
    "qwen3_next": Qwen3NextConfig(
        head_dim=8,
        num_experts=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
        **COMMON,
        **EXPERTS,
    ),
}


def other_target(directory: Path, config: PreTrainedConfig) -> Target:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return load(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_are_proven(targets, family):
    source_of(targets[family], rows=48).prove()


def test_a_bfloat16_target_is_proven(tmp_path):
    source_of(load(make_target(tmp_path / "target", "gemma3"), "bfloat16"), rows=48).prove()


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_of_attention_layers_are_proven_and_answer_as_transformers_does(tmp_path, name):
    target = other_target(tmp_path, OTHERS[name])
    source, wanted = source_of(target, rows=3), requests(*LENGTHS[:6])
    source.prove()
    for key, answer in answered(source, wanted).items():
        tokens = next(asked.prompt_tokens for asked in wanted if asked.key == key)
        assert said(answer) == generated(target, tokens)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_target_that_keeps_a_running_state_is_refused_by_its_name(tmp_path, kind):
    target = other_target(tmp_path, RECURRENT[kind])
    assert_refused(target, kind)


def mixing_rows(module, inputs, output):
    """What a layer does whose rows are not independent, as a batch norm."""
    return output + 0.01 * output.mean(dim=0, keepdim=True)


def looking_ahead(module, inputs, output):
    """What a layer does that is not causal: each token gets a little of the next one."""
    return output + 0.01 * output.roll(-1, dims=1)


@pytest.mark.parametrize("leak", [mixing_rows, looking_ahead])
def test_a_target_whose_rows_leak_is_refused_by_its_name(tmp_path, leak: Callable):
    target = load(make_target(tmp_path / "target"))
    handle = target.layers[0].register_forward_hook(leak)
    assert_refused(target, "qwen3", cause="logits of a batched row differ by ")
    handle.remove()
    source_of(target, rows=2).prove()


def assert_refused(target: Target, kind: str, cause: str = "") -> None:
    with pytest.raises(ValueError, match=f"^target.name={target.name}: {kind} cannot answer in batches here ") as error:
        source_of(target, rows=2).prove()
    assert cause in str(error.value)
    assert str(error.value).endswith("let a server run it and give --regenerate.endpoint")
    assert "\n" not in str(error.value)
