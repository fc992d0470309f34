"""What the roles on Ray cost, and where they stop growing: `python -m benchmarks.cluster` (eight minutes, one machine).

The queue is the real `dflash.cluster.QueueActor`. Its target workers are stand-ins: their forward is a sleep and their features
are made beforehand, so that two cores show what the roles cost and not what a model costs. The drafter worker is one that only
draws and fetches. A Ray cluster of this machine alone is started and ended; it needs 5 GB of memory.

    rate      2 target workers against 1, where they are the bottleneck
    overhead  CPU time a sample of every process, and how often the features' bytes are copied, for about 1, 10 and 100 MB
    scale     the queue with up to 512 threads, and from all that was measured, on paper, the walls at 8, 64 and 512 target workers

Exit code 1 when 2 target workers give less than 1.8 times the rate of 1, or when features are copied more than once.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch

from dflash import config as configuration
from dflash.cluster import QueueActor, Record, bytes_of, connected, features_from
from dflash.config import Config
from dflash.train import Group, Produce

REQUIRED_RATIO = 1.8
REQUIRED_COPIES = 1

MB, GB = 1e6, 1e9
WIDTH = 5 * 2_560  # of a token's features: a target of 4B parameters, five captured layers, two bytes a number
BYTES_PER_TOKEN = WIDTH * 2
DTYPE = torch.bfloat16
SAMPLES = 1024  # of an epoch; divides by every group and step here, so that every group and step is whole
QUEUE_BYTES = 10**9
WORKERS_ON_PAPER = (8, 64, 512)
MEASURED_THREADS = (1, *WORKERS_ON_PAPER)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", choices=("all", "rate", "overhead", "scale"), default="all")
    add_assumptions(parser)
    arguments = parser.parse_args()
    os.environ.pop("RAY_ADDRESS", None)  # never in a cluster that has something else to do
    os.environ["MALLOC_MMAP_THRESHOLD_"] = (
        "65536"  # a freed copy of features leaves the process at once: every one is seen
    )
    section, held = arguments.section, True
    with connected(config_of(tokens=40)):
        if section in ("all", "rate"):
            held &= measure_rate()
        if section in ("all", "overhead"):
            held &= measure_overhead()
        calls = measure_calls() if section in ("all", "scale") else None
    if calls is not None:  # without Ray's processes beside it
        on_paper(arguments, calls, measure_threads())
    return 0 if held else 1


# ---------------------------------------------------------------- the roles


def config_of(*, tokens: int, group: int = 8, step: int = 8, ready: int = 8, depth: int = 32) -> Config:
    """Of a stream of samples of `tokens` each, `group` of them a forward."""
    return configuration.parse(
        {
            "target": {"name": "a-stand-in"},
            "data": {"path": "none.jsonl", "max_tokens": max(tokens, 32)},
            "optim": {"samples_per_step": step},
            "stream": {
                "engine": "ray",
                "hs_min_ready": ready,
                "hs_queue_depth": depth,
                "hs_queue_bytes": QUEUE_BYTES,
                "group_tokens": tokens * group,
            },
            "run": {"epochs": 1_000_000},
        }
    )


@dataclass(frozen=True)
class Usage:
    """What a process has used so far."""

    cpu_ms: float
    private_bytes: int
    """Resident, without the object store's memory."""
    touched_bytes: int
    """Of the object store's memory, ever read or written by this process."""

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(
            self.cpu_ms - other.cpu_ms,
            self.private_bytes - other.private_bytes,
            self.touched_bytes - other.touched_bytes,
        )


def usage() -> Usage:
    touched = sum(resident for _, resident in object_store_mappings())
    return Usage(time.process_time() * 1e3, psutil.Process().memory_info().rss - touched, touched)


def object_store_mappings() -> list[tuple[range, int]]:
    """(addresses, resident bytes) of the object store in this process."""
    found, addresses = list[tuple[range, int]](), None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):  # the first line of a mapping
            start, end = (int(address, 16) for address in first.split("-"))
            addresses = range(start, end) if "plasma" in rest else None
        elif first == "Rss:" and addresses is not None:
            found.append((addresses, int(rest.split()[0]) * 1024))
    return found


