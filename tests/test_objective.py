"""Anchors, blocks, labels and the loss, by brute force against the formulas of the paper and of D-PACE."""

import functools
import itertools
import math
import operator
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.reference_case import GAMMA, GRADIENT_NORM, LOSS, reference_case
from dflash.config import ObjectiveConfig, gamma_of
from dflash.drafter import Drafter
from dflash.objective import (
    LOGITS_BYTES,
    Head,
    _chunks,
    anchor_positions,
    decay_weights,
    dpace_weights,
    head_loss,
    make_blocks,
    sample_anchors,
)
from dflash.shape import Shape

MASK = 49
DECAY, DPACE = ObjectiveConfig(gamma=2.5), ObjectiveConfig(loss="dpace", dpace_alpha=0.3)
both_losses = pytest.mark.parametrize("config", [DECAY, DPACE], ids=["decay", "dpace"])


def mask_of(text: str) -> torch.Tensor:
    """A loss mask from a drawing: `#` is supervised."""
    return torch.tensor([letter == "#" for letter in text])


TURNS = ["..####...###.#..##", "#####", ".....####################", "...##.##.##...#####"]


def random_blocks(*, block_size: int = 6, limit: int = 5, texts: list[str] = TURNS, seed: int = 0):
    """Tokens, masks and anchors of samples with several turns, and their blocks."""
    generator = torch.Generator().manual_seed(seed)
    masks = [mask_of(text) for text in texts]
    tokens = [torch.randint(0, MASK, (len(mask),), generator=generator) for mask in masks]
    anchors = [sample_anchors(mask.numpy(), limit=limit, seed=(seed, n)) for n, mask in enumerate(masks)]
    return tokens, masks, anchors, make_blocks(tokens, masks, anchors, block_size=block_size, mask_token_id=MASK)


def supervised_slots(tokens, masks, anchors, block_size: int) -> list[tuple[int, int, int, int]]:
    """(sample, block, slot, label) of every slot k with m = 1 in sections 4.4 and 4.5 of the spec: a cumulative product."""
    found = []
    for n, (token, mask, row) in enumerate(zip(tokens, masks, anchors, strict=True)):
        for a, anchor in enumerate(row):
            for k in range(1, block_size):
                positions = [anchor + i for i in range(1, k + 1)]
                if all(position < len(token) and bool(mask[position]) for position in positions):
                    found.append((n, a, k, int(token[anchor + k])))
    return found


# -- anchors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drawing", "positions"),
    [
        ("..####.", [2, 3, 4]),
        ("..####", [2, 3, 4]),  # a tail: the last block has one label
        ("##..##.#", [0, 4]),  # a lone supervised token has nothing to predict
        ("......", []),
        ("#.#.#", []),
        ("##", [0]),
    ],
)
def test_an_anchor_and_the_token_after_it_are_supervised(drawing, positions):
    assert anchor_positions(mask_of(drawing).numpy()).tolist() == positions


def test_anchors_are_ascending_distinct_and_all_of_them_when_there_are_few():
    mask = mask_of("..####...###.#..##" * 9).numpy()
    valid = anchor_positions(mask)
    drawn = sample_anchors(mask, limit=20, seed=(1, 2, 3))
    assert len(drawn) == 20
    assert set(drawn) <= set(valid)
    assert (np.diff(drawn) > 0).all()
    for limit in (len(valid), 1000):
        assert np.array_equal(sample_anchors(mask, limit=limit, seed=(1,)), valid)


def test_the_same_seed_draws_the_same_anchors_and_another_epoch_others():
    mask = np.ones(500, dtype=bool)
    first = sample_anchors(mask, limit=50, seed=(7, 0, 3))
    assert np.array_equal(first, sample_anchors(mask, limit=50, seed=(7, 0, 3)))
    for other in ((7, 1, 3), (8, 0, 3), (7, 0, 4)):
        assert not np.array_equal(first, sample_anchors(mask, limit=50, seed=other))


def test_every_position_is_drawn_equally_often():
    mask = np.ones(41, dtype=bool)
    counts = np.zeros(40)
    for epoch in range(2000):
        counts[sample_anchors(mask, limit=10, seed=(0, epoch))] += 1
    # 500 expected, standard deviation 19
    assert counts.min() > 400
    assert counts.max() < 600


