"""How close the streaming run comes to its slower side, and what stopping at the highest captured layer saves.

    python -m benchmarks.stream [--target demo/SmolLM2-135M-Instruct] [--rounds 3] [--steps 20]

Target and drafter are real (SmolLM2-135M and the demonstration's drafter), one thread and one core each. A round measures
the same samples three times: the target alone on its core, the drafter alone on its core with the features ready, and both
streaming through the queue. Tokens per second of wall time, so that waiting shows; the share is that of the slower side of
the same round, and the median over the rounds is what counts on a noisy machine. Exit code 1 when it is below 0.95.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from dflash import config as configuration
from dflash import run_dir as runs
from dflash.hs_queue import Sample
from dflash.job import Job, samples_of
from dflash.setup import set_up
from dflash.target import Target
from dflash.target_workers import LocalTargets
from dflash.train import Group, groups_to_run, local_producer, make_queue, run_target, take_step, threaded_stream

REQUIRED_SHARE = 0.95
TARGET_CORE, DRAFTER_CORE = 0, 1
WARM_UP_STEPS = 4  # of each measurement: the queue passes its gate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo/SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--anchors", type=int, default=64, help="more, or --vocabulary full, make the drafter slower")
    parser.add_argument("--vocabulary", choices=("full", "seen"), default="full")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        job = make_job(arguments, Path(scratch))
        measure_cut(job)
        shares = [one_round(job, arguments.steps) for _ in range(arguments.rounds)]
    share = statistics.median(shares)
    print(f"median share of the slower side's own rate: {share:.3f} (required {REQUIRED_SHARE}); rounds {shares}")
    return 0 if share >= REQUIRED_SHARE else 1


def make_job(arguments: argparse.Namespace, scratch: Path) -> Job:
    values = configuration.read_file("deployments/smollm2-cpu.yaml")
    values["target"]["name"] = arguments.target
    values["objective"] |= {"anchors": arguments.anchors, "vocabulary": arguments.vocabulary}
    values["optim"]["samples_per_step"] = (
        8  # the target's groups are of 8: a window of few samples would see their bursts
    )
    values["run"] |= {"root": str(scratch), "epochs": 1000}
    values["checkpoint"] = {"every_steps": 0}
    config = configuration.parse(values)
    run_dir = runs.create_run(config)
    return set_up(runs.read_config(run_dir), run_dir)


def measure_cut(job: Job) -> None:
    """CPU seconds of the same groups: up to the highest captured layer, the whole backbone, and with the head."""
    target, seconds = target_of(job), {}
    groups = [group.indices for group in itertools.islice(source_of(job), 12)]
    rows = [[tokens for _, tokens, _ in samples_of(job.data, group)] for group in groups]
    padded = [torch.nn.utils.rnn.pad_sequence(row, batch_first=True) for row in rows]
    with torch.no_grad():
        ways: dict[str, Callable[[int], object]] = {
            f"captured layers, up to {target.layer_ids[-1]}": lambda i: target.features(rows[i]),
            f"backbone, all {target.num_layers} layers": lambda i: target.decoder(input_ids=padded[i], use_cache=False),
            "backbone and head": lambda i: target.model(input_ids=padded[i], use_cache=False),
        }
        for index in range(len(groups)):  # interleaved: a change of the machine's speed hits all alike
            for name, run in ways.items():
                start = time.process_time()
                run(index)
                seconds.setdefault(name, []).append(time.process_time() - start)
    first = sum(next(iter(seconds.values())))
    for name, each in seconds.items():
        print(f"target, {name}: {sum(each):.2f} CPU s, {sum(each) / first:.2f} x")


def one_round(job: Job, steps: int) -> float:
    target_rate = target_alone(job, steps)
    drafter_rate = drafter_alone(job, steps)
    streaming_rate = streaming(job, steps)
    slower = min(target_rate, drafter_rate)
    print(
        f"target alone {target_rate:,.0f} tok/s, drafter alone {drafter_rate:,.0f} tok/s, streaming {streaming_rate:,.0f} tok/s: "
        f"{streaming_rate / slower:.3f} of the slower",
        flush=True,
    )
    return round(streaming_rate / slower, 3)


def target_of(job: Job) -> Target:
    assert isinstance(job.targets, LocalTargets)
    return job.targets.targets[0]


def source_of(job: Job) -> Iterator[Group]:
    return groups_to_run(job.config, job.data.lengths, 0, np.zeros(len(job.data), dtype=bool))


def produced(job: Job) -> Iterator[Sample]:
    target = target_of(job)
    return (sample for group in source_of(job) for sample in run_target(job.config, target, job.data, group))


def target_alone(job: Job, steps: int) -> float:
    os.sched_setaffinity(0, {TARGET_CORE})
    source = produced(job)
    per_step = job.config.optim.samples_per_step
    for _ in itertools.islice(source, WARM_UP_STEPS * per_step):
        pass
    start, tokens = time.perf_counter(), 0
    for sample in itertools.islice(source, steps * per_step):
        tokens += len(sample.tokens)
    return tokens / (time.perf_counter() - start)


def drafter_alone(job: Job, steps: int) -> float:
    per_step = job.config.optim.samples_per_step
    ready = list(itertools.islice(produced(job), (WARM_UP_STEPS + steps) * per_step))
    parts = iter([ready[at : at + per_step] for at in range(0, len(ready), per_step)])
    os.sched_setaffinity(0, {DRAFTER_CORE})
    return timed_steps(job, steps, lambda n: iter([next(parts)]))


def streaming(job: Job, steps: int) -> float:
    job.epoch, job.trained[:] = 0, False
    limit, never = job.targets.queue_bytes, threading.Event()
    queue = make_queue(job.config, job.data.lengths, 0, job.trained, max_bytes=limit, stopping=never)
    producer = local_producer(job.config, target_of(job), job.data)
    os.sched_setaffinity(0, {TARGET_CORE})  # threads inherit the core of whoever starts them
    with threaded_stream(source_of(job), [producer], queue) as draw_step:
        os.sched_setaffinity(0, {DRAFTER_CORE})
        return timed_steps(job, steps, draw_step)


def timed_steps(job: Job, steps: int, draw_step: Callable[[int], Iterator[list[Sample]]]) -> float:
    for _ in range(WARM_UP_STEPS):
        take_step(job, draw_step)
    start, tokens = time.perf_counter(), 0
    for _ in range(steps):
        tokens += sum(len(sample.tokens) for sample in take_step(job, draw_step).samples)
    return tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
