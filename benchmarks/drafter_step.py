"""How fast a training step of the drafter is: `python -m benchmarks.drafter_step` (3 minutes of one core, Linux).

Forward and backward of our drafter and loss, in turn with z-lab's model class under the shortest loss that trains it.
That class comes from PyPI into benchmarks/.peers when it is not there yet; without it ours is measured alone.

CPU seconds are the process's own, so that neighbours disturb them little; the ratio is the median over rounds of ours
by z-lab's right after. Peak memory is what the first step adds to a fresh process that holds weights and inputs.

The floor is the time that the products of a step take at the rate of a large float32 product, measured once a round.
S context tokens of F features, T = A*B block slots of which R = A*(B - 1) are supervised, width H, Q and E the widths
of all query and of all key heads, I the MLP's, V vocabulary, a each anchor's position; a multiply-add is 2 operations:

    head       2 * 2 R H V                                       logits and the gradient of the hidden state
    fc         2 * 2 S F H                                       forward and the gradient of its weight
    layer      3 * (2 T (2 H Q + 2 H E + 3 H I) + 2 S (2 H E))   forward and the gradients of input and weight
    attention  3 * 4 Q * sum over anchors of B (a + B)           visible pairs alone; the backward is twice the forward

Exit code: 0 all requirements hold, 1 one fails, 3 none fails but z-lab's class could not be installed.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read when torch loads; threads that spin would be charged to us as CPU time

import argparse
import ctypes
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3Config

from benchmarks.reference_case import GAMMA, GRADIENT_NORM, LOSS, ReferenceCase, reference_case
from dflash.config import ObjectiveConfig
from dflash.drafter import Drafter
from dflash.objective import Head, head_loss

CASES = {
    "reference": {"context_length": 512, "anchors": 64, "block_size": 8},
    "long": {"context_length": 2048, "anchors": 256, "block_size": 16},
    "loss": {
        "context_length": 2048,
        "anchors": 512,
        "block_size": 16,
        "vocabulary": 151_936,
    },  # the head alone, Qwen3's ids
}
ROUNDS = {"reference": 9, "long": 3}
PEERS = Path(__file__).parent / ".peers"
PRODUCT = 2048  # rows and columns of the product that measures the machine: larger ones run at the same rate
TOLERANCE = 1e-4

Step = Callable[[], torch.Tensor]


def zlab_class() -> type[nn.Module] | None:
    """z-lab's drafter of release 0.1.0, installed into PEERS if need be; None where it cannot be had."""
    source = PEERS / "dflash" / "model.py"
    if not source.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(PEERS), "dflash==0.1.0"]
        if subprocess.run(pip, stdout=subprocess.DEVNULL).returncode != 0:
            return None
    return _load(source, "zlab_model").DFlashDraftModel


def _load(source: Path, name: str) -> ModuleType:
    # by file: their package has our package's name
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def our_step(case: ReferenceCase) -> tuple[nn.Module, Step]:
    """Our drafter with the case's weights, and its step."""
    drafter = Drafter(case.shape)
    drafter.load_state_dict(case.weights)
    head = Head(case.head, bias=None, scale=1.0, softcap=None)
    objective = ObjectiveConfig(anchors=len(case.anchors), gamma=GAMMA)

    def step() -> torch.Tensor:
        drafter.zero_grad()
        blocks = case.blocks()
        hidden = drafter(case.features, F.embedding(blocks.ids, case.embedding), blocks.anchors)
        numerator, sums = head_loss(hidden, blocks, head, objective)
        loss = numerator / sums["weight"]
        loss.backward()
        return loss.detach()

    return drafter, step


