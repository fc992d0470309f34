"""The target answers here: a batch that is never waited for, since a row whose reply has ended is given to the next prompt.

Letters: n rows in use, S prompt tokens, T cache columns, D head width, V vocabulary.

Every row keeps its keys and values from column 0 on, so a column is a position: nothing is padded on the left, rows do not know of
each other, and one is moved by copying it. (transformers' own continuous batching does the same with pages; on a CPU it took twice
the time for the same tokens, and a row's random numbers there depend on the batch.)
"""

import hashlib
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from dflash.answers import LENGTH, REFUSED, STOP, Answer, Pending, Request
from dflash.sampling import Sampling, choose, probabilities
from dflash.target import PROOF_TOLERANCE, Target, stop_tokens

PREFILL_TOKENS = 8192  # of prompts in one forward, padding included
REFILL_SHARE = 8  # rows are refilled once 1 in 8 is free: prompts of one forward are then of like length
COLUMNS = 256  # by which the cache grows
ANSWER_RELEVANT = ("architecture", "layers", "width", "vocabulary", "dtype", "sha256")  # of a target's identity


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one target layer, [rows, heads, T, D] each, for a forward of one new token a row."""

    keys: Tensor  # pyright: ignore[reportIncompatibleVariableOverride] (never None here once it is in use)
    values: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, slots: "Slots"):
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        size = (self.slots.size, key_states.shape[1], 0)
        # zeros: a masked column must hold a number, since nothing times NaN is NaN
        self.keys = key_states.new_zeros(*size, key_states.shape[3])
        self.values = value_states.new_zeros(*size, value_states.shape[3])
        self.is_initialized = True

    def fit(self, columns: int) -> None:
        """Room for so many columns."""
        missing = columns - self.keys.shape[2]
        if missing > 0:
            more = (0, 0, 0, -(-missing // COLUMNS) * COLUMNS)
            self.keys = torch.nn.functional.pad(self.keys, more)
            self.values = torch.nn.functional.pad(self.values, more)

    def update(self, key_states: Tensor, value_states: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        slots, count = self.slots, len(key_states)
        self.fit(slots.longest)
        row = torch.arange(count, device=key_states.device)
        column = slots.columns[:count].to(key_states.device)
        self.keys[row, :, column] = key_states[:, :, 0]
        self.values[row, :, column] = value_states[:, :, 0]
        return self.keys[:count, :, : slots.longest], self.values[:count, :, : slots.longest]

    def put(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """A prompt's keys and values, [heads, S, D]."""
        if not self.is_initialized:
            self.lazy_initialization(keys[None], values[None])
        self.fit(keys.shape[1])
        self.keys[slot, :, : keys.shape[1]] = keys
        self.values[slot, :, : values.shape[1]] = values

    def move(self, old: int, new: int, columns: int) -> None:
        """Row `old` to where row `new` was."""
        self.keys[new, :, :columns] = self.keys[old, :, :columns]
        self.values[new, :, :columns] = self.values[old, :, :columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.longest, 0

    def get_seq_length(self) -> int:
        return self.slots.longest - 1

    def get_max_length(self) -> int:
        return -1


class Slots:
    """`size` rows of a target's keys and values, of which the first `count` are in use."""

    def __init__(self, target: Target, size: int):
        self.target, self.size, self.count = target, size, 0
        self.columns = torch.zeros(size, dtype=torch.int64, device=target.device)
        """[size]: where a row's next token goes, which is also its position."""
        self.longest = 0
        """Columns that the longest row has once its next token is in."""
        self._layers = [_SlotLayer(self) for _ in target.layers]
        self._cache = Cache(layers=list(self._layers))

    @torch.no_grad()
    def add(self, prompts: list[list[int]]) -> Tensor:
        """Takes prompts into the next free rows, in one forward; the logits [prompts, V] of their first new token."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        padded_nS = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in zip(padded_nS, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        ends, end_of = (lengths - 1).unique(return_inverse=True)
        device, cache = self.target.device, DynamicCache()
        # padded on the right without a mask, as Target.features does: no token of a causal model sees what comes after it
        output = self.target.model(input_ids=padded_nS.to(device), cache=cache, logits_to_keep=ends.to(device))
        filled: list[Any] = cache.layers
        for layer, new in zip(self._layers, filled, strict=True):
            for row, length in enumerate(lengths.tolist()):
                layer.put(self.count + row, new.keys[row, :, :length], new.values[row, :, :length])
        self.columns[self.count : self.count + len(prompts)] = lengths.to(device)
        self.count += len(prompts)
        return output.logits[torch.arange(len(prompts)), end_of].float()

    @torch.no_grad()
    def step(self, tokens: list[int]) -> Tensor:
        """One more token for each row in use; the logits [n, V] of the next."""
        assert len(tokens) == self.count
        columns = self.columns[: self.count]
        self.longest = int(columns.max()) + 1
        output = self.target.model(
            input_ids=torch.tensor(tokens, device=self.target.device)[:, None],
            attention_mask=self._masks(columns),
            position_ids=columns[:, None],
            cache=self._cache,
            logits_to_keep=1,
        )
        self.columns[: self.count] += 1
        return output.logits[:, -1].float()

    def drop(self, slot: int) -> None:
        """Frees a row; the last one in use takes its place."""
        self.count -= 1
        if slot != self.count:
            columns = int(self.columns[self.count])
            for layer in self._layers:
                layer.move(self.count, slot, columns)
            self.columns[slot] = columns

    def _masks(self, columns: Tensor) -> Any:
        """What a new token sees, [n, 1, 1, T] as numbers to add: its row up to itself, in a sliding layer only the window."""
        config = self.target.model.config.get_text_config(decoder=True)
        at_T = torch.arange(self.longest, device=columns.device)
        hidden = at_T > columns[:, None]
        dtype = self.target.dtype

        def mask(hidden_nT: Tensor) -> Tensor:
            zeros = torch.zeros(hidden_nT.shape, dtype=dtype, device=columns.device)
            return zeros.masked_fill(hidden_nT, torch.finfo(dtype).min)[:, None, None]

        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or [])
        if window is None or (kinds and "sliding_attention" not in kinds):
            return mask(hidden)
        sliding = mask(hidden | (at_T <= columns[:, None] - window))
        if not kinds:  # every layer slides, as in the first Mistral
            return sliding
        return {"full_attention": mask(hidden), "sliding_attention": sliding}


@dataclass
class _Row:
    """A reply in the making."""

    request: Request
    room: int
    """Tokens that it may still have."""
    uniform: Tensor
    """[max_new_tokens]: a random number for each of its tokens."""
    ids: list[int] = field(default_factory=list)


class LocalSource:
    """The target on this machine as a source of its own answers."""

    def __init__(self, target: Target, *, sampling: Sampling, max_new_tokens: int, seed: int, rows: int):
        self.target, self.sampling, self.rows = target, sampling, rows
        self.max_new_tokens, self.seed = max_new_tokens, seed
        self.stop = stop_tokens(target)
        config = target.model.config.get_text_config(decoder=True)
        self.positions: int = getattr(config, "max_position_embeddings", None) or sys.maxsize  # some have no limit

    @property
    def identity(self) -> dict[str, Any]:
        """What the target is, not where it lies: a copy of it elsewhere answers the same."""
        return {key: value for key, value in self.target.identity().items() if key in ANSWER_RELEVANT}

    def answers(self, pending: Pending) -> Generator[tuple[Request, Answer], None, None]:
        """Each answer as it ends; see `dflash.answers.Source`."""
        slots, rows = Slots(self.target, self.rows), list[_Row]()
        while True:
            free = self.rows - len(rows)
            asked = pending.take(free) if not rows or free >= max(1, self.rows // REFILL_SHARE) else []
            for group in _groups([request for request in asked if self._fits(request)]):
                new = [self._row(request) for request in group]
                self._extend(new, slots.add([request.prompt_tokens for request in group]))
                rows += new
            yield from ((request, self._refusal(request)) for request in asked if not self._fits(request))
            if not asked:
                if not rows:
                    return
                self._extend(rows, slots.step([row.ids[-1] for row in rows]))
            for at in reversed(range(len(rows))):  # from the last: a dropped row's place is taken by the last one
                if (answer := self._ended(rows[at])) is not None:
                    request = rows[at].request
                    slots.drop(at)
                    rows[at] = rows[-1]
                    rows.pop()
                    yield request, answer

    def _fits(self, request: Request) -> bool:
        return len(request.prompt_tokens) < self.positions

    def _refusal(self, request: Request) -> Answer:
        detail = f"a prompt of {len(request.prompt_tokens)} tokens; the target has {self.positions} positions"
        return Answer(content="", finish_reason=REFUSED, completion_tokens=0, detail=detail)

    def _row(self, request: Request) -> _Row:
        seed = int.from_bytes(hashlib.sha256(f"{self.seed} {request.key}".encode()).digest()[:8])
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(self.max_new_tokens, dtype=torch.float64, generator=generator)
        room = min(self.max_new_tokens, self.positions - len(request.prompt_tokens))
        return _Row(request, room, uniform)

    def _extend(self, rows: list[_Row], logits: Tensor) -> None:
        """The next token of each row, by its logits [n, V]."""
        if self.sampling.greedy:
            tokens = logits.argmax(-1)
        else:
            uniform = torch.stack([row.uniform[len(row.ids)] for row in rows])
            tokens = choose(probabilities(logits, self.sampling), uniform.to(logits.device))
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.ids.append(token)

    def _ended(self, row: _Row) -> Answer | None:
        stopped = row.ids[-1] in self.stop
        if not stopped and len(row.ids) < row.room:
            return None
        ids = row.ids[:-1] if stopped else row.ids
        return Answer(
            content=str(self.target.tokenizer.decode(ids, skip_special_tokens=False)),
            finish_reason=STOP if stopped else LENGTH,
            completion_tokens=len(row.ids),
            token_ids=ids,
        )

    def prove(self) -> None:
        """Shows on this very target that a batched, refilled row gets the logits of a plain forward. Raises ValueError.

        Architectures that keep more than keys and values of every token, or whose masks cannot be given, fail here.
        """
        draw = torch.Generator().manual_seed(1)
        texts = [torch.randint(self.target.vocabulary, (length,), generator=draw).tolist() for length in (21, 9, 34)]
        try:
            slots = Slots(self.target, 2)
            ours = list(slots.add([text[:-3] for text in texts[:2]]))
            slots.step([text[-3] for text in texts[:2]])
            slots.drop(0)
            slots.add([texts[2][:-3]])
            slots.step([texts[1][-2], texts[2][-3]])
            ours += list(slots.step([texts[1][-1], texts[2][-2]]))
            theirs = [self._plain(text) for text in (texts[0][:-3], texts[1][:-3], texts[1], texts[2][:-1])]
        except Exception as error:  # whatever an unknown architecture says of a cache that it does not expect
            raise ValueError(self._unfit(f"{type(error).__name__}: {error}")) from error
        differences = [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]
        if not max(differences) <= PROOF_TOLERANCE[self.target.dtype]:
            raise ValueError(self._unfit(f"logits of a batched row differ by {max(differences):.1e}"))

    def _unfit(self, cause: str) -> str:
        kind = self.target.model.config.model_type
        return (
            f"target.name={self.target.name}: {kind} cannot answer in batches here ({cause}); "
            "let a server run it and give --regenerate.endpoint"
        )

    @torch.no_grad()
    def _plain(self, text: list[int]) -> Tensor:
        tokens = torch.tensor([text], device=self.target.device)
        return self.target.model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[0, -1].float()


def _groups(requests: list[Request]) -> Iterator[list[Request]]:
    """Requests, longest first, in groups that one forward takes."""
    group: list[Request] = []
    for request in requests:
        if group and (len(group) + 1) * max(len(each.prompt_tokens) for each in [*group, request]) > PREFILL_TOKENS:
            yield group
            group = []
        group.append(request)
    if group:
        yield group
