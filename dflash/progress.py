"""What a person sees of a run: a bar on a terminal, plain lines without one, one screen at the end."""

import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_SECONDS = 10  # between two lines where there is no terminal


class ProgressLine:
    """`with ProgressLine(total_steps, first_step) as progress: progress.show(row)` after each step's metrics row."""

    def __init__(self, total_steps: int, first_step: int):
        self._console = Console(stderr=True)
        self._total, self._printed = total_steps, 0.0
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total_steps, completed=first_step)

    def say(self, text: str) -> None:
        """One line above the bar."""
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, row: dict[str, Any]) -> None:
        """The state after a step. Wait shares: of the time since the last step, waiting for the other side."""
        text = (
            f"loss {row['loss']:.3f}  tau {row['tau']:.2f}  {row['tokens_per_second']:,.0f} tok/s  "
            f"queue {row['hs_samples']}  waits: drafter {row['drafter_wait_share']:.0%} target {row['target_wait_share']:.0%}"
        )
        self._bar.update(self._task, completed=row["step"], description=text)
        now, last = time.monotonic(), row["step"] == self._total
        if self._bar.disable and (now - self._printed >= PLAIN_SECONDS or last):
            self._printed = now
            remaining = row["seconds_remaining"]
            self.say(f"step {row['step']}/{self._total}  {text}  ETA {remaining / 60:.0f} min")

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()


def print_summary(run_dir: Path, lines: dict[str, str]) -> None:
    """One screen at the end: what came out, where it lies and what to do next."""
    width = max(map(len, lines))
    print(f"\n{run_dir}", *(f"  {key:<{width}}  {value}" for key, value in lines.items()), sep="\n", file=sys.stderr)
