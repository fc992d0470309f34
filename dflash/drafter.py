"""The DFlash drafter: a Qwen3-style stack whose block slots attend to the target's hidden states.

N samples, S context tokens, F = captured layers x width, H width, A anchors, B block slots, L layers, D head width.
Architecture and tensor names are those of z-lab's checkpoints (arXiv 2602.06036, A.3), so that a checkpoint is served as it is.
The drafter owns no embedding and no head: both are the target's, frozen.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dflash.attention import BlockAttention, sees_slot
from dflash.shape import Shape

RMS_NORM_EPS = 1e-6  # Qwen3's; the drafter is a Qwen3 stack whatever the target
INITIALIZER_RANGE = 0.02


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, its variance in float32 at least, as Qwen3 computes it."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (weight * F.rms_norm(wide, (x.shape[-1],), eps=RMS_NORM_EPS)).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight)


def rope_tables(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [*positions, head_dim], float32 whatever the drafter's dtype: a bfloat16 frequency drifts with position."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim)
    angles = positions.to(torch.float32)[..., None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of x [N, heads, T, D] in the half-split form, with tables [N or 1, T, D]."""
    cos, sin = (table[:, None] for table in rope)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.q_norm = RMSNorm(shape.head_dim)
        self.k_norm = RMSNorm(shape.head_dim)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:  # [N, T, heads*D] -> [N, heads, T, D]
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def queries(self, x: torch.Tensor, rope: tuple) -> torch.Tensor:
        """[N, heads, T, D], normed per head before the rotary embedding."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), rope)

    def keys_values(self, x: torch.Tensor, rope: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [N, kv heads, T, D] of context rows or block slots: the same weights project both."""
        return rotate(self.k_norm(self._heads(self.k_proj(x))), rope), self._heads(self.v_proj(x))