# -- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [2, 6, 16])
def test_blocks_equal_the_formulas_for_several_turns_tails_and_uneven_samples(block_size):
    tokens, masks, anchors, blocks = random_blocks(block_size=block_size)
    expected = supervised_slots(tokens, masks, anchors, block_size)
    count = max(map(len, anchors))
    assert blocks.ids.shape == (4, count, block_size)
    for n, row in enumerate(anchors):
        padded = [*row, *[row[-1]] * (count - len(row))]
        assert blocks.anchors[n].tolist() == padded
        for a, anchor in enumerate(padded):
            assert blocks.ids[n, a].tolist() == [int(tokens[n][anchor]), *[MASK] * (block_size - 1)]
    rows = [(n * count + a) * block_size + k for n, a, k, _ in expected]
    assert blocks.rows.tolist() == rows
    assert blocks.labels.tolist() == [label for *_, label in expected]
    assert blocks.slots.tolist() == [k for _, _, k, _ in expected]
    assert blocks.samples.tolist() == [n for n, *_ in expected]
    owners = list(dict.fromkeys((n, a) for n, a, *_ in expected))
    assert blocks.blocks.tolist() == [owners.index((n, a)) for n, a, *_ in expected]
    starts = [next(r for r, (n, a, *_) in enumerate(expected) if (n, a) == owner) for owner in owners]
    assert blocks.starts.tolist() == [*starts, len(expected)]
    assert owners == [(n, a) for n, row in enumerate(anchors) for a in range(len(row))], "every true block has a label"


def test_nothing_after_the_first_unsupervised_token_of_a_block_counts():
    mask = mask_of(".###.#####")
    blocks = make_blocks([torch.arange(10)], [mask], [np.array([2, 6])], block_size=6, mask_token_id=MASK)
    assert blocks.labels.tolist() == [3, 7, 8, 9]  # not 5 to 7 of the first block, whatever their mask says
    assert blocks.slots.tolist() == [1, 1, 2, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="moves blocks to a GPU: needs one")
def test_blocks_move_to_a_gpu_but_for_what_the_cpu_reads():
    *_, blocks = random_blocks()
    moved = blocks.to(torch.device("cuda"))
    assert blocks.tensors.keys() == {"ids", "rows", "labels", "slots", "blocks", "samples"}
    for name, tensor in blocks.tensors.items():
        assert moved.tensors[name].is_cuda
        assert torch.equal(moved.tensors[name].cpu(), tensor)
    assert moved.anchors is blocks.anchors
    assert moved.starts is blocks.starts


# -- weights ---------------------------------------------------------------------------------------------------------


def test_decay_weights_are_the_papers():
    weights = decay_weights(torch.arange(1, 16), gamma_of(ObjectiveConfig(), 16))
    assert weights.dtype == torch.float64
    # the spec's figures for gamma 7
    assert [round(value, 3) for value in weights[[0, 1, 2, 14]].tolist()] == [1.0, 0.867, 0.751, 0.135]
    assert weights.sum().item() == pytest.approx(6.63, abs=0.005)
    torch.testing.assert_close(
        weights, torch.tensor([math.exp(-(k - 1) / 7) for k in range(1, 16)], dtype=torch.float64)
    )


def brute_dpace(cross_entropy: list[float], alpha: float) -> list[float]:
    """w_k = sum_{m>=k} prod_{i<=m} ((1 - alpha) exp(-CE_i) + alpha) over one block's labels (arXiv 2605.18810)."""
    confidence = [(1 - alpha) * math.exp(-value) + alpha for value in cross_entropy]
    reach = [math.prod(confidence[: m + 1]) for m in range(len(confidence))]
    return [sum(reach[k:]) for k in range(len(reach))]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_are_the_formula_for_blocks_of_every_length(alpha):
    lengths = [5, 1, 3, 5]
    generator = torch.Generator().manual_seed(0)
    values = [3 * torch.rand(length, dtype=torch.float64, generator=generator) for length in lengths]
    weights = dpace_weights(
        torch.cat(values),
        torch.cat([torch.arange(1, length + 1) for length in lengths]),
        torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)),
        count=4,
        block_size=6,
        alpha=alpha,
    )
    expected = functools.reduce(operator.iadd, (brute_dpace(value.tolist(), alpha) for value in values), [])
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-13)


# -- the loss --------------------------------------------------------------------------------------------------------


def make_head(kind: str, *, vocabulary: int = 50, width: int = 8, dtype: torch.dtype = torch.float64) -> Head:
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64).to(dtype)
    return {
        "plain": Head(weight, None, 1.0, None),
        "bias": Head(weight, bias, 1.0, None),
        "scale": Head(weight, None, 0.4, None),
        "softcap": Head(weight, None, 1.0, 3.0),
        "all of them": Head(weight, bias, 1.7, 3.0),
    }[kind]


