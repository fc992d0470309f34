"""What every `python -m dflash.X` shares: exit codes, refusals of one line, the signals' first meaning."""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

FINISHED, FAILED, REFUSED, STOPPED = 0, 1, 2, 3
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOP_WITH_STDIN = "--stop-with-stdin"


class Refused(Exception):
    """What the user gave cannot be trained; nothing was."""


class Parser(argparse.ArgumentParser):
    """Refuses in one line, without a screen of usage before it; every command's own flag is `--stop-with-stdin`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.add_argument(
            STOP_WITH_STDIN,
            action=_StopWithStdin,
            help="stop when standard input ends: for whoever supervises this process; one that dies closes it",
        )

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


class _StopWithStdin(argparse.Action):
    """Leaves nothing in the namespace: it is no setting of what the command does."""

    def __init__(self, option_strings: list[str], dest: str, help: str):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, *_) -> None:
        threading.Thread(target=_stop_with_stdin, name="stdin", daemon=True).start()


def _stop_with_stdin() -> None:
    # not sys.stdin: its lock, held by this thread, would abort the interpreter's exit
    with contextlib.suppress(OSError):  # closed from the start: ended as well
        while os.read(0, 1 << 16):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def stop_at_once(*_) -> NoReturn:
    """A handler of SIGTERM and SIGINT for what may be left at any moment; a second signal must not cut short what it starts."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # SIG_IGN would make Python complain of one that has just come
    raise KeyboardInterrupt


def one_line(error: BaseException) -> str:
    """Libraries write several lines, and the last of them is seldom the cause."""
    return " ".join(str(error).split())


def run(body: Callable[[], int], *, stopped: str) -> int:
    """The exit code of a command that may be stopped at any moment: `body`'s own, or that of how it ended.

    A ValueError is what the user can mend (REFUSED). `stopped` tells whoever stopped it what is left. The last line on stderr is
    the cause when the code is not 0.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, stop_at_once)
    try:
        return body()
    except ValueError as error:
        print(f"dflash: {one_line(error)}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(f"dflash: {stopped}", file=sys.stderr)
        return STOPPED
    except Exception as error:
        print(f"dflash: failed: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
        return FAILED
