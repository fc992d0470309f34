"""Speculative decoding says what the target alone would say: whatever the drafter, the block size, and the way to choose."""

import dataclasses
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import FAMILIES, SENTENCES, WORDS, tiny_model, tiny_target, tiny_tokenizer, write_jsonl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GPT2Config,
    Lfm2Config,
    MambaConfig,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    RwkvConfig,
)

from dflash import checkpoint
from dflash import config as configuration
from dflash.config import DrafterConfig
from dflash.conversation import Template
from dflash.decode import Decoded, Decoder, Reader, accept, decode_plain, prove_rollback
from dflash.drafter import Drafter, initialise
from dflash.run_dir import create_run
from dflash.sampling import Sampling, probabilities
from dflash.shape import Shape, resolve_shape
from dflash.target import Target, load_target, stop_tokens
from dflash.train import FINISHED, main

PROMPTS = 50
NEVER: frozenset[int] = frozenset()  # no token stops
WINDOW = 16  # of the gemmas' sliding layers


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Kernels of a few hundred values: a second thread costs many times what it brings where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(directory: Path, *, dtype: str = "float32", captured_layers: int = 2) -> Target:
    return load_target(
        str(directory),
        revision=None,
        dtype=dtype,
        device="cpu",
        device_map=None,
        attention=None,
        layer_ids=None,
        captured_layers=captured_layers,
        trust_remote_code=False,
    )


def saved(directory: Path, config: Any, *, seed: int = 0) -> Path:
    """`directory`, now holding a model of that configuration with random weights, and the tiny tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def shape_for(target: Target, block_size: int, **changes: Any) -> Shape:
    config = DrafterConfig(
        layers=2,
        block_size=block_size,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=24,
    )
    shape = resolve_shape(
        config,
        target_config=target.model.config.get_text_config(),
        width=target.width,
        vocabulary=target.vocabulary,
        target_layers=target.num_layers,
        target_layer_ids=target.layer_ids,
        mask_token_id=target.vocabulary - 1,
    )
    return dataclasses.replace(shape, **changes)


def random_drafter(target: Target, block_size: int = 16, *, seed: int = 0, **changes: Any) -> Drafter:
    drafter = Drafter(shape_for(target, block_size, **changes))
    initialise(drafter, seed=seed, features=None)
    return drafter.eval()


class Scripted(Drafter):
    """Drafts what `propose` says for a block whose anchor is new token `index`; notes what it was given."""

    def __init__(self, target: Target, block_size: int, **changes: Any):
        super().__init__(shape_for(target, block_size, **changes))
        self.hidden_of = hidden_of_each_token(target)
        self.begin([], lambda index: [])

    def begin(self, prompt: list[int], propose: Callable[[int], list[int]]) -> None:
        self.prompt, self.propose = prompt, propose
        self.features: list[torch.Tensor] = []
        self.blocks: list[tuple[int, int]] = []  # position of the anchor, size

    def draft(self, new_features, block_inputs, cache):
        self.features.append(new_features[0])
        cache.length += new_features.shape[1]
        self.blocks.append((cache.length, block_inputs.shape[1]))
        tokens = self.propose(cache.length - len(self.prompt))
        return self.hidden_of[torch.tensor([0, *tokens[: block_inputs.shape[1] - 1]])][None]


def hidden_of_each_token(target: Target) -> torch.Tensor:
    """[V, H]: states whose likeliest token, by the target's head, is each token."""
    hidden = target.head_weight.clone().requires_grad_()
    optimizer, everyone = torch.optim.Adam([hidden], lr=0.1), torch.arange(target.vocabulary)
    while not torch.equal(target.logits(hidden).argmax(-1), everyone):
        optimizer.zero_grad()
        F.cross_entropy(target.logits(hidden), everyone).backward()
        optimizer.step()
    return hidden.detach()


