"""The drafter's architecture in numbers: what comes from the target, what the configuration says, what cannot be."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
from tiny import TINY_SHAPE

from dflash.config import DrafterConfig
from dflash.shape import Shape, check_layer_ids, layer_ids, parameter_count, resolve_shape

# -- the captured layers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target_layers", "captured", "ids"),
    [
        (28, 5, [1, 7, 13, 19, 25]),
        (30, 5, [1, 8, 14, 20, 27]),  # 7.5 and 20.5 both go to the even neighbour
        (32, 5, [1, 8, 15, 22, 29]),
        (34, 5, [1, 8, 16, 24, 31]),
        (36, 5, [1, 9, 17, 25, 33]),
        (40, 5, [1, 10, 19, 28, 37]),
        (48, 5, [1, 12, 23, 34, 45]),
        (62, 5, [1, 16, 30, 44, 59]),
        (64, 5, [1, 16, 31, 46, 61]),
        (80, 5, [1, 20, 39, 58, 77]),
        (40, 8, [1, 6, 11, 16, 22, 27, 32, 37]),
        (60, 6, [1, 12, 23, 35, 46, 57]),
        (36, 1, [18]),
        (8, 5, [1, 2, 3, 4, 5]),
        (6, 5, [0, 1, 2, 3, 4]),  # the rule's range 1..3 is too short for 5
        (4, 2, [0, 2]),
        (4, 3, [0, 1, 2]),
        (4, 1, [2]),
        (3, 2, [0, 1]),
        (3, 1, [1]),
        (2, 1, [0]),  # N // 2 would be the last layer
    ],
)
def test_layer_ids_are_those_of_the_papers_rule_and_never_the_last(target_layers, captured, ids):
    assert layer_ids(target_layers, captured) == ids


def test_layer_ids_are_always_distinct_ascending_and_below_the_last():
    for target_layers in range(2, 100):
        for captured in range(1, target_layers):
            ids = layer_ids(target_layers, captured)
            assert len(ids) == captured
            assert check_layer_ids(ids, target_layers) == ids


@pytest.mark.parametrize(
    ("target_layers", "captured", "message"),
    [
        (1, 1, "before or after the final norm"),
        (4, 4, "3 to capture (0 to 2, never the last)"),
        (2, 5, "1 to capture (0 to 0, never the last)"),
        (28, 0, "at least one layer"),
    ],
)
def test_too_many_layers_for_a_small_target_are_refused(target_layers, captured, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        layer_ids(target_layers, captured)
    assert "\n" not in str(refusal.value)


# -- the shape -------------------------------------------------------------------------------------------------------


def resolved(config: DrafterConfig, **target) -> Shape:
    of_target = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 100,
        "max_position_embeddings": 512,
    } | target
    return resolve_shape(
        config,
        target_config=SimpleNamespace(**{name: value for name, value in of_target.items() if value is not None}),
        width=64,
        vocabulary=300,
        target_layers=8,
        target_layer_ids=[1, 3, 5],
        mask_token_id=7,
    )


def test_what_the_configuration_leaves_open_comes_from_the_target():
    shape = resolved(DrafterConfig(layers=2, block_size=8))
    assert (shape.width, shape.vocabulary, shape.target_layers, shape.target_layer_ids) == (64, 300, 8, (1, 3, 5))
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate_size, shape.max_positions) == (
        8,
        2,
        16,
        100,
        512,
    )
    assert (shape.layers, shape.block_size, shape.mask_token_id, shape.sliding_window) == (2, 8, 7, None)
    assert shape.layer_types == ("full_attention",) * 2
    assert shape.windows == [None, None]


def test_a_target_config_without_the_optional_fields_resolves():
    shape = resolved(DrafterConfig(layers=1), num_key_value_heads=None, head_dim=None, intermediate_size=None)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate_size) == (8, 8, 8, 256)


def test_what_the_configuration_sets_wins_over_the_target():
    config = DrafterConfig(
        layers=2,
        heads=6,
        kv_heads=3,
        head_dim=10,
        intermediate_size=20,
        rope_theta=5e5,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=9,
    )
    shape = resolved(config)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate_size, shape.rope_theta) == (
        6,
        3,
        10,
        20,
        5e5,
    )
    assert shape.windows == [9, None]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DrafterConfig(heads=6, kv_heads=4), ["drafter.heads=6", "drafter.kv_heads=4"]),
        (DrafterConfig(heads=3), ["drafter.heads=3", "drafter.kv_heads=2"]),
        (DrafterConfig(head_dim=15), ["drafter.head_dim=15"]),
    ],
)
def test_heads_that_cannot_be_are_refused(config, words):
    with pytest.raises(ValueError, match=r"^drafter\.head") as refusal:
        resolved(config)
    assert all(word in str(refusal.value) for word in words)
    assert "\n" not in str(refusal.value)


def test_the_drafter_of_qwen3_8b_has_about_a_billion_parameters():
    shape = dataclasses.replace(
        TINY_SHAPE,
        width=4096,
        target_layer_ids=(1, 9, 17, 25, 33),
        layers=5,
        layer_types=("full_attention",) * 5,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate_size=12_288,
    )
    attention, mlp = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 2 * 128, 3 * 4096 * 12_288
    assert parameter_count(shape) == 5 * 4096 * 4096 + 2 * 4096 + 5 * (attention + mlp + 2 * 4096)
    assert 1.04e9 < parameter_count(shape) < 1.06e9
