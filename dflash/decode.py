"""Speculative decoding: the drafter proposes a block, the target verifies it in one forward; the output stays the target's own.

Steps 1 to 7 of `Decoder.decode` are those of DFlash (arXiv 2602.06036); acceptance when sampling is that of speculative
sampling (arXiv 2211.17192). One prompt at a time. `decode_plain` is the same target without a drafter.

n new tokens of one forward, B block size (the anchor's slot included), F captured layers x width, V vocabulary.
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from dflash.drafter import ContextCache, Drafter
from dflash.sampling import GREEDY, Sampling, choose, probabilities
from dflash.target import PROOF_TOLERANCE, Target


@dataclass(frozen=True)
class Decoded:
    """One answer and what it took."""

    tokens: list[int]
    """The new ones, up to and including a stop token, at most max_new_tokens."""
    finish_reason: str
    """"stop" where the last one is a stop token, else "length"."""
    committed: list[int]
    """Per draft-and-verify step: accepted drafts and the bonus token; nothing behind a stop token. A step that max_new_tokens
    cuts counts whole: that cut says nothing of the drafter. The first token is the prefill's, and no step's."""
    accepted: list[int]
    """Per step: how many of those are drafts."""
    target_seconds: float
    """Wall time of prefill, verification and choice; with `drafter_seconds` the whole of the decoding."""
    drafter_seconds: float

    @property
    def steps(self) -> int:
        """Verifications: target forwards after the prefill."""
        return len(self.committed)

    @property
    def tau(self) -> float:
        """Tokens per verification, the bonus token included; NaN where the first token was the last."""
        return sum(self.committed) / self.steps if self.steps else math.nan


class Decoder:
    """A target and a drafter, ready to decode; the drafter computes in its own dtype, on its own device.

    Raises ValueError, one line, for a block larger than the drafter's and for a target that cannot take tokens back.
    """

    def __init__(self, target: Target, drafter: Drafter, *, block_size: int | None = None):
        trained = drafter.shape.block_size
        if block_size is not None and not 2 <= block_size <= trained:
            raise ValueError(
                f"block_size={block_size}: this drafter was trained for blocks of {trained}; use 2 to {trained}"
            )
        prove_rollback(target)
        self.target, self.drafter = target, drafter
        self.block_size = block_size or trained
        self.device, self.dtype = drafter.fc.weight.device, drafter.fc.weight.dtype

    @torch.no_grad()
    def decode(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        stop: frozenset[int],
        sampling: Sampling = GREEDY,
        seed: int = 0,
    ) -> Decoded:
        """The target's answer to `prompt`, token ids: with greedy sampling the one of `decode_plain`, else of its distribution.

        `seed` and the prompt determine it. Raises ValueError, one line, where prompt and answer are too long for the target
        or the drafter.
        """
        limit = check_lengths(prompt, max_new_tokens, self.target, self.drafter)
        draw = torch.Generator().manual_seed(seed)
        reader, context = Reader(self.target), ContextCache(self.drafter.shape.layers)
        committed, accepted, drafter_seconds = [], [], 0.0
        began = now(self.device)

        # 1. prefill: features of the whole prompt, and the first token, which has none yet
        features, logits = reader.read(prompt, logits_of_last=1)
        reader.record()
        new = [pick(logits[-1], sampling, draw)]
        while new[-1] not in stop and len(new) < max_new_tokens:
            start = reader.length  # position of the anchor, the newest token
            block = min(self.block_size, limit - start)

            # 2, 3. draft a block behind the anchor from the features of all tokens before it
            before = now(self.device)
            drafts, draft_chances = self._draft(features, new[-1], block, context, sampling, draw)
            drafter_seconds += now(self.device) - before

            # 4, 5. one forward of the target over the anchor and its drafts says which of them to keep, and what follows
            features, logits = reader.read([new[-1], *drafts], logits_of_last=block)
            count, bonus = accept(drafts, draft_chances, logits, sampling, draw)

            # 6. what was not kept is forgotten; the bonus is the next anchor and has no features yet
            reader.forget(block - 1 - count)
            features = features[: count + 1]

            # 7. nothing behind the first stop token was ever said
            said = up_to_stop([*drafts[:count], bonus], stop)
            new += said
            committed.append(len(said))
            accepted.append(min(count, len(said)))

        seconds = now(self.device) - began
        tokens = new[:max_new_tokens]
        reason = "stop" if tokens[-1] in stop else "length"
        return Decoded(tokens, reason, committed, accepted, seconds - drafter_seconds, drafter_seconds)

    def _draft(
        self,
        features: Tensor,
        anchor: int,
        block: int,
        context: ContextCache,
        sampling: Sampling,
        draw: torch.Generator,
    ) -> tuple[list[int], Tensor | None]:
        """Drafts for slots 1..block-1, and the distributions [block-1, V] they were drawn from where not greedy."""
        target = self.target
        ids = torch.tensor([anchor] + [self.drafter.shape.mask_token_id] * (block - 1), device=target.device)
        inputs = (F.embedding(ids, target.embedding_weight) * target.embedding_scale).to(self.device, self.dtype)
        hidden = self.drafter.draft(features[None].to(self.device, self.dtype), inputs[None], context)
        # the head is the target's, in its dtype
        logits = target.logits(hidden[0, 1:].to(target.head_weight))
        if sampling.greedy:
            return logits.argmax(-1).tolist(), None
        chances = probabilities(logits, sampling)
        return choose(chances, uniform(block - 1, draw)).tolist(), chances


@torch.no_grad()
def decode_plain(
    target: Target,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop: frozenset[int],
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Decoded:
    """The target's answer to `prompt` without a drafter, one token a forward: every step commits one token."""
    check_lengths(prompt, max_new_tokens, target)
    draw = torch.Generator().manual_seed(seed)
    reader = Reader(target)
    began = now(target.device)
    _, logits = reader.read(prompt, logits_of_last=1)
    new = [pick(logits[-1], sampling, draw)]
    while new[-1] not in stop and len(new) < max_new_tokens:
        _, logits = reader.read(new[-1:], logits_of_last=1)
        new.append(pick(logits[-1], sampling, draw))
    steps = len(new) - 1
    reason = "stop" if new[-1] in stop else "length"
    return Decoded(new, reason, [1] * steps, [0] * steps, now(target.device) - began, 0.0)


