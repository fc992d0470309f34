"""The start-up proofs on the real drafter, and on drafters that are wrong in one thing: A anchors, B slots, S context rows."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dflash.drafter import ContextCache, Drafter, Layer, initialise, rope_tables
from dflash.proofs import prove_drafter
from dflash.shape import Shape

SHAPE = Shape(
    width=32,
    vocabulary=64,
    target_layers=4,
    target_layer_ids=(0, 2),
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    block_size=4,
    mask_token_id=63,
    layer_types=("full_attention", "full_attention"),
    sliding_window=None,
    rope_theta=1e6,
    max_positions=4096,
)
SLIDING = replace(SHAPE, layer_types=("sliding_attention", "full_attention"), sliding_window=8)
SHAPES = {"full": SHAPE, "sliding": SLIDING}
DEEP = replace(SHAPE, width=256, layers=5, head_dim=64, intermediate_size=768, layer_types=("full_attention",) * 5)
DTYPES = (torch.float32, torch.bfloat16)  # bfloat16: as on a GPU, under autocast over float32 weights
LENGTHS = (4, 5, 9, 30, 48, 100)


def material(length: int, width: int = SHAPE.width) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [S, F] with a large mean, as a target's are, and embedded block tokens [B, H]."""
    draw = torch.Generator().manual_seed(length)
    features = torch.randn(length, 2 * width, generator=draw) + 3 * torch.randn(2 * width, generator=draw)
    return features, torch.randn(SHAPE.block_size, width, generator=draw)


def prove(drafter: Drafter, length: int = 60, dtype: torch.dtype = torch.float32) -> None:
    features, inputs = material(length, drafter.shape.width)
    initialise(drafter, seed=1, features=features)
    prove_drafter(drafter, features, inputs.to(dtype), dtype)


# what slot k of the block at anchor a sees of context row j, and of slot k2 of the block at anchor a2; window of the layer
def sees_context(j, a, k, window):
    return (j < a) & (window is None or a + k - j < window)


def sees_slot(a2, k2, a, k, window):
    return (a2 == a) & (window is None or (k2 <= k) & (k - k2 < window))


class DenseDrafter(Drafter):
    """Trains under a dense mask of the test's own rule; decodes as the real one does."""

    def __init__(self, shape: Shape, *, context: Callable = sees_context, slot: Callable = sees_slot):
        super().__init__(shape)
        self.rules = context, slot
        self.layers = torch.nn.ModuleList(DenseLayer(self, shape, window) for window in shape.windows)

    def forward(self, features, block_inputs, anchors):
        self.training_anchors = anchors[0], features.shape[1]
        return super().forward(features, block_inputs, anchors)

    def draft(self, new_features, block_inputs, cache):
        self.training_anchors = None
        return super().draft(new_features, block_inputs, cache)

    def mask(self, window: int | None) -> torch.Tensor:
        """[A*B, S + A*B]."""
        anchors, length = self.training_anchors
        context, slot = self.rules
        a = anchors.repeat_interleave(self.shape.block_size)
        k = torch.arange(self.shape.block_size).repeat(len(anchors))
        of_context = context(torch.arange(length), a[:, None], k[:, None], window)
        return torch.cat([of_context, slot(a, k, a[:, None], k[:, None], window)], dim=1)


class DenseLayer(Layer):
    def __init__(self, drafter: DenseDrafter, shape: Shape, window: int | None):
        super().__init__(shape)
        self.drafter, self.window = (drafter,), window  # in a tuple, or torch would call it a submodule

    def forward(self, x, block_rope, context, attend):
        (drafter,) = self.drafter

        def dense(query, context_kv, block_kv):
            key, value = (torch.cat(pair, dim=2) for pair in zip(context_kv, block_kv, strict=True))
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=drafter.mask(self.window), enable_gqa=True
            )

        return super().forward(x, block_rope, context, attend if drafter.training_anchors is None else dense)


