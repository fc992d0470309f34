"""The roles of train.py on Ray, for several drafter workers or several machines (extra `cluster`).

    python -m dflash.cluster --config FILE     proves that the cluster of RAY_ADDRESS can hold a run: files, packages, room

    the driver, python -m dflash.train RUN_DIR     starts the actors and watches them; after a loss the drafters start again
      TargetWorker, cluster.target_workers of them     a copy of the target each; run groups, answer the drafters
      QueueActor                                       the hidden-state queue; its threads ask the target workers for groups
      DrafterWorker, cluster.drafter_workers of them   `train.run_steps`, together (team.py); the first one writes the run directory

The queue holds records: what a sample is, and a reference to its features, which stay in the object store of the machine that made
them until a drafter worker fetches them. The queue *asks* for groups, since in Ray the results of a call belong to its caller: what
a target worker has delivered outlives it, and what was lost with a machine is produced again by the call that made it, under the
same reference. So a sample is in the queue once, whatever is lost.

What is lost, and what becomes of it:
- a target worker: Ray starts it again and repeats its call, cluster.max_restarts times; then the run fails.
- a drafter worker, the queue, or their machine: all drafter workers and the queue start again from the run's last complete
  checkpoint, cluster.max_restarts times. The target workers stay.
- the driver: Ray ends all of its actors.
"""

import argparse
import contextlib
import functools
import itertools
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import AuthenticationError, GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from dflash import config as configuration
from dflash import run_dir as runs
from dflash.command import FINISHED, STOP_SIGNALS, Parser, Refused, run, stop_at_once
from dflash.config import Config
from dflash.data import prepare_configured
from dflash.evaluate import Prompts
from dflash.hs_queue import Closed, Sample, StreamFailed, bucket_of
from dflash.job import Job, samples_of
from dflash.machine import check_data_files
from dflash.setup import set_up
from dflash.target_workers import LocalTargets, TargetFacts
from dflash.team import Team, TeamLost
from dflash.train import (
    Group,
    Produce,
    groups_to_run,
    lockstep_stream,
    logged_in,
    make_queue,
    run_steps,
    run_target,
    stop_gracefully,
    threaded_stream,
)

POLL_SECONDS = 0.5  # between two looks at a stop request
PING_SECONDS = 5.0  # between two looks at whether a busy target worker lives; a long forward answers meanwhile
LAST_LINES_SECONDS = 1.0  # in which Ray passes on what the workers said last
HEAD_SECONDS = 60.0  # for a head that its supervisor is starting again
LOOK_SECONDS = 15.0  # in which the loss that another error is a consequence of shows up; a killed process does in one
STORE_SHARE = 0.5  # of an object store that the queue may fill by default; the rest is what drafters fetch and workers have in hand
# a local cluster's object store: the queue's bytes, and as much again for what is fetched and in hand
LOCAL_STORE_FACTOR = 2
SMALLEST_STORE = 256 * 2**20

log = logging.getLogger("dflash")


class Lost(Exception):
    """An actor, or the machine that it was on, is gone; the message says which and why."""


class TargetLost(Exception):
    """A target worker is gone for good."""


class NoRoom(Exception):
    """No machine has room for an actor that replaces a lost one."""


@dataclass(eq=False)
class Record:
    """A sample in the queue: what `hs_queue.Sample` says of itself, and where its features are."""

    index: int
    epoch: int
    bucket: int
    nbytes: int
    features: Any = None
    """ray.ObjectRef of bytes, [S x K*H] in the target's dtype; None in what goes back to the queue's report."""
    born: int = 0


# ---------------------------------------------------------------- target workers


