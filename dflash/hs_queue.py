"""The bucketed hidden-state queue between target workers and drafter workers.

A step's loss is as smooth as its mix of lengths, and neither depth nor threshold smooths it while draws go to one bucket. So
both ends serve the bucket that is furthest behind its share of the corpus: `production_order` plans what the target runs next,
`HiddenStateQueue.draw` picks what a drafter gets. Steps are then quieter than independent sampling (benchmarks/queue.py).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

# Samples of one bucket that are sorted together before they are cut into groups. On log-normal lengths padding is 2.6 % (64),
# 1.3 % (128), 0.7 % (256), 0.3 % (512): little left to gain, and in a wider window a sample meets the same neighbours every epoch.
LOOK_AHEAD = 256
# Most samples of one group. 8,192 tokens hold 54 samples of the shortest bucket, more than the gate asks for: when the drafters are
# the faster side and draw at 30 buffered, most steps are then of one or two buckets (distance from the corpus 0.41; independent
# sampling 0.28). At most 16 give 0.19, 12 give 0.16, 8 give 0.14, as good as a full queue. The price: 1.5 times the forwards, the
# smallest of about 1,400 tokens.
GROUP_SAMPLES = 8
# Seconds after which a waiting thread looks again at whether it shall stop, and adds what it waited to the report.
POLL_SECONDS = 0.2


class Closed(Exception):
    """The run stops: the queue was closed, or `stopping` said so. Not an error; what is buffered is not trained."""


class StreamFailed(RuntimeError):
    """A side of the stream failed. The message names the real cause, and `__cause__` is that exception."""


@dataclass(eq=False)
class Sample:
    """One record of the queue: the state travels with the data."""

    index: int
    """Place in the data set."""
    id: str
    epoch: int
    bucket: int
    tokens: torch.Tensor
    """[S] int64 on the CPU."""
    loss_mask: torch.Tensor
    """[S] bool on the CPU."""
    features: torch.Tensor
    """[S, K*H] on the CPU, pinned where there is a GPU."""
    born: int = 0
    """Steps that had been reported when it was put; the queue sets it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the features. Tokens and mask add 9 a token, less than 0.1 % of the features of a 1B target."""
        return self.features.nbytes


def bucket_of(lengths: np.ndarray, edges: Sequence[int]) -> np.ndarray:
    """Bucket of every length. `edges` are inclusive upper bounds in tokens, ascending; one open bucket follows the last."""
    return np.searchsorted(edges, lengths)


def bucket_counts(lengths: np.ndarray, edges: Sequence[int]) -> list[int]:
    """Samples of every bucket in one epoch: the `corpus` of the queue."""
    return np.bincount(bucket_of(lengths, edges), minlength=len(edges) + 1).tolist()


def furthest_behind(corpus: Sequence[int], done: Sequence[int], available: Iterable[int]) -> int:
    """The available bucket with the largest deficit `share * (sum(done) + 1) - done`; the lower one of equals.

    `corpus` and `done` count samples per bucket. The deficit is compared times sum(corpus), in integers, so ties are exact.
    """
    total, turn = sum(corpus), sum(done) + 1
    return max(available, key=lambda bucket: corpus[bucket] * turn - done[bucket] * total)


def production_order(
    lengths: np.ndarray,
    *,
    edges: Sequence[int],
    group_tokens: int,
    seed: int,
    epoch: int,
    skip: Collection[int] = (),
) -> list[np.ndarray]:
    """One epoch's groups of sample indices of like length, in the order in which the target shall run them.

    A group has at most GROUP_SAMPLES samples and a padded size, longest x count, of at most `group_tokens`; a longer sample is a
    group alone. Order and groups depend on seed and epoch and never on `skip` (samples already trained): that only leaves out
    groups that are skipped whole. The caller runs a partly trained group whole, so that its features are the same to the last bit,
    and puts only its untrained samples.
    """
    corpus = bucket_counts(lengths, edges)
    rng = np.random.default_rng([seed, epoch])
    shuffled = rng.permutation(len(lengths))
    bucket_of_shuffled = bucket_of(lengths, edges)[shuffled]
    waiting = [_groups(shuffled[bucket_of_shuffled == b], lengths, group_tokens, rng) for b in range(len(corpus))]

    order, sent = [], [0] * len(corpus)
    while available := [bucket for bucket, groups in enumerate(waiting) if groups]:
        bucket = furthest_behind(corpus, sent, available)
        order.append(waiting[bucket].popleft())
        sent[bucket] += len(order[-1])
    skipped = np.zeros(len(lengths), dtype=bool)
    skipped[np.fromiter(skip, dtype=np.int64)] = True
    return [group for group in order if not skipped[group].all()] if skip else order


def _groups(members: np.ndarray, lengths: np.ndarray, group_tokens: int, rng: np.random.Generator) -> deque[np.ndarray]:
    """One bucket's members, already in random order, as groups: each window is sorted, cut, and its groups shuffled."""
    groups: deque[np.ndarray] = deque()
    for start in range(0, len(members), LOOK_AHEAD):
        window = members[start : start + LOOK_AHEAD]
        window = window[np.argsort(lengths[window], kind="stable")[::-1]]
        longest_from, cuts = lengths[window].tolist(), [0]
        while cuts[-1] < len(window):
            cuts.append(cuts[-1] + min(GROUP_SAMPLES, max(1, group_tokens // longest_from[cuts[-1]])))
        # shuffled, or every window would run from its longest to its shortest sample
        groups.extend(window[cuts[i] : cuts[i + 1]] for i in rng.permutation(len(cuts) - 1))
    return groups


def check_limits(lengths: np.ndarray, bytes_per_token: int, *, min_ready: int, depth: int, max_bytes: int) -> None:
    """Refuses limits under which the queue could stand still. Raises ValueError.

    `lengths` are the tokens of every sample of the data set, `bytes_per_token` the bytes of one token's features.
    """
    limits = {"stream.hs_min_ready": min_ready, "stream.hs_queue_depth": depth, "stream.hs_queue_bytes": max_bytes}
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if min_ready > depth:
        raise ValueError(
            f"stream.hs_min_ready={min_ready} exceeds stream.hs_queue_depth={depth}: no draw could ever start; "
            "lower the first or raise the second"
        )
    # The buffer holds a stretch of the endless sequence of epochs: with the gate still closed, each sample at most so often.
    copies = 2 + min_ready // len(lengths)
    longest = np.sort(lengths)[::-1][:min_ready].astype(np.int64)
    gate_tokens = int(np.repeat(longest, copies)[:min_ready].sum())
    largest_bytes, gate_bytes = int(longest[0]) * bytes_per_token, gate_tokens * bytes_per_token
    if largest_bytes > max_bytes:
        raise ValueError(
            f"stream.hs_queue_bytes={max_bytes} does not hold the longest sample: {longest[0]} tokens x {bytes_per_token} bytes "
            f"= {largest_bytes}; raise it or lower data.max_tokens"
        )
    if gate_bytes > max_bytes:
        raise ValueError(
            f"stream.hs_queue_bytes={max_bytes} does not hold the stream.hs_min_ready={min_ready} longest samples that may meet: "
            f"{gate_tokens} tokens x {bytes_per_token} bytes = {gate_bytes}, so a draw might never start; "
            "raise it, or lower stream.hs_min_ready or data.max_tokens"
        )


class HiddenStateQueue:
    """Samples on their way from target workers (`put`) to drafter workers (`draw`), bounded in number and in bytes.

    Any number of threads may put and draw. Three rules keep it fair and free of deadlock:
    - A draw waits for `min_ready` samples, every time, until `end` lifts the gate.
    - A draw takes from one epoch only, the oldest that is not yet complete.
    - A sample is let in only when all of the epochs before it have arrived. So whatever is buffered can be drawn, later epochs
      never fill the queue before an earlier one's stragglers, and neither limit is ever exceeded.
    Hence a draw waits only while fewer than `min_ready` samples are buffered, and then `check_limits` has shown that a put finds
    room: one side can always move, as long as every sample of an epoch is put or dropped.
    """

    def __init__(
        self,
        *,
        corpus: Sequence[int],
        min_ready: int,
        depth: int,
        max_bytes: int,
        trained: tuple[int, Sequence[int]] | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`corpus`: samples per bucket of one epoch. `trained`: the epoch that a resumed run goes on in, and the samples per bucket
        that it has trained; a sample dropped back then is not among them, it is dropped again. `stopping` is asked at least every
        0.2 s by whoever waits; once true, put and draw raise Closed (a signal handler sets a flag, it must not call the queue).
        """
        assert sum(corpus) > 0
        assert 0 < min_ready <= depth
        self.corpus = list(corpus)
        self.min_ready, self.depth, self.max_bytes = min_ready, depth, max_bytes
        self._changed = threading.Condition()
        self._stopping = stopping
        self._closed = self._ended = False
        self._error: BaseException | None = None

        buckets = len(self.corpus)
        self._epoch, done = trained or (0, [0] * buckets)
        self._waiting: dict[int, list[deque[Sample]]] = defaultdict(lambda: [deque() for _ in range(buckets)])
        # per epoch and bucket: drawn or dropped, so a bucket whose samples were dropped is not owed them later
        self._done: dict[int, list[int]] = defaultdict(lambda: [0] * buckets, {self._epoch: list(done)})
        # per epoch: samples put or dropped; the oldest epoch that is not yet here in full
        self._arrived: dict[int, int] = defaultdict(int, {self._epoch: sum(done)})
        self._arriving = self._epoch
        self._advance()

        self._samples, self._bytes = [0] * buckets, [0] * buckets
        self._seconds = {"gate": 0.0, "blocked": 0.0}
        self._steps = self._put = self._drawn = 0
        self._dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        """Samples buffered now."""
        return sum(self._samples)

    def has_room(self, nbytes: int) -> bool:
        """Whether a sample of so many bytes fits now; for an engine that runs both roles in one thread."""
        with self._changed:
            return len(self) < self.depth and sum(self._bytes) + nbytes <= self.max_bytes

    def put(self, sample: Sample) -> None:
        """Adds one sample; blocks while the queue is full, or while samples of earlier epochs are still to come.

        Raises Closed when the run stops, StreamFailed when a side failed.
        """
        nbytes = sample.nbytes
        with self._changed:
            self._wait(lambda: self._may_put(sample.epoch, nbytes), "blocked")
            sample.born = self._steps
            self._waiting[sample.epoch][sample.bucket].append(sample)
            self._samples[sample.bucket] += 1
            self._bytes[sample.bucket] += nbytes
            self._put += 1
            self._arrived[sample.epoch] += 1
            self._advance()
            self._changed.notify_all()

    def drop(self, epoch: int, bucket: int, reason: str) -> None:
        """Counts a sample of an epoch that will never come, e.g. because its features are not finite. Never blocks."""
        with self._changed:
            assert epoch >= self._arriving, f"epoch {epoch} has arrived in full"
            self._dropped[reason] += 1
            self._done[epoch][bucket] += 1
            self._arrived[epoch] += 1
            self._advance()
            self._changed.notify_all()

    def draw(self, n: int, *, epoch: int | None = None) -> list[Sample]:
        """Up to `n` samples of one epoch, each from the bucket furthest behind, oldest first; blocks while the gate is closed.

        Fewer than `n` when fewer are buffered, so that a step may be larger than the queue: `draw_step` asks again. With `epoch`,
        only samples of that epoch, and [] once it is complete. [] also when the data has ended and nothing is left.
        Raises Closed when the run stops, StreamFailed when a side failed.
        """
        assert n > 0
        with self._changed:
            self._wait(lambda: self._may_draw(epoch), "gate")
            if epoch not in (None, self._epoch):
                return []
            # a reference, because the last sample of the epoch makes it complete and forgets it
            waiting, done, drawn = self._waiting[self._epoch], self._done[self._epoch], []
            while len(drawn) < n and (available := [bucket for bucket, line in enumerate(waiting) if line]):
                bucket = self._next_bucket(waiting, done, available)
                drawn.append(waiting[bucket].popleft())
                done[bucket] += 1
                self._samples[bucket] -= 1
                self._bytes[bucket] -= drawn[-1].nbytes
            self._drawn += len(drawn)
            self._advance()
            self._changed.notify_all()
            return drawn

    def draw_step(self, n: int, *, before_draw: Callable[[], None] = lambda: None) -> Iterator[list[Sample]]:
        """The parts of one optimizer step: `n` samples of one epoch together, fewer only at the end of the epoch or of the data.

        `before_draw` fills the queue where one thread runs both roles.
        """
        epoch = None
        while n:
            before_draw()
            part = self.draw(n, epoch=epoch)
            if not part:
                return
            yield part
            n, epoch = n - len(part), part[0].epoch

    def end(self) -> None:
        """Every sample is out, of all producers: lifts the gate."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """A side failed: every put and draw, waiting or later, raises StreamFailed from the first such error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """The drafters want no more: every put and draw, waiting or later, raises Closed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def report(self, step: Sequence[Sample]) -> dict:
        """The queue's part of a metrics row, in JSON types. Call it once per step with all the samples that the step drew.

        Buffered: as of now. Age: steps reported between a sample's put and its own step. Distance: total variation between the
        step's mix and the corpus, 0 to 1. Seconds and counts add up since this process began; threads that wait add up too.
        """
        assert step
        with self._changed:
            ages = [self._steps - sample.born for sample in step]
            self._steps += 1
            in_step = Counter(sample.bucket for sample in step)
            mix = [in_step[bucket] / len(step) for bucket in range(len(self.corpus))]
            total = sum(self.corpus)
            return {
                "hs_samples": sum(self._samples),
                "hs_bytes": sum(self._bytes),
                "hs_bucket_samples": list(self._samples),
                "hs_bucket_bytes": list(self._bytes),
                "hs_gate_seconds": self._seconds["gate"],
                "hs_blocked_seconds": self._seconds["blocked"],
                "hs_age_mean": sum(ages) / len(ages),
                "hs_age_max": max(ages),
                "hs_mix": mix,
                "hs_mix_distance": sum(abs(m - c / total) for m, c in zip(mix, self.corpus, strict=True)) / 2,
                "hs_in": self._put,
                "hs_out": self._drawn,
                "hs_dropped": dict(self._dropped),
            }

    def _next_bucket(self, waiting: list[deque[Sample]], done: list[int], available: list[int]) -> int:
        """The policy of the draw; benchmarks/queue.py puts worse ones here."""
        return furthest_behind(self.corpus, done, available)

    def _may_put(self, epoch: int, nbytes: int) -> bool:
        assert not self._ended, "a sample after the end"
        assert epoch >= self._arriving, "a sample more than its epoch has"
        room = self.has_room(nbytes)
        assert room or len(self) >= self.min_ready, "no room and too few to draw: check_limits was not asked, or misled"
        return room and epoch == self._arriving

    def _may_draw(self, epoch: int | None) -> bool:
        return self._ended or len(self) >= self.min_ready or epoch not in (None, self._epoch)

    def _advance(self) -> None:
        """Moves on from epochs that have arrived in full, and from those that are drawn in full."""
        total = sum(self.corpus)
        while self._arrived[self._arriving] >= total:
            del self._arrived[self._arriving]
            self._arriving += 1
        while sum(self._done[self._epoch]) >= total:
            del self._done[self._epoch]
            self._waiting.pop(self._epoch, None)
            self._epoch += 1

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Returns when `ready()`; raises once the run stops or a side failed. The caller holds the lock."""
        while True:
            if self._error is not None:
                raise StreamFailed(f"{type(self._error).__name__}: {self._error}") from self._error
            if self._closed or self._stopping():
                raise Closed
            if ready():
                return
            started = time.perf_counter()
            self._changed.wait(POLL_SECONDS)
            self._seconds[what] += time.perf_counter() - started