def naive(hidden, tokens, masks, anchors, head: Head, config: ObjectiveConfig, *, ids: list[int] | None = None) -> dict:
    """Full logits of every slot, one slot after the other, from the spec's words; `ids` are the only ones to choose from."""
    block_size = hidden.shape[2]
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    ids = list(range(logits.shape[-1])) if ids is None else ids
    by_block: dict[tuple[int, int], list[tuple[torch.Tensor, bool]]] = {}
    for n, a, k, label in supervised_slots(tokens, masks, anchors, block_size):
        chosen = logits[n, a, k, ids]
        cross_entropy = torch.logsumexp(chosen, 0) - chosen[ids.index(label)]
        by_block.setdefault((n, a), []).append((cross_entropy, ids[int(chosen.argmax())] == label))
    numerator, weight_sum, tau = hidden.new_zeros(()), 0.0, 0
    loss, correct, slots = np.zeros(len(tokens)), np.zeros(block_size - 1), np.zeros(block_size - 1)
    for (n, _), block in by_block.items():
        values = [cross_entropy.item() for cross_entropy, _ in block]
        weights = brute_dpace(values, config.dpace_alpha)
        if config.loss == "decay":
            assert config.gamma is not None
            weights = [math.exp(-k / config.gamma) for k in range(len(block))]
        for k, ((cross_entropy, right), weight) in enumerate(zip(block, weights, strict=True)):
            numerator = numerator + weight * cross_entropy
            weight_sum, loss[n] = weight_sum + weight, loss[n] + weight * values[k]
            correct[k], slots[k] = correct[k] + right, slots[k] + 1
        rights = [right for _, right in block] + [False]
        tau += 1 + rights.index(False)
    return {
        "numerator": numerator,
        "weight": weight_sum,
        "loss": loss,
        "tau": tau,
        "blocks": len(by_block),
        "correct": correct,
        "slots": slots,
    }