class MeasuredQueue(QueueActor):
    def usage(self) -> Usage:
        return usage()


class StandInTarget:
    """A target worker as the queue sees it: a forward is a sleep, the features are there already."""

    def __init__(self, forward_seconds: float, tokens: int, as_bytes: bool = True):
        self._seconds, self._features = forward_seconds, torch.ones(tokens, WIDTH, dtype=DTYPE)
        self._given: Callable[[torch.Tensor], Any] = bytes_of if as_bytes else lambda tensor: tensor

    @ray.method(concurrency_group="produce")
    def produce(self, group: Group) -> list[Any]:
        time.sleep(self._seconds)
        return [None, *(self._given(self._features) for _ in range(int(group.wanted.sum())))]

    @ray.method(concurrency_group="ask")
    def usage(self) -> Usage:
        return usage()

    @ray.method(concurrency_group="ask")
    def peak_bytes(self) -> int:
        """The most that was resident without the object store's memory since this was asked last, roughly: as if the store's
        had all been touched by then."""
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        assert peak is not None
        return int(peak[1]) * 1024 - usage().touched_bytes

    @ray.method(concurrency_group="ask")
    def copy_ms(self) -> float:
        """CPU time of one plain copy of the features, into memory that was written before."""
        source, places = bytes_of(self._features), 4
        targets = np.ones((places, len(source)), dtype=np.uint8)
        repeats = max(8, int(2e9 / len(source)))
        started = time.process_time()
        for repeat in range(repeats):
            np.copyto(targets[repeat % places], source)
        return (time.process_time() - started) / repeats * 1e3

    @ray.method(concurrency_group="ping")
    def stop(self) -> None:
        pass

    @ray.method(concurrency_group="ping")
    def ping(self) -> None:
        pass


@dataclass(frozen=True)
class Taken:
    samples: int
    seconds: float
    in_store: int
    """Samples whose tensor lay in the object store's memory."""


class StandInDrafter:
    """Draws and fetches as `cluster.DrafterWorker` does, and trains nothing."""

    def __init__(self, queue: Any):
        self._queue, self._step = queue, 0

    def take(self, steps: int, samples_per_step: int, tokens: int) -> Taken:
        samples, in_store, store = 0, 0, list[range]()  # the store is there with the first features
        started = time.perf_counter()
        for _ in range(steps):
            drawn: list[Record] = []
            for part in itertools.count():
                records = ray.get(self._queue.draw.remote(0, self._step, part, samples_per_step))
                if records is None:
                    break
                arrays = ray.get([record.features for record in records])
                for array in arrays:
                    is_tensor = isinstance(array, torch.Tensor)
                    features = array if is_tensor else features_from(array, tokens, DTYPE)
                    assert features.shape == (tokens, WIDTH)
                    store = store or [addresses for addresses, _ in object_store_mappings()]
                    in_store += lies_in(store, features)
                drawn += [Record(record.index, record.epoch, record.bucket, 0, None, record.born) for record in records]
            ray.get(self._queue.report.remote(self._step, drawn))
            samples, self._step = samples + len(drawn), self._step + 1
        return Taken(samples, time.perf_counter() - started, in_store)

    def usage(self) -> Usage:
        return usage()


def lies_in(store: list[range], features: torch.Tensor) -> bool:
    """Whether a tensor lies there from its first to its last byte."""
    first = features.data_ptr()
    return any(first in addresses and first + features.nbytes - 1 in addresses for addresses in store)


@dataclass(frozen=True)
class Roles:
    queue: Any
    targets: list[Any]
    drafter: Any