def random_prompts(target: Target, count: int = PROMPTS, *, longest: int = 60, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens; the first one is a single token, others are far longer than a window."""
    draw = random.Random(seed)
    lengths = [1, longest, *(draw.randint(1, longest) for _ in range(count - 2))]
    return [[draw.randrange(target.vocabulary) for _ in range(length)] for length in lengths]


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=[] if family == "qwen3" else pytest.mark.slow) for family in FAMILIES],
)
def target(request, tmp_path_factory) -> Target:
    return load(tiny_target(tmp_path_factory.mktemp(request.param), request.param, layers=3, hidden=32))


@pytest.fixture(scope="module")
def plain_answers(target) -> list[tuple[list[int], Decoded]]:
    """Prompts and what the target says to them, one token a forward."""
    prompts = random_prompts(target)
    return [(prompt, decode_plain(target, prompt, max_new_tokens=12, stop=NEVER)) for prompt in prompts]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Target:
    return load(tiny_target(tmp_path_factory.mktemp("qwen3"), layers=3, hidden=32))


# ---------------------------------------------------------------- a target that has learnt something, a drafter that was trained


@dataclasses.dataclass(frozen=True)
class Taught:
    """A target that has learnt sentences by heart, and the drafter that the trainer overfitted on one of its answers."""

    target: Target
    drafter: Drafter
    prompts: list[list[int]]
    """The questions that the target has learnt, then the first of them with a damaged piece of its answer."""
    answers: list[Decoded]
    """What the target says to each, one token a forward."""


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> Taught:
    root = tmp_path_factory.mktemp("taught")
    target = taught_target(root / "target")
    template, draw = Template(target.tokenizer, {}), random.Random(6)
    questions = [question(index) for index in range(len(SENTENCES))]
    prompts = [template.tokens(template.render(messages, None, add_generation_prompt=True)) for messages in questions]
    answer = decode_plain(target, prompts[0], max_new_tokens=60, stop=stop_tokens(target)).tokens
    reply = target.tokenizer.decode(answer[:-1])
    assert reply == SENTENCES[0]
    sample = {"id": "only", "messages": [*questions[0], {"role": "assistant", "content": reply}]}
    drafter = trained_drafter(root, target, write_jsonl(root / "data.jsonl", [sample]))
    while len(prompts) < PROMPTS:
        piece = answer[: draw.randrange(1, 12)]
        piece[draw.randrange(len(piece))] = draw.randrange(target.vocabulary)
        prompts.append(prompts[0] + piece)
    answers = [decode_plain(target, prompt, max_new_tokens=24, stop=stop_tokens(target)) for prompt in prompts]
    return Taught(target, drafter, prompts, answers)


def question(index: int) -> list[dict[str, str]]:
    """A question of random words; the first ones are those that the target has learnt to answer."""
    draw = random.Random(index)
    return [{"role": "user", "content": " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 8)))}]


def taught_target(directory: Path) -> Target:
    """A target that answers the question of each sentence with it."""
    target, steps = load(tiny_target(directory, layers=3)), 80
    template = Template(target.tokenizer, {})
    texts = [
        template.render([*question(index), {"role": "assistant", "content": sentence}], None)
        for index, sentence in enumerate(SENTENCES)
    ]
    batch: Any = target.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    model = target.model.requires_grad_().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        logits = model(input_ids=batch.input_ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(directory)
    return load(directory)


def trained_drafter(root: Path, target: Target, data: Path) -> Drafter:
    """The drafter that a run of the trainer leaves behind."""
    values = {
        "target": {"name": target.name, "captured_layers": 2},
        "data": {"path": str(data), "prepared_dir": str(root / "prepared")},
        "drafter": {
            "layers": 2,
            "block_size": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 24,
        },
        "optim": {"samples_per_step": 1, "lr": 3e-3},
        "stream": {"engine": "lockstep", "hs_min_ready": 1, "hs_queue_depth": 2},
        "checkpoint": {"every_steps": 0},
        "run": {"root": str(root / "runs"), "epochs": 100},
    }
    run_dir = create_run(configuration.parse(values))
    assert main([str(run_dir)]) == FINISHED
    newest = checkpoint.newest(run_dir)
    assert newest is not None
    loaded = checkpoint.load(newest)
    drafter = Drafter(shape_of(loaded.state["shape"]))
    drafter.load_state_dict(loaded.drafter)
    return drafter.eval()


def shape_of(recorded: dict[str, Any]) -> Shape:
    return Shape(**recorded | {name: tuple(recorded[name]) for name in ("target_layer_ids", "layer_types")})


# ---------------------------------------------------------------- greedy: token by token the target's own


def assert_plain(decoded: Decoded, plain: Decoded, max_new_tokens: int) -> None:
    """The answer is the plain one, and the figures say how it came about."""
    assert decoded.tokens == plain.tokens[:max_new_tokens]
    emitted = 1 + sum(decoded.committed)
    assert emitted >= len(decoded.tokens) > emitted - decoded.committed[-1]


@pytest.mark.parametrize("block_size", [4, 16])
def test_greedy_output_is_the_plain_one_with_a_random_drafter(target, plain_answers, block_size):
    decoder = Decoder(target, random_drafter(target), block_size=block_size)
    for prompt, plain in plain_answers:
        assert_plain(decoder.decode(prompt, max_new_tokens=6, stop=NEVER), plain, 6)


@pytest.mark.parametrize("block_size", [4, 16])
def test_greedy_output_is_the_plain_one_with_an_adversarial_drafter(target, plain_answers, block_size):
    """Right for some slots, then the target's second choice, which is as near to right as a wrong draft can be."""
    adversary, draw = Scripted(target, block_size), random.Random(1)
    decoder = Decoder(target, adversary)
    for prompt, plain in plain_answers:
        second = second_choices(target, prompt, plain.tokens)
        right: list[int] = []

        def propose(index, plain=plain, second=second, right=right):
            right.append(min(draw.choice([0, 0, 1, 2, block_size - 2, block_size - 1]), 11 - index))
            cut = index + 1 + right[-1]
            return plain.tokens[index + 1 : cut] + second[cut:] + [0] * block_size

        adversary.begin(prompt, propose)
        decoded = decoder.decode(prompt, max_new_tokens=12, stop=NEVER)
        assert_plain(decoded, plain, 12)
        assert decoded.accepted == right
        assert decoded.committed == [count + 1 for count in right]


def second_choices(target: Target, prompt: list[int], answer: list[int]) -> list[int]:
    """The target's second most likely token in the place of each token of the answer, by one whole forward."""
    with torch.no_grad():
        logits = target.model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].topk(2).indices[:, 1].tolist()


