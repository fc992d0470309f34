"""What a person sees of a command: a bar on a terminal, plain lines without one, one screen at the end."""

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_SECONDS = 10  # between two lines where there is no terminal


class ProgressLine:
    """`with ProgressLine("step", total_steps, first_step) as progress: progress.show(done, "loss 3.2", seconds_remaining)`."""

    def __init__(self, unit: str, total: int, done: int = 0):
        self._console = Console(stderr=True)
        self._unit, self._total, self._printed = unit, total, 0.0
        self._bar = Progress(
            TextColumn(unit + " {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done)

    def say(self, text: str) -> None:
        """One line above the bar."""
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, done: int, text: str, seconds_remaining: float) -> None:
        """The state once `done` units are done."""
        self._bar.update(self._task, completed=done, description=text)
        now, last = time.monotonic(), done == self._total
        if self._bar.disable and (now - self._printed >= PLAIN_SECONDS or last):
            self._printed = now
            self.say(f"{self._unit} {done}/{self._total}  {text}  ETA {seconds_remaining / 60:.0f} min")

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()


def print_summary(where: Path, lines: dict[str, str]) -> None:
    """One screen at the end: what came out, where it lies and what to do next."""
    width = max(map(len, lines))
    print(f"\n{where}", *(f"  {key:<{width}}  {value}" for key, value in lines.items()), sep="\n", file=sys.stderr)