@contextlib.contextmanager
def roles(
    config: Config, *, workers: int, forward_seconds: float, tokens: int, as_bytes: bool = True
) -> Iterator[Roles]:
    """A queue that is open, its target workers and a drafter worker."""
    groups = {"produce": 1, "ask": 1, "ping": 1}
    target: Any = ray.remote(num_cpus=0, concurrency_groups=groups)(StandInTarget)  # pyright: ignore[reportCallIssue]
    targets = [target.remote(forward_seconds, tokens, as_bytes) for _ in range(workers)]
    lengths = np.full(SAMPLES, tokens, dtype=np.int32)
    queue_actor: Any = ray.remote(num_cpus=0, max_concurrency=4)(MeasuredQueue)  # pyright: ignore[reportCallIssue]
    queue = queue_actor.remote(config, lengths, 0, np.zeros(SAMPLES, dtype=bool), drafter_workers=1)
    drafter_worker: Any = ray.remote(num_cpus=0)(StandInDrafter)
    drafter = drafter_worker.remote(queue)
    try:
        ray.get([worker.ping.remote() for worker in targets])
        ray.get(queue.open.remote(targets, max_bytes=QUEUE_BYTES, bytes_per_token=BYTES_PER_TOKEN))
        yield Roles(queue, targets, drafter)
    finally:
        for actor in (drafter, queue):
            ray.kill(actor)
        time.sleep(1.0)  # else the queue says that a target worker was lost
        for actor in targets:
            ray.kill(actor)


# ---------------------------------------------------------------- rate


def measure_rate(*, forward_seconds: float = 0.2, groups: int = 30, rounds: int = 2) -> bool:
    """Whether 2 target workers give enough of twice the rate of 1."""
    tokens, per_step = 40, 8
    config = config_of(tokens=tokens, group=8, step=per_step)
    print(
        f"rate: a forward of 8 samples is a sleep of {forward_seconds} s, features of {tokens * BYTES_PER_TOKEN / MB:.1f} MB, the "
        "drafter waits",
        flush=True,
    )
    ratios = []
    for _ in range(rounds):
        rates = []
        for workers in (1, 2):
            with roles(config, workers=workers, forward_seconds=forward_seconds, tokens=tokens) as cast:
                ray.get(cast.drafter.take.remote(4 * workers, per_step, tokens))
                taken: Taken = ray.get(cast.drafter.take.remote(groups * workers, per_step, tokens))
            rates.append(taken.samples / taken.seconds)
        ratios.append(rates[1] / rates[0])
        of_sleep = [rate * forward_seconds / 8 / workers for workers, rate in zip((1, 2), rates, strict=True)]
        print(
            f"  1 target worker {rates[0]:.1f} samples/s, 2 {rates[1]:.1f}: {ratios[-1]:.2f} times "
            f"({of_sleep[0]:.2f} and {of_sleep[1]:.2f} of what the sleep alone allows)",
            flush=True,
        )
    ratio = statistics.median(ratios)
    print(f"  median {ratio:.2f} times (required {REQUIRED_RATIO})\n", flush=True)
    return ratio >= REQUIRED_RATIO


# ---------------------------------------------------------------- overhead and copies


@dataclass(frozen=True)
class Overhead:
    """A sample's, on one machine."""

    samples: int
    sample_bytes: int
    queue: Usage
    target_ms: float  # of all target workers
    drafter_ms: float
    rest_ms: float  # raylet, with the object store in it, and Ray's directory
    copy_ms: float  # of one plain copy of a sample in the target worker's process
    stored: float  # times that a sample's bytes are in the object store
    private: float  # times that they were in the target worker's own memory, beside the features themselves
    not_in_store: float  # share of the samples that the drafter worker had elsewhere than in the object store
    queue_touched: int  # bytes of the object store, ever

    @property
    def copies(self) -> float:
        """Of a sample's bytes, on their way from the target worker's features to the drafter worker's."""
        return self.stored + self.private + self.not_in_store + self.queue_touched / self.sample_bytes


