"""The target workers as a drafter worker sees them: facts of the target, features on demand, decoding.

`LocalTargets` are copies of the target in this process; those of a cluster are in cluster.py.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash.config import Config
from dflash.conversation import Template
from dflash.decode import prove_rollback
from dflash.drafter import Drafter
from dflash.evaluate import Prompts, check_prompts, decode_tau
from dflash.shape import Shape, resolve_shape
from dflash.target import Target, load_configured, resolve_mask_token


@dataclass(frozen=True)
class TargetFacts:
    """What a drafter needs of its target beside features; without the target's layers."""

    identity: dict[str, Any]
    shape: Shape
    """The drafter's: its width, vocabulary and layer ids are the target's."""
    tokenizer: Any
    embedding_weight: Tensor
    """[V, H], the raw rows."""
    head_weight: Tensor | None
    """[V, H]; None where it is the embedding."""
    head_bias: Tensor | None
    """[V]"""
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_weight.dtype

    @property
    def bytes_per_token(self) -> int:
        """Of the features."""
        return len(self.shape.target_layer_ids) * self.shape.width * self.dtype.itemsize


class TargetWorkers(Protocol):
    """What `LocalTargets` and the target workers of a cluster have in common. Any of them may be asked from several threads."""

    count: int
    queue_bytes: int
    """Limit of the hidden-state queue."""

    @property
    def facts(self) -> TargetFacts: ...

    def features(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """The captured states of a group: for tokens of [S_i] each, [S_i, K*H], on whatever device."""
        ...

    def check_decoding(self, prompts: Prompts) -> None:
        """Raises ValueError where a prompt or the target cannot be decoded with a drafter."""
        ...

    def decode(
        self, weights: Mapping[str, Tensor], prompts: Prompts, stopping: threading.Event
    ) -> dict[str, Any] | None:
        """`evaluate.decode_tau` with a drafter of these weights; None once `stopping` is set."""
        ...


class LocalTargets:
    """One proven copy of the target on each of the configured devices of this process."""

    def __init__(self, config: Config, *, queue_bytes: int):
        """Raises ValueError, one line, for what the user can mend."""
        self._config = config
        self.targets = [load_configured(config.target, device=device) for device in config.target.devices]
        for target in self.targets:
            target.prove()
        self.facts = facts_of(self.targets[0], config)
        self.count, self.queue_bytes = len(self.targets), queue_bytes

    def features(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        return self.targets[0].features(tokens)

    def check_decoding(self, prompts: Prompts) -> None:
        target = self.targets[0]
        template = Template(target.tokenizer, self._config.data.template_kwargs)
        with torch.device("meta"):
            drafter = Drafter(self.facts.shape)
        check_prompts(prompts, template, self._config.evaluate, target, [drafter])
        prove_rollback(target)

    def decode(
        self, weights: Mapping[str, Tensor], prompts: Prompts, stopping: threading.Event
    ) -> dict[str, Any] | None:
        with torch.device("meta"):
            drafter = Drafter(self.facts.shape)  # the same weights in layers that are not compiled for training
        drafter.load_state_dict(weights, assign=True)
        return decode_tau(
            self.targets[0],
            drafter,
            prompts,
            config=self._config.evaluate,
            template_kwargs=self._config.data.template_kwargs,
            stopping=stopping,
        )


def facts_of(target: Target, config: Config) -> TargetFacts:
    """The facts of a loaded target. Raises ValueError for settings of the drafter that do not go with it."""
    tied = target.head_weight.data_ptr() == target.embedding_weight.data_ptr()
    return TargetFacts(
        identity=target.identity(),
        shape=resolve_shape(
            config.drafter,
            target_config=target.model.config.get_text_config(),
            width=target.width,
            vocabulary=target.vocabulary,
            target_layers=target.num_layers,
            target_layer_ids=target.layer_ids,
            mask_token_id=resolve_mask_token(target, config.drafter.mask_token_id),
        ),
        tokenizer=target.tokenizer,
        embedding_weight=target.embedding_weight,
        head_weight=None if tied else target.head_weight,
        head_bias=target.head_bias,
        embedding_scale=target.embedding_scale,
        logit_scale=target.logit_scale,
        logit_softcap=target.logit_softcap,
    )
