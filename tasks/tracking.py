"""One training run as one MLflow run: its rows, facts and end. Nothing else imports mlflow or pynvml.

The trainer writes its run directory; a `Tracker` follows it and sends what is new from a thread of its own. MLflow may be down at
any time, for any time: nobody waits for it, and it is caught up. tracking.json in the run directory says how far it has come:

  id, run_id       the MLflow run; `id` is a tag of it, which finds a run whose own id was not saved any more
  read             {file: how far its rows have arrived}
  sending          the rows on their way. After a doubt (a lost answer, a killed supervisor) MLflow is asked whether they arrived,
                   so that every row gets there exactly once, also when the trainer has cut its file meanwhile
  end, ended       how the run ended, and whether MLflow knows

What a killed supervisor left behind, `reconcile` ends.
"""

import contextlib
import fcntl
import functools
import gc
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from dflash import run_dir as runs
from dflash.files import sha256_of_json, taken, write_json
from dflash.metrics import Cursor, MetricsFile, read_rows
from tasks.child import JobFailed
from tasks.gpus import Gpu, GpuLost, gpu_tags, read_gpus, visible_gpus
from tasks.mlflow_words import as_text, feature_bytes, metrics_of, params_of, tags_of, target_speed, without_secret

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric

SETTINGS = {  # of MLflow, unless the environment says otherwise; its own would have a call wait four minutes for a dead server
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
POLL_SECONDS = 5
OUTAGE_SECONDS = 30  # the longest pause between two tries
LEAVE_SECONDS = 5  # to wait for the thread when a Tracker is left without an end
METRICS_PER_CALL, PARAMS_PER_CALL, DIGEST_LENGTH = 1000, 100, 36  # MLflow's limits
FILES = ("metrics.jsonl", "heldout.jsonl", "evaluation.jsonl", "gpu.jsonl", "final.jsonl")
MLFLOW_STATUS = {  # of the trainer's state
    "finished": "FINISHED",
    "stopped": "KILLED",
    "failed": "FAILED",
    "refused": "FAILED",
    "crashed": "FAILED",
}

__all__ = [
    "GpuLost",
    "MlflowDown",
    "Tracker",
    "connect",
    "gpus",
    "is_missing",
    "mlflow_needed",
    "reconcile",
    "tracking_uri",
    "without_secret",
]

GONE = "trainer and supervisor are gone and left no reason"

log = logging.getLogger("dflash.tracking")


# ---------------------------------------------------------------- where MLflow is


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI; by default a database in the working directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


def connect() -> "MlflowClient":
    """A client of `tracking_uri()`; makes the database if it is a file that is not there. Raises when MLflow is down."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    import mlflow  # seconds of CPU time: only where it is needed

    for name in ("alembic", "mlflow.store.db.utils"):  # a screen of migrations for a new database
        logging.getLogger(name).setLevel(logging.WARNING)
    uri = tracking_uri()
    mlflow.set_tracking_uri(uri)  # what resolves runs:/ and models:/
    if (database := _database(uri)) is None:
        return mlflow.MlflowClient(tracking_uri=uri)
    database.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{database}.lock", "a") as lock:  # two processes that make the tables at once: one of them crashes
        fcntl.flock(lock, fcntl.LOCK_EX)
        client = mlflow.MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
        client.search_registered_models(max_results=1)
    return client


def _database(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def _experiment(client: "MlflowClient", name: str) -> str:
    """Its id; makes it when it is missing. Files of a database in a file lie beside it."""
    from mlflow.exceptions import MlflowException

    database = _database(tracking_uri())
    place = None if database is None else str(database.parent / "mlartifacts" / name)
    found = client.get_experiment_by_name(name)
    if found is None:
        with contextlib.suppress(MlflowException):  # another process was faster
            return client.create_experiment(name, artifact_location=place)
        found = client.get_experiment_by_name(name)
        if found is None:
            raise ValueError(f"MLflow made no experiment {name!r}")
    return found.experiment_id


class MlflowDown(JobFailed):
    """MLflow does not answer, where nothing can be done without it."""


@contextlib.contextmanager
def mlflow_needed(remedy: str) -> Iterator[None]:
    """Raises MlflowDown, with the remedy, where MLflow fails in the block."""
    try:
        yield
    except MlflowDown as error:
        raise MlflowDown(f"{error}: {remedy}") from None
    except Exception as error:
        from mlflow.exceptions import MlflowException

        if isinstance(error, MlflowException):
            where = without_secret(tracking_uri())
            raise MlflowDown(f"MLflow at {where} fails: {remedy} ({_one_line(error)})") from None
        raise


def is_missing(error: Exception) -> bool:
    """Whether MLflow answered that there is no such thing."""
    return getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST"


# ---------------------------------------------------------------- one run directory, one MLflow run


class Tracker:
    """Follows a run directory into MLflow until the end of the `with` block. Only `end` waits for it, and leaving, for seconds.

    Only one supervises a run directory at a time: ValueError for a second one. A directory that was tracked before, whose run
    had ended or not, goes on in its own MLflow run; one that is not to be trained (`trains` false) keeps its end.
    """

    def __init__(
        self, run_dir: Path, experiment: str = "dflash", tags: dict[str, str] | None = None, *, trains: bool = True
    ):
        self.run_dir, self._trains = run_dir, trains
        self._experiment, self._tags = experiment, dict(tags or {})
        self._files: deque[tuple[Path, str]] = deque()
        self._wake, self._leaving, self._delivered = threading.Event(), threading.Event(), threading.Event()
        self._gpus: list[Gpu] | None = None
        self._gpu_rows: MetricsFile | None = None

    def __enter__(self) -> "Tracker":
        lock = _supervise(self.run_dir)
        try:
            self._gpus = gpus()
            self._tags |= gpu_tags(self._gpus)
            self._delivery = _Delivery(self.run_dir, self._experiment, self._tags, self._files)
            if self._trains:
                self._delivery.reopen()
            else:
                self._delivery.keep_end()
        except BaseException:
            lock.close()
            raise
        self._thread = threading.Thread(target=self._follow, args=(lock,), name="tracking", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        self._wake.set()
        self._thread.join(LEAVE_SECONDS)
        if self._gpu_rows is not None:
            self._gpu_rows.__exit__()

    @property
    def run_id(self) -> str | None:
        """The MLflow run; None as long as MLflow was not reached."""
        return self._delivery.record["run_id"]

    def run_url(self) -> str | None:
        """Its page, None until it is there; where MLflow is a file, the page that `mlflow server` shows of it by default."""
        record = self._delivery.record
        if record["run_id"] is None:
            return None
        server = record["uri"] if record["uri"].startswith("http") else "http://127.0.0.1:5000"
        return f"{server.rstrip('/')}/#/experiments/{record['experiment_id']}/runs/{record['run_id']}"

    def sample_gpus(self, step: int) -> None:
        """Adds a row for this step to gpu.jsonl, unless it has one. Raises GpuLost.

        Without NVML there is one row that says that there are no devices.
        """
        if self._gpu_rows is None:
            self._gpu_rows = MetricsFile(self.run_dir / "gpu.jsonl", after_step=2**62)  # keeps all that is there
        if step <= self._gpu_rows.last_step or (self._gpus is None and self._gpu_rows.last_step >= 0):
            return
        self._gpu_rows.write({"step": step, "time": time.time(), "gpus": read_gpus(_nvml(), self._gpus or [])})

    def log_final(self, step: int, values: dict[str, float]) -> None:
        """Adds what real decoding measured of a checkpoint to final.jsonl; the first measurement of a step stays."""
        with MetricsFile(self.run_dir / "final.jsonl", after_step=2**62) as rows:
            if step > rows.last_step:
                rows.write({"step": step, "time": time.time(), **values})
        self._wake.set()

    def log_file(self, path: Path, artifact_dir: str) -> None:
        """Has a file logged as an artifact as soon as MLflow takes it."""
        self._files.append((path, artifact_dir))
        self._wake.set()

    def end(self, state: str, reason: str | None, wait_seconds: float = 60) -> bool:
        """Sends the rest and ends the MLflow run; True once all has arrived. Otherwise it is left to `reconcile`.

        The trainer must have ended: rows that come later are not waited for. Files may still be logged.
        """
        self._delivered.clear()
        self._delivery.ask_end(state, reason, time.time())
        self._wake.set()
        return self._delivered.wait(wait_seconds)

    def _follow(self, lock: IO[str]) -> None:
        delivery, pause, down = self._delivery, 0.0, False
        with lock:  # held until nothing more is sent
            while True:
                leaving, end = self._leaving.is_set(), delivery.unsent_end  # before rows are read: then these are all
                try:
                    delivery.deliver()
                    if end is not None and delivery.finish(end):
                        self._delivered.set()
                except Exception as error:  # whatever it is: training goes on, and it is tried again
                    pause = 1 if end is not None else min(max(2 * pause, 1), OUTAGE_SECONDS)
                    if not down:
                        where = without_secret(tracking_uri())
                        log.warning("MLflow at %s fails; it will be caught up: %s", where, _one_line(error))
                    down = True
                else:
                    if pause == 0:
                        gc.freeze()  # MLflow's modules: walking over them costs a fifth of what sending costs
                    pause = POLL_SECONDS
                    if down:
                        log.info("MLflow is back and has caught up")
                    down = False
                if leaving:
                    return
                self._wake.wait(pause)
                self._wake.clear()


def _one_line(error: Exception) -> str:
    return without_secret(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _supervise(run_dir: Path) -> IO[str]:
    """The held lock of a run directory's supervisor; the kernel lets go when the process dies. Raises ValueError."""
    lock = open(run_dir / ".supervisor.lock", "a")  # noqa: SIM115 (held by the caller)
    if not taken(lock):
        lock.close()
        raise ValueError(f"{run_dir} is supervised by another process; cancel that flow run first")
    return lock


class _Delivery:
    """The way of one run directory into MLflow. Every call but `ask_end` may raise, and nothing is lost or doubled by it."""

    def __init__(self, run_dir: Path, experiment: str, tags: dict[str, str], files: deque[tuple[Path, str]]):
        self._run_dir, self._tags, self._files = run_dir, tags, files
        self._path = run_dir / "tracking.json"
        self._saving = threading.Lock()
        self._sure = False  # whether what was sent last has arrived or not
        self._seen: dict[str, tuple[int, ...]] = {}
        if self._path.exists():
            self.record: dict[str, Any] = _read_record(self._path)
        else:
            self.record = _unsent() | {
                "experiment": experiment,
                "host": socket.gethostname(),
                "end": None,
                "ended": False,
            }
        self._save(uri=without_secret(tracking_uri()))  # the id is known before the run is made with it

    def _save(self, **changes: Any) -> None:
        with self._saving:
            self.record = self.record | changes
            write_json(self._path, self.record)

    def reopen(self) -> None:
        """Goes on after an end."""
        self._save(end=None, ended=False)

    def keep_end(self) -> None:
        """Stays with the end that there was; one that MLflow was never told is the status'."""
        status = runs.read_status(self._run_dir)
        if self.record["end"] is None and status["state"] in MLFLOW_STATUS:
            self.ask_end(status["state"], status.get("reason"), status["time"])

    def ask_end(self, state: str, reason: str | None, when: float) -> None:
        assert state in MLFLOW_STATUS, state
        self._save(end={"state": state, "reason": reason, "time": when}, ended=False)

    @property
    def unsent_end(self) -> dict[str, Any] | None:
        record = self.record
        return None if record["ended"] else record["end"]

    def deliver(self) -> None:
        """Sends all that is new."""
        if not self._sure:
            self._reach()
            self._settle()
            self._sure = True
        try:
            self._describe()
            late = self.record["sending"]
            for name in sorted(FILES, key=lambda name: late is None or late["file"] != name):
                self._send_rows(name)
            while self._files:
                self._send_file(*self._files[0])
                self._files.popleft()
        except BaseException:
            self._sure = False  # asks first whether MLflow is back, which costs less than reading rows for nothing
            raise

    def finish(self, end: dict[str, Any]) -> bool:
        """Ends the MLflow run; False if another end was asked for meanwhile."""
        self._set_tags({"dflash.state": end["state"], "end.reason": end["reason"] or end["state"]})
        status, milliseconds = MLFLOW_STATUS[end["state"]], int(end["time"] * 1000)
        self._client.set_terminated(self.record["run_id"], status, end_time=milliseconds)
        with self._saving:
            if self.record["end"] != end:
                return False
            self.record = self.record | {"ended": True}
            write_json(self._path, self.record)
        return True

    @functools.cached_property
    def _client(self) -> "MlflowClient":
        return connect()

    def _reach(self) -> None:
        """Finds this directory's MLflow run, or makes it, as running."""
        client, run_id = self._client, self.record["run_id"]
        if run_id is not None:
            try:
                run = client.get_run(run_id)
            except Exception as error:
                if not is_missing(error):
                    raise
                log.warning("MLflow at %s has no run %s any more: a new one gets all rows", self.record["uri"], run_id)
                self._save(**_unsent(), ended=False)
                self._seen.clear()
                run_id = None
            else:
                if self.record["ended"]:
                    return
                if run.info.status != "RUNNING":
                    client.update_run(run_id, status="RUNNING")
                if "end.reason" in run.data.tags:
                    client.delete_tag(run_id, "end.reason")
        if run_id is None:
            experiment = _experiment(client, self.record["experiment"])
            made = client.search_runs([experiment], f"tags.`dflash.id` = '{self.record['id']}'", max_results=1)
            name, tags = self._run_dir.name, self._first_tags()
            run = made[0] if made else client.create_run(experiment, tags=tags, run_name=name)
            self._save(run_id=run.info.run_id, experiment_id=experiment)
        self._set_tags(self._tags | {"dflash.state": "running"})

    def _first_tags(self) -> dict[str, str]:
        return {
            "dflash.id": self.record["id"],
            "dflash.run_dir": str(self._run_dir.absolute()),
            "dflash.host": self.record["host"],
            "mlflow.source.name": "python -m dflash.train",
            "mlflow.source.type": "LOCAL",
        }

    def _set_tags(self, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        values = [RunTag(name, as_text(value)) for name, value in tags.items()]
        self._client.log_batch(self.record["run_id"], tags=values)

    def _settle(self) -> None:
        """Asks whether the rows that were being sent have arrived."""
        sending = self.record["sending"]
        if sending is None or "step" not in sending:
            return
        history = self._client.get_metric_history(self.record["run_id"], sending["key"])
        if any(metric.step == sending["step"] for metric in history):
            self._arrived(sending)
        else:
            self._save(sending={"file": sending["file"], "time": sending["time"]})

    def _arrived(self, sending: dict[str, Any]) -> None:
        self._save(read=self.record["read"] | {sending["file"]: sending["read"]}, sending=None)

    def _describe(self) -> None:
        """Configuration, code, target and data, as soon as their files are there; again when they have changed."""
        for name, describe in (("config.json", self._log_config), ("provenance.json", self._log_provenance)):
            if (state := self._changed(name)) is None:
                continue
            values = json.loads((self._run_dir / name).read_text())
            digest = sha256_of_json(values)
            if self.record["described"].get(name) != digest:  # a restart may come with newer code
                describe(values)
                self._save(described=self.record["described"] | {name: digest})
            self._seen[name] = state

    def _changed(self, name: str) -> tuple[int, ...] | None:
        """What the disk says of a file that is not as it was when `_seen` was set; None if it is, or is not there."""
        try:
            stat = (self._run_dir / name).stat()
        except FileNotFoundError:
            return None
        state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        return None if self._seen.get(name) == state else state

    def _log_config(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, value) for name, value in params_of(config).items()]
        for start in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(self.record["run_id"], params=params[start : start + PARAMS_PER_CALL])

    def _log_provenance(self, provenance: dict[str, Any]) -> None:
        self._set_tags(tags_of(provenance))
        contexts = {"training": provenance["data"], "evaluation": provenance["heldout"]}
        sets = [_dataset(data, context) for context, data in contexts.items() if data is not None]
        self._client.log_inputs(self.record["run_id"], datasets=sets)

    def _send_rows(self, name: str) -> None:
        from mlflow.entities import Metric

        if (state := self._changed(name)) is None:
            return
        read = self.record["read"].get(name, {"offset": 0, "step": -1, "since": None})
        rows, end = read_rows(self._run_dir / name, Cursor(read["offset"], read["step"]))
        late = self.record["sending"]  # not there yet; should it still come, MLflow knows it by its times as the same
        clock = late["time"] if late is not None and late["file"] == name else time.time()
        upto, metrics = read, list[Metric]()
        for row in rows:
            named, since = metrics_of(name, row, self._bucket_edges), None
            if name == "metrics.jsonl":
                speed, since = target_speed(row, upto["since"], self._token_bytes)
                named |= speed
            if len(metrics) + len(named) > METRICS_PER_CALL:
                self._send_metrics(name, clock, metrics, upto)
                metrics = []
            milliseconds = int(row.get("time", clock) * 1000)
            metrics += [Metric(key, value, milliseconds, row["step"]) for key, value in named.items()]
            # offset 0: the reader finds its place by the step; it is known as an offset only behind the last row
            upto = {"offset": 0, "step": row["step"], "since": since}
        if rows:
            self._send_metrics(name, clock, metrics, upto | {"offset": end.offset})
        self._seen[name] = state

    def _send_metrics(self, name: str, clock: float, metrics: "list[Metric]", upto: dict[str, Any]) -> None:
        """Sends what the rows of a file up to here say, and remembers that."""
        sending = {"file": name, "time": clock, "read": upto}
        if metrics:
            sending |= {"key": metrics[-1].key, "step": metrics[-1].step}
            self._save(sending=sending)
            self._client.log_batch(self.record["run_id"], metrics=metrics)
        self._arrived(sending)

    @functools.cached_property
    def _bucket_edges(self) -> list[int]:
        return json.loads((self._run_dir / "config.json").read_text())["stream"]["bucket_edges"]

    @functools.cached_property
    def _token_bytes(self) -> int | None:
        """Of a token's features; the trainer writes what they are before its first row."""
        return feature_bytes(json.loads((self._run_dir / "provenance.json").read_text()))

    def _send_file(self, path: Path, artifact_dir: str) -> None:
        if not path.is_file():
            log.warning("%s is not there any more and was not logged", path)
            return
        self._client.log_artifact(self.record["run_id"], str(path), artifact_dir)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:  # a power cut
        raise ValueError(f"{path} is not JSON ({error}); remove it, and all rows go into a new MLflow run") from None


def _unsent() -> dict[str, Any]:
    """The part of tracking.json that belongs to one MLflow run. `id` finds it when it was made but its own id was not saved."""
    blank = {"run_id": None, "experiment_id": None, "described": {}, "read": {}, "sending": None}
    return {"id": uuid.uuid4().hex, **blank}


def _dataset(data: dict[str, Any], context: str) -> "DatasetInput":
    from mlflow.entities import Dataset, DatasetInput, InputTag

    path = without_secret(data["path"])
    report = data.get("report")  # counts of samples and tokens, and what was dropped
    dataset = Dataset(
        name=Path(path).name,
        digest=data["digest"][:DIGEST_LENGTH],
        source_type="local",
        source=json.dumps({"uri": path}),
        profile=None if report is None else json.dumps(report),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


# ---------------------------------------------------------------- what a killed supervisor left behind


def reconcile(root: Path, *, name: str = "*", reason: str = GONE) -> list[str]:
    """Ends the MLflow runs and statuses under `root` that nobody looks after any more; a line for each.

    `name` is the run directory's, if it is known which; `reason` is why the ones crashed that did not say how they ended.
    """
    lines, down = list[str](), False
    for path in sorted(root.glob(f"{name}/tracking.json")):
        run_dir = path.parent
        with contextlib.ExitStack() as held:
            try:
                record = _read_record(path)
                if record["ended"] or record["host"] != socket.gethostname():
                    continue
                held.enter_context(_supervise(run_dir))
                end = _end_of(run_dir, record, reason)
            except ValueError as error:
                lines.append(f"left alone: {error}")
                continue
            if down:  # the statuses on the disk do not wait for it
                continue
            delivery = _Delivery(run_dir, record["experiment"], {}, deque())
            delivery.ask_end(end["state"], end["reason"], end["time"])
            try:
                delivery.deliver()
                delivery.finish(delivery.record["end"])
            except Exception as error:
                down = True
                lines.append(f"MLflow at {without_secret(tracking_uri())} fails, later then: {_one_line(error)}")
            else:
                lines.append(
                    f"{run_dir} {end['state']}: {end['reason'] or 'no reason given'}; MLflow has all of it now"
                )
    return lines


def _end_of(run_dir: Path, record: dict[str, Any], reason: str) -> dict[str, Any]:
    """state, reason and time, as the supervisor said, else as status.json says, which is declared crashed if it still runs there.

    A trainer that stopped, and no supervisor who said why: it lost its supervisor, which is a crash too. Raises ValueError while
    the trainer runs.
    """
    if (pid := runs.trainer_of(run_dir)) is not None:
        raise ValueError(f"{run_dir} is being trained by process {pid}")
    said = record["end"]
    if said is None:
        step = runs.read_status(run_dir).get("step", 0)
        runs.declare_crashed(run_dir, f"{reason}, at step {step}", states=(*runs.LIVING, "stopped"))
    else:
        runs.declare_crashed(run_dir, said["reason"] or GONE)
    end = said or runs.read_status(run_dir)
    if end.get("state") not in MLFLOW_STATUS:
        raise ValueError(f"{run_dir} has not ended: its status is {end.get('state')}")
    return end


# ---------------------------------------------------------------- GPUs


@functools.cache
def _nvml() -> Any:
    """The NVML module, initialised; None where there is none, which is said once."""
    try:
        import pynvml
    except ImportError:
        log.info("no GPU telemetry: the package nvidia-ml-py is not installed")
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.info("no GPU telemetry: NVML says %s", error)
        return None
    return pynvml


def gpus() -> list[Gpu] | None:
    """The devices that a child of this process may use (see gpus.py); None without NVML."""
    nvml = _nvml()
    return None if nvml is None else visible_gpus(nvml)
