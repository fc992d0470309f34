"""Train a DFlash drafter on one machine: target workers -> hidden-state queue -> drafter. READ THIS FIRST.

    python -m dflash.train --config FILE [--SECTION.FIELD VALUE ...]   make a run directory and train in it
    python -m dflash.train RUN_DIR                                     train in a prepared one, or go on with a crashed one

Exit codes: 0 finished, 1 failed, 2 refused before any training, 3 stopped on request with a checkpoint.
"""

import argparse
import contextlib
import itertools
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dflash import checkpoint as checkpoints
from dflash import config as configuration
from dflash import run_dir as runs
from dflash.batches import micro_batches, on_device
from dflash.command import FAILED, FINISHED, REFUSED, STOP_SIGNALS, STOPPED, Parser, Refused, one_line, stop_at_once
from dflash.config import Config, OptimConfig
from dflash.data import Prepared
from dflash.hs_queue import Closed, HiddenStateQueue, Sample, StreamFailed, bucket_counts, bucket_of, production_order
from dflash.job import Job, autocast, embed, samples_of
from dflash.objective import head_loss
from dflash.recorder import Recorder, StepResult
from dflash.setup import optimizer_tensors, set_up, state_of
from dflash.target import Target
from dflash.target_workers import LocalTargets

JOIN_SECONDS = 5  # that a target worker has to end its forward once the run is over

log = logging.getLogger("dflash")
DrawStep = Callable[[int], Iterator[list[Sample]]]
Produce = Callable[["Group"], Iterable[Sample]]


# ---------------------------------------------------------------- the run, in order


def train(run_dir: Path, stopping: threading.Event) -> int:
    """Trains in a prepared run directory until all steps are done or `stopping` is set; returns FINISHED or STOPPED.

    Raises Refused before any training for what the user can mend, afterwards whatever went wrong.
    """
    try:
        config = runs.read_config(run_dir)
        job = None if config.stream.engine == "ray" else set_up(config, run_dir)
    except ValueError as error:
        raise Refused(str(error)) from error
    if job is None:
        return _train_on_cluster(config, run_dir, stopping)

    targets = job.targets
    assert isinstance(targets, LocalTargets)
    share_cores(job, targets)
    queue = make_queue(
        config, job.data.lengths, job.epoch, job.trained, max_bytes=targets.queue_bytes, stopping=stopping
    )
    stream = lockstep_stream if config.stream.engine == "lockstep" else threaded_stream
    source = groups_to_run(config, job.data.lengths, job.epoch, job.trained)
    producers = [local_producer(config, target, job.data) for target in targets.targets]
    stop_gracefully(stopping)
    with stream(source, producers, queue) as draw_step:
        return run_steps(job, run_dir, draw_step, queue.report, stopping)


def _train_on_cluster(config: Config, run_dir: Path, stopping: threading.Event) -> int:
    try:
        from dflash import cluster
    except ImportError as error:
        raise Refused(f"stream.engine=ray: {error}; install it: pip install 'dflash-stream[cluster]'") from error
    return cluster.train(config, run_dir, stopping)