class TargetWorker:
    """A proven copy of the target in a process of its own. It is loaded at the first call, also after Ray had to start it again."""

    def __init__(self, config: Config):
        self._config, self._loading, self._stopping = config, threading.RLock(), threading.Event()
        torch.set_num_threads(config.cluster.target_cpus)

    @functools.cached_property
    def _targets(self) -> LocalTargets:
        return LocalTargets(self._config, queue_bytes=0)  # the queue is elsewhere

    @functools.cached_property
    def _data(self):
        return prepare_configured(self._config, self._loaded().facts.tokenizer)[0]

    def _loaded(self) -> LocalTargets:
        with self._loading:
            return self._targets

    @ray.method(concurrency_group="ask")
    def load(self) -> None:
        """Returns once the target is loaded and proven. Raises ValueError, one line, for what the user can mend."""
        self._loaded()

    @ray.method(concurrency_group="ask")
    def facts(self) -> TargetFacts:
        """The target's, with its embedding and head on the CPU."""
        facts = self._loaded().facts
        tensors = ("embedding_weight", "head_weight", "head_bias")
        return replace(
            facts, **{name: value if (value := getattr(facts, name)) is None else value.cpu() for name in tensors}
        )

    @ray.method(concurrency_group="produce")
    def produce(self, group: Group) -> list[Any]:
        """None, and then the features' bytes of each wanted sample; None alone tells the queue that they are there."""
        (target,) = self._loaded().targets
        with self._loading:
            data = self._data
        return [None, *(bytes_of(sample.features) for sample in run_target(self._config, target, data, group))]

    @ray.method(concurrency_group="ask")
    def features(self, tokens: list[np.ndarray]) -> list[np.ndarray]:
        """The features' bytes of a group that a drafter worker asks for, outside the queue."""
        return [bytes_of(feature) for feature in self._loaded().features([tensor_on(ids) for ids in tokens])]

    @ray.method(concurrency_group="ask")
    def check_decoding(self, prompts: Prompts) -> None:
        self._loaded().check_decoding(prompts)

    @ray.method(concurrency_group="ask")
    def decode(self, weights: dict[str, np.ndarray], prompts: Prompts) -> dict[str, Any] | None:
        """`LocalTargets.decode`, until `stop`."""
        place = self._loaded().targets[0].device
        tensors = {name: tensor_on(array).to(place) for name, array in weights.items()}
        return self._loaded().decode(tensors, prompts, self._stopping)

    @ray.method(concurrency_group="ping")
    def stop(self) -> None:
        self._stopping.set()

    @ray.method(concurrency_group="ping")
    def ping(self) -> None:
        """Answers whatever else this worker is doing."""


def bytes_of(tensor: Tensor) -> np.ndarray:
    """A tensor's bytes, which Ray copies once, into the object store; it would serialise a tensor by another copy."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).reshape(-1).numpy()


def tensor_on(array: np.ndarray) -> Tensor:
    """A tensor on an array's own memory, which is Ray's and must not be written to; torch cannot express that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def features_from(array: np.ndarray, tokens: int, dtype: torch.dtype) -> Tensor:
    """[S, K*H] on the bytes where they lie."""
    return tensor_on(array).view(dtype).view(tokens, -1)


class RemoteTargets:
    """The target workers of a cluster as a drafter worker sees them (target_workers.TargetWorkers)."""

    def __init__(self, workers: list[ActorHandle], facts: list[Any], queue_bytes: int, patience: float):
        """`facts`: a reference in a list, so that Ray passes it on as one."""
        self._workers, self._reference, self._patience = workers, facts, patience
        self._facts: TargetFacts | None = None
        self.count, self.queue_bytes = len(workers), queue_bytes

    @property
    def facts(self) -> TargetFacts:
        facts = self._facts = self._facts or ray.get(self._reference[0])
        assert facts is not None
        return facts

    def features(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        arrays = self._answer("features", [ids.numpy() for ids in tokens])
        return [features_from(array, len(ids), self.facts.dtype) for array, ids in zip(arrays, tokens, strict=True)]

    def check_decoding(self, prompts: Prompts) -> None:
        self._answer("check_decoding", prompts)

    def decode(
        self, weights: Mapping[str, Tensor], prompts: Prompts, stopping: threading.Event
    ) -> dict[str, Any] | None:
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in weights.items()}
        return self._answer("decode", arrays, prompts)  # whoever sets `stopping` tells the target workers too

    def _answer(self, method: str, *arguments: Any) -> Any:
        worker = self._workers[0]
        return answer(getattr(worker, method).remote(*arguments), worker, "target worker 0", self._patience)


