"""A real Prefect server and worker on free ports, and flow runs as an operator sees them: through the command line and the API."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
START_SECONDS = 180  # a fresh home makes its tables first
BUSY_SECONDS = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class PrefectServer:
    """`prefect server start` with a home of its own; after `kill` or `stop`, `start` goes on with the same port and data."""

    def __init__(self, home: Path):
        self.home, self.port = home, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        # TMPDIR: the machine's slot is a file there, and no run of anybody else shall hold up a test
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": f"http://127.0.0.1:{self.port}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
            "OMP_WAIT_POLICY": "PASSIVE",
            "TMPDIR": str(home),
        }

    def start(self) -> None:
        with (self.home / "server.log").open("ab") as output:
            self._process = subprocess.Popen(
                [*_prefect(), "server", "start", "--host", "127.0.0.1", "--port", str(self.port), "--no-ui"],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            assert self._process.poll() is None, (self.home / "server.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the Prefect server does not come up"
            time.sleep(0.2)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(60)

    def prefect(self, *words: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """`prefect WORDS`, in the checkout."""
        return subprocess.run(
            [*_prefect(), *words],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def api(self, method: str, path: str, body: Any = None) -> Any:
        """One call of the REST API, again while the server says that its database is busy, as Prefect's own client does.

        With SQLite it says so at once where another of its connections has written since this call read, and then
        nothing of the call is kept.
        """
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(0.1, 1))

    def deploy(self) -> None:
        """The work pool and all deployments of prefect.yaml."""
        for words in (
            ("work-pool", "create", "dflash", "--type", "process", "--overwrite"),
            ("--no-prompt", "deploy", "--all"),
        ):
            done = self.prefect(*words)
            assert done.returncode == 0, done.stdout + done.stderr

    def submit(self, deployment: str, **parameters: Any) -> str:
        """The id of a new flow run of dflash/<deployment>."""
        found = self.api("GET", f"deployments/name/dflash/{deployment}")
        run = self.api(
            "POST",
            f"deployments/{found['id']}/create_flow_run",
            {"parameters": parameters, "state": {"type": "SCHEDULED"}},
        )
        return run["id"]

    def state(self, flow_run: str) -> dict[str, Any]:
        return self.api("GET", f"flow_runs/{flow_run}")["state"]

    def wait(self, flow_run: str, *, seconds: float = 300) -> dict[str, Any]:
        """The final state of a flow run."""
        deadline = time.monotonic() + seconds
        while (state := self.state(flow_run))["type"] not in ("COMPLETED", "FAILED", "CANCELLED", "CRASHED"):
            assert time.monotonic() < deadline, state
            time.sleep(0.5)
        return state

    def task_runs(self, flow_run: str) -> dict[str, list[str]]:
        """{task name: names of its states}, in order."""
        rows = self.api(
            "POST", "task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}, "sort": "EXPECTED_START_TIME_ASC"}
        )
        names: dict[str, list[str]] = {}
        for row in rows:
            names.setdefault(row["name"].rsplit("-", 1)[0], []).append(row["state"]["name"])
        return names

    def artifacts(self, flow_run: str) -> dict[str, dict[str, Any]]:
        """{key: newest artifact} of a flow run."""
        rows = self.api("POST", "artifacts/filter", {"flow_runs": {"id": {"any_": [flow_run]}}, "sort": "CREATED_DESC"})
        return {row["key"]: row for row in reversed(rows)}


class Worker:
    """`prefect worker start`, as deployments/worker.sh does it."""

    def __init__(self, server: PrefectServer, environment: dict[str, str]):
        self._environment = server.environment | {"PREFECT_WORKER_QUERY_SECONDS": "2"} | environment
        self.log = server.home / f"worker-{time.time_ns()}.log"
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    "env",
                    "--default-signal=INT,QUIT",
                    *_prefect(),
                    "worker",
                    "start",
                    "--pool",
                    "dflash",
                    "--type",
                    "process",
                ],
                env=self._environment,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


@contextmanager
def worker(server: PrefectServer, **environment: str) -> Iterator[Worker]:
    """A worker whose flows see `environment`; stopped at the end."""
    started = Worker(server, environment)
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """One server for the session, with the pool and the deployments of prefect.yaml."""
    server = PrefectServer(tmp_path_factory.mktemp("prefect"))
    server.start()
    server.deploy()
    yield server
    server.stop()


def _prefect() -> list[str]:
    return [sys.executable, "-m", "prefect"]


def processes_with(word: str) -> dict[int, str]:
    """{pid: command line} of all living processes whose command line holds a word, such as a run directory."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        if word in command:
            found[int(path.parent.name)] = command
    return found
