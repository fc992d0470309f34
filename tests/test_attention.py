"""What a slot sees, against a dense softmax written from the rule's words alone."""

import math

import pytest
import torch

from dflash.attention import CHUNK_SLOTS, BlockAttention, _flex

# None: a full layer. Else a sliding one: narrower than a block, wider than one, wider than all context, itself alone.
WINDOWS = [None, 3, 11, 1000, 1]
OVERLAPPING = [[5, 6, 8, 17, 30, 39], [0, 1, 12, 12, 12, 12]]  # the second row has three anchors and repeats its last


def inputs(anchors, *, block_size, context_length, heads=4, kv_heads=2, head_dim=8, seed=0):
    """Random queries, context keys and values, block keys and values, float64 and ready for gradients."""
    generator = torch.Generator().manual_seed(seed)
    samples, slots = len(anchors), len(anchors[0]) * block_size
    sizes = [(heads, slots)] + [(kv_heads, context_length)] * 2 + [(kv_heads, slots)] * 2
    return [
        torch.randn(samples, count, length, head_dim, dtype=torch.float64, generator=generator).requires_grad_()
        for count, length in sizes
    ]


def attention_over(
    anchors, *, block_size, context_length, query_groups=2, device="cpu", dtype=torch.float64
) -> BlockAttention:
    return BlockAttention(
        torch.tensor(anchors),
        block_size=block_size,
        context_length=context_length,
        query_groups=query_groups,
        device=torch.device(device),
        dtype=dtype,
    )


def sees(key: int, query: int, anchors: list[int], *, block_size: int, context_length: int, window: int | None) -> bool:
    """The spec's sections 2.3 and 4.3, one pair at a time; keys are the context, then block after block."""
    block, slot = divmod(query, block_size)
    position = anchors[block] + slot
    if key < context_length:
        return key < anchors[block] and (window is None or position - key < window)
    key_block, key_slot = divmod(key - context_length, block_size)
    if key_block != block:
        return False
    return window is None or (key_slot <= slot and slot - key_slot < window)


def dense(query, context_key, context_value, block_key, block_value, anchors, *, block_size, context_length, window):
    """Softmax over every key with the invisible ones at minus infinity, one query head at a time."""
    samples, heads, slots, head_dim = query.shape
    keys, values = torch.cat([context_key, block_key], 2), torch.cat([context_value, block_value], 2)
    rule = {"block_size": block_size, "context_length": context_length, "window": window}
    output = []
    for n in range(samples):
        visible = torch.tensor(
            [[sees(key, slot, anchors[n], **rule) for key in range(context_length + slots)] for slot in range(slots)]
        )
        for head in range(heads):
            of = head * keys.shape[1] // heads  # neighbouring query heads share a key head
            scores = query[n, head] @ keys[n, of].T / math.sqrt(head_dim)
            output.append(torch.softmax(scores.masked_fill(~visible, -math.inf), -1) @ values[n, of])
    return torch.stack(output).unflatten(0, (samples, heads))


def assert_equals_dense(anchors, *, block_size, context_length, window, heads=4, kv_heads=2):
    tensors = inputs(anchors, block_size=block_size, context_length=context_length, heads=heads, kv_heads=kv_heads)
    query, context_key, context_value, block_key, block_value = tensors
    attention = attention_over(
        anchors, block_size=block_size, context_length=context_length, query_groups=heads // kv_heads
    )
    ours = attention(query, (context_key, context_value), (block_key, block_value), window)
    theirs = dense(*tensors, anchors, block_size=block_size, context_length=context_length, window=window)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for own, their in zip(
        torch.autograd.grad(ours, tensors, upstream), torch.autograd.grad(theirs, tensors, upstream), strict=True
    ):
        torch.testing.assert_close(own, their, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", WINDOWS)
def test_equals_a_dense_softmax_for_overlapping_and_repeated_anchors(window):
    assert_equals_dense(OVERLAPPING, block_size=6, context_length=40, window=window)


@pytest.mark.parametrize("window", [None, 20])
def test_equals_a_dense_softmax_across_chunk_boundaries(window):
    anchors = [list(range(3, 63, 3)), [2] + [50] * 19]
    assert 2 * CHUNK_SLOTS < 20 * 16, "three chunks at least, or this test crosses no boundary"
    assert_equals_dense(anchors, block_size=16, context_length=64, window=window, heads=2, kv_heads=1)


@pytest.mark.parametrize("window", [None, 4])
def test_a_block_larger_than_a_chunk_equals_a_dense_softmax(window):
    assert_equals_dense([[2, 9]], block_size=CHUNK_SLOTS + 7, context_length=12, window=window, heads=2, kv_heads=2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (4, 1)])
