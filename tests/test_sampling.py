import math

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dflash.sampling import GREEDY, Sampling, choose, probabilities

SETTINGS = [
    Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    for temperature in (0.05, 0.7, 1.0, 3.0)
    for top_k in (0, 1, 3, 40, 1000)
    for top_p in (1e-9, 0.3, 0.9, 0.999, 1.0)
]
JUST_UNDER_ONE = math.nextafter(1.0, 0.0)


def warped(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """transformers' own distribution: temperature, then top-k, then top-p."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    ids: torch.Tensor = torch.zeros(len(logits), 1, dtype=torch.int64)
    return warpers(ids, logits.clone()).softmax(-1)


def random_logits(kind: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(30, 50, generator=draw)
    if kind == "ties":
        return (logits * 2).round()
    if kind == "all equal":
        return torch.full_like(logits, -3.0)
    if kind == "extremes":
        return logits * 1e4
    if kind == "masked":
        return logits.masked_fill(torch.rand(logits.shape, generator=draw) < 0.5, -torch.inf)
    if kind == "one left":
        return torch.full_like(logits, -torch.inf).scatter(1, torch.arange(30)[:, None], 5.0)
    return logits * 3


KINDS = ("plain", "ties", "all equal", "extremes", "masked", "one left")


@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_is_that_of_transformers_warpers(kind):
    logits = random_logits(kind)
    for sampling in SETTINGS:
        ours, theirs = probabilities(logits, sampling), warped(logits, sampling)
        assert torch.equal(ours > 0, theirs > 0), sampling
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(ours.sum(-1), torch.ones(30))


def test_any_leading_dimensions_are_rows_of_their_own():
    logits, sampling = random_logits("plain"), Sampling(temperature=0.8, top_k=7, top_p=0.8)
    together = probabilities(logits.view(2, 3, 5, 50), sampling).view(30, 50)
    alone = torch.stack([probabilities(row, sampling) for row in logits])
    torch.testing.assert_close(together, alone)


def test_bfloat16_logits_are_computed_in_float32():
    logits = random_logits("plain").bfloat16()
    chances = probabilities(logits, Sampling(temperature=0.7))
    assert chances.dtype == torch.float32
    torch.testing.assert_close(chances, (logits.float() / 0.7).softmax(-1))


def test_only_temperature_zero_is_greedy():
    assert GREEDY.greedy
    assert not Sampling(temperature=1e-3).greedy


def test_tokens_are_drawn_as_often_as_they_are_likely():
    draws = 200_000
    chances = torch.tensor([0.0, 0.4, 0.0, 0.25, 0.3, 0.05, 0.0])
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = choose(chances.expand(draws, -1), uniform).bincount(minlength=len(chances))
    assert (counts[chances == 0] == 0).all()
    expected = draws * chances
    deviation = (draws * chances * (1 - chances)).sqrt()
    assert ((counts - expected).abs() <= 4 * deviation).all()


def test_weights_need_not_sum_to_one():
    chances = torch.tensor([0.1, 0.0, 0.3])
    uniform = torch.linspace(0, JUST_UNDER_ONE, 101, dtype=torch.float64)
    assert torch.equal(choose(chances.expand(101, -1), uniform), choose(1e-6 * chances.expand(101, -1), uniform))
    assert choose(chances, torch.tensor(0.2)) == 0
    assert choose(chances, torch.tensor(0.3)) == 2


@pytest.mark.parametrize("uniform", [0.0, 5e-324, JUST_UNDER_ONE, 1 - 2**-24])
def test_a_token_without_probability_is_never_drawn(uniform):
    draw = torch.Generator().manual_seed(1)
    chances = torch.rand(500, 40, generator=draw).softmax(-1)
    chances[:, :3] = chances[:, -3:] = 0  # the first and the last ones are what the ends of the interval would hit
    chances *= 3 * torch.rand(500, 1, generator=draw)  # any sum: the number's product with it must stay below it
    tokens = choose(chances, torch.full((500,), uniform, dtype=torch.float64))
    assert (chances.gather(1, tokens[:, None]) > 0).all()
    assert tokens.eq(3 if uniform < 0.5 else 36).all()


def test_the_same_numbers_give_the_same_tokens_alone_or_together():
    draw = torch.Generator().manual_seed(2)
    chances = torch.rand(64, 20, generator=draw).softmax(-1)
    uniform = torch.rand(64, generator=draw, dtype=torch.float64)
    together = choose(chances, uniform)
    assert together.tolist() == [int(choose(row, number)) for row, number in zip(chances, uniform, strict=True)]
    assert torch.equal(together, choose(chances, uniform))