def answer(result: Any, worker: ActorHandle, name: str, patience: float) -> Any:
    """What a target worker's call returns, waiting for Ray to start it again and repeat the call where it was lost.

    Raises TargetLost once it is gone for good, or neither answers nor says that it lives for `patience` seconds.
    """
    alive, ping = time.monotonic(), worker.ping.remote()
    while not ray.wait([result], timeout=PING_SECONDS, fetch_local=False)[0]:
        if ray.wait([ping], timeout=0)[0]:
            alive, ping = time.monotonic(), worker.ping.remote()
        elif time.monotonic() - alive > patience:
            raise TargetLost(
                f"{name} was lost and could not be started again within {patience:g} s (cluster.start_seconds): "
                "no machine has room for it"
            )
    try:
        return ray.get(result)
    except RayActorError as error:
        raise TargetLost(f"{name} was lost once more than cluster.max_restarts allows: {reason_of(error)}") from error
    except RayTaskError as error:
        raise error.cause from None


# ---------------------------------------------------------------- the queue


class QueueActor:
    """The stream of train.py over records: the same queue, the same threads, with calls of target workers for forwards."""

    def __init__(self, config: Config, lengths: np.ndarray, epoch: int, trained: np.ndarray, *, drafter_workers: int):
        self._config, self._lengths, self._start = config, lengths, (epoch, trained)
        self._stopping = threading.Event()
        self._workers = drafter_workers
        self._dealing = threading.Lock()
        self._step, self._dealt = -1, list[list[Any] | None]()
        self._parts: Iterator[list[Any]] = iter(())
        self._at = list[int]()  # per drafter worker: the part of the step that it asked for last
        self._ended: BaseException | None = None
        self._reported: tuple[int, dict[str, Any]] = -1, {}

    def open(self, workers: list[ActorHandle], *, max_bytes: int, bytes_per_token: int) -> None:
        """Starts the stream."""
        config, (epoch, trained) = self._config, self._start
        self._queue = make_queue(config, self._lengths, epoch, trained, max_bytes=max_bytes, stopping=self._stopping)
        source = groups_to_run(config, self._lengths, epoch, trained)
        producers = [
            self._producer(worker, f"target worker {number}", bytes_per_token) for number, worker in enumerate(workers)
        ]
        stream = lockstep_stream if config.cluster.lockstep else threaded_stream
        self._stream = stream(source, producers, self._queue)
        self._draw_step = self._stream.__enter__()  # for as long as this actor lives

    def _producer(self, worker: ActorHandle, name: str, bytes_per_token: int) -> Produce:
        """`train.run_target` in a target worker."""

        def produce(group: Group) -> list[Any]:
            wanted = group.indices[group.wanted]
            calls: Any = worker.produce.options(num_returns=len(wanted) + 1).remote(group)
            done, *features = calls
            answer(done, worker, name, self._config.cluster.start_seconds)
            lengths = self._lengths[wanted]
            buckets = bucket_of(lengths, self._config.stream.bucket_edges)
            rows = zip(wanted.tolist(), buckets.tolist(), lengths.tolist(), features, strict=True)
            return [
                Record(index, group.epoch, bucket, tokens * bytes_per_token, reference)
                for index, bucket, tokens, reference in rows
            ]

        return produce

    # Ray repeats a call whose answer a broken connection swallowed: these answer alike when they are asked again

    @ray.method(max_task_retries=-1)
    def draw(self, rank: int, step: int, part: int, n: int) -> list[Record] | None:
        """One part of a step's draw, the same for all drafter workers; None after the last. Raises as the queue does, to all."""
        with self._dealing:
            if self._ended is not None:
                raise self._ended
            if step != self._step:
                self._step, self._dealt, self._parts = step, [], self._draw_step(n)
                self._at = [0] * self._workers
            if part == len(self._dealt):
                try:
                    self._dealt.append(next(self._parts, None))
                except (Closed, StreamFailed) as error:
                    self._ended = error
                    raise
            self._at[rank] = part
            for fetched in range(min(self._at)):  # by all: they have asked for the next
                self._dealt[fetched] = None  # or a step larger than the queue would pile up in the object store
            return self._dealt[part]

    @ray.method(max_task_retries=-1)
    def report(self, step: int, samples: list[Any]) -> dict[str, Any]:
        """`HiddenStateQueue.report` of a step."""
        if step != self._reported[0]:
            self._reported = step, self._queue.report(samples)
        return self._reported[1]

    def stop(self) -> None:
        """From now on every draw raises Closed."""
        self._stopping.set()

    @ray.method(max_task_retries=-1)
    def ping(self) -> None:
        """Answers while a draw waits."""


