"""The drafter against its own decoding, an independent forward written from the spec, and z-lab's checkpoint layout."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from tiny import TINY_SHAPE

from dflash.drafter import (
    ContextCache,
    Drafter,
    check_tensors,
    initialise,
    rope_tables,
    rotate,
)
from dflash.shape import Shape

MIXED = ("sliding_attention", "full_attention", "sliding_attention")
SLIDING = ("sliding_attention",) * 3
SHAPES = {
    "full": TINY_SHAPE,
    "sliding, window in the block": dataclasses.replace(TINY_SHAPE, layer_types=SLIDING, sliding_window=4),
    "sliding, window past the block": dataclasses.replace(TINY_SHAPE, layer_types=SLIDING, sliding_window=9),
    "mixed": dataclasses.replace(TINY_SHAPE, layer_types=MIXED, sliding_window=7),
}
ANCHORS = [5, 8, 9, 17, 30]
CONTEXT = 40
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def random_drafter(
    shape: Shape = TINY_SHAPE, *, dtype: torch.dtype = torch.float64, seed: int = 0, **options
) -> Drafter:
    """Every weight random, norms around one: a norm left out or put in twice shows."""
    drafter = Drafter(shape, **options).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = 0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.copy_(noise + (parameter.dim() == 1))
    return drafter


def random_inputs(
    anchors: list[list[int]],
    shape: Shape = TINY_SHAPE,
    *,
    context: int = CONTEXT,
    dtype: torch.dtype = torch.float64,
    seed: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features [N, S, F], block inputs [N, A, B, H] that all differ, and anchors [N, A]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, dtype=torch.float64, generator=generator).to(dtype)

    samples, count = len(anchors), len(anchors[0])
    features = normal(samples, context, len(shape.target_layer_ids) * shape.width)
    return features, normal(samples, count, shape.block_size, shape.width), torch.tensor(anchors)


def decoded(drafter: Drafter, features: torch.Tensor, block_inputs: torch.Tensor, anchors: list[int]) -> torch.Tensor:
    """Hidden states [A, B, H] of one sample's blocks, drafted one after the other behind a growing cache."""
    cache, committed, blocks = ContextCache(drafter.shape.layers), 0, []
    for index, anchor in enumerate(anchors):
        blocks.append(drafter.draft(features[None, committed:anchor], block_inputs[None, index], cache)[0])
        committed = anchor
        assert cache.length == committed
        assert all(layer is not None and layer[0].shape[2] == layer[1].shape[2] == committed for layer in cache.layers)
    return torch.stack(blocks)


# -- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "tensors"), [(1, 14), (5, 58)])
def test_tensors_are_exactly_those_of_a_z_lab_checkpoint(layers, tensors):
    shape = dataclasses.replace(TINY_SHAPE, layers=layers, layer_types=("full_attention",) * layers)
    expected = {"fc.weight": [32, 96], "hidden_norm.weight": [32], "norm.weight": [32]}
    for layer in range(layers):
        expected |= {
            f"layers.{layer}.input_layernorm.weight": [32],
            f"layers.{layer}.post_attention_layernorm.weight": [32],
            f"layers.{layer}.self_attn.q_proj.weight": [32, 32],
            f"layers.{layer}.self_attn.k_proj.weight": [16, 32],
            f"layers.{layer}.self_attn.v_proj.weight": [16, 32],
            f"layers.{layer}.self_attn.o_proj.weight": [32, 32],
            f"layers.{layer}.self_attn.q_norm.weight": [8],
            f"layers.{layer}.self_attn.k_norm.weight": [8],
            f"layers.{layer}.mlp.gate_proj.weight": [48, 32],
            f"layers.{layer}.mlp.up_proj.weight": [48, 32],
            f"layers.{layer}.mlp.down_proj.weight": [32, 48],
        }
    drafter = Drafter(shape)
    assert {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()} == expected
    assert len(expected) == tensors == 3 + 11 * layers
    assert list(drafter.buffers()) == []
    assert all(parameter.requires_grad for parameter in drafter.parameters())


# -- training is decoding --------------------------------------------------------------------------------------------


@every_shape
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)], ids=["float32", "float64"]
)
def test_training_forward_equals_incremental_decoding(shape, dtype, tolerance):
    drafter = random_drafter(shape, dtype=dtype)
    features, block_inputs, anchors = random_inputs([ANCHORS], shape, dtype=dtype)
    trained = drafter(features, block_inputs, anchors)[0]
    drafted = decoded(drafter, features[0], block_inputs[0], ANCHORS)
    # relative to hidden states of size one: the final norm scales them
    torch.testing.assert_close(trained, drafted, rtol=tolerance, atol=tolerance)


