"""What a run tells: rows, status, held-out measurements, progress and the summary, none of which waits for a GPU."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash import checkpoint as checkpoints
from dflash import run_dir as runs
from dflash.batches import micro_batches, on_device
from dflash.hs_queue import Sample, production_order
from dflash.job import Job, autocast, embed, samples_of
from dflash.metrics import MetricsFile, finite_or_null, read_rows
from dflash.objective import head_loss
from dflash.progress import ProgressLine, print_summary

STATUS_SECONDS = 2  # between two writes of status.json while running
HELDOUT_EPOCH = 2**31  # held-out anchors are drawn as of this epoch: the same at every measurement

log = logging.getLogger("dflash")


class NonFinite(Exception):
    """A loss or a gradient is not finite."""


@dataclass(frozen=True)
class StepResult:
    """A step that was launched. On a GPU its numbers are still on their way to the host until `done`."""

    step: int
    epoch: int
    lr: float
    samples: list[Sample]  # in the order of `values`' losses
    values: torch.Tensor  # weight, tau, blocks, gradient norm, correct [B-1], slots [B-1], loss per sample; on the CPU
    done: torch.Event | None


class Recorder:
    """Rows, status, held-out measurements, progress: everything that leaves the trainer, without waiting for a GPU."""

    def __init__(self, job: Job, run_dir: Path, report: Callable[[Sequence[Sample]], dict], stopping: threading.Event):
        """`report` is the queue's. Of a team's drafter workers the first one writes; all of them measure."""
        self._job, self._run_dir, self._report, self._stopping = job, run_dir, report, stopping
        self._pending: list[tuple[StepResult, dict[str, Any]]] = []
        self._heldout: dict[int, dict[str, Any]] = {}
        self._best: dict[str, Any] | None = None
        self._skipped = self._skipped_in_row = 0
        self._row: dict[str, Any] = {}
        self._started = self._last_time = time.perf_counter()
        self._last_waits = (0.0, 0.0)
        self._status_time = 0.0

    def __enter__(self) -> "Recorder":
        job, files = self._job, contextlib.ExitStack()
        self._files = files
        if not job.team.writes:
            return self
        new = job.started_from == 0
        self._metrics = files.enter_context(MetricsFile(self._run_dir / "metrics.jsonl", after_step=job.step))
        self._heldout_file = files.enter_context(
            MetricsFile(self._run_dir / "heldout.jsonl", after_step=-1 if new else job.step)
        )
        self._evaluation_file = files.enter_context(
            MetricsFile(self._run_dir / "evaluation.jsonl", after_step=job.step)
        )
        for row in read_rows(self._run_dir / "evaluation.jsonl")[0]:  # of this run before it was interrupted
            self._mark_best(row)
        self._progress = files.enter_context(ProgressLine("step", job.total_steps, job.step))
        steps = f"steps {job.step + 1} to {job.total_steps}" if job.step < job.total_steps else "no step to take"
        self._progress.say(f"{self._run_dir}: {len(job.data):,} samples, {steps}")
        if job.device.type == "cpu" and not torch.cuda.is_available():
            log.info("no GPU on this machine: target and drafter run on the CPU in float32")
        self.status("running")
        return self

    def __exit__(self, *error) -> None:
        self._files.__exit__(*error)

    def record(self, result: StepResult) -> None:
        """Takes a step's result; its row is written once its numbers have arrived, after the next step at the latest.

        Raises NonFinite for a step that was not finite, unless optim.skip_nonfinite allows one more in a row.
        """
        if not self._job.team.writes:
            return
        self._pending.append((result, self._measured_now(result)))
        while self._pending and (len(self._pending) > 1 or result.done is None or result.done.query()):
            self._write(*self._pending.pop(0))

    def flush(self) -> None:
        """Writes every row, waiting for its numbers."""
        while self._pending:
            self._write(*self._pending.pop(0))

    def _measured_now(self, result: StepResult) -> dict[str, Any]:
        now, report = time.perf_counter(), self._report(result.samples)
        waits = report["hs_gate_seconds"], report["hs_blocked_seconds"]
        elapsed, self._last_time = max(now - self._last_time, 1e-9), now
        gate, blocked = (new - old for new, old in zip(waits, self._last_waits, strict=True))
        self._last_waits = waits
        tokens = sum(len(sample.tokens) for sample in result.samples)
        row = {
            "time": time.time(),
            "seconds": elapsed,
            "tokens": tokens,
            "tokens_per_second": tokens / elapsed,
            "drafter_wait_share": min(1.0, gate / elapsed),
            "target_wait_share": min(1.0, blocked / elapsed / self._job.targets.count),
            **report,
        }
        if self._job.device.type == "cuda":  # the caching allocator's own counters: reading them waits for nothing
            memory = torch.cuda.memory_stats(self._job.device)
            row["gpu_allocated_bytes"] = memory["allocated_bytes.all.current"]
            row["gpu_allocated_peak_bytes"] = memory["allocated_bytes.all.peak"]
            row["gpu_allocation_retries"] = memory["num_alloc_retries"]
        return row

    def _write(self, result: StepResult, measured: dict[str, Any]) -> None:
        job = self._job
        if result.done is not None:
            result.done.synchronize()
        weight, tau, blocks, norm, *rest = result.values.tolist()
        slots = job.shape.block_size - 1
        correct, counts, losses = rest[:slots], rest[slots : 2 * slots], rest[2 * slots :]
        finite = math.isfinite(norm) and all(map(math.isfinite, losses))
        self._skipped_in_row = 0 if finite else self._skipped_in_row + 1
        self._skipped += not finite
        run_seconds, done_steps = time.perf_counter() - self._started, result.step - job.started_from
        self._row = {
            "step": result.step,
            "epoch": result.epoch,
            "loss": sum(losses) / weight,
            "tau": tau / blocks,
            "slot_accuracy": [right / count if count else None for right, count in zip(correct, counts, strict=True)],
            "gradient_norm": norm,
            "lr": result.lr,
            "samples": [sample.index for sample in result.samples],
            "skipped_nonfinite": self._skipped,
            "seconds_remaining": run_seconds / done_steps * (job.total_steps - result.step),
            **measured,
        }
        self._metrics.write(self._row)
        if not finite:
            self._not_finite(result, losses)
        self._show(self._row)
        if time.monotonic() - self._status_time >= STATUS_SECONDS:
            self.status("running")

    def _show(self, row: dict[str, Any]) -> None:
        # wait shares: of the time since the last step, waiting for the other side
        text = (
            f"loss {row['loss']:.3f}  tau {row['tau']:.2f}  {row['tokens_per_second']:,.0f} tok/s  "
            f"queue {row['hs_samples']}  waits: drafter {row['drafter_wait_share']:.0%} target {row['target_wait_share']:.0%}"
        )
        self._progress.show(row["step"], text, row["seconds_remaining"])

    def _not_finite(self, result: StepResult, losses: list[float]) -> None:
        bad = [s.id for s, loss in zip(result.samples, losses, strict=True) if not math.isfinite(loss)]
        what = f"the loss of {', '.join(bad)}" if bad else f"the gradient of {', '.join(s.id for s in result.samples)}"
        log.warning("step %d: %s is not finite; the step was left out", result.step, what)
        if self._skipped_in_row > self._job.config.optim.skip_nonfinite:
            raise NonFinite(
                f"step {result.step}: {what} is not finite; the last checkpoint is good, see optim.skip_nonfinite"
            )

    def measure_heldout(self) -> None:
        """Loss and simulated tau on the held-out data, into heldout.jsonl; at most once for a step, given up on a stop."""
        job = self._job
        if job.heldout is None:
            return
        if not job.team.first_says(job.team.writes and self._heldout_file.last_step < job.step):
            return
        started = time.perf_counter()
        result = heldout_result(job, self._stopping)
        if result is None or not job.team.writes:
            return
        row = {"step": job.step, **result}
        self._heldout_file.write(row)
        self._heldout[job.step] = row
        self._progress.say(f"held-out at step {job.step}: simulated tau {row['tau']:.3f}, loss {row['loss']:.3f}")
        self._last_time += time.perf_counter() - started  # not the step's time

    def decode_prompts(self) -> None:
        """Decodes prompts for real with the checkpoint just saved, into evaluation.jsonl, and marks the best one.

        Target workers go on filling the queue meanwhile. At most once for a step, given up on a stop.
        """
        job, step = self._job, self._job.step
        if job.prompts is None:
            return
        if not job.team.first_says(job.team.writes and self._evaluation_file.last_step < step):
            return
        weights = job.team.whole(job.drafter.state_dict())
        if not job.team.writes:
            return
        started = time.perf_counter()
        result = job.targets.decode(weights, job.prompts, self._stopping)
        if result is None:
            return
        seconds = time.perf_counter() - started
        row = {"step": step, "seconds": seconds, **{f"eval/{name}": value for name, value in result.items()}}
        self._evaluation_file.write(row)
        self._mark_best(row)
        self.status("running")
        tau = "none: every reply is one token" if result["tau"] is None else f"{result['tau']:.3f}"
        counted = f"{result['prompts']} prompts, {result['tokens']:,} tokens, {seconds:.0f} s"
        self._progress.say(f"decoded at step {step}: tau {tau} ({counted})")
        self._last_time += seconds  # not the step's time

    def _mark_best(self, row: dict[str, Any]) -> None:
        """The first of equals stays best. No tau: every reply ended with its first token, and nothing was drafted."""
        tau = row["eval/tau"]
        if tau is not None and (self._best is None or tau > self._best["eval/tau"]):
            name = checkpoints.directory_of(Path(), row["step"])
            self._best = {"checkpoint": str(name), "step": row["step"], "eval/tau": tau}

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint that decoded best so far."""
        return None if self._best is None else self._best["step"]

    def status(self, state: str, reason: str | None = None) -> None:
        """Replaces status.json."""
        if not self._job.team.writes:
            return
        self._status_time = time.monotonic()
        shown = {key: finite_or_null(self._row.get(key)) for key in ("loss", "tau", "epoch", "tokens_per_second")}
        runs.write_status(
            self._run_dir,
            state=state,
            step=self._job.step,
            reason=reason,
            total_steps=self._job.total_steps,
            best=self._best,
            **shown,
        )

    def tell(self, finished: bool) -> None:
        """The one-screen summary."""
        if not self._job.team.writes:
            return
        job, run_dir = self._job, self._run_dir
        newest = checkpoints.directory_of(run_dir, job.step)
        lines = {
            "state": f"finished, {job.total_steps} steps"
            if finished
            else f"stopped at step {job.step} of {job.total_steps}",
            "train": f"loss {self._row['loss']:.3f}, simulated tau {self._row['tau']:.3f}"
            if self._row
            else "no step was taken",
        }
        if self._heldout:
            path = [f"{row['tau']:.3f} (step {step})" for step, row in sorted(self._heldout.items())]
            lines["held-out"] = "simulated tau " + " -> ".join([path[0], path[-1]] if len(path) > 1 else path)
        if self._skipped:
            lines["skipped"] = f"{self._skipped} steps were not finite and left out"
        lines["checkpoint"] = str(newest) if newest.exists() else "none"
        if self._best is not None:
            lines["best"] = f"{self._best['checkpoint']}, tau {self._best['eval/tau']:.3f} by decoding"
        lines["metrics"] = f"{run_dir / 'metrics.jsonl'} (one row a step), heldout.jsonl, trainer.log"
        lines["next"] = (
            f"train on: python -m dflash.train --config ... --resume-from {newest}"
            if finished
            else f"go on: python -m dflash.train {run_dir}"
        )
        print_summary(run_dir, lines)


