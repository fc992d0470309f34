"""The drafter's architecture in numbers, resolved from configuration and target; without torch, so that anyone may ask."""

import dataclasses
from collections.abc import Sequence

from dflash.config import DrafterConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The architecture, resolved: what a checkpoint records and a resume must agree with."""

    width: int
    vocabulary: int
    target_layers: int
    target_layer_ids: tuple[int, ...]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    rope_theta: float
    max_positions: int

    @property
    def windows(self) -> list[int | None]:
        """Per layer: the window of a sliding layer, None for a full one."""
        return [self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types]


def layer_ids(target_layers: int, captured: int) -> list[int]:
    """The ids of the target layers to capture, ascending, 0-based: id i means the output of decoder layer i.

    The paper's rule (arXiv 2602.06036): evenly from the second to the third-to-last layer,
    round(1 + i (N - 4) / (K - 1)), halves to even as Python rounds; N // 2 for a single one.
    Where a small target has fewer than K layers in that range, they are spread over 0 .. N-2 instead.
    The last layer is never among them: some engines hand out its state before the final norm, others after it.
    """
    if captured < 1:
        raise ValueError(f"target.captured_layers={captured}: at least one layer must feed the drafter")
    if target_layers < 2:
        raise ValueError(
            f"target: it has {target_layers} decoder layer; at least 2 are needed, because the last layer's output "
            "cannot be captured (engines differ on whether it is taken before or after the final norm)"
        )
    if captured > target_layers - 1:
        raise ValueError(
            f"target.captured_layers={captured}: this target of {target_layers} layers has {target_layers - 1} to "
            f"capture (0 to {target_layers - 2}, never the last); lower it"
        )
    if captured == 1:
        return [min(target_layers // 2, target_layers - 2)]
    first, last = (1, target_layers - 3) if captured <= target_layers - 3 else (0, target_layers - 2)
    return [round(first + i * (last - first) / (captured - 1)) for i in range(captured)]


def check_layer_ids(ids: Sequence[int], target_layers: int) -> list[int]:
    """`ids` as a list, if they are distinct, ascending and within 0 .. N-2; else a ValueError with the range."""
    wanted = f"give distinct, ascending ids within 0 to {target_layers - 2}"
    value = f"target.layer_ids={list(ids)}"
    if not ids:
        raise ValueError(f"{value}: empty; {wanted}")
    for layer_id in ids:
        if layer_id == target_layers - 1:
            raise ValueError(
                f"{value}: {layer_id} is the last layer, which engines capture before or after the final norm; {wanted}"
            )
        if not 0 <= layer_id < target_layers:
            raise ValueError(f"{value}: this target of {target_layers} layers has no layer {layer_id}; {wanted}")
    if list(ids) != sorted(set(ids)):
        raise ValueError(f"{value}: not ascending or not distinct; {wanted}")
    return list(ids)


def chosen_layers(target_layers: int, explicit: Sequence[int] | None, captured: int) -> list[int]:
    """The ids that a configuration names, checked, or those of the paper's rule. Raises ValueError."""
    return layer_ids(target_layers, captured) if explicit is None else check_layer_ids(explicit, target_layers)


def resolve_shape(
    config: DrafterConfig,
    *,
    target_config,
    width: int,
    vocabulary: int,
    target_layers: int,
    target_layer_ids: list[int],
    mask_token_id: int,
) -> Shape:
    """The drafter's architecture: what the configuration leaves open comes from the target's text config. Raises ValueError."""
    heads = config.heads or target_config.num_attention_heads
    kv_heads = config.kv_heads or (min(heads, getattr(target_config, "num_key_value_heads", None) or heads))
    head_dim = config.head_dim or getattr(target_config, "head_dim", None) or width // heads
    intermediate = config.intermediate_size or getattr(target_config, "intermediate_size", None) or 4 * width
    if heads % kv_heads:
        raise ValueError(f"drafter.heads={heads} is not a multiple of drafter.kv_heads={kv_heads}; change one of them")
    if head_dim % 2:
        raise ValueError(f"drafter.head_dim={head_dim} is odd; rotary embedding turns pairs, give an even width")
    return Shape(
        width=width,
        vocabulary=vocabulary,
        target_layers=target_layers,
        target_layer_ids=tuple(target_layer_ids),
        layers=config.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        block_size=config.block_size,
        mask_token_id=mask_token_id,
        layer_types=tuple(config.layer_types or ["full_attention"] * config.layers),
        sliding_window=config.sliding_window,
        rope_theta=config.rope_theta,
        max_positions=target_config.max_position_embeddings,
    )


def parameter_count(shape: Shape) -> int:
    """Trainable parameters of a drafter of this shape; nothing is allocated, however large it is."""
    per_head = shape.heads + shape.kv_heads
    attention = 2 * shape.width * per_head * shape.head_dim + 2 * shape.head_dim
    layer = attention + 3 * shape.width * shape.intermediate_size + 2 * shape.width
    return len(shape.target_layer_ids) * shape.width**2 + 2 * shape.width + shape.layers * layer