# ---------------------------------------------------------------- drafter workers


@dataclass(frozen=True)
class Start:
    """Where a drafter worker goes on."""

    lengths: np.ndarray
    epoch: int
    trained: np.ndarray
    bytes_per_token: int


class DrafterWorker:
    """One of the drafter workers that train one drafter together."""

    def __init__(self, config: Config, run_dir: Path, rank: int):
        self._config, self._run_dir, self._rank = config, run_dir, rank
        self._stopping = threading.Event()
        self._held = contextlib.ExitStack()  # for as long as this actor lives
        torch.set_num_threads(config.cluster.drafter_cpus)
        if rank == 0:
            self._held.enter_context(logged_in(run_dir))

    def found(self) -> tuple[str, int]:
        """Address and port at which the other workers find this one, the first."""
        address = ray.util.get_node_ip_address()
        self._store = TCPStore(address, 0, self._config.cluster.drafter_workers, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def set_up(self, targets: RemoteTargets, address: tuple[str, int]) -> Start:
        """Connects the workers and sets this one up. Raises ValueError, one line, for what the user can mend."""
        if self._rank == 0:
            # one that was cut off from the cluster may still be writing; it ends when it learns that it was given up
            self._held.enter_context(runs.only_writer(self._run_dir, seconds=self._config.cluster.start_seconds))
        # gloo would take the address of the host's name, on many machines the one that nobody else reaches
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(ray.util.get_node_ip_address()))
        team = Team.connect(
            self._rank,
            self._config.cluster.drafter_workers,
            store=self._store if self._rank == 0 else None,
            address=address,
            sharded=self._config.cluster.shard_drafter,
        )
        job = set_up(self._config, self._run_dir, targets, team)
        self._job: Job = job
        return Start(job.data.lengths, job.epoch, job.trained, targets.facts.bytes_per_token)

    def train(self, queue: ActorHandle) -> None:
        """Starts `train.run_steps` in a thread: a call for as long as a run would not survive a broken connection."""
        how = self._job, self._run_dir, self._drawn_from(queue), functools.partial(self._report, queue), self._stopping
        self._training = ThreadPoolExecutor(1, "train").submit(run_steps, *how)

    @ray.method(max_task_retries=-1)
    def outcome(self) -> int | None:
        """FINISHED or STOPPED, None while it trains. Raises what the training raised."""
        return self._training.result() if self._training.done() else None

    @ray.method(max_task_retries=-1)
    def stop(self) -> None:
        self._stopping.set()

    @ray.method(max_task_retries=-1)
    def ping(self) -> None:
        """Answers once this worker has a place, and as long as it lives."""

    def _drawn_from(self, queue: ActorHandle) -> Callable[[int], Iterator[list[Sample]]]:
        def draw_step(n: int) -> Iterator[list[Sample]]:
            for part in itertools.count():
                records = result_of(queue.draw.remote(self._rank, self._job.step, part, n), "the queue")
                if records is None:
                    return
                yield self._with_features(records)

        return draw_step

    def _with_features(self, records: list[Record]) -> list[Sample]:
        """All samples of a draw; those of this worker's share with their features, fetched, the others without any."""
        job, nothing = self._job, torch.empty(0, 0)
        rows = samples_of(job.data, np.array([record.index for record in records]))
        samples = [
            Sample(record.index, row[0], record.epoch, record.bucket, row[1], row[2], nothing, record.born)
            for record, row in zip(records, rows, strict=True)
        ]
        where = {record.index: record.features for record in records}
        share = job.team.share(samples)
        try:
            arrays = ray.get([where[sample.index] for sample in share])
        except (ObjectLostError, RayActorError) as error:
            raise Lost(f"the features of a drawn sample were lost: {reason_of(error)}") from error
        except RayTaskError as error:
            raise error.cause from None
        for sample, array in zip(share, arrays, strict=True):
            sample.features = features_from(array, len(sample.tokens), job.targets.facts.dtype)
        return samples

    def _report(self, queue: ActorHandle, samples: Sequence[Sample]) -> dict[str, Any]:
        records = [Record(sample.index, sample.epoch, sample.bucket, 0, None, sample.born) for sample in samples]
        return result_of(queue.report.remote(self._job.step, records), "the queue")


