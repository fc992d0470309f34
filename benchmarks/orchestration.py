"""What the orchestration costs: CPU and wall seconds from the command to the first step, and the supervisor's share of a core.

    python -m benchmarks.orchestration [--config deployments/smollm2-cpu.yaml] [--steps 300] [--mlflow-file]

Runs `python -m flows.train` twice, in a directory of its own with Prefect embedded and an MLflow server beside it. The first run
makes the tables and the stages, the second finds everything cached and is the one that is measured. With `--mlflow-file` MLflow is
a file, which the supervisor itself then writes. Its target is that of `make demo`.
"""

import argparse
import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
STAGES = (  # (what is shown, the line of the log that ends it)
    ("Python, Prefect, its embedded server", "Beginning flow run"),
    ("prepare: inputs hashed, found in the cache", "prepare is from the cache"),
    ("deploy, launch", "trainer: process"),
)
FIRST_STEP = "trainer: imports, target, data, proofs, initialisation, first step"


def cpu_seconds(pid: int, *, tree: bool) -> float:
    """Of a process so far; with `tree` also of all its descendants, dead and alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if tree else []
    except OSError:  # it has ended
        return 0.0
    own = sum(map(int, fields[11:15] if tree else fields[11:13])) / TICKS
    return own + sum(cpu_seconds(int(child), tree=True) for child in children)


@contextlib.contextmanager
def mlflow_server(place: Path) -> Iterator[str]:
    """The address of an MLflow server that keeps its data in `place`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
        "--backend-store-uri",
        f"sqlite:///{place}/mlflow.db",
    ]
    words += ["--artifacts-destination", str(place / "artifacts")]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (place / "mlflow.log").open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *words], env=environment, stdout=output, stderr=output
        )
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                break
            assert server.poll() is None, (place / "mlflow.log").read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def run(config: str, steps: int, place: Path, mlflow: str) -> tuple[list[tuple[str, float, float]], float]:
    """([(stage, wall seconds, CPU seconds of all processes)] to the first step, the supervisor's share of a core from there on)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
        "PREFECT_HOME": str(place / "prefect"),
        "MLFLOW_TRACKING_URI": mlflow,
        "TMPDIR": str(place),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    words = [
        "--run.max_steps",
        str(steps),
        "--run.root",
        str(place / "runs"),
        "--data.prepared_dir",
        str(place / "prepared"),
    ]
    words += ["--evaluate.prompts_per_set", "2", "--checkpoint.every_steps", "0", "--data.heldout_path", "none"]
    log = place / "flow.log"
    with log.open("w") as output:
        flow = subprocess.Popen(
            [sys.executable, "-m", "flows.train", "--config", config, *words], env=environment, stderr=output
        )
    marks, waiting, started, monitored = list[tuple[str, float, float]](), list(STAGES), time.monotonic(), None
    while flow.poll() is None:
        time.sleep(0.05)
        said = log.read_text(errors="replace")
        while waiting and waiting[0][1] in said:
            marks.append((waiting.pop(0)[0], time.monotonic() - started, cpu_seconds(flow.pid, tree=True)))
        if monitored is None and (found := re.search(r"run directory (\S+)", said)) is not None:
            rows = Path(found[1]) / "metrics.jsonl"
            if rows.exists() and rows.stat().st_size:
                marks.append((FIRST_STEP, time.monotonic() - started, cpu_seconds(flow.pid, tree=True)))
                monitored = time.monotonic(), cpu_seconds(flow.pid, tree=False)
        if monitored is not None and "finished: " in said:
            break
    assert monitored is not None, log.read_text()
    share = (cpu_seconds(flow.pid, tree=False) - monitored[1]) / (time.monotonic() - monitored[0])
    assert flow.wait() == 0, log.read_text()
    return marks, share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="deployments/smollm2-cpu.yaml")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--mlflow-file", action="store_true")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        file = contextlib.nullcontext(f"sqlite:///{place}/mlflow.db")
        with file if parsed.mlflow_file else mlflow_server(place) as mlflow:
            run(parsed.config, 2, place, mlflow)
            marks, share = run(parsed.config, parsed.steps, place, mlflow)
    print("| from the command to the first step, everything cached | wall s | CPU s |\n|---|---|---|")
    wall_before = cpu_before = 0.0
    for stage, wall, cpu in marks:
        print(f"| {stage} | {wall - wall_before:.1f} | {cpu - cpu_before:.1f} |")
        wall_before, cpu_before = wall, cpu
    print(f"| **in all** | {wall_before:.1f} | {cpu_before:.1f} |\n")
    print(f"supervisor while it monitors: {100 * share:.2f} % of one core")
    if cpu_before > 60 or share > 0.01:
        sys.exit("FAIL: more than 60 CPU seconds to the first step, or than 1 % of a core")


if __name__ == "__main__":
    main()