class MLP(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.width)
        self.post_attention_layernorm = RMSNorm(shape.width)

    def forward(
        self, x: torch.Tensor, block_rope: tuple, context: Callable[[Attention], tuple], attend: Callable
    ) -> torch.Tensor:
        """x [N, T, H]; `context` gives this layer's context keys and values, `attend` joins them with the block's."""
        normed = self.input_layernorm(x)  # of the block only: the context was normed once, by hidden_norm
        query = self.self_attn.queries(normed, block_rope)
        output = attend(query, context(self.self_attn), self.self_attn.keys_values(normed, block_rope))
        x = x + self.self_attn.o_proj(output.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class ContextCache:
    """Keys and values of the context rows seen so far, one pair a layer; block slots are never kept."""

    def __init__(self, layers: int):
        self.length = 0
        self.layers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * layers

    def append(self, index: int, keys_values: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        old = self.layers[index]
        new = (
            keys_values
            if old is None
            else (torch.cat([old[0], keys_values[0]], 2), torch.cat([old[1], keys_values[1]], 2))
        )
        self.layers[index] = new
        return new


class Drafter(nn.Module):
    """A drafter of the given shape, uninitialised values until `initialise` or `load_state_dict`."""

    def __init__(self, shape: Shape, *, activation_checkpointing: bool = False):
        super().__init__()
        self.shape = shape
        self.activation_checkpointing = activation_checkpointing
        self.fc = nn.Linear(len(shape.target_layer_ids) * shape.width, shape.width, bias=False)
        self.hidden_norm = RMSNorm(shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)

    def forward(self, features: torch.Tensor, block_inputs: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Training: all blocks of all samples at once.

        features [N, S, F], right-padded; block_inputs [N, A, B, H], the embedded tokens of the blocks; anchors [N, A] on the
        CPU, ascending, as `attention.BlockAttention` takes them. Returns the normed hidden states [N, A, B, H].
        """
        _, count, block_size, _ = block_inputs.shape
        device, shape = features.device, self.shape
        context = self.hidden_norm(self.fc(features))
        context_rope = rope_tables(
            torch.arange(features.shape[1], device=device)[None], shape.head_dim, shape.rope_theta
        )
        positions = (anchors[:, :, None] + torch.arange(block_size)).flatten(1).to(device, non_blocking=True)
        block_rope = rope_tables(positions, shape.head_dim, shape.rope_theta)
        attention = BlockAttention(
            anchors,
            block_size=block_size,
            context_length=features.shape[1],
            query_groups=shape.heads // shape.kv_heads,
            device=device,
            dtype=block_inputs.dtype,
        )
        x = block_inputs.flatten(1, 2)
        for layer, window in zip(self.layers, shape.windows, strict=True):

            @torch.compiler.disable  # a compiled layer breaks here: chunks are no graph, flex attention is compiled by itself
            def attend(query, context_kv, block_kv, window=window):
                return attention(query, context_kv, block_kv, window)

            arguments = (x, block_rope, lambda own: own.keys_values(context, context_rope), attend)
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                x = layer(*arguments)
        return self.norm(x).unflatten(1, (count, block_size))

    @torch.no_grad()
    def draft(self, new_features: torch.Tensor, block_inputs: torch.Tensor, cache: ContextCache) -> torch.Tensor:
        """Decoding: one block behind a cached context; the counterpart of `forward` that serving runs.

        new_features [1, n, F] of the n tokens committed since the last call; block_inputs [1, B, H]; the block's anchor stands
        at position `cache.length` + n. Returns the normed hidden states [1, B, H]; the cache has grown by n.
        """
        device, shape = new_features.device, self.shape
        start = cache.length + new_features.shape[1]
        context = self.hidden_norm(self.fc(new_features))
        context_rope = rope_tables(
            torch.arange(cache.length, start, device=device)[None], shape.head_dim, shape.rope_theta
        )
        slot = torch.arange(block_inputs.shape[1], device=device)
        block_rope = rope_tables(start + slot[None], shape.head_dim, shape.rope_theta)
        x = block_inputs
        for index, (layer, window) in enumerate(zip(self.layers, shape.windows, strict=True)):

            def cached(own, index=index):
                return cache.append(index, own.keys_values(context, context_rope))

            def attend(query, context_kv, block_kv, window=window):
                key, value = (torch.cat(pair, dim=2) for pair in zip(context_kv, block_kv, strict=True))
                mask = None
                if window is not None:  # as one sequence of positions the block's rule covers the context too
                    mask = sees_slot(torch.arange(start + len(slot), device=device), start + slot[:, None], window)
                return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

            x = layer(x, block_rope, cached, attend)
        cache.length = start
        return self.norm(x)


def initialise(drafter: Drafter, *, seed: int, features: torch.Tensor | None) -> None:
    """Random weights, the same on every device: normal(0, 0.02) for matrices and ones for norms.

    With `features` [T, F] of real tokens (drafter.init = scaled) the rows of fc are fitted to them: divided by each channel's
    standard deviation, with the direction of the mean removed. Otherwise a few massive channels and the mean hold most of
    what the drafter can see of its context. The architecture is the same.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * INITIALIZER_RANGE)
        if features is not None:
            features = features.to("cpu", torch.float64)
            deviation = features.std(0).clamp_min(1e-6)
            # removed among the divided channels: removed before, it would bring the massive ones back
            mean = F.normalize(features.mean(0) / deviation, dim=0)
            rows = drafter.fc.weight.to("cpu", torch.float64)
            drafter.fc.weight.copy_((rows - (rows @ mean)[:, None] * mean) / deviation)


def check_tensors(state: dict[str, torch.Tensor], shape: Shape, *, what: str) -> None:
    """Refuses a state with a missing, a stray, a misshapen or a non-finite tensor: serving engines load such a one in silence."""
    with torch.device("meta"):
        expected = Drafter(shape).state_dict()
    for name in sorted(expected.keys() | state.keys()):
        if name not in state:
            raise ValueError(f"{what}: tensor {name} is missing")
        if name not in expected:
            raise ValueError(f"{what}: tensor {name} is not part of this drafter")
        if state[name].shape != expected[name].shape:
            raise ValueError(
                f"{what}: {name} is {list(state[name].shape)}, this drafter's is {list(expected[name].shape)}"
            )
        if not bool(state[name].isfinite().all()):
            raise ValueError(f"{what}: {name} holds a value that is not finite")