@every_shape
def test_every_sample_of_a_batch_equals_its_own_decoding(shape):
    drafter = random_drafter(shape)
    rows = [ANCHORS, [1, 2, 39, 39, 39], [7, 7, 7, 7, 7]]  # two rows with fewer anchors repeat their last
    features, block_inputs, anchors = random_inputs(rows, shape)
    trained = drafter(features, block_inputs, anchors)
    for n, row in enumerate(rows):
        for a, anchor in enumerate(row):
            alone = decoded(drafter, features[n], block_inputs[n, a : a + 1], [anchor])[0]
            torch.testing.assert_close(trained[n, a], alone, rtol=1e-13, atol=1e-13)


def test_a_shorter_block_drafts_what_a_full_layer_never_saw_only_if_it_is_causal():
    full, sliding = TINY_SHAPE, SHAPES["sliding, window past the block"]
    features, block_inputs, _ = random_inputs([[20]])
    for shape, same in ((full, False), (sliding, True)):
        drafter = random_drafter(shape)
        long = decoded(drafter, features[0], block_inputs[0], [20])[0, :3]
        short = decoded(drafter, features[0], block_inputs[0, :, :3], [20])[0]
        assert torch.allclose(long, short, rtol=1e-12, atol=1e-12) is same


# -- who sees what ---------------------------------------------------------------------------------------------------


@every_shape
def test_gradient_reaches_features_before_the_anchor_and_within_the_window_and_no_others(shape):
    drafter = random_drafter(shape)
    features, block_inputs, anchors = random_inputs([ANCHORS, [2, 3, 4, 20, 39]], shape)
    features.requires_grad_()
    hidden = drafter(features, block_inputs, anchors)
    for n in range(2):
        for a, anchor in enumerate(anchors[n].tolist()):
            (gradient,) = torch.autograd.grad(
                hidden[n, a].square().sum() + hidden[n, a].sum(), features, retain_graph=True
            )
            reached = gradient.abs().amax(-1) > 0
            first = 0 if "full_attention" in shape.layer_types else max(0, anchor + 1 - (shape.sliding_window or 0))
            expected = torch.zeros(2, CONTEXT, dtype=torch.bool)
            expected[n, first:anchor] = True
            assert torch.equal(reached, expected), f"sample {n}, anchor {anchor}"


@every_shape
def test_gradient_reaches_no_other_block_and_in_a_causal_layer_no_later_slot(shape):
    drafter = random_drafter(shape)
    features, block_inputs, anchors = random_inputs([ANCHORS, [2, 3, 4, 20, 39]], shape)
    block_inputs.requires_grad_()
    hidden = drafter(features, block_inputs, anchors)
    for n in range(2):
        for a in range(len(ANCHORS)):
            for slot in range(shape.block_size):
                (gradient,) = torch.autograd.grad(hidden[n, a, slot].square().sum(), block_inputs, retain_graph=True)
                reached = gradient.abs().amax(-1) > 0
                own = reached[n, a].clone()
                reached[n, a] = False
                assert not reached.any()
                if "full_attention" in shape.layer_types:
                    assert own.all()
                else:
                    assert own[: slot + 1].all() or (shape.sliding_window or 0) < shape.block_size
                    assert own[slot]
                    assert not own[slot + 1 :].any()


@every_shape
def test_permuted_samples_and_blocks_permute_the_outputs(shape):
    drafter = random_drafter(shape)
    features, block_inputs, anchors = random_inputs([[5, 8, 8, 8, 30], ANCHORS, [1, 2, 3, 20, 39]], shape)
    hidden = drafter(features, block_inputs, anchors)
    order = torch.tensor([2, 0, 1])
    permuted = drafter(features[order], block_inputs[order], anchors[order])
    torch.testing.assert_close(permuted, hidden[order], rtol=1e-13, atol=1e-13)
    # three different blocks of the first sample stand at the same anchor
    order = torch.tensor([0, 3, 1, 2, 4])
    permuted = drafter(features[:1], block_inputs[:1, order], anchors[:1])
    torch.testing.assert_close(permuted, hidden[:1, order], rtol=1e-13, atol=1e-13)
    subset = torch.tensor([0, 3])
    alone = drafter(features[1:2], block_inputs[1:2, subset], anchors[1:2, subset])
    torch.testing.assert_close(alone, hidden[1:2, subset], rtol=1e-13, atol=1e-13)