def test_plain_greedy_output_is_that_of_transformers_own_loop(target):
    for prompt in random_prompts(target, 8, longest=80):
        decoded = decode_plain(target, prompt, max_new_tokens=20, stop=stop_tokens(target))
        ids = torch.tensor([prompt])
        # a mask of ones: it takes the token 0 of a prompt for padding otherwise
        theirs = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
        assert decoded.tokens == theirs[0, len(prompt) :].tolist()


def test_a_drafter_that_is_always_right_needs_one_forward_a_block(qwen3):
    scripted = Scripted(qwen3, 8)
    for prompt in random_prompts(qwen3, 5):
        plain = decode_plain(qwen3, prompt, max_new_tokens=50, stop=NEVER)
        scripted.begin(prompt, lambda index, plain=plain: plain.tokens[index + 1 :])
        decoded = Decoder(qwen3, scripted).decode(prompt, max_new_tokens=33, stop=NEVER)
        assert decoded.tokens == plain.tokens[:33]
        assert (decoded.committed, decoded.accepted, decoded.tau) == ([8] * 4, [7] * 4, 8.0)


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_drafter_overfitted_on_one_sample_reaches_the_block_size_on_it(taught, block_size):
    decoder = Decoder(taught.target, taught.drafter, block_size=block_size)
    stop, answer = stop_tokens(taught.target), taught.answers[0].tokens
    decoded = decoder.decode(taught.prompts[0], max_new_tokens=60, stop=stop)
    assert decoded.tokens == answer
    assert decoded.finish_reason == "stop"
    full, rest = divmod(len(answer) - 1, block_size)
    assert full > 0
    assert decoded.committed == [block_size] * full + [rest] * (rest > 0)
    decoded = decoder.decode(taught.prompts[0], max_new_tokens=1 + full * block_size, stop=stop)
    assert decoded.tau == block_size


@pytest.mark.parametrize("block_size", [4, 16])
def test_greedy_output_is_the_plain_one_with_a_trained_drafter(taught, block_size):
    decoder, stop = Decoder(taught.target, taught.drafter, block_size=block_size), stop_tokens(taught.target)
    steps = tokens = ended = 0
    for prompt, plain in zip(taught.prompts, taught.answers, strict=True):
        decoded = decoder.decode(prompt, max_new_tokens=24, stop=stop)
        assert (decoded.tokens, decoded.finish_reason) == (plain.tokens, plain.finish_reason)
        steps, tokens, ended = (
            steps + decoded.steps,
            tokens + sum(decoded.committed),
            ended + (plain.finish_reason == "stop"),
        )
    assert ended > 5
    assert 1.1 < tokens / steps < block_size  # neither never nor always right


# ---------------------------------------------------------------- what the drafter is given


def test_the_drafter_is_given_each_token_s_features_once_in_order_as_training_computes_them(target):
    scripted, draw = Scripted(target, 8), random.Random(2)
    decoder = Decoder(target, scripted)
    for prompt in random_prompts(target, 6, longest=50, seed=3):
        plain = decode_plain(target, prompt, max_new_tokens=60, stop=NEVER)

        def propose(index, plain=plain):
            cut = index + 1 + draw.randrange(8)
            return plain.tokens[index + 1 : cut] + [0] * 8

        scripted.begin(prompt, propose)
        decoded = decoder.decode(prompt, max_new_tokens=50, stop=NEVER)
        given = torch.cat(scripted.features)
        # the newest token of the last block has none yet
        assert len(given) == scripted.blocks[-1][0]
        (whole,) = target.features([torch.tensor(prompt + decoded.tokens)])
        torch.testing.assert_close(given, whole[: len(given)], rtol=1e-4, atol=1e-4)


