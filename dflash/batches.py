"""From drawn samples to micro-batches of like length on the drafter's device."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dflash.hs_queue import Sample
from dflash.job import Job
from dflash.objective import Blocks, make_blocks, sample_anchors

NOTHING = -1  # index of a sample that is none


@dataclass(frozen=True)
class MicroBatch:
    samples: list[Sample]  # empty where it only keeps step with the other drafter workers
    features: torch.Tensor  # [N, S, F], right-padded with zeros
    blocks: Blocks


def micro_batches(job: Job, samples: list[Sample]) -> list[tuple[list[Sample], list[np.ndarray]]]:
    """Samples with their anchors, longest first, cut so that padded context plus block slots stay within the budget."""
    budget, block_size = job.config.optim.micro_batch_tokens, job.shape.block_size
    batches: list[tuple[list[Sample], list[np.ndarray]]] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.tokens)):
        anchors = anchors_of(job, sample)
        if batches:
            longest, most = len(batches[-1][0][0].tokens), max(map(len, [*batches[-1][1], anchors]))
            if (len(batches[-1][0]) + 1) * (longest + most * block_size) <= budget:
                batches[-1][0].append(sample)
                batches[-1][1].append(anchors)
                continue
        batches.append(([sample], [anchors]))
    if job.team.sharded:  # every forward and backward is a collective: all workers make as many
        batches += [([_nothing(job)], [np.array([1])])] * (job.team.most(len(batches)) - len(batches))
    return batches


def _nothing(job: Job) -> Sample:
    """A sample without a label: it adds exactly zero to loss, weight and gradients."""
    tokens = torch.zeros(2, dtype=torch.int64)
    width = len(job.shape.target_layer_ids) * job.shape.width
    return Sample(NOTHING, "", 0, 0, tokens, tokens.bool(), torch.zeros(2, width, dtype=job.dtype))


def anchors_of(job: Job, sample: Sample) -> np.ndarray:
    """This epoch's anchors of a sample: new in every epoch, the same however the sample is batched or resumed."""
    seed = (job.config.run.seed, sample.epoch, sample.index)
    return sample_anchors(sample.loss_mask.numpy(), limit=job.config.objective.anchors, seed=seed)


def on_device(job: Job, batches: list[tuple[list[Sample], list[np.ndarray]]]) -> Iterator[MicroBatch]:
    """The micro-batches on the drafter's device; on a GPU the next one travels on a side stream while this one is trained."""
    if job.device.type != "cuda":
        yield from (make_batch(job, *batch) for batch in batches)
        return
    side, compute = torch.cuda.Stream(job.device), torch.cuda.current_stream(job.device)
    ahead: tuple[MicroBatch, torch.Event] | None = None
    for batch in [*batches, None]:
        travelling = None
        if batch is not None:
            with torch.cuda.stream(side):
                travelling = make_batch(job, *batch), side.record_event()
        if ahead is not None:
            arrived, event = ahead
            compute.wait_event(event)
            for tensor in (arrived.features, *arrived.blocks.tensors.values()):
                tensor.record_stream(compute)  # or its memory could be given away while it is computed with
            yield arrived
        ahead = travelling


def make_batch(job: Job, samples: list[Sample], anchors: list[np.ndarray]) -> MicroBatch:
    """One micro-batch on the drafter's device."""
    tokens = [sample.tokens for sample in samples]
    features = samples[0].features.new_zeros(
        len(samples), max(map(len, tokens)), samples[0].features.shape[1], dtype=job.dtype, device=job.device
    )
    for row, sample in zip(features, samples, strict=True):
        row[: len(sample.features)].copy_(sample.features, non_blocking=True)
    blocks = make_blocks(
        tokens,
        [sample.loss_mask for sample in samples],
        anchors,
        block_size=job.shape.block_size,
        mask_token_id=job.shape.mask_token_id,
    )
    return MicroBatch([sample for sample in samples if sample.index != NOTHING], features, blocks.to(job.device))