@every_shape
def test_padding_of_the_context_changes_nothing(shape):
    drafter = random_drafter(shape)
    rows = [ANCHORS, [2, 3, 11, 11, 11]]
    features, block_inputs, anchors = random_inputs(rows, shape)
    short = drafter(features[1:, :12], block_inputs[1:], anchors[1:])  # a sample of 12 tokens alone
    garbage = features.clone()
    garbage[1, 12:] = 1e6
    garbage = torch.cat(
        [garbage, torch.full((2, 25, features.shape[-1]), -1e6, dtype=features.dtype)], dim=1
    ).requires_grad_()
    padded = drafter(garbage, block_inputs, anchors)
    torch.testing.assert_close(padded[1:], short, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(padded[:1], drafter(features[:1], block_inputs[:1], anchors[:1]), rtol=1e-13, atol=1e-13)
    (gradient,) = torch.autograd.grad(padded.square().sum(), garbage)
    assert gradient[1, 12:].abs().max() == 0
    assert gradient[:, CONTEXT:].abs().max() == 0


# -- an independent forward ------------------------------------------------------------------------------------------


def independent(
    state: dict[str, np.ndarray], shape: Shape, features: np.ndarray, block_inputs: np.ndarray, anchor: int
) -> np.ndarray:
    """One block [B, H] of one sample (features [S, F]), in NumPy and float64 throughout."""
    size, head_dim = shape.block_size, shape.head_dim

    def normed(x, name):
        return state[name] * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def turned(x, positions):  # [T, heads, D]: channel i and channel i + D/2 are one complex number
        pairs = x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]
        speed = shape.rope_theta ** (-2 * np.arange(head_dim // 2) / head_dim)
        pairs = pairs * np.exp(1j * positions[:, None, None] * speed)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    def heads(x, name):
        return (x @ state[name].T).reshape(len(x), -1, head_dim)

    block_positions = anchor + np.arange(size)
    positions = np.concatenate([np.arange(anchor), block_positions])
    context = normed(features[:anchor] @ state["fc.weight"].T, "hidden_norm.weight")
    x = block_inputs
    for layer, kind in enumerate(shape.layer_types):
        at = f"layers.{layer}."
        own = normed(x, at + "input_layernorm.weight")
        rows = np.concatenate([context, own])
        query = turned(
            normed(heads(own, at + "self_attn.q_proj.weight"), at + "self_attn.q_norm.weight"), block_positions
        )
        key = turned(normed(heads(rows, at + "self_attn.k_proj.weight"), at + "self_attn.k_norm.weight"), positions)
        value = heads(rows, at + "self_attn.v_proj.weight")
        distance = block_positions[:, None] - positions[None, :]
        visible = np.ones_like(distance, dtype=bool)
        if kind == "sliding_attention":
            visible = (distance >= 0) & (distance < shape.sliding_window)
        attended = np.empty_like(query)
        for head in range(shape.heads):
            of = head // (shape.heads // shape.kv_heads)
            weight = np.where(visible, np.exp(query[:, head] @ key[:, of].T / math.sqrt(head_dim)), 0.0)
            attended[:, head] = weight / weight.sum(-1, keepdims=True) @ value[:, of]
        x = x + attended.reshape(size, -1) @ state[at + "self_attn.o_proj.weight"].T
        own = normed(x, at + "post_attention_layernorm.weight")
        gate = own @ state[at + "mlp.gate_proj.weight"].T
        up = own @ state[at + "mlp.up_proj.weight"].T
        x = x + gate / (1 + np.exp(-gate)) * up @ state[at + "mlp.down_proj.weight"].T
    return normed(x, "norm.weight")


WIDER_HEADS = dataclasses.replace(TINY_SHAPE, heads=3, kv_heads=3, head_dim=14)
ONE_KEY_HEAD = dataclasses.replace(TINY_SHAPE, heads=6, kv_heads=1, head_dim=4, layer_types=MIXED, sliding_window=7)
INDEPENDENT = SHAPES | {
    "one key head per head, wider than the width": WIDER_HEADS,
    "one key head for six": ONE_KEY_HEAD,
}


@pytest.mark.parametrize("shape", INDEPENDENT.values(), ids=INDEPENDENT)
def test_forward_equals_an_independent_one_written_from_the_spec(shape):
    drafter = random_drafter(shape)
    state = {name: tensor.detach().numpy() for name, tensor in drafter.state_dict().items()}
    rows = [ANCHORS, [1, 2, 39, 39, 39]]
    features, block_inputs, anchors = random_inputs(rows, shape)
    ours = drafter(features, block_inputs, anchors).detach().numpy()
    for n, row in enumerate(rows):
        for a, anchor in enumerate(row):
            theirs = independent(state, shape, features[n].numpy(), block_inputs[n, a].numpy(), anchor)
            # the drafter's angles are float32: at most 45 rad times 6e-8, twice
            np.testing.assert_allclose(ours[n, a], theirs, rtol=0, atol=1e-5)


# -- rotary embedding ------------------------------------------------------------------------------------------------


def test_rope_tables_are_float32_and_right_at_far_positions():
    positions = torch.tensor([[0, 1, 7, 4095, 40_000]])
    cos, sin = rope_tables(positions, 16, 1e6)
    angles = np.outer(positions[0].numpy(), 1e6 ** (-np.arange(0, 16, 2) / 16))
    angles = np.concatenate([angles, angles], axis=-1)
    assert cos.dtype == sin.dtype == torch.float32
    # two roundings, of the frequency and of the angle, each 6e-8 of an angle of up to 40,000
    tolerance = 1.3e-7 * (1 + angles)
    assert (np.abs(cos[0].numpy() - np.cos(angles)) < tolerance).all()
    assert (np.abs(sin[0].numpy() - np.sin(angles)) < tolerance).all()


def test_a_bfloat16_drafter_turns_by_float32_angles():
    shape = dataclasses.replace(TINY_SHAPE, max_positions=8192)
    wide, narrow = (
        random_drafter(shape, dtype=torch.float32),
        random_drafter(shape, dtype=torch.float32).to(torch.bfloat16),
    )
    position = torch.tensor([[3, 4000]])
    for left, right in zip(
        rope_tables(position, 8, 1e4), rope_tables(position, narrow.shape.head_dim, 1e4), strict=True
    ):
        assert left.dtype == right.dtype == torch.float32
        assert torch.equal(left, right)
    wide.load_state_dict(narrow.state_dict())  # the rounded weights, in float32
    x = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rope = rope_tables(position, 8, 1e4)
    for of in ("queries", "keys_values"):
        for layer in range(3):
            exact = getattr(wide.layers[layer].self_attn, of)(x.float(), rope)
            rounded = getattr(narrow.layers[layer].self_attn, of)(x, rope)
            for theirs, ours in zip(exact, rounded, strict=True):
                # a bfloat16 frequency is off by up to 0.4 %, at position 4000 a whole turn and more
                torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.05)


def test_rotation_keeps_length_and_makes_products_depend_on_distance_alone():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 1, 1, 8, dtype=torch.float64, generator=generator) for _ in range(2))

    def turned(tensor, position):
        return rotate(tensor, rope_tables(torch.tensor([[position]]), 8, 1e4))

    torch.testing.assert_close(turned(x, 77).norm(), x.norm(), rtol=1e-6, atol=0)
    near, far = (turned(x, 5) * turned(y, 2)).sum(), (turned(x, 105) * turned(y, 102)).sum()
    torch.testing.assert_close(near, far, rtol=0, atol=1e-4)
    assert (near - (turned(x, 5) * turned(y, 3)).sum()).abs() > 1e-2