def run_steps(
    job: Job,
    run_dir: Path,
    draw_step: DrawStep,
    report: Callable[[Sequence[Sample]], dict],
    stopping: threading.Event,
) -> int:
    """Every step that is left, with all that is measured and saved in between; returns FINISHED or STOPPED."""
    config = job.config
    with (
        Recorder(job, run_dir, report, stopping) as recorder,
        checkpoints.Saver(run_dir, keep=config.checkpoint.keep) as saver,
    ):

        def save() -> None:
            state = job.team.whole(job.drafter.state_dict()), job.team.whole(optimizer_tensors(job))
            if job.team.writes:
                saver.save(job.step, *state, state_of(job), spare=recorder.best_step)

        recorder.measure_heldout()
        if checkpoints.directory_of(
            run_dir, job.step
        ).exists():  # this run's own, which may have died before it was decoded
            recorder.decode_prompts()
        saved = job.step
        with contextlib.suppress(Closed):  # stop requested: the draw says so, to all drafter workers alike
            while job.step < job.total_steps:
                recorder.record(take_step(job, draw_step))
                if _due(job.step, config.run.heldout_every_steps):
                    recorder.measure_heldout()
                if _due(job.step, config.checkpoint.every_steps):
                    recorder.flush()  # so that a step that was not finite is never saved
                    save()
                    saved = job.step
                    recorder.decode_prompts()
                saver.check()
        recorder.flush()
        if job.step != saved or job.total_steps == 0:
            save()
        finished = job.step == job.total_steps
        if finished:
            recorder.measure_heldout()
            recorder.decode_prompts()
        saver.wait()
        recorder.status("finished" if finished else "stopped", None if finished else "stop requested")
    recorder.tell(finished)
    return FINISHED if finished else STOPPED


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def take_step(job: Job, draw_step: DrawStep) -> StepResult:
    """One optimizer step: draw, forward and backward by micro-batches of like length, one weighted mean, update."""
    optim = job.config.optim
    lr = lr_at(job.step, total=job.total_steps, optim=optim)
    drawn: list[Sample] = []
    samples: list[Sample] = []  # of those, this drafter worker's, in the order of their losses
    losses: list[torch.Tensor] = []
    sums: dict[str, torch.Tensor] = {}
    for part in draw_step(optim.samples_per_step):
        drawn += part
        for batch in on_device(job, micro_batches(job, job.team.share(part))):
            with autocast(job):
                hidden = job.drafter(batch.features, embed(job, batch.blocks.ids), batch.blocks.anchors)
            numerator, added = head_loss(hidden, batch.blocks, job.loss_head, job.config.objective)
            numerator.backward()
            samples += batch.samples
            for sample in batch.samples:  # a step may be larger than the queue: its features must not pile up here
                sample.features = sample.features[:0].clone()
            losses.append(added.pop("loss")[: len(batch.samples)])
            sums = {name: sums[name] + value if sums else value for name, value in added.items()}
    assert drawn, "the stream ended before its last step"

    samples, losses, sums = job.team.whole_step(drawn, samples, losses, sums, slots=job.shape.block_size - 1)
    gradients = job.team.gradients(job.drafter)
    norm = job.team.norm(gradients) / sums["weight"]
    finite = norm.isfinite() & torch.stack([loss.isfinite().all() for loss in losses]).all()
    # backward summed numerators: dividing once makes the step one weighted mean, however it was split
    scale = (optim.clip / norm.clamp_min(optim.clip) / sums["weight"]).float()
    torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
    for group in job.optimizer.param_groups:
        group["lr"] = lr
    # the fused kernel leaves the step out, on the device, when this says so: GradScaler's own way
    job.optimizer.found_inf = (~finite).float()  # pyright: ignore[reportAttributeAccessIssue]
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)

    values = torch.cat(
        [
            sums["weight"][None],
            sums["tau"][None],
            sums["blocks"][None],
            norm[None],
            sums["correct"],
            sums["slots"],
            *losses,
        ]
    )
    values = values.to("cpu", non_blocking=True)
    done = torch.cuda.current_stream(job.device).record_event() if job.device.type == "cuda" else None
    job.step += 1
    result = StepResult(job.step, job.epoch, lr, samples, values, done)
    job.trained[[sample.index for sample in samples]] = True
    if job.trained.all():
        job.epoch += 1
        job.trained[:] = False
    return result


def lr_at(step: int, *, total: int, optim: OptimConfig) -> float:
    """Learning rate of 0-based `step` of `total`: linear warm-up, then cosine, or constant with a linear decay (WSD)."""
    warmup = math.ceil(optim.warmup_fraction * total)
    low = optim.lr * optim.min_lr_fraction
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == "wsd":
        left = (total - step) / max(1.0, optim.decay_fraction * total)
        return low + (optim.lr - low) * min(1.0, left)
    return low + (optim.lr - low) * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup))) / 2


# ---------------------------------------------------------------- the stream: target workers -> queue


@dataclass(frozen=True)
class Group:
    """Samples of like length for one forward of the target. All are run, also those trained before a resume: a group of
    another size could give features that differ in the last bit."""

    epoch: int
    indices: np.ndarray  # of the data set
    wanted: np.ndarray  # bool, which of `indices` go into the queue


def make_queue(
    config: Config, lengths: np.ndarray, epoch: int, trained: np.ndarray, *, max_bytes: int, stopping: threading.Event
) -> HiddenStateQueue:
    """The queue of a run that has `trained` (bool [samples]) of `epoch` behind it."""
    edges = config.stream.bucket_edges
    return HiddenStateQueue(
        corpus=bucket_counts(lengths, edges),
        min_ready=config.stream.hs_min_ready,
        depth=config.stream.hs_queue_depth,
        max_bytes=max_bytes,
        trained=(epoch, bucket_counts(lengths[trained], edges)),
        stopping=stopping.is_set,
    )