def zlab_step(case: ReferenceCase, model: type[nn.Module]) -> tuple[nn.Module, Step]:
    """z-lab's drafter with the same weights, the dense mask that it takes, and logits of the predicted slots alone."""
    shape, anchors = case.shape, torch.from_numpy(case.anchors)
    config = Qwen3Config(
        hidden_size=shape.width,
        vocab_size=shape.vocabulary,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=shape.max_positions,
        **{  # not Qwen3's own
            "num_target_layers": shape.target_layers,
            "block_size": shape.block_size,
            "dflash_config": {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.target_layer_ids)},
            "attn_implementation": "sdpa",
        },
    )
    drafter = model(config)
    drafter.load_state_dict(case.weights)
    length, slots = len(case.tokens), torch.arange(shape.block_size)

    def step() -> torch.Tensor:
        drafter.zero_grad()
        ids = torch.full((len(anchors), shape.block_size), shape.mask_token_id)
        ids[:, 0] = case.tokens[anchors]
        position = anchors[:, None] + slots
        block = torch.arange(len(anchors)).repeat_interleave(shape.block_size)
        in_context = torch.arange(length) < anchors[block, None]
        mask = torch.cat([in_context, block[:, None] == block], dim=1)
        hidden = drafter(
            position_ids=torch.cat([torch.arange(length), position.flatten()])[None],
            attention_mask=mask[None, None],
            noise_embedding=F.embedding(ids.flatten(), case.embedding)[None],
            target_hidden=case.features,
        )
        predicted = hidden.unflatten(1, ids.shape)[0, :, 1:].flatten(0, 1)
        cross_entropy = F.cross_entropy(
            predicted @ case.head.T, case.tokens[position[:, 1:]].flatten(), reduction="none"
        )
        weight = torch.exp((1 - slots[1:]) / GAMMA).repeat(len(anchors))
        loss = (weight * cross_entropy).sum() / weight.sum()
        loss.backward()
        return loss.detach()

    return drafter, step


def loss_step(case: ReferenceCase) -> Step:
    """Our loss alone, forward and backward, from a hidden state of unit variance."""
    blocks, head = case.blocks(), Head(case.head, bias=None, scale=1.0, softcap=None)
    hidden = torch.randn(*blocks.ids.shape, case.shape.width, requires_grad=True)

    def step() -> torch.Tensor:
        numerator, _ = head_loss(hidden, blocks, head, ObjectiveConfig(anchors=len(case.anchors)))
        numerator.backward()
        return numerator.detach()

    return step


def gradient_norm(drafter: nn.Module) -> float:
    return sum(float(p.grad.double().square().sum()) for p in drafter.parameters() if p.grad is not None) ** 0.5


def floor_operations(case: ReferenceCase) -> float:
    """Floating-point operations that a step cannot do without, by the formula atop the file."""
    shape, context, count = case.shape, len(case.tokens), len(case.anchors)
    slots, supervised = count * shape.block_size, count * (shape.block_size - 1)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    head = 2 * 2 * supervised * shape.width * shape.vocabulary
    fc = 2 * 2 * context * case.features.shape[-1] * shape.width
    per_slot = shape.width * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
    layer = 3 * (2 * slots * per_slot + 2 * context * 2 * shape.width * keys)
    attention = 3 * 4 * queries * shape.block_size * int((case.anchors + shape.block_size).sum())
    return head + fc + shape.layers * (layer + attention)