def test_each_step_drafts_what_training_s_forward_would_at_that_anchor(tmp_path):
    target = load(tiny_target(tmp_path, "gemma2", layers=3, hidden=32))  # which scales its embedding
    drafter = random_drafter(target, 8)
    noted: list[tuple[int, torch.Tensor]] = []

    class Noting(Drafter):
        def draft(self, new_features, block_inputs, cache):
            hidden = super().draft(new_features, block_inputs, cache)
            noted.append((cache.length, hidden[0]))
            return hidden

    noting = Noting(drafter.shape)
    noting.load_state_dict(drafter.state_dict())
    prompt = random_prompts(target, 2)[1]
    decoded = Decoder(target, noting).decode(prompt, max_new_tokens=12, stop=NEVER)
    tokens = torch.tensor(prompt + decoded.tokens)
    anchors = torch.tensor([[anchor for anchor, _ in noted]])
    blocks = torch.full((1, len(noted), 8), drafter.shape.mask_token_id)
    blocks[0, :, 0] = tokens[anchors[0]]
    inputs = F.embedding(blocks, target.embedding_weight) * target.embedding_scale
    with torch.no_grad():
        hidden = drafter(target.features([tokens])[0][None], inputs, anchors)
    torch.testing.assert_close(torch.stack([state for _, state in noted]), hidden[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma3", "gemma2"])
def test_logits_are_those_of_a_whole_forward_however_often_tokens_were_forgotten_past_the_window(family, tmp_path):
    target, draw = load(tiny_target(tmp_path, family, layers=4, hidden=32)), random.Random(4)
    for first in (1, WINDOW - 2, WINDOW, 5 * WINDOW):
        kept = [draw.randrange(target.vocabulary) for _ in range(first)]
        reader = Reader(target)
        with torch.no_grad():
            reader.read(kept, logits_of_last=1)
            reader.record()
            for _ in range(30):
                block = [draw.randrange(target.vocabulary) for _ in range(draw.choice([2, 4, WINDOW + 3]))]
                features, logits = reader.read(block, logits_of_last=len(block))
                whole = target.model(input_ids=torch.tensor([kept + block]), use_cache=False).logits[0]
                torch.testing.assert_close(logits, whole[len(kept) :], rtol=1e-4, atol=1e-4)
                (expected,) = target.features([torch.tensor(kept + block)])
                torch.testing.assert_close(features, expected[len(kept) :], rtol=1e-4, atol=1e-4)
                rejected = draw.randrange(len(block))
                reader.forget(rejected)
                kept += block[: len(block) - rejected]
                assert reader.length == len(kept)


# ---------------------------------------------------------------- where it ends


class Story:
    """A prompt, the target's answer to it, and a drafter that drafts a given number of its tokens right, then wrong ones."""

    def __init__(self, target: Target, prompt: list[int]):
        self.target, self.drafter = target, Scripted(target, 8)
        self.decoder = Decoder(target, self.drafter)
        self.prompt = prompt
        self.answer = decode_plain(target, self.prompt, max_new_tokens=60, stop=NEVER).tokens
        self.unsaid = min(set(range(2, target.vocabulary)) - set(self.answer))

    def decode(self, *, right: int, max_new_tokens: int, stop: frozenset[int] = NEVER) -> Decoded:
        answer = self.answer
        self.drafter.begin(self.prompt, lambda index: answer[index + 1 : index + 1 + right] + [self.unsaid] * 8)
        return self.decoder.decode(self.prompt, max_new_tokens=max_new_tokens, stop=stop)


@pytest.fixture(scope="module")
def story(taught) -> Story:
    return Story(taught.target, taught.prompts[0])


@pytest.mark.parametrize("right", [0, 1, 3, 7])
def test_an_answer_ends_at_its_first_stop_token_and_nothing_behind_it_is_counted(story, right):
    answer = story.answer
    assert len(set(answer[:14])) > 8
    for token in sorted(set(answer[:14])):
        end = answer.index(token)
        committed, said = [], 1
        while said <= end:  # steps of right + 1 tokens, the last one up to the stop token
            committed.append(min(right + 1, end + 1 - said))
            said += right + 1
        decoded = story.decode(right=right, max_new_tokens=40, stop=frozenset({token, story.unsaid}))
        assert decoded.tokens == answer[: end + 1]
        assert decoded.finish_reason == "stop"
        assert decoded.committed == committed
        assert decoded.accepted == [min(right, count) for count in committed]
        assert decoded.steps == len(committed)
        plain = decode_plain(story.target, story.prompt, max_new_tokens=40, stop=frozenset({token}))
        assert (plain.tokens, plain.finish_reason) == (decoded.tokens, "stop")


@pytest.mark.parametrize("right", [0, 2, 7])
def test_an_answer_is_never_longer_than_asked_and_its_last_step_counts_whole(story, right):
    for max_new_tokens in range(1, 20):
        decoded = story.decode(right=right, max_new_tokens=max_new_tokens)
        assert decoded.tokens == story.answer[:max_new_tokens]
        assert decoded.finish_reason == "length"
        steps = math.ceil((max_new_tokens - 1) / (right + 1))
        assert decoded.committed == [right + 1] * steps
        assert decoded.accepted == [right] * steps


def test_a_stop_token_behind_the_last_token_asked_for_cuts_the_count_and_not_the_answer(story):
    stop = story.answer[5]
    assert story.answer.index(stop) == 5
    decoded = story.decode(right=7, max_new_tokens=3, stop=frozenset({stop}))
    assert decoded.tokens == story.answer[:3]
    assert decoded.finish_reason == "length"
    assert (decoded.committed, decoded.accepted) == ([5], [5])


def test_one_token_asked_for_is_the_prefill_s_and_takes_no_step(story):
    for stop, reason in ((NEVER, "length"), (frozenset(story.answer[:1]), "stop")):
        for max_new_tokens in (1,) if stop == NEVER else (1, 30):
            decoded = story.decode(right=7, max_new_tokens=max_new_tokens, stop=stop)
            assert decoded.tokens == story.answer[:1]
            assert (decoded.finish_reason, decoded.steps, decoded.drafter_seconds) == (reason, 0, 0.0)
            assert math.isnan(decoded.tau)
            assert story.drafter.blocks == []


def test_a_smaller_block_drafts_fewer_slots_and_a_larger_one_is_refused(story):
    for block_size in (2, 5):
        story.drafter.begin(story.prompt, lambda index: story.answer[index + 1 :])
        decoded = Decoder(story.target, story.drafter, block_size=block_size).decode(
            story.prompt, max_new_tokens=21, stop=NEVER
        )
        assert decoded.tokens == story.answer[:21]
        assert decoded.committed == [block_size] * (20 // (block_size))
    for block_size in (9, 1, 0):
        with pytest.raises(
            ValueError, match=rf"block_size={block_size}: this drafter was trained for blocks of 8; use 2 to 8"
        ):
            Decoder(story.target, story.drafter, block_size=block_size)


def test_times_are_those_of_the_two_models_and_sum_to_the_whole(story):
    began = time.perf_counter()
    decoded = story.decode(right=0, max_new_tokens=20)
    whole = time.perf_counter() - began
    assert decoded.target_seconds > 0
    assert decoded.drafter_seconds > 0
    assert whole / 2 < decoded.target_seconds + decoded.drafter_seconds <= whole


# ---------------------------------------------------------------- the ends of the context


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Target:
    """A target with 40 learned positions: there is no 41st to look up."""
    config = GPT2Config(vocab_size=512, n_positions=40, n_embd=32, n_layer=3, n_head=4, initializer_range=0.2)
    config.bos_token_id, config.eos_token_id = None, 2
    return load(saved(tmp_path_factory.mktemp("gpt2"), config))


@pytest.mark.parametrize("length", [1, 20, 30, 38, 39])
def test_an_answer_may_fill_the_context_to_its_last_position(gpt2, length):
    prompt = random_prompts(gpt2, 2, longest=length)[1]
    scripted = Scripted(gpt2, 16)
    plain = decode_plain(gpt2, prompt, max_new_tokens=40 - length, stop=NEVER)
    scripted.begin(prompt, lambda index: (plain.tokens[index + 1 : index + 3] + [7] * 16)[:15])
    decoded = Decoder(gpt2, scripted).decode(prompt, max_new_tokens=40 - length, stop=NEVER)
    assert decoded.tokens == plain.tokens
    assert len(prompt) + len(decoded.tokens) == 40
    assert [block for _, block in scripted.blocks] == [min(16, 40 - anchor) for anchor, _ in scripted.blocks]


def test_an_answer_that_could_leave_the_context_is_refused(gpt2):
    decoder, prompt = Decoder(gpt2, random_drafter(gpt2)), [5] * 30
    for decode in (decoder.decode, lambda *args, **named: decode_plain(gpt2, *args, **named)):
        with pytest.raises(
            ValueError, match=r"a prompt of 30 tokens and max_new_tokens=11 are more than the 40 positions of ."
        ):
            decode(prompt, max_new_tokens=11, stop=NEVER)
        with pytest.raises(ValueError, match="shorten the prompt or lower max_new_tokens"):
            decode([5] * 40, max_new_tokens=1, stop=NEVER)


def test_the_drafter_s_positions_bound_the_context_too(qwen3):
    drafter = random_drafter(qwen3, max_positions=32)
    decoded = Decoder(qwen3, drafter).decode([5] * 20, max_new_tokens=12, stop=NEVER)
    assert decoded.tokens == decode_plain(qwen3, [5] * 20, max_new_tokens=12, stop=NEVER).tokens
    with pytest.raises(ValueError, match="max_new_tokens=13 are more than the 32 positions of the drafter"):
        Decoder(qwen3, drafter).decode([5] * 20, max_new_tokens=13, stop=NEVER)


def test_a_prompt_that_is_none_is_refused(qwen3):
    decoder = Decoder(qwen3, random_drafter(qwen3))
    for decode in (decoder.decode, lambda *args, **named: decode_plain(qwen3, *args, **named)):
        for prompt, max_new_tokens, cause in (
            ([], 5, "the prompt has no tokens"),
            ([3, 512], 5, "the prompt holds token 512, and .* knows 0 to 511; use its own tokenizer"),
            ([-1], 5, "the prompt holds token -1"),
            ([3], 0, "max_new_tokens=0: an answer has at least 1"),
        ):
            with pytest.raises(ValueError, match=cause) as refusal:
                decode(prompt, max_new_tokens=max_new_tokens, stop=NEVER)
            assert "\n" not in str(refusal.value)


def test_stop_tokens_are_those_of_the_generation_config_and_the_tokenizer(tmp_path):
    target = load(tiny_target(tmp_path, layers=3, hidden=32))
    assert target.tokenizer.eos_token_id == 2
    for eos, expected in ((7, {2, 7}), ([7, 9], {2, 7, 9}), (2, {2}), (None, {2})):
        target.model.generation_config.eos_token_id = eos
        assert stop_tokens(target) == expected


# ---------------------------------------------------------------- targets that cannot forget

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
COMMON = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "max_position_embeddings": 256,
}
STATEFUL = {
    "linear attention": (
        Qwen3NextConfig(head_dim=8, **LINEAR, **EXPERTS, **COMMON),
        "Qwen3NextForCausalLM with its linear_",
    ),
    "mamba": (MambaConfig(state_size=8, **COMMON), "MambaForCausalLM with its linear_attention layers"),
    # attention and a state that adds so little here that a proof by numbers alone would pass
    "mamba beside attention": (
        FalconH1Config(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, head_dim=8, **COMMON),
        "FalconH1ForCausalLM with its hybrid layers",
    ),
    # keeps its state aside, so that the cache itself has nothing to object to
    "rwkv": (RwkvConfig(attention_hidden_size=32, **COMMON), r"RwkvForCausalLM cannot .*its logits then differ by"),
}


@pytest.mark.parametrize("config, cause", STATEFUL.values(), ids=STATEFUL)
def test_a_target_with_a_running_state_is_refused_by_name(tmp_path, config, cause):
    target = load(saved(tmp_path, config))
    with pytest.raises(ValueError, match=cause) as refusal:
        Decoder(target, random_drafter(target))
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).startswith(f"target.name={tmp_path}: ")
    assert "cannot forget rejected drafts" in str(refusal.value)


def test_a_target_whose_state_can_be_restored_is_served(tmp_path):
    """Short convolutions: transformers keeps their inputs until it is told which of them stay."""
    config = Lfm2Config(block_ff_dim=64, layer_types=["conv", "full_attention"] * 2, initializer_range=0.1, **COMMON)
    target = load(saved(tmp_path, config))
    decoder = Decoder(target, random_drafter(target, 4))
    for prompt in random_prompts(target, 10):
        decoded = decoder.decode(prompt, max_new_tokens=10, stop=NEVER)
        assert_plain(decoded, decode_plain(target, prompt, max_new_tokens=10, stop=NEVER), 10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_attention_family_is_proven_in_either_dtype(target, dtype):
    prove_rollback(load(Path(target.name), dtype=dtype))


def test_a_drafter_in_float32_serves_a_target_in_bfloat16(target):
    half = load(Path(target.name), dtype="bfloat16")
    drafter = random_drafter(half)
    for served in (drafter, random_drafter(half).bfloat16()):
        decoded = Decoder(half, served).decode([5, 6, 7], max_new_tokens=10, stop=NEVER)
        assert len(decoded.tokens) == 10


# ---------------------------------------------------------------- sampling: the target's distribution

SAMPLINGS = {
    "temperature": Sampling(temperature=0.6),
    "top-k": Sampling(temperature=0.8, top_k=3),
    "top-p": Sampling(temperature=0.8, top_p=0.8),
    "top-k and top-p": Sampling(temperature=1.2, top_k=5, top_p=0.9),
}
DIFFERENT, ALIKE = 1e-6, 1e-3  # p-values: of a wrong rule it is below the first, of the right one above the second


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Of Pearson's chi-square test; cells expected to hold fewer than 5 draws are pooled. 0 where the impossible happened."""
    counts, expected = counts.double().flatten(), expected.double().flatten()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    pools = [(counts[~rare], expected[~rare])] + [(counts[rare].sum()[None], expected[rare].sum()[None])] * bool(
        rare.any()
    )
    observed, wanted = (torch.cat(parts) for parts in zip(*pools, strict=True))
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2).double(), statistic / 2))


