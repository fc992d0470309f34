"""What the drafter is asked: anchors, blocks, labels, the weighted loss through the target's frozen head, simulated tau.

N samples, S tokens, A anchors, B block slots (slot 0 is the known anchor), H width, V vocabulary, R supervised slots.
Slot k of the block with anchor a predicts the token at a + k (LAYOUT-Z: arXiv 2602.06036, z-lab, vLLM, SGLang).
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from dflash.config import ObjectiveConfig, gamma_of

# Bytes of logits that exist at once. At 49,152 ids 32 to 64 MB took within 4 % of each other; fewer rows make a slower product.
LOGITS_BYTES = 48 << 20


def anchor_positions(loss_mask: np.ndarray) -> np.ndarray:
    """All positions a of a sample [S] that can be an anchor: a and a + 1 are supervised. Tails are allowed and masked."""
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:])


def sample_anchors(loss_mask: np.ndarray, *, limit: int, seed: tuple[int, ...]) -> np.ndarray:
    """At most `limit` anchors, uniform without replacement, ascending; the same for the same seed, e.g. (seed, epoch, index)."""
    positions = anchor_positions(loss_mask)
    if len(positions) > limit:
        positions = np.sort(np.random.default_rng(seed).choice(positions, limit, replace=False))
    return positions


@dataclass(frozen=True)
class Blocks:
    """The blocks of one micro-batch, and its R supervised slots in the order of the M blocks that they belong to."""

    anchors: torch.Tensor  # [N, A] int64, on the CPU; a row with fewer repeats its last, and the repeats hold no label
    ids: torch.Tensor  # [N, A, B] int64: the anchor's token, then mask tokens
    rows: torch.Tensor  # [R] int64, the slot as a flat index of [N, A, B]
    labels: torch.Tensor  # [R] int64
    slots: torch.Tensor  # [R] int64, 1..B-1
    blocks: torch.Tensor  # [R] int64, 0..M-1 ascending
    starts: np.ndarray  # [M + 1], where each block's slots begin in R; on the CPU
    samples: torch.Tensor  # [R] int64, 0..N-1

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What the device works on: everything but `anchors` and `starts`."""
        return {name: getattr(self, name) for name in ("ids", "rows", "labels", "slots", "blocks", "samples")}

    def to(self, device: torch.device) -> "Blocks":
        """The same blocks with `tensors` on the device."""
        if device.type == "cpu":
            return self
        # from pinned memory the copy waits for nothing
        return replace(self, **{name: t.pin_memory().to(device, non_blocking=True) for name, t in self.tensors.items()})