def measure_overhead() -> bool:
    """Whether features are copied at most once on one machine."""
    print(
        "overhead: 1 target worker, groups and steps of 4 samples, the features made beforehand and not read by the drafter"
    )
    print(
        "  CPU ms a sample    queue  target  drafter  Ray's own  one plain copy   queue's memory grew, store memory it touched"
    )
    floor = overhead(1, 8)  # Ray's own memory in a target worker is not quite at rest: 1 to 2 MB
    rows = list[Overhead]()
    for tokens, steps in ((40, 200), (400, 100), (4000, 25)):
        rows.append(overhead(tokens, steps, floor=floor.private * floor.sample_bytes))
        print_overhead(rows[-1], f"{rows[-1].sample_bytes / MB:.1f} MB")
    plain = overhead(4000, 12, as_bytes=False)
    print_overhead(plain, "torch tensor, 102.4")

    print("  copies of a sample's bytes: object store + target worker + drafter worker + queue")
    for row, name in [*((row, f"{row.sample_bytes / MB:.1f} MB") for row in rows), (plain, "torch tensor, 102.4")]:
        print(
            f"  {name:26s} {row.stored:13.3f}  {row.private:14.3f}  {row.not_in_store:15.3f}  "
            f"{row.queue_touched / row.sample_bytes:6.3f}",
            flush=True,
        )
    most = max(row.copies for row in rows)
    print(f"  the most {most:.2f} (required {REQUIRED_COPIES}, a copy is whole or none)\n", flush=True)
    return round(most) <= REQUIRED_COPIES


