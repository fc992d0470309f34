"""Drafter workers that train one drafter together: who trains which samples of a step, and one weighted mean over all of them.

Every worker holds a copy of the drafter and makes the same steps. A worker backpropagates the numerator of its samples; gradients,
numerators and weights are then summed over the workers, and each divides by the total weight, as one drafter alone would.
Where the engine is local, one worker is the whole team, and nothing here does anything.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dflash.drafter import Drafter
from dflash.hs_queue import Sample

SUMS = ("weight", "loss", "tau", "blocks", "correct", "slots")  # of objective.head_loss


CPU = torch.device("cpu")


class TeamLost(Exception):
    """Another drafter worker no longer answers."""


@dataclass(frozen=True)
class Team:
    """This worker's place among `size` drafter workers that torch.distributed has connected."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    sharded: bool = False
    """Each worker holds a part of every parameter (FSDP2); every forward and backward then is a collective."""

    @property
    def writes(self) -> bool:
        """Whether this worker is the one that writes the run directory."""
        return self.rank == 0

    @classmethod
    def connect(
        cls, rank: int, size: int, *, store: TCPStore | None, address: tuple[str, int], sharded: bool
    ) -> "Team":
        """Connects the workers, NCCL between GPUs and gloo between CPUs; the first one brings the store at `address`."""
        if size == 1:
            return ALONE
        if store is None:
            store = TCPStore(*address, size, is_master=False)
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
        return cls(rank, size, device, sharded)

    def same_drafter(self, drafter: nn.Module) -> None:
        """Gives every worker the first one's drafter."""
        if self.size > 1:
            for parameter in drafter.parameters():
                dist.broadcast(parameter.detach(), src=0)

    def shard(self, drafter: Drafter) -> None:
        """Leaves every worker its part, in place; an optimizer is made afterwards."""
        # nothing here writes to the drafter's result in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        mesh = init_device_mesh(self.device.type, (self.size,))
        for module in (*drafter.layers, drafter):
            # parts again after a forward: a drafter that fits whole is not sharded
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        for module in drafter.modules():
            if isinstance(module, FSDPModule):  # neither of them reaches the modules inside
                module.set_gradient_divide_factor(1.0)  # sums, as everywhere here; FSDP2's default is the mean
                module.set_force_sum_reduction_for_comms(True)  # a factor of 1 asks for an operation that gloo has not

    # ------------------------------------------------------------ a step

    def share(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples of a draw that this worker trains: the longest first, each to whoever has the fewest tokens yet.

        Every worker comes to the same split by itself. Of a draw with fewer samples than workers some get none.
        """
        if self.size == 1:
            return list(samples)
        tokens, mine = [0] * self.size, []
        for sample in sorted(samples, key=lambda sample: -len(sample.tokens)):
            least = tokens.index(min(tokens))
            tokens[least] += len(sample.tokens)
            if least == self.rank:
                mine.append(sample)
        return mine

    def whole_step(
        self, drawn: list[Sample], mine: list[Sample], losses: list[Tensor], sums: dict[str, Tensor], *, slots: int
    ) -> tuple[list[Sample], list[Tensor], dict[str, Tensor]]:
        """(samples, losses in their order, sums) of the whole step, from those of this worker.

        `drawn`: all samples of the step; `mine`: this worker's, in the order of `losses` ([N] each); `slots` of a block.
        """
        if self.size == 1:
            return mine, losses, sums
        at = {sample.index: position for position, sample in enumerate(drawn)}
        of_samples = torch.zeros(len(drawn), dtype=torch.float64, device=self.device)
        if mine:
            of_samples[[at[sample.index] for sample in mine]] = torch.cat(losses)
        self._add_up([of_samples])
        return drawn, [of_samples], self.total(sums, slots=slots)

    def total(self, sums: dict[str, Tensor], *, slots: int) -> dict[str, Tensor]:
        """`objective.head_loss`'s sums over all workers, float64; {} of a worker that had no sample. `slots` of a block."""
        if self.size == 1:
            return sums
        zeros = {
            name: torch.zeros(slots if name in ("correct", "slots") else (), dtype=torch.float64, device=self.device)
            for name in SUMS
        }
        whole = {name: sums.get(name, zero) for name, zero in zeros.items()}
        flat = torch.cat([value.reshape(-1) for value in whole.values()])
        self._add_up([flat])
        parts = flat.split([value.numel() for value in whole.values()])
        return {name: part.reshape(value.shape) for (name, value), part in zip(whole.items(), parts, strict=True)}

    def gradients(self, drafter: nn.Module) -> list[Tensor]:
        """The parameters' gradients, or this worker's parts of them, summed over the workers in place."""
        parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        if self.sharded:  # summed in every backward
            return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if self.size > 1:
            for parameter in parameters:  # of a worker that had no sample
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._add_up(gradients)
        return gradients

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Norm of the whole gradient, float64, on the device."""
        norm = torch.nn.utils.get_total_norm(gradients).double()
        if not self.sharded:
            return norm
        square = norm.square()
        self._add_up([square])
        return square.sqrt()

    def most(self, count: int) -> int:
        """The largest of all workers' counts."""
        counts = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        counts[self.rank] = count
        self._add_up([counts])
        return int(counts.max())

    # ------------------------------------------------------------ between steps

    def deal(self, groups: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """This worker's groups of indices, every `size`-th; empty ones at the end, so that all workers get equally many."""
        for first in range(0, len(groups), self.size):
            mine = first + self.rank
            yield groups[mine] if mine < len(groups) else np.empty(0, dtype=np.int64)

    def first_says(self, yes: bool) -> bool:
        """The first worker's answer."""
        return self.any(yes and self.rank == 0)

    def any(self, yes: bool) -> bool:
        """Whether any worker says yes."""
        if self.size == 1:
            return yes
        answers = torch.tensor([float(yes)], device=self.device)
        self._add_up([answers])
        return bool(answers.item())

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as one drafter alone would hold them; of a sharded one on the first worker's host, {} on the others."""
        if not self.sharded:
            return dict(tensors)
        whole = {}
        for name, tensor in tensors.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.writes:
                whole[name] = full.detach().cpu()
        return whole

    # ------------------------------------------------------------ torch.distributed

    def _add_up(self, tensors: Iterable[Tensor]) -> None:
        if self.size == 1:
            return
        try:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                assert work is not None
                work.wait()
        except RuntimeError as error:  # of gloo; DistBackendError of NCCL is one too
            raise TeamLost(str(error).partition("\n")[0]) from error


def local(tensor: Tensor) -> Tensor:
    """This worker's part of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor that every worker holds, in parts as the parameter is; nothing is sent."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


ALONE = Team()