def groups_to_run(config: Config, lengths: np.ndarray, epoch: int, trained: np.ndarray) -> Iterator[Group]:
    """Every group that the target still has to run, in order, to the end of the last epoch."""
    # copied here and now: the drafter moves on while the workers ask for groups
    first_epoch, trained = epoch, trained.copy()
    untouched = np.zeros_like(trained)

    def generate() -> Iterator[Group]:
        stream = config.stream
        for epoch in range(first_epoch, config.run.epochs):
            done = trained if epoch == first_epoch else untouched
            order = production_order(
                lengths,
                edges=stream.bucket_edges,
                group_tokens=stream.group_tokens,
                seed=config.run.seed,
                epoch=epoch,
                skip=np.flatnonzero(done).tolist(),
            )
            yield from (Group(epoch, indices, ~done[indices]) for indices in order)

    return generate()


def run_target(config: Config, target: Target, data: Prepared, group: Group) -> list[Sample]:
    """The group's wanted samples with their features, on the host."""
    buckets = bucket_of(data.lengths[group.indices], config.stream.bucket_edges)
    rows = list(samples_of(data, group.indices))
    features = to_host(target.features([tokens for _, tokens, _ in rows]))
    return [
        Sample(int(group.indices[at]), rows[at][0], group.epoch, int(buckets[at]), *rows[at][1:], features[at])
        for at in np.flatnonzero(group.wanted)
    ]


def local_producer(config: Config, target: Target, data: Prepared) -> Produce:
    """`run_target` on a CUDA stream of its own, so that its copies wait for its own forwards alone."""
    stream = torch.cuda.Stream(target.device) if target.device.type == "cuda" else None

    def produce(group: Group) -> list[Sample]:
        with torch.cuda.stream(stream):  # nothing on a CPU
            return run_target(config, target, data, group)

    return produce


def to_host(features: list[torch.Tensor]) -> list[torch.Tensor]:
    """The features in (pinned) host memory, arrived. Waits for this worker's own stream alone."""
    if features[0].device.type != "cuda":
        return features
    pinned = [torch.empty(feature.shape, dtype=feature.dtype, pin_memory=True) for feature in features]
    for host, feature in zip(pinned, features, strict=True):
        host.copy_(feature, non_blocking=True)
    torch.cuda.current_stream(features[0].device).synchronize()
    return pinned


@contextlib.contextmanager
def threaded_stream(
    source: Iterator[Group], producers: Sequence[Produce], queue: HiddenStateQueue
) -> Iterator[DrawStep]:
    """One thread per target worker fills the queue while the drafter draws. A failure on either side ends the other."""
    source_lock, running = threading.Lock(), itertools.count(len(producers) - 1, -1)

    def next_group() -> Group | None:
        with source_lock:
            return next(source, None)

    def work(produce: Produce) -> None:
        try:
            while (group := next_group()) is not None:
                for sample in produce(group):
                    queue.put(sample)
            if next(running) == 0:
                queue.end()
        except (Closed, StreamFailed):
            pass  # the run is over, or another worker has said why it is
        except BaseException as error:  # also a SystemExit: whatever ends this thread must end the run
            log.exception("a target worker failed")
            queue.fail(error)

    workers = [
        threading.Thread(target=work, args=(produce,), name=f"target-{number}", daemon=True)
        for number, produce in enumerate(producers)
    ]
    for worker in workers:
        worker.start()
    try:
        yield queue.draw_step
    finally:
        queue.close()
        deadline = time.monotonic() + JOIN_SECONDS
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))


def share_cores(job: Job, targets: LocalTargets) -> None:
    """Target workers and drafter that share the CPU get equal parts of its cores; more threads than cores only wait."""
    on_cpu = [place for place in (*(target.device for target in targets.targets), job.device) if place.type == "cpu"]
    if len(on_cpu) > 1 and job.config.stream.engine != "lockstep":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // len(on_cpu)))