def cpu_seconds(function: Callable[[], object]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (highest) of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure_memory(name: str, side: str) -> int:
    """Bytes that the first step adds to this process at its peak."""
    case = reference_case(**CASES[name])
    if name == "loss":
        step = loss_step(case)
    elif side == "ours":
        _, step = our_step(case)
    else:
        model = zlab_class()
        assert model is not None
        _, step = zlab_step(case, model)
    # Setting up has a peak of its own, and getrusage even that of the parent before exec: start the count anew, without
    # the memory that malloc still holds free and would lend to the step uncounted.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    step()
    return resident_bytes("VmHWM") - before


def peak_bytes(name: str, side: str) -> int:
    """`measure_memory` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.drafter_step", "--measure-memory", name, side]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def check_agreement(name: str, steps: dict[str, tuple[nn.Module, Step]]) -> None:
    """Warms both sides up and holds them to one loss and gradient norm: a faster step must be the same step."""
    expected = (LOSS, GRADIENT_NORM) if name == "reference" else None
    for side, (drafter, step) in steps.items():
        loss, norm = float(step()), gradient_norm(drafter)
        print(f"{name}: {side} has loss {loss:.5f}, gradient norm {norm:.5f}", flush=True)
        expected = expected or (loss, norm)
        assert max(abs(loss - expected[0]), abs(norm - expected[1])) < TOLERANCE, f"{name}, {side}: not {expected}"


@dataclass(frozen=True)
class Measured:
    """One side of one case: CPU seconds of each round, and the peak bytes of a step."""

    seconds: list[float]
    peak: int


def measure(name: str, model: type[nn.Module] | None) -> dict[str, Measured]:
    """Runs a case and prints its rows; z-lab's side only with its class."""
    case = reference_case(**CASES[name])
    steps = {"ours": our_step(case)}
    if model is not None:
        steps["z-lab"] = zlab_step(case, model)
    check_agreement(name, steps)
    square = torch.randn(PRODUCT, PRODUCT)
    seconds: dict[str, list[float]] = {"product": []} | {side: [] for side in steps}
    for _ in range(ROUNDS[name]):
        seconds["product"].append(cpu_seconds(lambda: square @ square))
        for side, (_, step) in steps.items():
            seconds[side].append(cpu_seconds(step))
    rate = 2 * PRODUCT**3 / median(seconds["product"])
    floor = floor_operations(case) / rate
    print(
        f"{name}: {floor_operations(case) / 1e9:.0f} Gflop, {rate / 1e9:.0f} Gflop per CPU s: floor {floor:.3f} CPU s"
    )
    measured = {side: Measured(seconds[side], peak_bytes(name, side)) for side in steps}
    print("side    CPU s median    min  sequence tok/CPU s  draft tok/CPU s  peak MB  share of floor")
    drafted = len(case.anchors) * (case.shape.block_size - 1)
    for side, of in measured.items():
        middle = median(of.seconds)
        print(
            f"{side:6s} {middle:14.3f} {min(of.seconds):6.3f} {len(case.tokens) / middle:19.0f}"
            f" {drafted / middle:16.0f} {of.peak / 1e6:8.0f} {floor / middle:15.0%}"
        )
    print(flush=True)
    return measured


def pair_ratio(measured: dict[str, Measured]) -> float:
    """Our CPU seconds as a share of z-lab's: the median over the rounds."""
    return median(
        ours / theirs for ours, theirs in zip(measured["ours"].seconds, measured["z-lab"].seconds, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--measure-memory", nargs=2, metavar=("CASE", "SIDE"), help="print the peak bytes of one step and end"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.measure_memory:
        print(measure_memory(*arguments.measure_memory))
        return 0

    model = zlab_class()
    measured = {name: measure(name, model) for name in ROUNDS}
    loss_peak = peak_bytes("loss", "ours")
    requirements = [
        (f"peak of the loss, 151,936 ids, 512 anchors of 16: {loss_peak / 1e6:.0f} MB < 500", loss_peak < 500e6)
    ]
    if model is None:
        print("z-lab's class (dflash==0.1.0) could not be installed: no comparison was made")
    else:
        reference, long = (pair_ratio(measured[name]) for name in ROUNDS)
        memory = measured["long"]["ours"].peak / measured["long"]["z-lab"].peak
        requirements += [
            (f"reference case: {reference:.3f} of z-lab's CPU seconds <= 1", reference <= 1),
            (f"long case: {1 / long:.2f} times as fast as z-lab >= 1.5", 1 / long >= 1.5),
            (f"long case: {memory:.2f} of z-lab's peak memory <= 1/3", memory <= 1 / 3),
        ]
    for text, holds in requirements:
        print("PASS" if holds else "FAIL", text)
    if not all(holds for _, holds in requirements):
        return 1
    return 3 if model is None else 0


if __name__ == "__main__":
    sys.exit(main())
