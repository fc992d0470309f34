from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from dflash.hs_queue import (
    GROUP_SAMPLES,
    Closed,
    HiddenStateQueue,
    Sample,
    StreamFailed,
    bucket_counts,
    bucket_of,
    check_limits,
    furthest_behind,
    production_order,
)

EDGES = (256, 512, 1024, 2048)
# Seconds in which a thread must end; it takes milliseconds, and this leaves a loaded machine its time.
SOON = 5
# Seconds after which a thread that has done nothing is taken to be blocked.
A_WHILE = 0.3


def lengths_like_the_corpus(samples: int, seed: int = 0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(6.3, 0.9, samples), 32, 4096).astype(np.int32)


def sample_of(index: int, bucket: int = 0, epoch: int = 0, width: int = 1) -> Sample:
    """A record whose features take 4 x width bytes."""
    tokens = torch.zeros(2, dtype=torch.int64)
    return Sample(
        index, f"sample {index}", epoch, bucket, tokens, torch.ones(2, dtype=torch.bool), torch.zeros(1, width)
    )


def queue_of(
    corpus: list[int], min_ready: int = 1, depth: int = 90, max_bytes: int = 2**30, **more: Any
) -> HiddenStateQueue:
    return HiddenStateQueue(corpus=corpus, min_ready=min_ready, depth=depth, max_bytes=max_bytes, **more)