class Reader:
    """A target that has read `length` tokens, and can forget the last ones."""

    def __init__(self, target: Target):
        self.target, self.length = target, 0
        self.cache = DynamicCache(config=target.model.config)

    def read(self, tokens: Sequence[int], *, logits_of_last: int) -> tuple[Tensor, Tensor]:
        """Reads the next n tokens: their features [n, F], and logits [logits_of_last, V] of what follows the last of them."""
        target = self.target
        output = target.decoder(
            input_ids=torch.tensor([list(tokens)], device=target.device),
            cache=self.cache,
            use_cache=True,
            output_hidden_states=True,
        )
        self.length += len(tokens)
        # hidden_states[0] is what enters the first layer
        states = [output.hidden_states[layer_id + 1][0].to(target.device) for layer_id in target.layer_ids]
        final = output.last_hidden_state[0, -logits_of_last:]
        return torch.cat(states, dim=-1), target.logits(final.to(target.head_weight.device))

    def record(self) -> None:
        """From now on layers that need only a window keep all of a read, until `forget` follows: after every read, then."""
        self.cache.activate_past_recording()

    def forget(self, count: int) -> None:
        """Takes back the last `count` tokens of the last read, which may be 0."""
        self.cache.crop(-count)
        self.length -= count


def accept(
    drafts: list[int], draft_chances: Tensor | None, logits: Tensor, sampling: Sampling, draw: torch.Generator
) -> tuple[int, int]:
    """How many of the drafts stay, and the bonus token behind them, from the target's logits [drafts + 1, V].

    Greedy: the drafts that are what the target would have said, up to the first that is not. Sampling: draft d of
    distribution q stays with probability min(1, p(d) / q(d)), else the bonus comes from max(p - q, 0), so that each token is
    one of the target's p (arXiv 2211.17192, theorem 1); behind the last draft it comes from p itself.
    """
    if draft_chances is None:
        choices = logits.argmax(-1).tolist()
        count = next((i for i, draft in enumerate(drafts) if draft != choices[i]), len(drafts))
        return count, choices[count]
    chances = probabilities(logits, sampling)
    draft_chances = draft_chances.to(chances.device)
    ids = torch.tensor(drafts, device=chances.device)[:, None]
    target_chance, draft_chance = (table[: len(drafts)].gather(1, ids)[:, 0] for table in (chances, draft_chances))
    # u < p / q, and never where p is 0
    kept = (uniform(len(drafts), draw).to(chances.device) * draft_chance < target_chance).tolist()
    count = kept.index(False) if False in kept else len(drafts)
    rest = chances[count]
    if count < len(drafts):
        residual = (rest - draft_chances[count]).clamp_min(0)
        # none is left only where p and q are the same but for rounding: then p is the residual's limit as well as any
        rest = residual if residual.any() else rest
    return count, int(choose(rest, uniform(1, draw)[0]))