FUTURE = "future tokens leak"
NOTHING = "the mask hides everything"
OTHER = "training and decoding disagree"
WRONG_RULES = {
    "the_anchors_own_row_is_visible": (SHAPE, {"context": lambda j, a, k, w: j <= a}, FUTURE),
    "all_rows_are_visible": (SHAPE, {"context": lambda j, a, k, w: (j >= 0) & (a >= 0)}, FUTURE),
    "rows_up_to_the_slot_are_visible": (SHAPE, {"context": lambda j, a, k, w: j < a + k}, FUTURE),
    "blocks_see_each_other": (SHAPE, {"slot": lambda a2, k2, a, k, w: (a2 >= 0) & (a >= 0)}, FUTURE),
    "blocks_see_the_block_before": (SHAPE, {"slot": lambda a2, k2, a, k, w: a2 <= a}, FUTURE),
    "all_context_is_hidden": (SHAPE, {"context": lambda j, a, k, w: (j < 0) & (a >= 0)}, NOTHING),
    "the_newest_row_is_hidden": (SHAPE, {"context": lambda j, a, k, w: j < a - 1}, NOTHING),
    "the_first_row_is_hidden": (SHAPE, {"context": lambda j, a, k, w: (j < a) & ((j > 0) | (a == 1))}, OTHER),
    "the_window_starts_at_the_anchor": (
        SLIDING,
        {"context": lambda j, a, k, w: (j < a) & (w is None or a - j < w)},
        OTHER,
    ),
    "the_window_is_one_too_long": (
        SLIDING,
        {"context": lambda j, a, k, w: (j < a) & (w is None or a + k - j <= w)},
        OTHER,
    ),
    "the_window_is_not_applied": (SLIDING, {"context": lambda j, a, k, w: j < a}, OTHER),
    "a_sliding_layer_is_not_causal_in_the_block": (SLIDING, {"slot": lambda a2, k2, a, k, w: a2 == a}, OTHER),
    "a_full_layer_is_causal_in_the_block": (SHAPE, {"slot": lambda a2, k2, a, k, w: (a2 == a) & (k2 <= k)}, OTHER),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_real_drafter_passes(shape, length):
    prove(Drafter(shape), length)


@pytest.mark.parametrize("shape", [*SHAPES.values(), DEEP], ids=[*SHAPES, "deep"])
def test_the_real_drafter_passes_in_bfloat16_over_float32_weights(shape):
    prove(Drafter(shape), dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_drafter_with_the_right_rule_as_a_dense_mask_passes(shape):
    prove(DenseDrafter(shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, rules, cause", WRONG_RULES.values(), ids=WRONG_RULES)
def test_a_drafter_with_a_wrong_mask_is_refused_with_its_cause(shape, rules, cause, dtype):
    with pytest.raises(ValueError, match=cause):
        prove(DenseDrafter(shape, **rules), dtype=dtype)


class LateRope(Drafter):
    """Decodes with the block one position too far; its context is right."""

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.layers = torch.nn.ModuleList(LateLayer(shape) for _ in range(shape.layers))

    def draft(self, new_features, block_inputs, cache):
        for layer in self.layers:
            layer.late = True
        try:
            return super().draft(new_features, block_inputs, cache)
        finally:
            for layer in self.layers:
                layer.late = False


class LateLayer(Layer):
    late = False

    def forward(self, x, block_rope, context, attend):
        if self.late:
            (cos, sin), (cos_1, sin_1) = block_rope, rope_tables(torch.tensor([1]), SHAPE.head_dim, SHAPE.rope_theta)
            block_rope = cos * cos_1 - sin * sin_1, sin * cos_1 + cos * sin_1
        return super().forward(x, block_rope, context, attend)


class ForgetfulCache(Drafter):
    """Decodes without the context of the calls before."""

    def draft(self, new_features, block_inputs, cache):
        fresh = ContextCache(self.shape.layers)
        fresh.length = cache.length
        result = super().draft(new_features, block_inputs, fresh)
        cache.length = fresh.length
        return result


class NotFinite(Drafter):
    def forward(self, features, block_inputs, anchors):
        hidden = super().forward(features, block_inputs, anchors)
        return torch.where(torch.isfinite(hidden), torch.nan, hidden)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", [LateRope, ForgetfulCache])
def test_a_drafter_that_decodes_otherwise_than_it_trains_is_refused(wrong, dtype):
    with pytest.raises(ValueError, match=OTHER):
        prove(wrong(SHAPE), dtype=dtype)


def test_a_drafter_whose_output_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="output on this run's features is not finite"):
        prove(NotFinite(SHAPE))


def test_the_proofs_change_nothing_of_the_drafter():
    drafter = Drafter(SHAPE)
    prove(drafter)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    features, inputs = material(60)
    prove_drafter(drafter, features, inputs, torch.float32)
    assert all(torch.equal(before[name], tensor) for name, tensor in drafter.state_dict().items())
    assert all(parameter.grad is None for parameter in drafter.parameters())
