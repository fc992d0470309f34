"""Proofs before the first step, in seconds: what goes wrong here raises no error later and shows a good loss.

They run on this run's own drafter, features and device. (`Target.prove` has shown that the features are the named layers'.)
"""

import torch

from dflash.drafter import ContextCache, Drafter

# relative to the largest value: float32 sums in another order differ by 1e-6; bfloat16 keeps 8 bits
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}
# Root mean square of the block's inputs here. As large as real ones they drown what attention adds: a wrong row then changes the
# result by 0.3 to 2 %, which bfloat16 hides; like this by 30 % and more, against 2 % of bfloat16's own (5 layers, width 1024).
INPUT_RMS = 0.01
CONTEXT_TOKENS = 48  # of one sample that the proofs look at: enough for four overlapping blocks, cheap on a CPU


def prove_drafter(drafter: Drafter, features: torch.Tensor, block_inputs: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError when a block sees what it will not have at inference, or training and decoding disagree.

    features [S, F] of one sample; block_inputs [B, H], embedded tokens of a block; `dtype` of the computation.
    """
    features = features[:CONTEXT_TOKENS].to(dtype)
    length, block_size = len(features), len(block_inputs)
    # neighbours closer than a block overlap; the last block reaches beyond the context, as the tail of a sample does
    anchors = sorted({1, min(3, length - 1), length // 2, length - 1})
    small = block_inputs.float() * (INPUT_RMS / block_inputs.float().square().mean().sqrt())
    inputs = small.to(dtype).expand(1, len(anchors), block_size, -1).clone()
    with _autocast(features.device, dtype):
        _prove_no_leak(drafter, features, inputs, anchors)
        _prove_decoding(drafter, features, inputs, anchors, dtype)


def _prove_no_leak(drafter: Drafter, features: torch.Tensor, inputs: torch.Tensor, anchors: list[int]) -> None:
    features = features[None].clone().requires_grad_()
    inputs = inputs.requires_grad_()
    hidden = drafter(features, inputs, torch.tensor([anchors]))
    if not hidden.isfinite().all():
        raise ValueError(
            "the drafter's output on this run's features is not finite; do not train with this installation"
        )
    for index, anchor in enumerate(anchors):
        # a projection that no norm undoes: the sum of squares of a normed vector is constant
        value = (hidden[0, index] * torch.linspace(-1, 1, hidden.shape[-1], device=hidden.device)).sum()
        of_features, of_inputs = torch.autograd.grad(value, (features, inputs), retain_graph=True)
        others = [i for i in range(len(anchors)) if i != index]
        if of_features[0, anchor:].any() or of_inputs[0, others].any():
            raise ValueError(
                f"the block at anchor {anchor} depends on features at or after it, or on another block: future tokens leak; "
                "do not train with this installation"
            )
        if not of_features[0, anchor - 1].any() or not of_inputs[0, index].any():
            raise ValueError(
                f"the block at anchor {anchor} does not depend on its context or itself: the mask hides everything"
            )


@torch.no_grad()
def _prove_decoding(
    drafter: Drafter, features: torch.Tensor, inputs: torch.Tensor, anchors: list[int], dtype: torch.dtype
) -> None:
    trained = drafter(features[None], inputs, torch.tensor([anchors]))
    cache = ContextCache(drafter.shape.layers)
    for index, anchor in enumerate(anchors):
        decoded = drafter.draft(features[None, cache.length : anchor], inputs[:, index], cache)
        difference = float((decoded[0] - trained[0, index]).abs().max() / trained.abs().max())
        if not difference <= TOLERANCE[dtype]:
            raise ValueError(
                f"training and decoding disagree at anchor {anchor} by {difference:.1e}, {TOLERANCE[dtype]:.0e} is allowed: "
                "it would be served as another model; do not train with this installation"
            )


def _autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