def interface_of(address: str) -> str:
    """The network interface that has an address of this machine."""
    found = [name for name, has in psutil.net_if_addrs().items() if address in [each.address for each in has]]
    assert found, f"no interface has {address}"
    return found[0]


# ---------------------------------------------------------------- the driver


def train(config: Config, run_dir: Path, stopping: threading.Event) -> int:
    """Trains in a prepared run directory on Ray; returns FINISHED or STOPPED. Raises as `dflash.train.train` does."""
    section = config.cluster
    with contextlib.ExitStack() as held:
        try:
            check_data_files(config)
            held.enter_context(connected(config))
            check_nodes(config)
            drafters_place, targets_place = reserve(config)
            targets, workers = start_targets(config, targets_place)
        except ValueError as error:
            raise Refused(str(error)) from error
        for losses in itertools.count():
            try:
                return train_from_last_checkpoint(config, run_dir, drafters_place, targets, workers, stopping)
            except Refused as refusal:
                if losses == 0:
                    raise
                raise RuntimeError(f"after a loss: {refusal}") from refusal  # training had begun
            except Lost as lost:
                if losses == section.max_restarts or stopping.is_set():
                    raise
                log.warning("%s; the drafters start again (%d of %d)", lost, losses + 1, section.max_restarts)
    raise AssertionError


def train_from_last_checkpoint(
    config: Config,
    run_dir: Path,
    place: PlacementGroup,
    targets: RemoteTargets,
    target_workers: list[ActorHandle],
    stopping: threading.Event,
) -> int:
    """Starts drafter workers and queue, and waits for their end. Raises Lost when one of them, or its machine, is gone."""
    section, actors, drafters = config.cluster, list[ActorHandle](), dict[str, ActorHandle]()
    try:
        drafters |= {
            f"drafter worker {rank}": _actor(DrafterWorker, place, 1 + rank, max_concurrency=4).remote(
                config, run_dir, rank
            )
            for rank in range(section.drafter_workers)
        }
        actors += drafters.values()
        results_of({actor.ping.remote(): name for name, actor in drafters.items()}, within=section.start_seconds)
        (address,) = results_of({actors[0].found.remote(): "drafter worker 0"})
        try:
            start, *_ = results_of({actor.set_up.remote(targets, address): name for name, actor in drafters.items()})
        except ValueError as error:
            raise Refused(str(error)) from error

        # a draw of each drafter worker may wait in it, once more where Ray repeats it, and other calls beside them
        queue = _actor(QueueActor, place, 0, max_concurrency=2 * section.drafter_workers + 2).remote(
            config, start.lengths, start.epoch, start.trained, drafter_workers=section.drafter_workers
        )
        actors.append(queue)
        limits = {"max_bytes": targets.queue_bytes, "bytes_per_token": start.bytes_per_token}
        results_of({queue.open.remote(target_workers, **limits): "the queue"}, within=section.start_seconds)
        stop_gracefully(stopping)
        results_of({actor.train.remote(queue): name for name, actor in drafters.items()})
        while True:
            codes = results_of({actor.outcome.remote(): name for name, actor in drafters.items()})
            if None not in codes:
                return codes[0]
            if stopping.is_set():  # said again and again: it changes nothing
                for actor in (queue, *drafters.values(), *target_workers):
                    actor.stop.remote()
            time.sleep(POLL_SECONDS)
    except (TeamLost, RuntimeError) as error:
        if isinstance(error, StreamFailed):
            raise
        # what one drafter worker says of another's end, by whichever of torch's ways, is not the cause
        lost = find_lost(drafters)
        if lost is None and isinstance(error, TeamLost):
            lost = Lost(f"the drafter workers lost sight of each other: {error}")
        raise (lost or error) from error
    finally:
        for actor in actors:
            ray.kill(actor)