def test_the_chi_square_test_is_calibrated():
    draw, expected = torch.Generator().manual_seed(0), torch.tensor([0.4, 0.3, 0.2, 0.099, 0.001])
    values = []
    for _ in range(400):
        tokens = torch.multinomial(expected, 2000, replacement=True, generator=draw)
        values.append(p_value(tokens.bincount(minlength=5), 2000 * expected))
    below = torch.tensor(values)
    assert abs((below < 0.1).double().mean() - 0.1) < 0.05
    assert abs((below < 0.5).double().mean() - 0.5) < 0.08


def accept_and_never_ask(drafts, draft_chances, logits, sampling, draw):
    """Wrong: every draft stays."""
    never_less = torch.full_like(draft_chances, 1e-9)
    return accept(drafts, never_less, logits, sampling, draw)


def accept_and_redraw_from_p(drafts, draft_chances, logits, sampling, draw):
    """Wrong: after a rejection the bonus comes from p, not from what of p the drafts left over."""
    count, _ = accept(drafts, draft_chances, logits, sampling, draw)
    return count, int(torch.multinomial(probabilities(logits[count], sampling), 1, generator=draw))


def accept_without_the_transform(drafts, draft_chances, logits, sampling, draw):
    """Wrong: p is the target's bare distribution, q that of the sampling asked for."""
    return accept(drafts, draft_chances, logits, Sampling(temperature=1.0), draw)