def test_query_heads_share_key_heads_as_a_dense_softmax_does(heads, kv_heads):
    assert_equals_dense(OVERLAPPING, block_size=4, context_length=40, window=None, heads=heads, kv_heads=kv_heads)


def test_a_layer_after_another_reuses_the_mask_of_its_own_window():
    tensors = inputs(OVERLAPPING, block_size=6, context_length=40)
    query, context, block = tensors[0], tuple(tensors[1:3]), tuple(tensors[3:])
    shared = attention_over(OVERLAPPING, block_size=6, context_length=40)
    for window in (None, 4, 9, None, 4):
        alone = attention_over(OVERLAPPING, block_size=6, context_length=40)
        assert torch.equal(shared(query, context, block, window), alone(query, context, block, window))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("anchors", "block_size"), [(OVERLAPPING, 6), ([list(range(3, 63, 3)), [2] + [50] * 19], 16)])
def test_flex_forward_equals_the_chunked_one(anchors, block_size, window):
    context_length = 64
    with torch.no_grad():
        tensors = [
            tensor.float()
            for tensor in inputs(anchors, block_size=block_size, context_length=context_length, head_dim=16)
        ]
        query, context, block = tensors[0], tuple(tensors[1:3]), tuple(tensors[3:])
        attention = attention_over(anchors, block_size=block_size, context_length=context_length, dtype=torch.float32)
        chunked = attention(query, context, block, window)
        flex = _flex(query, context, block, attention._block_mask(window))
    torch.testing.assert_close(flex, chunked, rtol=1e-5, atol=1e-5)


def test_flex_skips_most_of_a_long_samples_mask():
    anchors = [list(range(16, 1040, 16))]  # 64 blocks of 16 over 1,040 tokens
    full = attention_over(anchors, block_size=16, context_length=1040)._block_mask(None)
    sliding = attention_over(anchors, block_size=16, context_length=1040)._block_mask(64)
    # in tiles of 128: 8 rows of 17, of which a row sees its blocks' own 1 or 2 and the context up to its anchors
    assert full.sparsity() > 50
    assert sliding.sparsity() > 75


def gpu_case(*, samples, count, block_size, context_length, dtype, seed=0):
    """Random anchors and inputs [query, context key and value, block key and value] on the CPU, 4 heads of 64 over 2."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randint(1, context_length, (samples, count), generator=generator).sort(dim=1).values
    tensors = inputs(anchors.tolist(), block_size=block_size, context_length=context_length, head_dim=64, seed=seed)
    return anchors.tolist(), [tensor.detach().to(dtype) for tensor in tensors]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="compares the GPU's flex attention with the CPU's chunks: needs a GPU"
)
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize(("samples", "count", "block_size", "context_length"), [(2, 24, 16, 300), (3, 5, 7, 129)])
def test_flex_on_a_gpu_equals_the_chunked_cpu_forward_and_backward(window, samples, count, block_size, context_length):
    anchors, tensors = gpu_case(
        samples=samples, count=count, block_size=block_size, context_length=context_length, dtype=torch.float32
    )
    upstream = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1))
    results = []
    for device in ("cpu", "cuda"):
        moved = [tensor.to(device, copy=True).requires_grad_() for tensor in tensors]
        attention = attention_over(
            anchors, block_size=block_size, context_length=context_length, device=device, dtype=torch.float32
        )
        output = attention(moved[0], tuple(moved[1:3]), tuple(moved[3:]), window)
        results.append([output, *torch.autograd.grad(output, moved, upstream.to(device))])
    for on_cpu, on_gpu in zip(*results, strict=True):
        # tf32 products of the kernel's tiles: 10 bits of mantissa
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures the memory of a GPU: needs a GPU")
def test_no_dense_mask_exists_on_a_gpu():
    anchors, tensors = gpu_case(samples=1, count=512, block_size=16, context_length=8192, dtype=torch.bfloat16)
    moved = [tensor.cuda() for tensor in tensors]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention = attention_over(anchors, block_size=16, context_length=8192, device="cuda", dtype=torch.bfloat16)
    output = attention(moved[0], tuple(moved[1:3]), tuple(moved[3:]), None)
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    dense_mask = 512 * 16 * (8192 + 512 * 16)  # bytes, one per pair: 128 MiB
    # keys and values are joined (2 x 4 MiB), the output is 4 MiB
    assert grown < dense_mask / 4, f"{grown:,} bytes for an output of {output.nbytes:,}"