def result_of(call: Any, name: str) -> Any:
    """The result of an actor's call. Raises what the call raised, Lost where the actor is gone."""
    try:
        return ray.get(call)
    except RayActorError as error:
        raise Lost(f"{name} was lost: {reason_of(error)}") from error
    except RayTaskError as error:
        raise error.cause from None


def results_of(calls: Mapping[Any, str], *, within: float | None = None) -> list[Any]:
    """The results of calls, by reference: the name of the actor that was called.

    Raises the first failure, Lost where it is that an actor is gone; NoRoom where an actor does not answer `within` so long.
    """
    pending, began = list(calls), time.monotonic()
    while pending:
        done, pending = ray.wait(pending, timeout=POLL_SECONDS, fetch_local=False)
        for call in done:
            result_of(call, calls[call])
        if pending and within is not None and time.monotonic() - began > within:
            raise NoRoom(
                f"{calls[pending[0]]} could not be started within {within:g} s (cluster.start_seconds): no machine has room for it"
            )
    return ray.get(list(calls))


def find_lost(actors: Mapping[str, ActorHandle]) -> Lost | None:
    """The first of these actors that turns out to be gone within LOOK_SECONDS."""
    deadline = time.monotonic() + LOOK_SECONDS
    while time.monotonic() < deadline:
        for name, actor in actors.items():
            try:
                ray.get(actor.ping.remote(), timeout=POLL_SECONDS)
            except RayActorError as error:
                return Lost(f"{name} was lost: {reason_of(error)}")
            except GetTimeoutError:
                pass
        time.sleep(POLL_SECONDS)
    return None


def reason_of(error: Exception) -> str:
    """Why an actor or an object is gone, in a line of Ray's many."""
    text = " ".join(str(error).split())
    found = re.search(r"The actor (?:is dead|died|is temporarily unavailable)? ?because (.*)", text)
    return (found[1] if found else text)[:300]


def start_targets(config: Config, place: PlacementGroup) -> tuple[RemoteTargets, list[ActorHandle]]:
    """All target workers, loaded and proven. Raises ValueError, one line, for what the user can mend."""
    section = config.cluster
    log.info("loading target %s in %d target workers", config.target.name, section.target_workers)
    workers = [
        _actor(
            TargetWorker,
            place,
            number,
            concurrency_groups={"produce": 1, "ask": section.drafter_workers, "ping": 1},
            # Ray starts a lost one again, repeats its calls, and makes what was lost with a machine once more
            max_restarts=section.max_restarts,
            max_task_retries=-1,
        ).remote(config)
        for number in range(section.target_workers)
    ]
    # an error of loading comes from every worker alike: the first one's is told
    results_of({worker.load.remote(): f"target worker {number}" for number, worker in enumerate(workers)})
    facts = workers[0].facts.remote()
    return RemoteTargets(workers, [facts], queue_limit(config), section.start_seconds), workers


# ---------------------------------------------------------------- the cluster


@contextlib.contextmanager
def connected(config: Config) -> Iterator[None]:
    """In the cluster that RAY_ADDRESS names, or in one of this machine alone that ends with the block. Raises ValueError."""
    address, section = os.environ.get("RAY_ADDRESS"), config.cluster
    quiet = {"logging_level": logging.WARNING, "namespace": f"dflash-{uuid.uuid4()}"}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cores = section.target_workers * section.target_cpus + section.drafter_workers * section.drafter_cpus + 1
        store = None if config.stream.hs_queue_bytes is None else LOCAL_STORE_FACTOR * config.stream.hs_queue_bytes
        slots = max(cores, os.cpu_count() or 1)  # who asks for more workers than cores gets them
        ray.init(
            address="local",
            num_cpus=slots,
            object_store_memory=None if store is None else max(store, SMALLEST_STORE),
            include_dashboard=False,
            **quiet,
        )
    elif address.startswith("ray://"):
        raise ValueError(
            f"RAY_ADDRESS={address}: the trainer runs on a machine of the cluster, not as a client; start it there with "
            "RAY_ADDRESS=HEAD:6379"
        )
    else:
        try:
            _await_head(address, min(HEAD_SECONDS, section.start_seconds))
            ray.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            said = (isinstance(error, OSError) and error.strerror) or str(error).strip().partition("\n")[0]
            if any(isinstance(each, AuthenticationError) for each in (error, error.__cause__)):
                said = said.partition(". ")[0]
                remedy = "give this machine the cluster's token (RAY_AUTH_TOKEN or ~/.ray/auth_token)"
                raise ValueError(f"RAY_ADDRESS={address}: {said}; {remedy}") from error
            raise ValueError(
                f"RAY_ADDRESS={address}: no cluster answers there ({said}); start one with `ray start`, or unset it"
            ) from error
    for number in STOP_SIGNALS:  # Ray has its own handler of SIGTERM
        signal.signal(number, stop_at_once)
    try:
        yield
    finally:
        time.sleep(LAST_LINES_SECONDS)
        ray.shutdown()