def spawn(work: Callable[..., Any], *arguments: Any) -> Future:
    """Runs it in a thread that cannot keep the tests from ending; `result(SOON)` gives its value or raises its error."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def is_blocked(future: Future) -> bool:
    time.sleep(A_WHILE)
    return not future.done()


def draw_all(queue: HiddenStateQueue, n: int) -> list[list[Sample]]:
    """The steps of a run, each with its parts together."""
    steps = []
    while step := [sample for part in queue.draw_step(n) for sample in part]:
        steps.append(step)
    return steps


# --- order of production ---------------------------------------------------------------------------------------------------


def order_of(lengths: np.ndarray, **changed: Any) -> list[list[int]]:
    settings = {"edges": EDGES, "group_tokens": 8192, "seed": 0, "epoch": 0} | changed
    return [group.tolist() for group in production_order(lengths, **settings)]


def test_bucket_edges_are_inclusive_and_the_last_bucket_is_open():
    lengths = np.array([1, 256, 257, 2048, 2049, 10**6])
    assert bucket_of(lengths, EDGES).tolist() == [0, 0, 1, 3, 4, 4]
    assert bucket_counts(lengths, EDGES) == [2, 1, 0, 1, 2]


def test_furthest_behind_is_the_largest_deficit_among_the_available():
    rng = np.random.default_rng(0)
    for _ in range(300):
        corpus, done = rng.integers(1, 1000, 5), rng.integers(0, 50, 5)
        available = rng.permutation(5)[: rng.integers(1, 6)].tolist()
        deficit = corpus / corpus.sum() * (done.sum() + 1) - done
        chosen = furthest_behind(corpus.tolist(), done.tolist(), available)
        assert chosen in available
        assert deficit[chosen] >= deficit[available].max() - 1e-9
    assert furthest_behind([5, 5], [1, 1], [1, 0]) in (0, 1)


def test_an_epoch_holds_every_sample_once_in_groups_of_one_bucket_within_the_token_budget():
    lengths = np.append(lengths_like_the_corpus(3000), [9000, 8193])
    groups = order_of(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert len(set(bucket_of(lengths[group], EDGES))) == 1
        assert len(group) <= GROUP_SAMPLES
        assert len(group) == 1 or lengths[group].max() * len(group) <= 8192
    assert [3000] in groups  # longer than the budget: alone
    assert [3001] in groups


def test_groups_hold_like_lengths():
    lengths = lengths_like_the_corpus(20_000)
    groups = order_of(lengths)
    padded = sum(int(lengths[group].max()) * len(group) for group in groups)
    assert padded < 1.02 * lengths.sum()


def test_production_never_leaves_a_bucket_more_than_a_group_behind_its_share():
    lengths = lengths_like_the_corpus(5000)
    share = np.array(bucket_counts(lengths, EDGES)) / len(lengths)
    sent = np.zeros(5)
    for group in order_of(lengths):
        sent[bucket_of(lengths[group[:1]], EDGES)[0]] += len(group)
        assert np.abs(share * sent.sum() - sent).max() <= 2 * GROUP_SAMPLES


def test_order_is_seeded_and_different_in_every_epoch():
    lengths = lengths_like_the_corpus(5000)
    assert order_of(lengths) == order_of(lengths)
    others = [order_of(lengths, epoch=1), order_of(lengths, epoch=2), order_of(lengths, seed=1)]
    assert all(order_of(lengths) != other for other in others)
    neighbours = [{frozenset(group) for group in order} for order in (order_of(lengths), others[0])]
    assert len(neighbours[0] & neighbours[1]) < len(neighbours[0]) / 4  # not only the same groups in another order


def test_skipped_samples_leave_out_only_groups_that_are_skipped_whole():
    lengths = lengths_like_the_corpus(2000)
    groups = order_of(lengths)
    skip = {index for group in groups[:100] for index in group} | set(groups[150][:1]) | set(groups[200])
    kept = [group for group in groups if not skip.issuperset(group)]
    assert order_of(lengths, skip=skip) == kept
    assert groups[150] in kept or len(groups[150]) == 1


# --- mixing -----------------------------------------------------------------------------------------------------------------


def stream_an_epoch(depth: int, min_ready: int) -> tuple[list[dict], Counter]:
    """The queue's report of every step of an epoch, and the samples drawn per bucket, through two real threads.

    Every step finds the queue as full as it can be, so the figures are the queue's and not the machine's.
    """
    lengths = lengths_like_the_corpus(8000)
    buckets, corpus = bucket_of(lengths, EDGES), bucket_counts(lengths, EDGES)
    queue = queue_of(corpus, min_ready, depth)

    def produce() -> None:
        for group in order_of(lengths):
            for index in group:
                queue.put(sample_of(index, int(buckets[index])))
        queue.end()

    producer = spawn(produce)
    drawn, rows = Counter(), []
    while True:
        while len(queue) < depth and not producer.done():
            time.sleep(0)
        step = [sample for part in queue.draw_step(8) for sample in part]
        if not step:
            producer.result(SOON)
            return rows, drawn
        rows.append(queue.report(step))
        drawn.update(sample.bucket for sample in step)


@pytest.mark.parametrize(("depth", "min_ready"), [(90, 30), (30, 30)], ids=["target faster", "drafter faster"])
def test_steps_are_mixed_like_the_corpus_and_every_bucket_gets_exactly_its_share(depth, min_ready):
    rows, drawn = spawn(stream_an_epoch, depth, min_ready).result(60)
    body = rows[len(rows) // 20 : -len(rows) // 20]  # without the filling and the draining of the queue
    assert np.mean([row["hs_mix_distance"] for row in body]) <= 0.16
    loss_of_bucket = [3.2, 2.9, 2.5, 2.2, 2.0]
    assert np.std([np.dot(row["hs_mix"], loss_of_bucket) for row in body]) <= 0.09
    assert max(row["hs_age_max"] for row in rows) <= 30
    assert [drawn[bucket] for bucket in range(5)] == bucket_counts(lengths_like_the_corpus(8000), EDGES)


def test_a_draw_takes_the_oldest_of_a_bucket_first():
    queue = queue_of([6, 3])
    for index in range(9):
        queue.put(sample_of(index, bucket=index % 3 // 2))
    assert [sample.index for sample in queue.draw(9)] == [0, 2, 1, 3, 5, 4, 6, 8, 7]


# --- the gate ---------------------------------------------------------------------------------------------------------------


def test_the_gate_holds_at_every_draw_until_the_data_ends():
    queue = queue_of([100], min_ready=30)
    for index in range(29):
        queue.put(sample_of(index))
    first = spawn(queue.draw, 8)
    assert is_blocked(first)
    queue.put(sample_of(29))
    assert len(first.result(SOON)) == 8

    second = spawn(queue.draw, 8)
    for index in range(30, 37):
        queue.put(sample_of(index))
    assert is_blocked(second)
    queue.put(sample_of(37))
    assert len(second.result(SOON)) == 8

    third = spawn(queue.draw, 20)
    assert is_blocked(third)
    queue.end()
    assert len(third.result(SOON)) == 20
    assert [len(queue.draw(8)), len(queue.draw(8))] == [2, 0]


@pytest.mark.parametrize("samples", [1, 5])
def test_a_data_set_smaller_than_the_gate_is_drawn_when_it_ends(samples):
    queue = queue_of([samples], min_ready=30)
    steps = spawn(draw_all, queue, 8)
    for index in range(samples):
        queue.put(sample_of(index))
    assert is_blocked(steps)
    queue.end()
    assert [len(step) for step in steps.result(SOON)] == [samples]


def test_a_step_larger_than_the_queue_is_drawn_in_parts():
    queue = queue_of([100], min_ready=3, depth=7)
    steps = spawn(draw_all, queue, 40)
    for index in range(100):
        queue.put(sample_of(index))
    queue.end()
    assert [len(step) for step in steps.result(SOON)] == [40, 40, 20]


# --- limits -----------------------------------------------------------------------------------------------------------------


def test_put_blocks_while_the_queue_is_full_by_count():
    queue = queue_of([10], depth=2)
    queue.put(sample_of(0))
    assert queue.has_room(4)
    queue.put(sample_of(1))
    assert not queue.has_room(4)
    third = spawn(queue.put, sample_of(2))
    assert is_blocked(third)
    queue.draw(1)
    third.result(SOON)
    assert len(queue) == 2


def test_put_blocks_while_the_queue_is_full_by_bytes():
    queue = queue_of([10], max_bytes=1000)
    queue.put(sample_of(0, width=200))
    assert queue.has_room(200)
    assert not queue.has_room(201)
    second = spawn(queue.put, sample_of(1, width=51))
    assert is_blocked(second)
    queue.draw(1)
    second.result(SOON)
    assert queue.report(queue.draw(1))["hs_bytes"] == 0


REFUSALS = {
    "no gate": ({"min_ready": 0}, "stream.hs_min_ready=0 must be at least 1"),
    "negative gate": ({"min_ready": -3}, "stream.hs_min_ready=-3 must be at least 1"),
    "no depth": ({"depth": 0}, "stream.hs_queue_depth=0 must be at least 1"),
    "no bytes": ({"max_bytes": 0}, "stream.hs_queue_bytes=0 must be at least 1"),
    "gate above depth": ({"min_ready": 91}, "stream.hs_min_ready=91 exceeds stream.hs_queue_depth=90: no draw"),
    "longest sample": (
        {"max_bytes": 39_999},
        "hs_queue_bytes=39999 does not hold the longest sample: 4000 tokens x 10 bytes = 40000",
    ),
    # two epochs may meet in the queue, so each of the five may be there twice
    "gate": (
        {"min_ready": 3, "max_bytes": 109_999},
        "3 longest samples that may meet: 11000 tokens x 10 bytes = 110000",
    ),
}


@pytest.mark.parametrize(("limits", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_limits_that_would_stand_still_are_refused_in_one_line_with_the_arithmetic(limits, message):
    lengths = np.array([100, 4000, 3000, 2000, 1000])
    with pytest.raises(ValueError, match=r"^stream") as refusal:
        check_limits(lengths, 10, **{"min_ready": 2, "depth": 90, "max_bytes": 10**9} | limits)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_limits_that_just_suffice_are_accepted():
    lengths = np.array([100, 4000, 3000, 2000, 1000])
    check_limits(lengths, 10, min_ready=3, depth=3, max_bytes=110_000)
    check_limits(lengths, 10, min_ready=1, depth=1, max_bytes=40_000)
    check_limits(np.array([7]), 10, min_ready=3, depth=3, max_bytes=210)


def test_a_sample_that_cannot_fit_below_the_gate_is_an_error_and_no_endless_wait():
    queue = queue_of([10], min_ready=2, max_bytes=100)
    queue.put(sample_of(0, width=20))
    with pytest.raises(AssertionError, match="check_limits"):
        queue.put(sample_of(1, width=20))


# --- epochs -----------------------------------------------------------------------------------------------------------------


def test_a_draw_never_mixes_epochs_and_ends_one_with_its_remainder():
    queue = queue_of([5, 5])
    for epoch in range(3):
        for index in range(10):
            queue.put(sample_of(index, bucket=index // 5, epoch=epoch))
    queue.end()
    steps = spawn(draw_all, queue, 4).result(SOON)
    assert [len(step) for step in steps] == [4, 4, 2] * 3
    assert [{sample.epoch for sample in step} for step in steps] == [{0}] * 3 + [{1}] * 3 + [{2}] * 3


def test_an_epoch_is_let_in_only_when_the_one_before_has_arrived_so_stragglers_cannot_be_shut_out():
    queue = queue_of([5], min_ready=2, depth=3)
    for index in range(3):
        queue.put(sample_of(index))
    ahead = [spawn(queue.put, sample_of(index, epoch=1)) for index in range(3)]
    assert [sample.index for sample in queue.draw(3)] == [0, 1, 2]
    assert all(is_blocked(put) for put in ahead)  # there is room, but samples 3 and 4 are still at a target worker
    queue.put(sample_of(3))
    straggler = spawn(queue.put, sample_of(4))
    straggler.result(SOON)
    assert {sample.epoch for sample in queue.draw(8)} == {0}
    for put in ahead:
        put.result(SOON)
    assert [sample.epoch for sample in queue.draw(8)] == [1, 1, 1]


def test_a_dropped_sample_completes_the_epoch_for_waiting_producers_and_for_a_step_in_parts():
    queue = queue_of([2, 1])
    queue.put(sample_of(0))
    parts = queue.draw_step(3)
    assert [sample.index for sample in next(parts)] == [0]
    rest = spawn(lambda: [sample.index for part in parts for sample in part])
    ahead = spawn(queue.put, sample_of(0, epoch=1))
    assert is_blocked(rest)
    assert is_blocked(ahead)
    queue.drop(0, 0, "not finite")
    queue.drop(0, 1, "not finite")
    assert rest.result(SOON) == []  # the step ends with its epoch and takes nothing of the next one
    ahead.result(SOON)
    [again] = queue.draw(1)
    assert again.epoch == 1
    assert queue.report([again])["hs_dropped"] == {"not finite": 2}


def test_a_bucket_whose_samples_were_dropped_is_not_owed_them():
    queue = queue_of([10, 10])
    for _ in range(5):
        queue.drop(0, 1, "not finite")
    for index in range(15):
        queue.put(sample_of(index, bucket=int(index >= 10)))
    assert [sample.bucket for sample in queue.draw(6)] == [0, 0, 0, 0, 0, 0]
    assert Counter(sample.bucket for sample in queue.draw(9)) == {0: 4, 1: 5}


def test_epochs_smaller_than_the_gate_stream_on_without_an_end():
    queue = queue_of([3], min_ready=10, depth=12)

    def produce() -> None:
        for epoch in range(20):
            for index in range(3):
                queue.put(sample_of(index, epoch=epoch))
        queue.end()

    producer, steps = spawn(produce), spawn(draw_all, queue, 8)
    assert [[sample.epoch for sample in step] for step in steps.result(SOON)] == [[epoch] * 3 for epoch in range(20)]
    producer.result(SOON)


def test_one_sample_more_than_the_epoch_has_is_an_error():
    queue = queue_of([1])
    queue.put(sample_of(0))
    with pytest.raises(AssertionError, match="more than its epoch has"):
        queue.put(sample_of(0))
    queue.end()
    with pytest.raises(AssertionError, match="after the end"):
        queue.put(sample_of(0, epoch=1))


# --- resume -----------------------------------------------------------------------------------------------------------------

DROPPED = {7, 40, 41, 42, 333}  # of every epoch, as when their features are not finite


def lockstep(
    lengths: np.ndarray, n: int, epochs: int, depth: int, trained: tuple[int, set[int]] = (0, set())
) -> Iterator[list]:
    """The steps of a run whose two roles take turns in one thread, from the samples of the epoch that are already trained on."""
    buckets = bucket_of(lengths, EDGES)
    first, skip = trained
    counts = np.bincount(buckets[sorted(skip)], minlength=5).tolist() if skip else [0] * 5
    max_bytes = 60 * 4096  # below depth 90 the bytes, at depth 20 the count is what fills it
    queue = queue_of(bucket_counts(lengths, EDGES), min(10, depth), depth, max_bytes, trained=(first, counts))

    def produced() -> Iterator[Sample]:
        for epoch in range(first, epochs):
            done = skip if epoch == first else set()
            for group in order_of(lengths, epoch=epoch, skip=done):
                for index in set(group) & DROPPED:
                    queue.drop(epoch, int(buckets[index]), "not finite")
                for index in group:
                    if index not in done and index not in DROPPED:
                        yield sample_of(index, int(buckets[index]), epoch, width=int(lengths[index]) // 4)

    source = produced()
    waiting = next(source, None)

    def fill() -> None:
        nonlocal waiting
        while waiting is not None and queue.has_room(waiting.nbytes):
            queue.put(waiting)
            waiting = next(source, None)
        if waiting is None:
            queue.end()

    while step := [sample for part in queue.draw_step(n, before_draw=fill) for sample in part]:
        yield [(sample.epoch, sample.index) for sample in step]


@pytest.mark.parametrize(("n", "depth"), [(8, 90), (8, 20), (50, 20)], ids=["usual", "small queue", "steps in parts"])
def test_a_resumed_run_draws_exactly_as_the_unbroken_one(n, depth):
    lengths = lengths_like_the_corpus(400)

    def run(*trained: tuple[int, set[int]]) -> list:
        return spawn(lambda: list(lockstep(lengths, n, 3, depth, *trained))).result(60)

    unbroken = run()
    drawn = Counter(pair for step in unbroken for pair in step)
    assert drawn == {(epoch, index): 1 for epoch in range(3) for index in set(range(400)) - DROPPED}

    boundary = next(i for i, step in enumerate(unbroken) if step[0][0] == 1)
    rng = random.Random(0)
    for cut in [0, 1, boundary - 1, boundary, boundary + 1, *rng.sample(range(len(unbroken)), 5)]:
        epoch = unbroken[cut][0][0]
        trained = {index for step in unbroken[:cut] for of, index in step if of == epoch}
        assert run((epoch, trained)) == unbroken[cut:]


def test_a_run_resumed_at_the_end_of_an_epoch_goes_on_in_the_next():
    queue = queue_of([2, 1], trained=(4, [2, 1]))
    queue.put(sample_of(0, epoch=5))
    assert [sample.epoch for sample in queue.draw(1)] == [5]


# --- ends -------------------------------------------------------------------------------------------------------------------


def test_an_exception_of_a_producer_ends_waiting_and_later_draws_with_its_cause():
    queue = queue_of([100], min_ready=30)

    def produce() -> None:
        try:
            queue.put(sample_of(0))
            raise OSError("the target's device is gone")
        except OSError as error:
            queue.fail(error)

    draws = [spawn(queue.draw, 8) for _ in range(3)]
    spawn(produce)
    for draw in [*draws, spawn(queue.draw, 8)]:
        with pytest.raises(StreamFailed, match="OSError: the target's device is gone") as failure:
            draw.result(SOON)
        assert isinstance(failure.value.__cause__, OSError)


def test_a_killed_drafter_ends_waiting_and_later_puts_with_its_cause():
    queue = queue_of([100], depth=2)

    def consume() -> None:
        try:
            queue.draw(1)
            raise SystemExit("killed")
        except SystemExit as error:
            queue.fail(error)

    puts = [spawn(queue.put, sample_of(index)) for index in range(6)]
    spawn(consume)
    outcomes = [put.exception(SOON) for put in [*puts, spawn(queue.put, sample_of(6))]]
    failures = [outcome for outcome in outcomes if outcome is not None]
    assert len(failures) >= 4  # at most three of the seven found room
    assert all(isinstance(failure, StreamFailed) and isinstance(failure.__cause__, SystemExit) for failure in failures)


def test_the_first_failure_is_the_cause_even_when_the_other_side_fails_of_it():
    queue = queue_of([10])
    queue.fail(MemoryError("first"))
    with pytest.raises(StreamFailed) as failure:
        queue.draw(1)
    queue.fail(failure.value)
    with pytest.raises(StreamFailed, match=r"^MemoryError: first$"):
        queue.put(sample_of(0))


def test_closing_ends_waiting_and_later_puts_and_draws():
    queue = queue_of([10], depth=1)
    queue.put(sample_of(0))
    put = spawn(queue.put, sample_of(1))
    assert is_blocked(put)
    queue.close()
    for waiting in (put, spawn(queue.put, sample_of(2)), spawn(queue.draw, 1)):
        with pytest.raises(Closed):
            waiting.result(SOON)


def test_a_stop_order_ends_every_wait_without_a_call_to_the_queue():
    stop = []
    queue = queue_of([10], min_ready=2, depth=2, stopping=lambda: bool(stop))
    draw = spawn(queue.draw, 1)
    full = queue_of([10], depth=1, stopping=lambda: bool(stop))
    full.put(sample_of(0))
    put = spawn(full.put, sample_of(1))
    assert is_blocked(draw)
    assert is_blocked(put)
    stop.append("a signal handler may do no more than this")
    for waiting in (draw, put, spawn(full.draw, 1)):
        with pytest.raises(Closed):
            waiting.result(SOON)


# --- report -----------------------------------------------------------------------------------------------------------------


def test_the_report_says_what_is_buffered_how_old_the_step_is_and_how_it_is_mixed():
    queue = queue_of([5, 3])
    for index in range(4):
        queue.put(sample_of(index, bucket=int(index == 3), width=index + 1))
    first = queue.report(queue.draw(2))  # samples 0 and 3, one of each bucket
    queue.put(sample_of(4, width=10))
    queue.drop(0, 0, "too long")
    second = queue.report(queue.draw(2))
    assert first == {
        "hs_samples": 2,
        "hs_bytes": 20,
        "hs_bucket_samples": [2, 0],
        "hs_bucket_bytes": [20, 0],
        "hs_gate_seconds": 0.0,
        "hs_blocked_seconds": 0.0,
        "hs_age_mean": 0.0,
        "hs_age_max": 0,
        "hs_mix": [0.5, 0.5],
        "hs_mix_distance": 0.125,
        "hs_in": 4,
        "hs_out": 2,
        "hs_dropped": {},
    }
    assert (second["hs_samples"], second["hs_bytes"], second["hs_in"], second["hs_out"]) == (1, 40, 5, 4)
    assert (second["hs_age_mean"], second["hs_age_max"]) == (1.0, 1)  # put before the first step, drawn for the second
    assert (second["hs_mix"], second["hs_mix_distance"]) == ([1.0, 0.0], 0.375)
    assert second["hs_dropped"] == {"too long": 1}
    assert json.loads(json.dumps(second)) == second


def test_the_report_counts_the_seconds_of_waits_that_still_last():
    queue = queue_of([10], min_ready=2, depth=2)
    one = sample_of(0)

    def grows(seconds: str) -> bool:
        deadline = time.monotonic() + SOON
        while (counted := queue.report([one])[seconds] > 0.15) is False and time.monotonic() < deadline:
            time.sleep(0.05)
        return counted

    draw = spawn(queue.draw, 1)
    assert grows("hs_gate_seconds")
    assert not draw.done()
    queue.put(one)
    queue.put(sample_of(1))
    draw.result(SOON)
    queue.put(sample_of(2))
    assert queue.report([one])["hs_blocked_seconds"] == 0
    put = spawn(queue.put, sample_of(3))
    assert grows("hs_blocked_seconds")
    assert not put.done()
    queue.close()


# --- all together -----------------------------------------------------------------------------------------------------------


class WatchedQueue(HiddenStateQueue):
    """Notes what is buffered whenever a sample is taken; with draws of one sample that is at every draw."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.buffered_while_producers_lived: list[int] = []
        self.most_samples = self.most_bytes = 0

    def _next_bucket(self, waiting: list[deque[Sample]], done: list[int], available: list[int]) -> int:
        if not self._ended:
            self.buffered_while_producers_lived.append(len(self))
        self.most_samples, self.most_bytes = max(self.most_samples, len(self)), max(self.most_bytes, sum(self._bytes))
        return super()._next_bucket(waiting, done, available)


