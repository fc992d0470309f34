"""How a run ends, told the same way everywhere: the trainer's exit code, status.json, Prefect's state, MLflow's status.

| trainer                                       | status.json | Prefect   | MLflow   |
|-----------------------------------------------|-------------|-----------|----------|
| exit 0                                        | finished    | Completed | FINISHED |
| exit 1                                        | failed      | Failed    | FAILED   |
| exit 2: nothing was trained                   | refused     | Failed    | FAILED   |
| exit 3: a cancel, Ctrl-C or dflash/restart    | stopped     | Cancelled | KILLED   |
| killed by a signal, or its supervisor was     | crashed     | Crashed   | FAILED   |
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

from prefect.client.orchestration import get_client
from prefect.exceptions import CancelledRun, CrashedRun, FailedRun, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, Crashed, Failed

from dflash.command import one_line
from tasks.child import JobFailed

STATES = {"failed": Failed, "refused": Failed, "stopped": Cancelled, "crashed": Crashed}


class TrainerEnded(Exception):
    """A trainer ended otherwise than finished."""

    def __init__(self, state: str, reason: str, *, step: int):
        super().__init__(reason)
        self.state, self.reason, self.step = state, reason, step


TOLD = (TrainerEnded, JobFailed, ValueError)  # their message is all that a user needs
TOLD_BEFORE = (
    FailedRun,
    CancelledRun,
    CrashedRun,
)  # Prefect's engine, of a state that it has just logged with its message


class _WithoutTraceback(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, TOLD):
            record.exc_info = record.exc_text = None
        return not isinstance(error, TOLD_BEFORE)


for _name in ("prefect.task_runs", "prefect.flow_runs", "prefect.engine"):
    logging.getLogger(_name).addFilter(_WithoutTraceback())


def told_by_state(body: Callable[..., Any]) -> Callable[..., Any]:
    """A flow's function that ends in the Prefect state of the table above, with the reason as its message."""

    @functools.wraps(body)
    def flow_function(*args: Any, **kwargs: Any) -> Any:
        try:
            return body(*args, **kwargs)
        except TrainerEnded as end:
            return STATES[end.state](message=end.reason)
        except (ValueError, JobFailed) as error:
            return Failed(message=one_line(error))
        except (KeyboardInterrupt, TerminationSignal) as signalled:
            if isinstance(signalled, TerminationSignal) and _is_being_cancelled():
                raise  # Prefect knows why, and says so
            return Cancelled(message="the flow's process was told to end")

    return flow_function


def _is_being_cancelled() -> bool:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run.id).state
    return state is not None and state.is_cancelling()
