"""A run in progress: what `setup.set_up` proved and built, and what every step moves on."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from dflash.config import Config
from dflash.data import Prepared
from dflash.drafter import Drafter
from dflash.evaluate import Prompts
from dflash.objective import Head
from dflash.shape import Shape
from dflash.target_workers import TargetWorkers
from dflash.team import Team


@dataclass
class Job:
    """A run in progress. The fields of the last group change with every step; a checkpoint holds them."""

    config: Config
    team: Team  # of drafter workers that this one is in
    targets: TargetWorkers
    data: Prepared
    heldout: Prepared | None
    prompts: Prompts | None  # decoded at every checkpoint
    shape: Shape
    device: torch.device  # of the drafter
    dtype: torch.dtype  # of its computation: bfloat16 on a GPU, over float32 weights
    embedding: torch.Tensor  # [V, H] on the drafter's device
    head: Head  # the target's
    loss_head: Head  # the same, or its rows for the token ids that the data holds
    total_steps: int
    started_from: int  # step of the checkpoint that this process went on from, or 0

    drafter: Drafter
    optimizer: torch.optim.AdamW
    step: int
    epoch: int
    trained: np.ndarray  # [samples] bool: trained in this epoch


def embed(job: Job, ids: torch.Tensor) -> torch.Tensor:
    """[..., H]: what the drafter sees of token ids [...], the target's raw embedding rows times its scale."""
    return (F.embedding(ids, job.embedding) * job.targets.facts.embedding_scale).to(job.dtype)


def samples_of(data: Prepared, group: np.ndarray) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(id, tokens [S] int64, loss mask [S] bool) of each sample of a group."""
    for index in group.tolist():
        sample_id, tokens, loss_mask = data.sample(index)
        yield sample_id, torch.from_numpy(tokens).long(), torch.from_numpy(loss_mask)


def autocast(job: Job) -> torch.autocast:
    """bfloat16 over float32 weights on a GPU, nothing on a CPU."""
    return torch.autocast(job.device.type, dtype=torch.bfloat16, enabled=job.dtype == torch.bfloat16)