def make_blocks(
    tokens: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    anchors: list[np.ndarray],
    *,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Blocks of N samples (tokens and loss masks [S_i], at least one anchor each), on the CPU.

    A slot is supervised while every slot of its block up to it is: nothing after the first unsupervised token counts, since a
    drafter is only ever accepted up to there. The tail beyond a sample's end is unsupervised.
    """
    count = max(map(len, anchors))
    padded = np.stack([np.pad(row, (0, count - len(row)), mode="edge") for row in anchors])
    ids = np.full((len(tokens), count, block_size), mask_token_id, dtype=np.int64)
    supervised = np.zeros(ids.shape, dtype=bool)
    labels = np.zeros(ids.shape, dtype=np.int64)
    for n, (token, mask, row) in enumerate(
        zip((t.numpy() for t in tokens), (m.numpy() for m in loss_masks), anchors, strict=True)
    ):
        position = row[:, None] + np.arange(block_size)  # [anchors, B]
        inside = np.minimum(position, len(token) - 1)
        ids[n, :, 0] = token[padded[n]]
        labels[n, : len(row)] = token[inside]
        supervised[n, : len(row)] = np.logical_and.accumulate((position < len(token)) & mask[inside], axis=1)
    supervised[:, :, 0] = False
    rows = np.flatnonzero(supervised)
    per_block = supervised.sum(-1).reshape(-1)
    per_block = per_block[per_block > 0]
    return Blocks(
        anchors=torch.from_numpy(padded),
        ids=torch.from_numpy(ids),
        rows=torch.from_numpy(rows),
        labels=torch.from_numpy(labels.reshape(-1)[rows]),
        slots=torch.from_numpy(rows % block_size),
        blocks=torch.from_numpy(np.repeat(np.arange(len(per_block)), per_block)),
        starts=np.concatenate([[0], np.cumsum(per_block)]),
        samples=torch.from_numpy(rows // (count * block_size)),
    )


@dataclass(frozen=True)
class Head:
    """The target's frozen head, or the rows of it that the loss may choose from (objective.vocabulary = seen)."""

    weight: torch.Tensor  # [V, H]
    bias: torch.Tensor | None  # [V]
    scale: float  # multiplies the logits
    softcap: float | None  # logits become softcap * tanh(logits / softcap)
    index_of: torch.Tensor | None = None  # [whole vocabulary] -> row of `weight`, when it is restricted

    def restricted(self, ids: torch.Tensor) -> "Head":
        """The head over these token ids [V'] alone."""
        index_of = torch.full((len(self.weight),), -1, device=self.weight.device)
        index_of[ids] = torch.arange(len(ids), device=self.weight.device)
        return Head(self.weight[ids], None if self.bias is None else self.bias[ids], self.scale, self.softcap, index_of)


def decay_weights(slots: torch.Tensor, gamma: float) -> torch.Tensor:
    """exp(-(k - 1) / gamma) of slots k >= 1, [R] float64 (arXiv 2602.06036, section 4.2)."""
    return torch.exp(-(slots.double() - 1) / gamma)


def dpace_weights(
    cross_entropy: torch.Tensor, slots: torch.Tensor, blocks: torch.Tensor, *, count: int, block_size: int, alpha: float
) -> torch.Tensor:
    """D-PACE (arXiv 2605.18810): w_k = sum over m >= k of prod over i <= m of ((1 - alpha) exp(-CE_i) + alpha), [R].

    `blocks` 0..count-1. A slot without a label adds nothing.
    """
    reach = cross_entropy.new_zeros(count, block_size - 1)  # labels fill a block from slot 1 on, so zeros only follow
    reach[blocks, slots - 1] = (1 - alpha) * torch.exp(-cross_entropy) + alpha
    return reach.cumprod(1).flip(1).cumsum(1).flip(1)[blocks, slots - 1]


class _HeadLoss(torch.autograd.Function):
    """sum of w * CE over slots and, in the same pass, its gradient: no logits of more than one chunk ever exist."""

    @staticmethod
    def forward(ctx, hidden, labels, head: Head, chunks, weigh):
        # hidden [R, H], labels [R]. Returns sum(w * CE), then [R] each: CE, w, whether the label is the likeliest id.
        wide = torch.promote_types(hidden.dtype, torch.float32)
        cross_entropy, weight = (torch.empty(len(hidden), dtype=wide, device=hidden.device) for _ in range(2))
        correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # One buffer for all chunks, of logits and then of probabilities: the page faults of fresh ones took a sixth of the loss.
        longest = max((rows.stop - rows.start for rows, _ in chunks), default=0)
        buffer = head.weight.new_empty(longest, len(head.weight))
        for rows, blocks in chunks:
            of_chunk = buffer[: rows.stop - rows.start]
            logits = torch.mm(hidden[rows].to(head.weight.dtype), head.weight.T, out=of_chunk).to(wide)
            if head.bias is not None:
                logits += head.bias
            slope = head.scale  # of a logit with respect to hidden @ weight
            if head.scale != 1.0:
                logits *= head.scale
            if head.softcap is not None:
                logits.div_(head.softcap).tanh_()
                slope = head.scale * (1 - logits.square())
                logits *= head.softcap
            label = labels[rows, None]
            top, likeliest = logits.max(dim=-1, keepdim=True)
            of_label = logits.gather(-1, label)
            # in place on a CPU; a GPU's kernel does not promise that, and its allocator makes a fresh one cheap
            probability = torch.softmax(logits, dim=-1, out=None if logits.is_cuda else logits)
            log_sum = top - probability.gather(-1, likeliest).log()
            cross_entropy[rows] = (log_sum - of_label)[:, 0]
            correct[rows] = (likeliest == label)[:, 0]
            weight[rows] = weigh(cross_entropy[rows], rows, blocks).to(wide)
            if gradient is not None:
                of_logits = probability.scatter_add_(-1, label, torch.full_like(of_label, -1.0))
                if head.softcap is not None or head.scale != 1.0:
                    of_logits *= slope
                pull = of_logits.to(head.weight.dtype) @ head.weight
                gradient[rows] = (pull * weight[rows, None]).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(cross_entropy, weight, correct)
        return (weight * cross_entropy).double().sum(), cross_entropy, weight, correct

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None, None


def _chunks(starts: np.ndarray, rows_per_chunk: int) -> list[tuple[slice, slice]]:
    """(slots, blocks) slices of whole blocks, at most `rows_per_chunk` slots unless one block is larger.

    Whole, because D-PACE weighs a slot by the rest of its block.
    """
    chunks, first = [], 0
    while first < len(starts) - 1:
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + rows_per_chunk, side="right")) - 1)
        chunks.append((slice(int(starts[first]), int(starts[last])), slice(first, last)))
        first = last
    return chunks