@torch.no_grad()
def heldout_result(job: Job, stopping: threading.Event) -> dict[str, Any] | None:
    """Loss over the whole vocabulary, simulated tau and accuracy per slot on the held-out samples, always the same anchors.

    None when `stopping` is set before it is done.
    """
    assert job.heldout is not None
    lengths, stream = job.heldout.lengths, job.config.stream
    order = production_order(lengths, edges=stream.bucket_edges, group_tokens=stream.group_tokens, seed=0, epoch=0)
    sums: dict[str, torch.Tensor] = {}
    for group in job.team.deal(order):
        if job.team.any(stopping.is_set()):
            return None
        rows = list(samples_of(job.heldout, group))
        features = job.targets.features([tokens for _, tokens, _ in rows]) if rows else []
        samples = [
            Sample(index, sample_id, HELDOUT_EPOCH, 0, tokens, loss_mask, feature)
            for index, (sample_id, tokens, loss_mask), feature in zip(group.tolist(), rows, features, strict=True)
        ]
        for batch in on_device(job, micro_batches(job, samples)):
            with autocast(job):
                hidden = job.drafter(batch.features, embed(job, batch.blocks.ids), batch.blocks.anchors)
            _, added = head_loss(hidden, batch.blocks, job.head, job.config.objective)
            added["loss"] = added["loss"].sum()
            sums = {name: sums[name] + value if sums else value for name, value in added.items()}
    sums = job.team.total(sums, slots=job.shape.block_size - 1)
    return {
        "loss": float(sums["loss"] / sums["weight"]),
        "tau": float(sums["tau"] / sums["blocks"]),
        "slot_accuracy": (sums["correct"] / sums["slots"].clamp_min(1)).tolist(),
        "blocks": int(sums["blocks"]),
    }