def overhead(
    tokens: int,
    steps: int,
    *,
    as_bytes: bool = True,
    group: int = 4,
    step: int = 4,
    workers: int = 1,
    floor: float = 0.0,
) -> Overhead:
    """Measured over `steps` steps, after half as many for which the object store's memory is new; `floor` is the bytes that a
    target worker's own memory grows by where the features are next to nothing."""
    config = config_of(tokens=tokens, group=group, step=step, ready=step, depth=step + 2)
    with roles(config, workers=workers, forward_seconds=0, tokens=tokens, as_bytes=as_bytes) as cast:
        everyone = [cast.queue, cast.drafter, *cast.targets]
        ray.get(cast.drafter.take.remote(max(8, steps // 2), step, tokens))
        before, rest = ray.get([actor.usage.remote() for actor in everyone]), rest_cpu_ms()
        taken: Taken = ray.get(cast.drafter.take.remote(steps, step, tokens))
        after = ray.get([actor.usage.remote() for actor in everyone])
        rest = rest_cpu_ms() - rest
        private = min(private_bytes(cast, step, tokens) for _ in range(3))
        stored = stored_bytes(cast.targets[0], group) / group
        copy_ms: Any = ray.get(cast.targets[0].copy_ms.remote())
    queue, drafter, *targets = (late - early for late, early in zip(after, before, strict=True))
    sample_bytes = tokens * BYTES_PER_TOKEN
    return Overhead(
        samples=taken.samples,
        sample_bytes=sample_bytes,
        queue=queue,
        target_ms=sum(each.cpu_ms for each in targets),
        drafter_ms=drafter.cpu_ms,
        rest_ms=rest,
        copy_ms=copy_ms,
        stored=stored / sample_bytes,
        private=max(0.0, private - floor) / sample_bytes,
        not_in_store=1 - taken.in_store / taken.samples,
        queue_touched=after[0].touched_bytes,
    )


def print_overhead(row: Overhead, name: str) -> None:
    each = [row.queue.cpu_ms, row.target_ms, row.drafter_ms, row.rest_ms]
    queue, target, drafter, rest = (ms / row.samples for ms in each)
    print(
        f"  {name:17s} {queue:6.2f}  {target:6.2f}  {drafter:7.2f}  {rest:9.2f}  {row.copy_ms:14.2f}   "
        f"{row.queue.private_bytes / MB:.1f} MB, {row.queue_touched / MB:.1f} MB of {row.samples * row.sample_bytes / GB:.1f} GB",
        flush=True,
    )


def private_bytes(cast: Roles, step: int, tokens: int) -> int:
    """What a target worker's own memory grew by at the most, for a while, during a few steps."""
    target = cast.targets[0]
    ray.get(target.peak_bytes.remote())
    before: Usage = ray.get(target.usage.remote())
    ray.get(cast.drafter.take.remote(8, step, tokens))
    peak: int = ray.get(target.peak_bytes.remote())
    return max(0, peak - before.private_bytes)


def stored_bytes(target: Any, samples: int) -> float:
    """What the object store holds more of while so many samples of a target worker are held, with everyone else at rest."""
    before = _settled_store_bytes()
    group = Group(0, np.arange(samples), np.ones(samples, dtype=bool))
    held = target.produce.options(num_returns=samples + 1).remote(group)
    ray.wait(held, num_returns=len(held), fetch_local=False)
    return _settled_store_bytes() - before


def _settled_store_bytes() -> float:
    """In use, once it has not changed for a second."""
    seen = list[float]()
    while len(seen) < 3 or len(set(seen[-3:])) > 1:
        time.sleep(0.5)
        seen.append(ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"])
    return seen[-1]


def rest_cpu_ms() -> float:
    """Of the Ray cluster's own processes on this machine, without its workers."""
    names = ("raylet", "gcs_server")
    ours = [process for process in psutil.Process().children(recursive=True) if process.name() in names]
    return sum(process.cpu_times().user + process.cpu_times().system for process in ours) * 1e3


# ---------------------------------------------------------------- scale: what the calls cost


@dataclass(frozen=True)
class Calls:
    """CPU milliseconds of the queue actor's process, by what they are for."""

    sample: float
    group: float
    step: float

    def per_sample(self, *, group: int, step: int) -> float:
        return self.sample + self.group / group + self.step / step


def measure_calls() -> Calls:
    """From groups and steps of other sizes, at 1 MB."""
    print("scale, measured with Ray: CPU ms of the queue actor a sample of 1.0 MB")

    def queue_ms(*, group: int, step: int, workers: int = 1) -> float:
        row = overhead(40, 1024 // step, group=group, step=step, workers=workers)
        ms = row.queue.cpu_ms / row.samples
        print(f"  {workers} target worker(s), groups of {group}, steps of {step}: {ms:.2f}", flush=True)
        return ms

    both, small_groups, small_steps = queue_ms(group=8, step=8), queue_ms(group=1, step=8), queue_ms(group=8, step=1)
    group, step = (small_groups - both) / (1 - 1 / 8), (small_steps - both) / (1 - 1 / 8)
    calls = Calls(both - group / 8 - step / 8, group, step)
    print(
        f"  hence {calls.sample:.2f} a sample, {calls.group:.2f} a group (produce, ping, wait) and {calls.step:.2f} a step"
    )
    for workers in (2, 4, 8):
        queue_ms(group=8, step=8, workers=workers)
    print(flush=True)
    return calls


# ---------------------------------------------------------------- scale: what the threads cost


class QueueOfThreads(QueueActor):
    """The queue actor's own threads and queue, in one process; a forward is a sleep in the thread that would ask for it."""

    forward_seconds: float

    def _producer(self, worker: Any, name: str, bytes_per_token: int) -> Produce:
        def produce(group: Group) -> list[Any]:
            time.sleep(self.forward_seconds)
            wanted = group.indices[group.wanted].tolist()
            return [Record(index, group.epoch, 0, bytes_per_token) for index in wanted]

        return produce


@dataclass(frozen=True)
class Threads:
    """A queue with so many target workers' threads."""

    target_bound_ms: float
    """CPU milliseconds a sample, while the drafter waits for the target workers."""
    drafter_bound_ms: float
    """CPU milliseconds a sample, while all of the threads wait for room."""
    full_rate: float
    """Samples a second that pass at most while all of the threads wait for room."""
    idle_share: float
    """Of a core, while nobody draws and all of the threads wait."""
    thread_bytes: float
    """Resident memory of a thread."""


def threads_of(count: int) -> Threads:
    """Measured in a process of its own."""
    target_bound_ms, *_ = _with_threads(count, forward_seconds=0.02 * count, seconds=6.0)
    drafter_bound_ms, rate, idle, thread_bytes = _with_threads(count, forward_seconds=0.0, seconds=4.0)
    return Threads(target_bound_ms, drafter_bound_ms, rate, idle, thread_bytes)


def _with_threads(count: int, *, forward_seconds: float, seconds: float) -> tuple[float, float, float, float]:
    """(CPU ms a sample, samples a second, share of a core without a draw, bytes a thread)."""
    step = 64
    config = config_of(tokens=40, group=8, step=step, ready=64, depth=256)
    lengths, trained = np.full(SAMPLES, 40, dtype=np.int32), np.zeros(SAMPLES, dtype=bool)
    queue: Any = QueueOfThreads(config, lengths, 0, trained, drafter_workers=1)
    queue.forward_seconds = forward_seconds
    resident = psutil.Process().memory_info().rss
    queue.open([None] * count, max_bytes=10**12, bytes_per_token=BYTES_PER_TOKEN)
    time.sleep(1.0)
    thread_bytes = (psutil.Process().memory_info().rss - resident) / count
    cpu, started = time.process_time(), time.perf_counter()
    time.sleep(2.0)
    idle = (time.process_time() - cpu) / (time.perf_counter() - started)

    def take_step(number: int) -> int:
        drawn: list[Any] = []
        for part in itertools.count():
            records = queue.draw(0, number, part, step)
            if records is None:
                break
            drawn += records
        queue.report(number, drawn)
        return len(drawn)

    numbers = itertools.count()
    for _ in range(8):
        take_step(next(numbers))
    cpu, started, samples = time.process_time(), time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        samples += take_step(next(numbers))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - started
    queue.stop()
    return cpu / samples * 1e3, samples / wall, idle, thread_bytes


def measure_threads() -> dict[int, Threads]:
    print(
        "scale, measured in one process: the queue with a thread a target worker, whose forward of 8 samples is a sleep"
    )
    print("  threads   CPU ms a sample:  drafter waits  targets wait   samples/s at most  idle, of a core  kB a thread")
    measured = {}
    for count in MEASURED_THREADS:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            row = measured[count] = process.submit(threads_of, count).result()
        print(
            f"  {count:7d}   {row.target_bound_ms:30.3f}  {row.drafter_bound_ms:12.3f}  {row.full_rate:18,.0f}  "
            f"{row.idle_share:15.2f}  {row.thread_bytes / 1e3:11.0f}",
            flush=True,
        )
    print(flush=True)
    return measured


# ---------------------------------------------------------------- scale: on paper


def add_assumptions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("assumptions of the table on paper")

    def add(name: str, default: float, what: str) -> None:
        group.add_argument(f"--{name}", type=type(default), default=default, help=f"{what} (default {default})")

    add("forward-seconds", 0.2, "of one group: 4B parameters x 2 x 8,000 tokens at 320 TFLOP/s")
    add("group-samples", 8, "samples of a group")
    add("tokens", 1000, "of a sample")
    add("bytes-per-token", BYTES_PER_TOKEN, "of features: 5 layers x 2,560 x 2 bytes")
    add("samples-per-step", 64, "of an optimizer step")
    add("queue-samples", 256, "stream.hs_queue_depth")
    add("workers-per-machine", 8, "target workers of a machine")
    add("drafter-machines", 1, "machines that the drafter workers are on, evenly")
    add("network-gbit", 100.0, "per second into or out of a machine")
    add("store-gb", 200.0, "object store of a machine")


@dataclass(frozen=True)
class Demand:
    """What a run with so many target workers that are never idle asks for, as shares of what there is."""

    samples: float  # a second
    queue_cores: float  # at the drafters' wait, and at the targets': the larger
    into_drafters: float  # bytes a second, into each of their machines
    out_of_targets: float  # bytes a second, out of each of their machines
    target_store: float  # bytes in the fullest of their machines
    drafter_store: float  # bytes in each of their machines


def demand(workers: int, arguments: argparse.Namespace, calls: Calls, threads: dict[int, Threads]) -> Demand:
    sample_bytes = arguments.tokens * arguments.bytes_per_token
    group, step = arguments.group_samples, arguments.samples_per_step
    samples = workers * group / arguments.forward_seconds
    # what a sample costs more with so many threads than with one; the rest of their cost is in the calls
    counts = list(threads)
    herd = max(
        np.interp(workers, counts, [getattr(threads[count], which) for count in counts]) - getattr(threads[1], which)
        for which in ("target_bound_ms", "drafter_bound_ms")
    )
    here = min(workers, arguments.workers_per_machine)
    return Demand(
        samples=samples,
        queue_cores=samples * (calls.per_sample(group=group, step=step) + max(0.0, float(herd))) / 1e3,
        into_drafters=samples * sample_bytes / arguments.drafter_machines,
        out_of_targets=samples * sample_bytes * here / workers,
        # in hand, a group each; buffered and drawn, all of it made by this machine at the worst
        target_store=(here * group + arguments.queue_samples + step) * sample_bytes,
        drafter_store=step / arguments.drafter_machines * sample_bytes,
    )


WALLS = {  # what ends the growth, and which setting moves it
    "queue actor, 1 core": "larger groups (stream.group_tokens) and steps (optim.samples_per_step), a little; then a run each",
    "network into the drafters": "cluster.drafter_workers on more machines; target.captured_layers; a faster network",
    "network out of the targets": "fewer target workers a machine (cluster.target_gpus, machines); target.captured_layers",
    "object store, target machine": "stream.hs_queue_bytes, stream.hs_queue_depth; ray start --object-store-memory",
    "object store, drafter machine": "optim.samples_per_step; more drafter machines; ray start --object-store-memory",
}


def shares(needed: Demand, arguments: argparse.Namespace) -> dict[str, float]:
    """Of every resource, in the order of WALLS; more than 1 is more than there is."""
    network, store = arguments.network_gbit * 1e9 / 8, arguments.store_gb * GB
    used = (
        needed.queue_cores,
        needed.into_drafters / network,
        needed.out_of_targets / network,
        needed.target_store / store,
        needed.drafter_store / store,
    )
    return dict(zip(WALLS, used, strict=True))


def on_paper(arguments: argparse.Namespace, calls: Calls, threads: dict[int, Threads]) -> None:
    sample_mb = arguments.tokens * arguments.bytes_per_token / MB
    print(
        f"scale, on paper: {arguments.group_samples} samples of {sample_mb:.1f} MB a forward of {arguments.forward_seconds} s, "
        f"steps of {arguments.samples_per_step}, {arguments.queue_samples} buffered,"
    )
    print(
        f"  {arguments.workers_per_machine} target workers a machine, drafters on {arguments.drafter_machines} machine(s) that "
        f"keep up, {arguments.network_gbit:g} Gbit/s and {arguments.store_gb:g} GB of object store a machine"
    )
    columns = {count: demand(count, arguments, calls, threads) for count in WORKERS_ON_PAPER}
    print(f"  {'target workers':40s}" + "".join(f"{count:>10d}" for count in columns) + "   full with")

    def row(name: str, values: list[float], form: str, last: str = "") -> None:
        print(f"  {name:40s}" + "".join(f"{value:>10{form}}" for value in values) + last)

    each = list(columns.values())
    row("samples a second", [one.samples for one in each], ",.0f")
    row("GB a second into the drafters' machines", [one.into_drafters / GB for one in each], ",.1f")
    row("GB a second out of a target machine", [one.out_of_targets / GB for one in each], ",.1f")
    row("GB of object store, target machine", [one.target_store / GB for one in each], ",.1f")
    row("GB of object store, drafter machine", [one.drafter_store / GB for one in each], ",.1f")
    full = {name: first_over(name, arguments, calls, threads) for name in WALLS}
    for name in WALLS:
        last = "never" if full[name] is None else f"{full[name]} target workers"
        row(f"share: {name}", [shares(one, arguments)[name] for one in each], ".2f", f"   {last}")
    reached = {name: count for name, count in full.items() if count is not None}
    if not reached:
        print("  no wall up to 4,096 target workers")
        return
    for place, name in enumerate(sorted(reached, key=lambda name: reached[name])):
        word = "first wall" if place == 0 else "then"
        print(f"  {word}: {name}, with {reached[name]} target workers; moved by {WALLS[name]}")


def first_over(name: str, arguments: argparse.Namespace, calls: Calls, threads: dict[int, Threads]) -> int | None:
    """The fewest target workers that ask for more of a resource than there is; None for never, up to 4,096."""
    for workers in range(1, 4097):
        if shares(demand(workers, arguments, calls, threads), arguments)[name] > 1:
            return workers
    return None


if __name__ == "__main__":
    sys.exit(main())