def _await_head(address: str, seconds: float) -> None:
    """Until HOST:PORT takes connections; OSError after `seconds`. Ray itself would try for minutes, without a word."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # such as "auto", where Ray looks for a cluster of this machine
        return
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=max(1.0, until - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(1.0)


def target_bundles(config: Config) -> list[dict[str, float]]:
    """What each target worker needs of a machine."""
    section = config.cluster
    return [_bundle(section.target_cpus, section.target_gpus)] * section.target_workers


def drafter_bundles(config: Config) -> list[dict[str, float]]:
    """What the queue, and each drafter worker, needs of a machine."""
    section = config.cluster
    return [{"CPU": 1.0}] + [_bundle(section.drafter_cpus, section.drafter_gpus)] * section.drafter_workers


def _bundle(cpus: int, gpus: float | None) -> dict[str, float]:
    if gpus is None:
        gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0
    return {"CPU": float(cpus)} | ({"GPU": gpus} if gpus else {})


def reserve(config: Config) -> tuple[PlacementGroup, PlacementGroup]:
    """Room for the queue and the drafter workers, and for the target workers. Raises ValueError where there is none."""
    # the drafters' first: they belong together, the target workers go wherever there is room
    drafters = _reserve(drafter_bundles(config), "PACK", config)
    return drafters, _reserve(target_bundles(config), "SPREAD", config)


def _reserve(bundles: list[dict[str, float]], strategy: str, config: Config) -> PlacementGroup:
    """Room for these bundles. Raises ValueError where there is none within cluster.start_seconds."""
    group = placement_group(bundles, strategy=strategy)
    if not group.wait(config.cluster.start_seconds):
        asked = target_bundles(config) + drafter_bundles(config)
        sums = {name: sum(bundle.get(name, 0) for bundle in asked) for name in ("CPU", "GPU")}
        have = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
        raise ValueError(
            f"cluster.target_workers={config.cluster.target_workers} and cluster.drafter_workers={config.cluster.drafter_workers} "
            f"with the queue ask for {sums['CPU']:g} CPUs and {sums['GPU']:g} GPUs, the cluster has {have['CPU']:g} and "
            f"{have['GPU']:g}, {ray.available_resources().get('CPU', 0):g} CPUs and {ray.available_resources().get('GPU', 0):g} "
            f"GPUs of them free; add machines, or lower them (waited {config.cluster.start_seconds:g} s)"
        )
    return group


def _actor(cls: type, place: PlacementGroup, bundle: int, **options: Any) -> Any:
    """A class as an actor's, for a bundle with all that was reserved there."""
    resources = place.bundle_specs[bundle]
    where = PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=bundle)
    gpus = resources.get("GPU", 0)
    return ray.remote(num_cpus=resources["CPU"], num_gpus=gpus, scheduling_strategy=where, **options)(cls)


def queue_limit(config: Config) -> int:
    """The queue's limit in bytes: the configured one, or a part of the smallest object store. Raises ValueError for more than it.

    The smallest, because whatever target worker is fastest may have made all that is buffered.
    """
    stores = [int(node["Resources"].get("object_store_memory", 0)) for node in ray.nodes() if node["Alive"]]
    limit = config.stream.hs_queue_bytes or int(min(stores) * STORE_SHARE)
    if limit > min(stores):
        raise ValueError(
            f"stream.hs_queue_bytes={limit} exceeds the {min(stores)} bytes of the cluster's smallest object store, and would be "
            "swapped to a disk; lower it (none: half of that), or start the machines with a larger --object-store-memory"
        )
    return limit


