"""How close a step's length mix stays to the corpus, and what the queue costs: `python -m benchmarks.queue` (half a minute).

The real HiddenStateQueue between two real threads. Corpus: 20,000 log-normal lengths in five buckets; groups of like length of
8,192 tokens (stratified production: of at most GROUP_SAMPLES samples); 8 samples a step. A step is drawn when the queue is full,
as when the target is the faster side. The rows with depth = ready show the other side: every draw finds only what the gate asks
for. The naive policies live here only, as subclasses of the queue or in place of production_order.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np
import torch

from dflash.hs_queue import HiddenStateQueue, Sample, bucket_counts, bucket_of, production_order

EDGES = (256, 512, 1024, 2048)
GROUP_TOKENS = 8192
SAMPLES_PER_STEP = 8
# A loss that depends on the bucket alone, so that its noise is the noise of the mix.
TOY_LOSS = np.array([3.2, 2.9, 2.5, 2.2, 2.0])
NOTHING = torch.zeros(1)


def corpus_lengths(samples: int = 20_000) -> np.ndarray:
    lengths = np.random.default_rng(0).lognormal(6.3, 0.9, samples)
    return np.clip(lengths, 32, 4096).astype(np.int32)


class LongestFirst(HiddenStateQueue):
    def _next_bucket(self, waiting: list[deque[Sample]], done: list[int], available: list[int]) -> int:
        return available[-1]


class FullestFirst(HiddenStateQueue):
    def _next_bucket(self, waiting: list[deque[Sample]], done: list[int], available: list[int]) -> int:
        return max(available, key=lambda bucket: len(waiting[bucket]))


class InProportion(HiddenStateQueue):
    """Buckets at random, in proportion to what is buffered."""

    rng = np.random.default_rng(1)

    def _next_bucket(self, waiting: list[deque[Sample]], done: list[int], available: list[int]) -> int:
        buffered = np.array([len(line) for line in waiting])
        return int(self.rng.choice(len(waiting), p=buffered / buffered.sum()))


def burst_order(lengths: np.ndarray) -> list[np.ndarray]:
    """Groups of like length out of windows of 512 samples, shuffled inside the window, whatever their bucket."""
    rng, groups = np.random.default_rng(1), []
    for start in range(0, len(lengths), 512):
        window = start + np.argsort(lengths[start : start + 512])
        in_window, group = [], []
        for index in window:
            if group and lengths[index] * (len(group) + 1) > GROUP_TOKENS:
                in_window.append(np.array(group))
                group = []
            group.append(index)
        in_window.append(np.array(group))
        rng.shuffle(in_window)
        groups += in_window
    return groups


def stratified_order(lengths: np.ndarray) -> list[np.ndarray]:
    return production_order(lengths, edges=EDGES, group_tokens=GROUP_TOKENS, seed=0, epoch=0)


def sample_of(index: int, bucket: int) -> Sample:
    return Sample(index, str(index), 0, bucket, tokens=NOTHING, loss_mask=NOTHING, features=NOTHING)


def stream(queue: HiddenStateQueue, order: list[np.ndarray], buckets: np.ndarray) -> tuple:
    """One epoch through two threads: distance and mix of every step, and the age in steps of every sample."""
    produced = threading.Event()

    def produce() -> None:
        for group in order:
            for index in group.tolist():
                queue.put(sample_of(index, int(buckets[index])))
        queue.end()
        produced.set()

    threading.Thread(target=produce, daemon=True).start()
    distances, mixes, ages, steps = [], [], [], 0
    while True:
        while len(queue) < queue.depth and not produced.is_set():
            time.sleep(0)
        step = [sample for part in queue.draw_step(SAMPLES_PER_STEP) for sample in part]
        if not step:
            return np.array(distances), np.array(mixes), np.array(ages)
        row = queue.report(step)
        distances.append(row["hs_mix_distance"])
        mixes.append(row["hs_mix"])
        ages += [steps - sample.born for sample in step]
        steps += 1


def cpu_microseconds(corpus: list[int], buckets: np.ndarray, repeats: int = 20_000) -> float:
    """CPU time of one put and one draw with 90 samples buffered, nobody waiting."""
    queue = HiddenStateQueue(corpus=[count * 2 for count in corpus], min_ready=30, depth=91, max_bytes=2**40)
    samples = [sample_of(index, int(buckets[index % len(buckets)])) for index in range(90 + repeats)]
    for sample in samples[:90]:
        queue.put(sample)
    started = time.process_time()
    for sample in samples[90:]:
        queue.put(sample)
        queue.draw(1)
    return (time.process_time() - started) / repeats * 1e6


def main() -> None:
    lengths = corpus_lengths()
    buckets, corpus = bucket_of(lengths, EDGES), bucket_counts(lengths, EDGES)
    share = np.array(corpus) / len(lengths)
    print(f"corpus: {len(lengths)} samples, shares {np.round(share, 3).tolist()}, {SAMPLES_PER_STEP} samples a step\n")
    print("production  draw            depth ready  distance  std of toy loss  age p99  age max (steps)")

    def row(production: str, draw: str, depth: int, ready: int) -> None:
        order = {"bursts": burst_order, "stratified": stratified_order}[production](lengths)
        policy = {"longest": LongestFirst, "fullest": FullestFirst, "in proportion": InProportion}
        kind = policy.get(draw, HiddenStateQueue)
        queue = kind(corpus=corpus, min_ready=ready, depth=depth, max_bytes=2**40)
        distances, mixes, ages = stream(queue, order, buckets)
        body = slice(len(distances) // 20, -len(distances) // 20)  # without the filling and the draining of the queue
        distance, noise = distances[body].mean(), (mixes @ TOY_LOSS)[body].std()
        print(
            f"{production:11s} {draw:15s} {depth:5d} {ready:5d}  {distance:8.3f}  {noise:15.3f}"
            f"  {np.percentile(ages, 99):7.0f}  {ages.max():7d}",
            flush=True,
        )

    for depth, ready in ((60, 10), (90, 30), (256, 128)):
        for production in ("bursts", "stratified"):
            for draw in ("longest", "fullest", "in proportion", "stratified"):
                row(production, draw, depth, ready)
    iid = np.random.default_rng(1).multinomial(SAMPLES_PER_STEP, share, 20_000) / SAMPLES_PER_STEP
    distance, noise = np.abs(iid - share).sum(1).mean() / 2, (iid @ TOY_LOSS).std()
    print(f"{'plain sampling, i.i.d. from the corpus':40s}  {distance:8.3f}  {noise:15.3f}")
    print("\nthe drafter faster than the target: every draw finds what the gate asks for and no more")
    for ready in (10, 30, 128):
        row("stratified", "stratified", ready, ready)

    print(
        f"\nput + draw of one sample at depth 90: {cpu_microseconds(corpus, buckets):.1f} CPU microseconds (limit 100)"
    )
    million = np.resize(lengths, 1_000_000)
    started = time.process_time()
    production_order(million, edges=EDGES, group_tokens=GROUP_TOKENS, seed=0, epoch=0)
    print(f"production order of an epoch of 1,000,000 samples: {time.process_time() - started:.2f} CPU seconds")


if __name__ == "__main__":
    main()