def head_loss(
    hidden: torch.Tensor, blocks: Blocks, head: Head, config: ObjectiveConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The numerator of the weighted loss over the supervised slots of hidden [N, A, B, H], to be differentiated, and sums.

    The caller divides by the sum of `weight` over everything that makes up a step, so that the loss is one weighted mean
    however the samples were split. Sums, float64 on the device: `weight`; `loss` per sample [N]; `tau` and `blocks`
    (accepted tokens, bonus included, and blocks: greedy acceptance against the data's tokens); `correct` and `slots` [B - 1].
    """
    samples, _, block_size, width = hidden.shape
    labels = blocks.labels if head.index_of is None else head.index_of[blocks.labels]
    per_chunk = max(1, LOGITS_BYTES // (4 * len(head.weight)))

    def weigh(cross_entropy: torch.Tensor, rows: slice, of: slice) -> torch.Tensor:
        slots = blocks.slots[rows]
        if config.loss == "decay":
            return decay_weights(slots, gamma_of(config, block_size))
        local = blocks.blocks[rows] - of.start
        return dpace_weights(
            cross_entropy, slots, local, count=of.stop - of.start, block_size=block_size, alpha=config.dpace_alpha
        )

    with torch.autocast(hidden.device.type, enabled=False):  # the dtypes below are meant
        supervised = hidden.reshape(-1, width).index_select(0, blocks.rows)
        chunks = _chunks(blocks.starts, per_chunk)
        numerator, cross_entropy, weight, correct = _HeadLoss.apply(supervised, labels, head, chunks, weigh)
        count = len(blocks.starts) - 1
        right = correct.double()
        accepted = right.new_zeros(count, block_size - 1)
        accepted[blocks.blocks, blocks.slots - 1] = right
        per_slot = right.new_zeros(2, block_size - 1)
        per_slot[0].index_add_(0, blocks.slots - 1, right)
        per_slot[1].index_add_(0, blocks.slots - 1, torch.ones_like(right))
        loss = right.new_zeros(samples).index_add_(0, blocks.samples, (weight * cross_entropy).double())
        sums = {
            "weight": weight.double().sum(),
            "loss": loss,
            "tau": count + accepted.cumprod(1).sum(),
            "blocks": right.new_tensor(count),
            "correct": per_slot[0],
            "slots": per_slot[1],
        }
    return numerator, sums