@contextlib.contextmanager
def lockstep_stream(
    source: Iterator[Group], producers: Sequence[Produce], queue: HiddenStateQueue
) -> Iterator[DrawStep]:
    """Both roles by turns in one thread: the queue is filled before every draw, so that a run is reproducible to the last bit."""
    samples = (sample for group in source for sample in producers[0](group))
    held = next(samples, None)  # the next sample of the source, until it fits

    def fill() -> None:
        nonlocal held
        while held is not None and queue.has_room(held.nbytes):
            queue.put(held)
            held = next(samples, None)
        if held is None:
            queue.end()

    yield lambda n: queue.draw_step(n, before_draw=fill)


# ---------------------------------------------------------------- the command


def stop_gracefully(stopping: threading.Event) -> None:
    """From now on SIGTERM and SIGINT set `stopping`, as often as they come and to the very end of the process."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: stopping.set())


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code. The last line on stderr is the cause when it is not 0."""
    for number in STOP_SIGNALS:
        signal.signal(number, stop_at_once)
    try:
        with _claimed_run_dir(arguments) as run_dir:
            return _train_logged(run_dir)
    except Refused as error:
        print(f"dflash: {one_line(error)}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("dflash: stopped before any training", file=sys.stderr)
        return STOPPED
    except Exception as error:
        cause = error.__cause__ if isinstance(error, StreamFailed) and error.__cause__ else error
        # the message of a StreamFailed from another process names the cause, its `__cause__` has not come along
        what = one_line(cause) if isinstance(cause, StreamFailed) else f"{type(cause).__name__}: {one_line(cause)}"
        print(f"dflash: failed: {what}", file=sys.stderr)
        return FAILED


@contextlib.contextmanager
def _claimed_run_dir(arguments: list[str] | None) -> Iterator[Path]:
    """The run directory that the command makes or names, held against a second trainer. Raises Refused."""
    with contextlib.ExitStack() as held:
        try:
            run_dir = _run_dir_of(arguments)
            held.enter_context(runs.only_trainer(run_dir))
        except ValueError as error:  # only here: once training has begun, a ValueError is a failure
            raise Refused(str(error)) from error
        yield run_dir


def _run_dir_of(arguments: list[str] | None) -> Path:
    parser = Parser(
        prog="python -m dflash.train",
        usage="%(prog)s RUN_DIR | --config FILE [--SECTION.FIELD VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # or --run.epoch would be taken for --run.epochs
    )
    parser.add_argument("run_dir", nargs="?", type=Path, help="a prepared run directory, instead of a configuration")
    configuration.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    run_dir = parsed.run_dir
    if run_dir is None:
        return runs.create_run(configuration.from_arguments(parsed))
    overrides = [name for name, value in vars(parsed).items() if name != "run_dir" and value is not None]
    if overrides:
        raise ValueError(
            f"{run_dir} has its configuration frozen: --{overrides[0]} cannot change it; start a new run with --config"
        )
    runs.read_config(run_dir)
    if runs.read_status(run_dir).get("state") == "finished":
        raise ValueError(
            f"{run_dir} is finished; start a new run, with --resume-from one of its checkpoints to train on"
        )
    return run_dir.absolute()


def _train_logged(run_dir: Path) -> int:
    """Trains with trainer.log open; a run that ends otherwise than well says so in status.json."""
    with logged_in(run_dir):
        try:
            return train(run_dir, threading.Event())
        except BaseException as error:
            state = {Refused: "refused", KeyboardInterrupt: "stopped"}.get(type(error), "failed")
            log.exception(state)
            step = runs.read_status(run_dir).get("step", 0)
            runs.write_status(run_dir, state=state, step=step, reason=f"{type(error).__name__}: {error}")
            if isinstance(error, SystemExit):  # a process that ends with it looks as if all were well
                raise RuntimeError("SystemExit in the drafter's thread") from error
            raise


@contextlib.contextmanager
def logged_in(run_dir: Path) -> Iterator[None]:
    """What this process logs goes to trainer.log, and to the terminal."""
    file, terminal = logging.FileHandler(run_dir / "trainer.log"), logging.StreamHandler(sys.stderr)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    # what is going on, for whoever waits for a large target; a failure's traceback is for the file
    terminal.addFilter(lambda record: record.levelno < logging.ERROR)
    for handler in (file, terminal):
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        for handler in (file, terminal):
            log.removeHandler(handler)
            handler.close()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    sys.stdout.flush()
    # a target worker may still be inside a long forward: its thread must not keep the process, nor crash its teardown
    os._exit(code)
