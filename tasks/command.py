"""A flow from the command line, here and now: with the server that is configured, else with Prefect embedded."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.client.orchestration import get_client

from dflash import config as configuration
from dflash.command import FAILED, FINISHED, REFUSED, STOPPED, Parser, one_line
from tasks.parameters import STAGES, read


def run_here(flow: Flow[..., Any], module: str, description: str | None, arguments: Sequence[str] | None = None) -> int:
    """Parses `--config FILE --SECTION.FIELD VALUE ... --refresh STAGE ...` and runs the flow; the exit code of how it ended."""
    try:
        parser = Parser(
            prog=f"python -m {module}",
            usage="%(prog)s --config FILE [--SECTION.FIELD VALUE ...] [--refresh STAGE ...]",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument("--refresh", nargs="+", choices=STAGES, default=[], help="stages to do again")
        configuration.add_arguments(parser)
        parsed = parser.parse_args(arguments)
        if parsed.config is None:
            raise ValueError("--config is not set; give a file, e.g. deployments/smollm2-cpu.yaml")
        sections = configuration.given(parsed)
        read(parsed.config, sections)
    except ValueError as error:
        print(f"dflash: {one_line(error)}", file=sys.stderr)
        return REFUSED
    _start_server()
    state = flow(config=str(Path(parsed.config).absolute()), refresh=parsed.refresh, **sections, return_state=True)
    if state.is_completed():
        return FINISHED
    print(f"dflash: {state.name.lower()}: {state.message}", file=sys.stderr)
    return STOPPED if state.is_cancelled() else FAILED


def _start_server() -> None:
    """Starts the embedded server, where it is used, deaf to Ctrl-C: that is meant for the flow, which ends it when it has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with get_client(sync_client=True) as client:
            client.api_healthcheck()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
