"""A real MLflow server for the tests, in processes of its own: `with MlflowServer(directory) as server:` listens at server.url.

`kill` is a power cut, `stop` is in order; `start` brings it back on the same port with the same data. The fixtures
`mlflow_server`, `mlflow_file` and `mlflow_store` (both in turn) are every test's (conftest.py).
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.tracking import connect

START_SECONDS = 180
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class MlflowServer:
    """Its database and artifacts are in `directory`; `server.log` there says what it did."""

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "MlflowServer":
        """Returns once it answers."""
        assert self.process is None
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--workers",
            "1",
        ]
        command += ["--backend-store-uri", f"sqlite:///{self.directory}/mlflow.db"]
        command += ["--artifacts-destination", str(self.directory / "artifacts")]
        # with jobs on, seven processes more stay behind
        settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")} | settings
        with open(self.directory / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self.directory,
                start_new_session=True,
                preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),  # it must not outlive its test
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"MLflow's server did not start, see {self.directory / 'server.log'}")
            time.sleep(0.1)
        return self

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, how)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        with contextlib.suppress(ProcessLookupError):  # its worker
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process = None

    def __enter__(self) -> "MlflowServer":
        return self.start()

    def __exit__(self, *_) -> None:
        if self.process is not None:
            self.stop()


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """One for all tests; whoever ends it starts it again."""
    with MlflowServer(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, made once: it takes more than a second."""
    directory = tmp_path_factory.mktemp("database")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{directory / 'mlflow.db'}")
        connect()
    return directory / "mlflow.db"


@pytest.fixture
def mlflow_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path) -> str:
    """The default tracking URI: a database in the working directory, which is tmp_path."""
    shutil.copy(empty_database, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture(params=["server", "file"])
def mlflow_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tracking URI: once that of the server, once the default, a database in the working directory."""
    if request.param == "file":
        return request.getfixturevalue("mlflow_file")
    url = request.getfixturevalue("mlflow_server").url
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    return url