def planted_hidden(tokens, masks, anchors, blocks, head: Head, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random hidden states [N, A, B, H]; in half of the slots they lean to the right label, so that some are accepted."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(*blocks.ids.shape, head.weight.shape[1], generator=generator, dtype=torch.float64)
    for n, a, k, label in supervised_slots(tokens, masks, anchors, blocks.ids.shape[2]):
        if torch.rand((), generator=generator) < 0.6:
            hidden[n, a, k] += 2 * head.weight[label].double()
    return hidden.to(dtype).requires_grad_()


def assert_equals_naive(hidden, tokens, masks, anchors, blocks, head, config, *, ids=None):
    own = head if ids is None else head.restricted(torch.tensor(ids))
    numerator, sums = head_loss(hidden, blocks, own, config)
    expected = naive(hidden, tokens, masks, anchors, head, config, ids=ids)
    torch.testing.assert_close(numerator, expected["numerator"], rtol=1e-10, atol=1e-10)
    for name in ("weight", "loss", "tau", "blocks", "correct", "slots"):
        np.testing.assert_allclose(sums[name].numpy(), expected[name], rtol=1e-10, atol=1e-10, err_msg=name)
        assert sums[name].dtype == torch.float64
        assert not sums[name].requires_grad
    # an upstream factor, as the caller's division by the sum of weights is one
    (ours,) = torch.autograd.grad(numerator / 7, hidden)
    (theirs,) = torch.autograd.grad(expected["numerator"] / 7, hidden)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert expected["blocks"] < expected["tau"], "some slots are accepted, or the metrics are not tried"
    return ours


@both_losses
@pytest.mark.parametrize("kind", ["plain", "bias", "scale", "softcap", "all of them"])
def test_loss_gradient_and_metrics_equal_a_naive_cross_entropy(kind, config):
    tokens, masks, anchors, blocks = random_blocks()
    head = make_head(kind)
    hidden = planted_hidden(tokens, masks, anchors, blocks, head)
    gradient = assert_equals_naive(hidden, tokens, masks, anchors, blocks, head, config)
    unsupervised = torch.ones(blocks.ids.numel(), dtype=torch.bool)
    unsupervised[blocks.rows] = False
    assert gradient.flatten(0, 2)[unsupervised].abs().max() == 0, (
        "slot 0, masked slots and padding blocks teach nothing"
    )


@both_losses
@pytest.mark.parametrize("kind", ["plain", "all of them"])
def test_a_head_restricted_to_seen_ids_equals_a_naive_one_over_them(kind, config):
    tokens, masks, anchors, blocks = random_blocks()
    seen = sorted({int(label) for label in blocks.labels} | {0, 1, 48})
    assert 10 < len(seen) < 50
    head = make_head(kind)
    hidden = planted_hidden(tokens, masks, anchors, blocks, head)
    assert_equals_naive(hidden, tokens, masks, anchors, blocks, head, config, ids=seen)


@both_losses
def test_a_loss_in_several_chunks_is_the_sum_over_its_blocks(config):
    tokens, masks, anchors, blocks = random_blocks(limit=4, texts=["." + "#" * 20, "..###..######"])
    vocabulary = 600_000  # 27 rows of logits a chunk, not a multiple of a block's 5
    head = make_head("plain", vocabulary=vocabulary, width=2)
    assert LOGITS_BYTES // (4 * vocabulary) < len(blocks.rows), "two chunks at least, or this test crosses no boundary"
    hidden = planted_hidden(tokens, masks, anchors, blocks, head)
    numerator, sums = head_loss(hidden, blocks, head, config)
    (gradient,) = torch.autograd.grad(numerator, hidden)
    total, weight = 0.0, 0.0
    for n, row in enumerate(anchors):
        for a in range(len(row)):
            alone = make_blocks([tokens[n]], [masks[n]], [row[a : a + 1]], block_size=6, mask_token_id=MASK)
            part = hidden[n : n + 1, a : a + 1].detach().requires_grad_()
            of_block, of_block_sums = head_loss(part, alone, head, config)
            (its_gradient,) = torch.autograd.grad(of_block, part)
            torch.testing.assert_close(gradient[n, a], its_gradient[0, 0], rtol=1e-10, atol=1e-10)
            total, weight = total + of_block.item(), weight + of_block_sums["weight"].item()
    assert numerator.item() == pytest.approx(total, rel=1e-10)
    assert sums["weight"].item() == pytest.approx(weight, rel=1e-10)


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 5, 6, 11, 1000])
def test_chunks_are_whole_blocks_in_order_and_no_larger_than_asked_or_one_block(rows_per_chunk):
    starts = np.array([0, 5, 6, 9, 14, 19, 20, 25])
    chunks = _chunks(starts, rows_per_chunk)
    assert [row for rows, _ in chunks for row in range(rows.start, rows.stop)] == list(range(25))
    assert [block for _, blocks in chunks for block in range(blocks.start, blocks.stop)] == list(range(7))
    for rows, blocks in chunks:
        assert (rows.start, rows.stop) == (starts[blocks.start], starts[blocks.stop])
        assert rows.stop - rows.start <= rows_per_chunk or blocks.stop - blocks.start == 1
    for (rows, _), (after, blocks) in itertools.pairwise(chunks):  # none could have taken one block more
        assert rows.stop - rows.start + starts[blocks.start + 1] - after.start > rows_per_chunk


def test_a_bfloat16_head_gives_the_float32_loss_within_its_rounding():
    tokens, masks, anchors, blocks = random_blocks()
    wide = make_head("plain", dtype=torch.bfloat16)
    wide = Head(wide.weight.float(), None, 1.0, None)  # the same rounded values in float32
    hidden = planted_hidden(tokens, masks, anchors, blocks, wide, dtype=torch.bfloat16)
    results = []
    for head in (wide, Head(wide.weight.bfloat16(), None, 1.0, None)):
        own = hidden.detach().to(head.weight.dtype).requires_grad_()
        numerator, sums = head_loss(own, blocks, head, DECAY)
        assert numerator.dtype == torch.float64
        (gradient,) = torch.autograd.grad(numerator, own)
        assert gradient.dtype == own.dtype
        results.append((numerator / sums["weight"], gradient.float()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0.01, atol=0)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0.05, atol=0.05)


def test_a_loss_without_gradient_equals_the_one_with():
    tokens, masks, anchors, blocks = random_blocks()
    head = make_head("all of them")
    hidden = planted_hidden(tokens, masks, anchors, blocks, head)
    with torch.no_grad():
        plain, _ = head_loss(hidden, blocks, head, DPACE)
    assert not plain.requires_grad
    assert torch.equal(plain, head_loss(hidden, blocks, head, DPACE)[0].detach())


# -- a whole step ----------------------------------------------------------------------------------------------------

