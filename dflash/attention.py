"""What a slot may attend to: one rule, run by flex attention on a GPU and by chunks of blocks on a CPU.

N samples, A anchors, B block slots, S context tokens, D head width. Queries are the A*B slots only; keys are the S context
rows and the A*B slots. Slot k of the block with anchor a stands at position a + k and sees

    context row j        if  j < a                             and, in a sliding layer, a + k - j < window
    slot k' of its block if  it is a full layer, or k' <= k    and, in a sliding layer, k - k' < window

and nothing of any other block. The context bound is strict and by position: at inference the anchor is the newest token,
whose hidden state does not exist yet. (Mask of arXiv 2602.06036; sliding layers as z-lab's client and vLLM run them.)
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

# Slots that one call of scaled_dot_product_attention takes on a CPU. Between 64 and 512 measured within 10 % of each other;
# larger chunks pay for keys of each other's blocks, smaller ones for calls.
CHUNK_SLOTS = 128


def sees_context(position, anchor, slot, window: int | None):
    """Whether a slot sees a context row; operands broadcast (tensors of positions, or the scalars of a flex mask)."""
    before = position < anchor
    return before if window is None else before & (anchor + slot - position < window)


def sees_slot(key_slot, slot, window: int | None):
    """Whether a slot sees a slot of its own block; `window` None is a full layer, else sliding and causal."""
    if window is None:
        return key_slot == key_slot
    return (key_slot <= slot) & (slot - key_slot < window)


@dataclass(frozen=True)
class _Chunk:
    blocks: slice  # of the A anchors
    context: slice  # of the S rows: what any slot of the chunk can see
    mask: torch.Tensor  # [N, 1, G*slots, context + slots], 0 or -inf


class BlockAttention:
    """The attention of one micro-batch; masks are made once and shared by all layers.

    anchors: [N, A] int64 on the CPU, ascending in each row; a row with fewer anchors repeats its last one, so that every
    slot sees at least itself (a row of masked keys alone would be NaN).
    """

    def __init__(
        self,
        anchors: torch.Tensor,
        *,
        block_size: int,
        context_length: int,
        query_groups: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.anchors, self.block_size, self.context_length = anchors, block_size, context_length
        self.query_groups, self.device, self.dtype = query_groups, device, dtype
        # by window: all layers of a kind share one mask
        self._block_masks: dict[int | None, BlockMask] = {}
        self._chunk_lists: dict[int | None, list[_Chunk]] = {}

    def __call__(
        self,
        query: torch.Tensor,  # [N, heads, A*B, D]
        context: tuple[torch.Tensor, torch.Tensor],  # keys and values [N, kv heads, S, D]
        block: tuple[torch.Tensor, torch.Tensor],  # keys and values [N, kv heads, A*B, D]
        window: int | None,
    ) -> torch.Tensor:
        """[N, heads, A*B, D]; softmax over context and block jointly, scaled by D ** -0.5."""
        if self.device.type == "cuda":
            if window not in self._block_masks:
                self._block_masks[window] = self._block_mask(window)
            return _flex(query, context, block, self._block_masks[window])
        if window not in self._chunk_lists:
            self._chunk_lists[window] = self._chunks(window)
        return self._chunked(query, context, block, self._chunk_lists[window])

    def _chunks(self, window: int | None) -> list[_Chunk]:
        samples, count = self.anchors.shape
        per_chunk = max(1, CHUNK_SLOTS // self.block_size)
        slot = torch.arange(self.block_size)
        chunks = []
        for first in range(0, count, per_chunk):
            anchors = self.anchors[:, first : first + per_chunk]
            low = 0 if window is None else max(0, int(anchors.min()) - window + 1)
            high = max(low, int(anchors.max()))
            anchor_NQ1 = anchors.repeat_interleave(self.block_size, dim=1)[:, :, None]
            slot_Q = slot.repeat(anchors.shape[1])
            own_QQ = torch.block_diag(*[torch.ones(self.block_size, self.block_size)] * anchors.shape[1]).bool()
            own_QQ &= sees_slot(slot_Q[None, :], slot_Q[:, None], window)
            visible = torch.cat(
                [
                    sees_context(torch.arange(low, high), anchor_NQ1, slot_Q[:, None], window),
                    own_QQ.expand(samples, -1, -1),
                ],
                dim=-1,
            )
            # the query heads of one key head are stacked as rows: keys and values are never repeated
            mask = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, -torch.inf)
            mask = mask.repeat(1, self.query_groups, 1)[:, None]
            chunks.append(_Chunk(slice(first, first + anchors.shape[1]), slice(low, high), mask))
        return chunks

    def _chunked(self, query, context, block, chunks: list[_Chunk]) -> torch.Tensor:
        samples, heads, _, width = query.shape
        kv_heads = context[0].shape[1]
        # split, not slices: the gradient of a slice is a tensor of zeros as large as what it was cut from
        sizes = [(chunk.blocks.stop - chunk.blocks.start) * self.block_size for chunk in chunks]
        outputs = []
        for chunk, rows, *own in zip(chunks, *(x.split(sizes, dim=2) for x in (query, *block)), strict=True):
            key, value = (torch.cat([c[:, :, chunk.context], b], dim=2) for c, b in zip(context, own, strict=True))
            rows = rows.reshape(samples, kv_heads, -1, width)
            output = F.scaled_dot_product_attention(rows, key, value, attn_mask=chunk.mask)
            outputs.append(output.reshape(samples, heads, -1, width))
        return torch.cat(outputs, dim=2)

    def _block_mask(self, window: int | None) -> BlockMask:
        """The rule as flex attention's block-sparse mask: no dense mask ever exists when it is compiled, as on a GPU."""
        samples, count = self.anchors.shape
        anchors = self.anchors.to(self.device, non_blocking=True)
        size, context_length = self.block_size, self.context_length

        def visible(sample, head, query, key):
            anchor, slot = anchors[sample, query // size], query % size
            key_slot = key - context_length
            in_context = (key < context_length) & sees_context(key, anchor, slot, window)
            same_block = (key >= context_length) & (key_slot // size == query // size)
            return in_context | (same_block & sees_slot(key_slot % size, slot, window))

        make = _compiled(create_block_mask) if self.device.type == "cuda" else create_block_mask
        return make(visible, samples, None, count * size, context_length + count * size, device=str(self.device))


def _flex(query, context, block, mask: BlockMask) -> torch.Tensor:
    key, value = (torch.cat([c, b], dim=2) for c, b in zip(context, block, strict=True))
    attend = _compiled(flex_attention) if query.is_cuda else flex_attention
    return attend(query, key, value, block_mask=mask, enable_gqa=True)


@functools.cache
def _compiled(function: Callable) -> Callable:
    # dynamic: every micro-batch has its own length and number of anchors, and a recompile costs seconds
    return torch.compile(function, dynamic=True)
