"""How a token is chosen from logits: greedily, or by temperature, top-k and top-p, in this order, as serving engines do."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen; `temperature` 0 takes the most likely one."""

    temperature: float = 0.0
    top_k: int = 0
    """Most likely tokens that remain; 0: all."""
    top_p: float = 1.0
    """The most likely tokens whose probability, after temperature and top-k, first reaches this remain."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling()


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [..., V], float32, that a token is sampled from, of logits [..., V]; not for greedy sampling."""
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    chances = logits.softmax(-1)
    if sampling.top_p < 1:
        # from the least likely up, as transformers and vLLM do: of equally likely tokens the same ones remain
        ordered, order = chances.sort(dim=-1)
        dropped = ordered.cumsum(-1) <= 1 - sampling.top_p
        dropped[..., -1] = False
        chances = chances.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0)
        chances = chances / chances.sum(-1, keepdim=True)
    return chances


def choose(chances: Tensor, uniform: Tensor) -> Tensor:
    """Tokens [...] drawn by uniform numbers [...] in [0, 1) from weights [..., V], of which not all are 0.

    The same numbers give the same tokens, and a token of weight 0 is never drawn.
    """
    bounds = chances.double().cumsum(-1)
    # in float64, where a number below 1 stays below the total: nothing behind the last token of any weight is ever drawn
    point = uniform.to(bounds)[..., None] * bounds[..., -1:]
    return torch.searchsorted(bounds, point, right=True)[..., 0]