# -- activation checkpointing ----------------------------------------------------------------------------------------


@every_shape
def test_activation_checkpointing_gives_identical_gradients(shape):
    gradients = []
    for activation_checkpointing in (False, True):
        drafter = random_drafter(shape, activation_checkpointing=activation_checkpointing)
        features, block_inputs, anchors = random_inputs([ANCHORS], shape)
        drafter(features, block_inputs, anchors).pow(3).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in drafter.named_parameters()})
    for name, plain in gradients[0].items():
        assert plain is not None
        assert plain.abs().max() > 0
        assert torch.equal(plain, gradients[1][name]), name


# -- initialisation --------------------------------------------------------------------------------------------------


def lopsided_features(count: int = 400, channels: int = 96) -> torch.Tensor:
    """Features [T, F] as a target gives them: a few massive channels, and a mean of the size of the deviation."""
    generator = torch.Generator().manual_seed(5)
    deviation = torch.rand(channels, dtype=torch.float64, generator=generator) + 0.5
    deviation[[3, 40]] *= 200
    mean = deviation * torch.randn(channels, dtype=torch.float64, generator=generator)
    return mean + deviation * torch.randn(count, channels, dtype=torch.float64, generator=generator)


def test_plain_initialisation_is_normal_and_ones():
    drafter = Drafter(TINY_SHAPE)
    initialise(drafter, seed=3, features=None)
    matrices = {name: tensor for name, tensor in drafter.state_dict().items() if tensor.dim() == 2}
    assert all(bool((tensor == 1).all()) for name, tensor in drafter.state_dict().items() if name not in matrices)
    values = torch.cat([tensor.flatten() for tensor in matrices.values()])
    # 20,000 draws: the standard error of the deviation is 0.5 %
    assert values.std().item() == pytest.approx(0.02, rel=0.03)
    assert abs(values.mean().item()) < 1e-3
    assert len(values.unique()) > 0.99 * len(values), "tensors are drawn one after the other, not copies"