@pytest.mark.parametrize("seed", range(4))
def test_many_producers_and_drafters_pass_every_sample_of_every_epoch_on_exactly_once(seed):
    rng = random.Random(seed)
    lengths = lengths_like_the_corpus(rng.choice([3, 150, 400]), seed)
    buckets, corpus, epochs = bucket_of(lengths, EDGES), bucket_counts(lengths, EDGES), 4
    min_ready = rng.choice([1, 7])
    depth, max_bytes = min_ready + rng.choice([0, 20]), 4 * 4096 * (min_ready + 2)
    check_limits(lengths, 4, min_ready=min_ready, depth=depth, max_bytes=max_bytes)
    queue = WatchedQueue(corpus=corpus, min_ready=min_ready, depth=depth, max_bytes=max_bytes)
    plan = iter([(epoch, group) for epoch in range(epochs) for group in order_of(lengths, epoch=epoch)])
    turn, dropped = threading.Lock(), []

    def produce(worker: int) -> None:
        pause = random.Random(worker)
        while True:
            with turn:
                epoch, group = next(plan, (None, []))
            if epoch is None:
                return
            time.sleep(pause.random() * 0.002)
            for index in group:
                if pause.random() < 0.05:
                    queue.drop(epoch, int(buckets[index]), "by chance")
                    dropped.append((epoch, index))
                else:
                    queue.put(sample_of(index, int(buckets[index]), epoch, width=int(lengths[index])))

    def consume() -> list[tuple[int, int]]:
        got = []
        while samples := queue.draw(1):
            got += [(sample.epoch, sample.index) for sample in samples]
        return got

    producers = [spawn(produce, worker) for worker in range(4)]
    drafters = [spawn(consume) for _ in range(3)]
    for producer in producers:
        producer.result(60)
    queue.end()
    got = [pair for drafter in drafters for pair in drafter.result(60)]
    assert Counter(got + dropped) == {(epoch, index): 1 for epoch in range(epochs) for index in range(len(lengths))}
    assert min(queue.buffered_while_producers_lived, default=min_ready) >= min_ready
    assert queue.most_samples <= depth
    assert queue.most_bytes <= max_bytes
    assert len(queue) == 0
    for drafter in drafters:  # each saw the epochs in their order
        seen = [epoch for epoch, _ in drafter.result()]
        assert seen == sorted(seen)