WRONG_RULES = (accept_and_never_ask, accept_and_redraw_from_p, accept_without_the_transform)


def pairs_said(rule, sampling: Sampling, draws: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Counts [6, 6] of the first two tokens said under fixed p and q, the expected counts, and the share of first drafts kept.

    The second token, where the first draft was rejected, is drawn from p as the next step would.
    """
    generator = torch.Generator().manual_seed(12)
    logits, draft_logits = 2 * torch.randn(3, 6, generator=generator), 2 * torch.randn(2, 6, generator=generator)
    chances, draft_chances = probabilities(logits, sampling), probabilities(draft_logits, sampling)
    counts, kept = torch.zeros(6, 6), 0
    for _ in range(draws):
        drafts = [int(torch.multinomial(row, 1, generator=generator)) for row in draft_chances]
        count, bonus = rule(drafts, draft_chances, logits, sampling, generator)
        said = [*drafts[:count], bonus, int(torch.multinomial(chances[1], 1, generator=generator))]
        counts[said[0], said[1]] += 1
        kept += count > 0
    return counts, draws * chances[0][:, None] * chances[1], kept / draws


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_acceptance_rule_says_tokens_of_the_target_s_distribution_and_keeps_all_the_drafts_it_can(sampling):
    generator = torch.Generator().manual_seed(12)
    p = probabilities(2 * torch.randn(3, 6, generator=generator), sampling)[0]
    q = probabilities(2 * torch.randn(2, 6, generator=generator), sampling)[0]
    draws = 3000
    counts, expected, kept = pairs_said(accept, sampling, draws)
    assert p_value(counts, expected) > ALIKE
    possible = float(torch.minimum(p, q).sum())
    assert 0.05 < possible < 0.9
    assert abs(kept - possible) < 4 * math.sqrt(possible * (1 - possible) / draws)


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_a_wrong_acceptance_rule_is_found_out(rule):
    counts, expected, _ = pairs_said(rule, SAMPLINGS["top-k and top-p"], 3000)
    assert p_value(counts, expected) < DIFFERENT


def test_a_drafter_equal_to_the_target_is_always_accepted_and_one_of_other_tokens_never():
    draw, sampling = torch.Generator().manual_seed(0), Sampling(temperature=1.0)
    logits = torch.randn(5, 10, generator=draw)
    apart = logits.clone()
    apart[:, :5] = -torch.inf
    opposite = probabilities(logits.masked_fill(apart.isfinite(), -torch.inf), sampling)
    for _ in range(300):
        chances = probabilities(logits[:-1], sampling)
        drafts = torch.multinomial(chances, 1, generator=draw)[:, 0].tolist()
        assert accept(drafts, chances, logits, sampling, draw)[0] == 4
        drafts = torch.multinomial(opposite[:-1], 1, generator=draw)[:, 0].tolist()
        count, bonus = accept(drafts, opposite[:-1], apart, sampling, draw)
        assert (count, bonus >= 5) == (0, True)


def test_where_no_residual_is_left_the_bonus_is_of_the_target_s_distribution():
    """Of a drafter that equals the target but for rounding, here exaggerated: q is above p everywhere."""
    draw, sampling = torch.Generator().manual_seed(0), Sampling(temperature=1.0, top_k=3)
    logits, rejected = torch.randn(2, 6, generator=draw), torch.zeros(6)
    chances = probabilities(logits, sampling)
    for _ in range(2000):
        drafts = torch.multinomial(chances[:1], 1, generator=draw)[:, 0].tolist()
        count, bonus = accept(drafts, 2 * chances[:1], logits, sampling, draw)
        rejected[bonus] += count == 0
    assert rejected.sum() == pytest.approx(1000, abs=120)
    assert p_value(rejected, rejected.sum() * chances[0]) > ALIKE


VOCABULARY = 8


@pytest.fixture(scope="module")
def eight(tmp_path_factory) -> Target:
    """A target that knows eight tokens."""
    directory = tmp_path_factory.mktemp("eight")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate("_.!abcde")}, "_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="_", eos_token="!").save_pretrained(directory)
    model = tiny_model(layers=2, hidden=16, vocabulary=VOCABULARY)
    model.lm_head.weight.data *= 4  # so that its distributions are as uneven as a real target's
    model.save_pretrained(directory)
    return load(directory, captured_layers=1)


def opinionated_drafter(target: Target, **changes: Any) -> Drafter:
    drafter = random_drafter(target, 4, seed=5, layers=1, layer_types=("full_attention",), **changes)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return drafter


def triples_said(decoder: Decoder, prompt: list[int], sampling: Sampling, draws: int) -> torch.Tensor:
    """Counts [V, V, V] of the three tokens of an answer, over seeds."""
    counts = torch.zeros(VOCABULARY, VOCABULARY, VOCABULARY)
    for seed in range(draws):
        counts[tuple(decoder.decode(prompt, max_new_tokens=3, stop=NEVER, sampling=sampling, seed=seed).tokens)] += 1
    return counts


def triple_chances(target: Target, prompt: list[int], sampling: Sampling) -> torch.Tensor:
    """[V, V, V]: how likely the target alone says three tokens, by whole forwards over every two first ones."""
    pairs = torch.cartesian_prod(torch.arange(VOCABULARY), torch.arange(VOCABULARY))
    tokens = torch.cat([torch.tensor(prompt).expand(len(pairs), -1), pairs], dim=1)
    with torch.no_grad():
        logits = target.model(input_ids=tokens, use_cache=False).logits[:, len(prompt) - 1 :]
    first, second, third = probabilities(logits, sampling).unbind(1)
    both = first.gather(1, pairs[:, :1]) * second.gather(1, pairs[:, 1:])
    return (both * third).view(VOCABULARY, VOCABULARY, VOCABULARY)


EIGHT_PROMPT = [3, 5, 4, 4, 7, 2, 6]
MANY = [pytest.param(name, 4000, id=name, marks=pytest.mark.slow) for name in SAMPLINGS]


@pytest.mark.parametrize("name, draws", [pytest.param("top-k and top-p", 400, id="few draws"), *MANY])
def test_sampled_answers_have_the_target_s_own_joint_distribution(eight, name, draws):
    sampling = SAMPLINGS[name]
    chances = triple_chances(eight, EIGHT_PROMPT, sampling)
    assert chances.sum() == pytest.approx(1, abs=1e-5)
    counts = triples_said(Decoder(eight, opinionated_drafter(eight)), EIGHT_PROMPT, sampling, draws)
    assert p_value(counts, draws * chances) > ALIKE
    warmer = dataclasses.replace(sampling, temperature=(1.15 if draws > 1000 else 1.5) * sampling.temperature)
    assert p_value(counts, draws * triple_chances(eight, EIGHT_PROMPT, warmer)) < DIFFERENT


class DraftsTheLikeliest(Decoder):
    """Wrong: drafts the drafter's first choice, and calls it drawn from the drafter's distribution."""

    def _draft(self, *arguments):
        _, chances = super()._draft(*arguments)
        return chances.argmax(-1).tolist(), chances


def test_drafts_that_were_not_drawn_from_their_distribution_are_found_out(eight):
    sampling, draws = SAMPLINGS["top-k and top-p"], 200
    counts = triples_said(DraftsTheLikeliest(eight, opinionated_drafter(eight)), EIGHT_PROMPT, sampling, draws)
    assert p_value(counts, draws * triple_chances(eight, EIGHT_PROMPT, sampling)) < DIFFERENT


def test_sampling_from_a_single_token_is_greedy(story):
    """With top_k 1 both distributions are certain: the same tokens and the same steps, by the other way to accept."""
    for right in (0, 3, 7):
        greedy = story.decode(right=right, max_new_tokens=30)
        sampled = story.decoder.decode(
            story.prompt, max_new_tokens=30, stop=NEVER, sampling=Sampling(temperature=1.0, top_k=1), seed=3
        )
        assert sampled.tokens == greedy.tokens
        assert (sampled.committed, sampled.accepted) == (greedy.committed, greedy.accepted)


def test_a_seed_and_a_prompt_determine_a_sampled_answer(story):
    sampling = Sampling(temperature=1.0)
    decoder, prompts = Decoder(story.target, random_drafter(story.target)), random_prompts(story.target, 3)

    def answers(seed: int, order: list[list[int]]) -> dict[int, list[int]]:
        decoded = {
            len(prompt): decoder.decode(prompt, max_new_tokens=8, stop=NEVER, sampling=sampling, seed=seed)
            for prompt in order
        }
        return {length: answer.tokens for length, answer in decoded.items()}

    assert answers(1, prompts) == answers(1, prompts[::-1])
    assert all(answers(1, prompts)[length] != answers(2, prompts)[length] for length in answers(1, prompts))
    plain = [
        decode_plain(story.target, prompts[1], max_new_tokens=12, stop=NEVER, sampling=sampling, seed=s)
        for s in (1, 1, 2)
    ]
    assert plain[0].tokens == plain[1].tokens != plain[2].tokens