def pick(logits: Tensor, sampling: Sampling, draw: torch.Generator) -> int:
    """The next token from logits [V]."""
    if sampling.greedy:
        return int(logits.argmax())
    return int(choose(probabilities(logits, sampling), uniform(1, draw)[0]))


def uniform(count: int, draw: torch.Generator) -> Tensor:
    """[count] float64 in [0, 1), drawn on the CPU: the same on every device."""
    return torch.rand(count, generator=draw, dtype=torch.float64)


def up_to_stop(tokens: list[int], stop: frozenset[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
    return tokens[:end]


def check_lengths(prompt: Sequence[int], max_new_tokens: int, target: Target, drafter: Drafter | None = None) -> int:
    """Positions that target and drafter both have. Raises ValueError, one line, where prompt and answer do not fit them."""
    if not prompt:
        raise ValueError("the prompt has no tokens; give at least one")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: an answer has at least 1; raise it")
    unknown = next((token for token in prompt if not 0 <= token < target.vocabulary), None)
    if unknown is not None:
        raise ValueError(
            f"the prompt holds token {unknown}, and {target.name} knows 0 to {target.vocabulary - 1}; use its own tokenizer"
        )
    config = target.model.config.get_text_config(decoder=True)
    positions = [(getattr(config, "max_position_embeddings", None) or sys.maxsize, target.name)]  # some have no limit
    if drafter is not None:
        positions.append((drafter.shape.max_positions, "the drafter"))
    limit, whose = min(positions)
    if len(prompt) + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and max_new_tokens={max_new_tokens} are more than the {limit} positions of "
            f"{whose}; shorten the prompt or lower max_new_tokens"
        )
    return limit


def now(device: torch.device) -> float:
    """Seconds of the wall clock, once the device has done what it was given (what the target did has been read by then)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def prove_rollback(target: Target) -> None:
    """Raises ValueError, by name, for a target that is not as it was once it has read tokens and forgotten them.

    Keys of rejected drafts can be dropped. A running state (linear attention, Mamba) has them mixed in, and dropping raises no
    error: the answer is merely another one. transformers knows which layers are such; a model's own code may not say so, so it
    is tried as well: read, forget, read a block, against the same tokens read one by one.
    """
    draw = torch.Generator().manual_seed(0)
    first, wrong, right = (torch.randint(target.vocabulary, (count,), generator=draw).tolist() for count in (8, 16, 8))
    reader, plain = Reader(target), Reader(target)
    try:
        reader.read(first, logits_of_last=1)
        reader.record()
        reader.read(wrong, logits_of_last=1)
        reader.forget(len(wrong) - 1)
        _, in_a_block = reader.read(right, logits_of_last=len(right))
        plain.read([*first, wrong[0]], logits_of_last=1)
        one_by_one = torch.cat([plain.read([token], logits_of_last=1)[1] for token in right])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code raises when it meets a cache that it cannot use
        raise ValueError(
            _refusal(reader, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        ) from error
    if not reader.cache.is_croppable:
        raise ValueError(_refusal(reader, "tokens stay in their running state"))
    # the median: in bfloat16 a token may be routed to another expert
    difference = float(((in_a_block - one_by_one).norm(dim=-1) / one_by_one.norm(dim=-1)).median())
    allowed = PROOF_TOLERANCE[target.dtype]
    if not difference <= allowed:
        raise ValueError(_refusal(reader, f"its logits then differ by {difference:.1e}, {allowed:.0e} is allowed"))


def _refusal(reader: Reader, cause: str) -> str:
    target = reader.target
    kinds = getattr(target.model.config.get_text_config(decoder=True), "layer_types", None) or []
    kept = {kind for kind, layer in zip(kinds, reader.cache.layers, strict=False) if not layer.is_croppable}
    layers = f" with its {' and '.join(sorted(kept))} layers" if kept else ""
    return (
        f"target.name={target.name}: {type(target.model).__name__}{layers} cannot forget rejected drafts ({cause}); "
        "speculative decoding needs a target of attention layers"
    )