# ---------------------------------------------------------------- what every machine must have


@ray.remote(num_cpus=0, max_retries=0)
def _seen_from_here(paths: list[str], run_root: str, token: str) -> dict[str, Any]:
    """What a machine sees: the token, paths that are not there, its packages; leaves a file of its own in run.root."""
    root, node = Path(run_root), ray.get_runtime_context().get_node_id()
    try:
        said = (root / f".seen-{token}").read_text()
        (root / f".seen-{token}-{node}").write_text(said)
    except OSError as error:
        said = error.strerror
    return {
        "host": os.uname().nodename,
        "node": node,
        "said": said,
        "missing": [path for path in paths if not os.path.exists(path)],
        "packages": runs.package_versions() | {"dflash": runs.code_version()["commit"]},
    }


def check_nodes(config: Config) -> None:
    """Proves that every machine of the cluster sees the run's files and has our packages. Raises ValueError, one line."""
    root, token = Path(config.run.root), uuid.uuid4().hex
    root.mkdir(parents=True, exist_ok=True)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    paths = [path for path in (config.data.path, config.data.heldout_path) if path]
    paths += [config.target.name] if configuration.names_local_directory(config.target.name) else []
    paths += [path for path in (config.checkpoint.resume_from, config.drafter.init_from) if path]
    Path(config.data.prepared_dir).mkdir(parents=True, exist_ok=True)
    paths.append(config.data.prepared_dir)
    ours = runs.package_versions() | {"dflash": runs.code_version()["commit"]}
    try:
        (root / f".seen-{token}").write_text(token)
        calls = [
            _seen_from_here.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(paths, str(root), token)
            for node in nodes
        ]
        for node, call in zip(nodes, calls, strict=True):
            machine = f"machine {node['NodeManagerAddress']}"
            try:
                seen = ray.get(call, timeout=60)
            except GetTimeoutError:
                raise ValueError(f"{machine} of the cluster does not answer within 60 s; mend or remove it") from None
            except RayError as error:
                raise ValueError(
                    f"{machine} of the cluster cannot run our code ({reason_of(error)}); install the same dflash there"
                ) from error
            back = root / f".seen-{token}-{seen['node']}"
            if seen["said"] != token or not back.exists():
                raise ValueError(
                    f"run.root={root} is not the same storage on {machine} as here ({seen['said']}); "
                    "put it on storage that all machines see"
                )
            if seen["missing"]:
                raise ValueError(
                    f"{seen['missing'][0]} is not there on {machine}; put it on storage that all machines see"
                )
            different = [name for name, version in ours.items() if seen["packages"].get(name) != version]
            if different:
                name = different[0]
                raise ValueError(
                    f"{machine} has {name} {seen['packages'].get(name)}, this one {ours[name]}; install the same everywhere"
                )
    except OSError as error:
        raise ValueError(f"run.root={root}: {error.strerror}; give a directory that can be written") from None
    finally:
        for left in root.glob(f".seen-{token}*"):
            left.unlink(missing_ok=True)
    log.info("Ray: %s %s", "one machine, which sees" if len(nodes) == 1 else f"{len(nodes)} machines, all see", root)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code. The last line on stderr is the cause when it is not 0."""
    return run(lambda: _check(arguments), stopped="stopped; nothing was changed")


def _check(arguments: list[str] | None) -> int:
    parser = Parser(
        prog="python -m dflash.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    configuration.add_arguments(parser)
    config = configuration.with_absolute_paths(configuration.from_arguments(parser.parse_args(arguments)))
    if config.stream.engine != "ray":
        raise ValueError(f"stream.engine={config.stream.engine} needs no cluster; set it to ray")
    with connected(config):
        check_nodes(config)
        reserve(config)
        queue_limit(config)
        print(f"the cluster has room for the run, and all of its machines see {config.run.root}", flush=True)
    return FINISHED


if __name__ == "__main__":
    sys.exit(main())
