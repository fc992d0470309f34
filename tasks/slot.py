"""One run at a time on a machine: a lock of the kernel's, which is free the moment that its holders are dead.

Not a concurrency limit of the server: its leases live in the server's memory by default, so that a restarted server never gives the
slot back, and there would be none where Prefect is embedded.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from dflash.files import taken

POLL_SECONDS = 2.0


class Busy(Exception):
    """Another run has the machine, and this one was not to wait."""


@contextlib.contextmanager
def machine_slot(*, wait: bool = True) -> Iterator[int]:
    """Has this machine for one run; gives the lock's descriptor, for the trainer to hold too. Raises Busy if not to `wait`."""
    path = Path(tempfile.gettempdir()) / "dflash-machine.lock"
    with contextlib.suppress(PermissionError):  # another user's, who has made it writable for all
        path.touch(0o666)
        path.chmod(0o666)
    with path.open("r+") as lock:
        if not taken(lock):
            if not wait:
                raise Busy(f"this machine is busy with {path.read_text() or 'another run'}")
            wait_for_machine(lock, path)
        os.ftruncate(lock.fileno(), 0)
        os.pwrite(lock.fileno(), f"the flow run {flow_run.name}".encode(), 0)
        yield lock.fileno()


@task(name="wait for this machine", cache_policy=NO_CACHE, persist_result=False)
def wait_for_machine(lock: IO[str], path: Path) -> None:
    """Until the run that has this machine is over."""
    get_run_logger().info("this machine is busy with %s; waiting until it is over", path.read_text())
    while not taken(lock):
        time.sleep(POLL_SECONDS)