SHAPE = Shape(
    width=16,
    vocabulary=50,
    target_layers=6,
    target_layer_ids=(1, 3),
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    block_size=6,
    mask_token_id=MASK,
    layer_types=("full_attention", "sliding_attention"),
    sliding_window=9,
    rope_theta=1e4,
    max_positions=4096,
)


def step(micro_batches: list[list[int]], config: ObjectiveConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step over 8 uneven samples, split as given: one weighted mean over all of them."""
    generator = torch.Generator().manual_seed(4)
    drafter = Drafter(SHAPE).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = 0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.copy_(noise + (parameter.dim() == 1))
    embedding = torch.randn(50, 16, dtype=torch.float64, generator=generator)
    head = Head(torch.randn(50, 16, dtype=torch.float64, generator=generator), None, 1.0, None)
    texts = [*TURNS, "..##", "." * 30 + "#" * 25, "...####..####", "#" * 12]
    masks = [mask_of(text) for text in texts]
    tokens = [torch.randint(0, MASK, (len(mask),), generator=generator) for mask in masks]
    features = [torch.randn(len(mask), 32, dtype=torch.float64, generator=generator) for mask in masks]
    anchors = [sample_anchors(mask.numpy(), limit=7, seed=(0, n)) for n, mask in enumerate(masks)]
    numerators, weight = 0.0, 0.0
    for part in micro_batches:
        blocks = make_blocks(
            [tokens[n] for n in part],
            [masks[n] for n in part],
            [anchors[n] for n in part],
            block_size=6,
            mask_token_id=MASK,
        )
        padded = torch.nn.utils.rnn.pad_sequence([features[n] for n in part], batch_first=True)
        numerator, sums = head_loss(drafter(padded, embedding[blocks.ids], blocks.anchors), blocks, head, config)
        numerator.backward()
        numerators, weight = numerators + numerator.item(), weight + sums["weight"].item()
    return numerators / weight, {name: parameter.grad / weight for name, parameter in drafter.named_parameters()}


@both_losses
def test_loss_and_gradients_do_not_depend_on_the_micro_batches(config):
    whole, gradients = step([[0, 1, 2, 3, 4, 5, 6, 7]], config)
    for micro_batches in ([[5, 1, 4, 0], [7, 2, 3, 6]], [[n] for n in range(8)]):
        loss, others = step(micro_batches, config)
        assert loss == pytest.approx(whole, rel=1e-12)
        for name, gradient in gradients.items():
            assert (others[name] - gradient).abs().max() < 1e-10 * gradient.abs().max(), name


def test_the_reference_step_gives_the_figures_of_independent_trainers():
    case = reference_case()
    drafter = Drafter(case.shape)
    drafter.load_state_dict(case.weights)
    blocks = case.blocks()
    hidden = drafter(case.features, case.embedding[blocks.ids], blocks.anchors)
    numerator, sums = head_loss(hidden, blocks, Head(case.head, None, 1.0, None), ObjectiveConfig(gamma=GAMMA))
    loss = numerator / sums["weight"]
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in drafter.parameters()])
    assert loss.item() == pytest.approx(LOSS, abs=1e-4)
    assert norm.item() == pytest.approx(GRADIENT_NORM, abs=1e-4)


# -- memory ----------------------------------------------------------------------------------------------------------

MEASURE = """
import numpy as np, torch
from pathlib import Path
from dflash.config import ObjectiveConfig
from dflash.objective import Head, head_loss, make_blocks

def peak():  # not getrusage: a child's ru_maxrss begins at its parent's
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

vocabulary, count, length, width = 151_936, 512, 3072, 16
tokens, mask = torch.randint(0, vocabulary, (length,)), torch.ones(length, dtype=torch.bool)
anchors = np.sort(np.random.default_rng(0).choice(length - 16, count, replace=False))
blocks = make_blocks([tokens], [mask], [anchors], block_size=16, mask_token_id=vocabulary - 1)
head = Head(torch.randn(vocabulary, width), None, 1.0, None)
hidden = torch.randn(1, count, 16, width, requires_grad=True)
before = peak()
head_loss(hidden, blocks, head, ObjectiveConfig())[0].backward()
print((peak() - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's peak memory where Linux keeps it")
def test_the_loss_of_512_blocks_of_16_over_152_thousand_ids_takes_less_than_half_a_gigabyte():
    # a narrow head: its width costs time, and next to no memory. The logits of all slots would be 4.7 GB.
    result = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert LOGITS_BYTES < int(result.stdout) < 0.5e9