def test_initialisation_depends_on_its_seed_alone():
    def state(seed, *, global_seed=0, dtype=torch.float32):
        torch.manual_seed(global_seed)
        drafter = random_drafter(seed=global_seed, dtype=dtype)
        before = torch.get_rng_state()
        initialise(drafter, seed=seed, features=lopsided_features())
        assert torch.equal(torch.get_rng_state(), before), "the global generator is left alone"
        return drafter.state_dict()

    first, second, other, wide = state(1), state(1, global_seed=9), state(2), state(1, dtype=torch.float64)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        torch.testing.assert_close(tensor.double(), wide[name], rtol=1e-6, atol=1e-9)
        assert tensor.dim() == 1 or not torch.equal(tensor, other[name]), name


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="compares weights drawn for a GPU with those for the CPU: needs a GPU"
)
def test_initialisation_is_the_same_on_a_gpu():
    states = []
    for device in ("cpu", "cuda"):
        drafter = Drafter(TINY_SHAPE).to(device)
        initialise(drafter, seed=1, features=lopsided_features().to(device))
        states.append(drafter.state_dict())
    assert all(torch.equal(tensor, states[1][name].cpu()) for name, tensor in states[0].items())


def test_scaled_initialisation_fits_fc_to_the_features_and_nothing_else():
    features = lopsided_features()
    plain, scaled = Drafter(TINY_SHAPE).double(), Drafter(TINY_SHAPE).double()
    initialise(plain, seed=1, features=None)
    initialise(scaled, seed=1, features=features)
    for name, tensor in scaled.state_dict().items():
        if name != "fc.weight":
            assert torch.equal(tensor, plain.state_dict()[name]), name
    rows, mean = scaled.fc.weight.detach(), features.mean(0)
    projected = features @ rows.T
    assert (mean @ rows.T).abs().max() < 1e-12 * mean.norm(), "the mean is invisible"
    assert projected.mean(0).abs().max() < 1e-10
    # a row is a random mix of channels of one size: 0.02 * sqrt(96). Unscaled, the two massive ones alone make it 20 times that.
    assert (features @ plain.fc.weight.detach().T).std().item() > 15 * 0.02 * math.sqrt(96)
    assert projected.std().item() == pytest.approx(0.02 * math.sqrt(96), rel=0.3)


# -- a state from outside -------------------------------------------------------------------------------------------


def test_a_checked_state_passes_whatever_its_dtype():
    check_tensors(random_drafter(dtype=torch.bfloat16).state_dict(), TINY_SHAPE, what="state")


NOT_A_NUMBER = torch.full((32,), float("nan"))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"layers.1.mlp.up_proj.weight": None}, ["layers.1.mlp.up_proj.weight", "missing"]),
        ({"embed_tokens.weight": torch.zeros(50, 32)}, ["embed_tokens.weight", "not part"]),
        ({"fc.weight": torch.zeros(32, 64)}, ["fc.weight", "[32, 64]", "[32, 96]"]),
        ({"norm.weight": NOT_A_NUMBER}, ["norm.weight", "not finite"]),
        ({"hidden_norm.weight": 1 / torch.zeros(32)}, ["hidden_norm.weight", "not finite"]),
    ],
    ids=["missing", "stray", "misshapen", "not a number", "infinite"],
)
def test_a_state_of_another_drafter_is_refused_by_the_tensors_name(tensors, words):
    state = random_drafter(dtype=torch.float32).state_dict() | tensors
    with pytest.raises(ValueError, match="^state") as refusal:
        check_tensors({name: tensor for name, tensor in state.items() if tensor is not None}, TINY_SHAPE, what="state")
    assert all(word in str(refusal.value) for word in words)
    assert "\n" not in str(refusal.value)
