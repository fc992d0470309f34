"""What is shipped in deployments/ fits the configuration, the servers' own options, and one another."""

import configparser
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from forks import until
from machines import Machines, machines_impossible

from dflash.config import SECTIONS, Config, parse, read_file

DEPLOYMENTS = Path(__file__).parent.parent / "deployments"
PARAMETER_FILES = sorted(
    set(DEPLOYMENTS.glob("*.yaml")) - {DEPLOYMENTS / "compose.yaml", DEPLOYMENTS / "automations.yaml"}
)
UNITS = sorted((DEPLOYMENTS / "systemd").glob("*.service"))
VOLUME, POLICY, CLUSTER = yaml.safe_load_all((DEPLOYMENTS / "kuberay" / "cluster.yaml").read_text())
PODS: list[dict[str, Any]] = [CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"]]
COMPOSE = yaml.safe_load((DEPLOYMENTS / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
each_parameter_file = pytest.mark.parametrize("file", PARAMETER_FILES, ids=lambda file: file.stem)
each_unit = pytest.mark.parametrize("file", UNITS, ids=lambda file: file.stem)


def unit(file: Path) -> configparser.SectionProxy:
    """The [Service] section of a unit, with its continued lines joined."""
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(file.read_text().replace("\\\n", " "))
    return parser["Service"]


def text_values(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in text_values(each)]
    if isinstance(value, list | tuple):
        return [text for each in value for text in text_values(each)]
    return [value] if isinstance(value, str) else []


def workers_fit(config: Config, free: list[int]) -> bool:
    """Whether machines with so many free GPUs have room for the workers: the drafters' together, then the target's."""
    section = config.cluster
    asked = [section.drafter_gpus] * section.drafter_workers + [section.target_gpus] * section.target_workers
    for gpus in asked:
        machine = next((machine for machine, left in enumerate(free) if left >= (gpus or 1)), None)
        if machine is None:
            return False
        free[machine] -= int(gpus or 1)
    return True


# ---------------------------------------------------------------- parameter files


@each_parameter_file
def test_a_parameter_file_is_a_whole_configuration(file: Path) -> None:
    assert isinstance(parse(read_file(file)), Config)


@each_parameter_file
def test_a_parameter_file_repeats_a_default_only_with_a_reason_beside_it(file: Path) -> None:
    lines = file.read_text().splitlines()
    for section, values in read_file(file).items():
        start = lines.index(next(line for line in lines if line.startswith(f"{section}:")))
        for name in values:
            field = SECTIONS[section].__pydantic_fields__[name]
            parsed = getattr(getattr(parse(read_file(file)), section), name)
            if not field.is_required() and parsed == field.get_default(call_default_factory=True):
                line = next(line for line in lines[start:] if line.strip().startswith(f"{name}:"))
                assert " # " in line, f"{section}.{name} says what holds anyhow"


@each_parameter_file
def test_a_parameter_file_holds_no_absolute_path(file: Path) -> None:
    assert [text for text in text_values(read_file(file)) if text.startswith(("/", "~"))] == []


@each_parameter_file
def test_a_parameter_file_uses_the_machine_that_its_name_says(file: Path) -> None:
    named = re.search(r"-(?:(\d+)x)?(\d+)gpu", file.stem)
    machines, gpus = (int(named[1] or 1), int(named[2])) if named else (1, 0)
    config = parse(read_file(file))
    if config.stream.engine == "ray":
        assert workers_fit(config, [gpus] * machines)
        return
    used = {*config.target.devices, config.drafter.device} - {"auto"}
    assert used <= {f"cuda:{index}" for index in range(gpus)}
    if gpus and config.target.device_map is None:
        assert len(used) == gpus


def test_the_readme_names_every_file() -> None:
    readme = (DEPLOYMENTS / "README.md").read_text()
    files = [path.name for path in DEPLOYMENTS.iterdir() if path.is_file() and path.suffix != ".dockerignore"]
    assert [name for name in files if name != "README.md" and f"`{name}`" not in readme] == []
    assert [unit.stem for unit in UNITS if unit.stem not in readme] == []
    assert "`kuberay/cluster.yaml`" in readme


def test_nothing_in_deployments_names_a_place_on_somebodys_machine() -> None:
    files = [path for path in DEPLOYMENTS.rglob("*") if path.is_file()]
    assert len(files) > 10
    for file in files:
        assert re.findall(r"(?<![\w.])/(?:home|root|opt|work|tmp|Users|mnt)\b", file.read_text()) == [], file


# ---------------------------------------------------------------- compose


def environment_examples() -> list[str]:
    lines = (DEPLOYMENTS / "team.env.example").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_published_port_is_bound_to_loopback() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert not any("network_mode" in service for service in SERVICES.values())


def test_the_environment_example_holds_exactly_the_variables_that_compose_reads_and_no_value() -> None:
    read = set(re.findall(r"\$\{(\w+)", (DEPLOYMENTS / "compose.yaml").read_text()))
    assert {line.partition("=")[0] for line in environment_examples()} == read
    assert all(line.endswith("=") for line in environment_examples())


def test_nothing_starts_without_a_secret_and_none_is_written_down() -> None:
    uses = re.findall(r"\$\{(\w+)([^}]*)\}", (DEPLOYMENTS / "compose.yaml").read_text())
    assert {name for name, rule in uses if not rule.startswith(":?")} == {"HF_TOKEN"}  # only some targets need it
    for name, service in SERVICES.items():
        for key, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|SECRET|AUTH_STRING|TOKEN|USERNAME|CONNECTION_URL|STORE_URI", key):
                assert "${" in value, f"{name}: {key}"


def test_images_are_pinned_and_of_no_registry_by_name() -> None:
    base = re.findall(r"^FROM (\S+)$", (DEPLOYMENTS / "Dockerfile").read_text(), re.MULTILINE)
    images = base + [service["image"] for service in SERVICES.values() if "build" not in service]
    assert len(images) == 2
    assert all(re.fullmatch(r"[a-z]+:\d+\.\d+(-slim)?", image) for image in images)


def test_the_image_adds_only_pinned_packages_to_the_pinned_project() -> None:
    dockerfile = (DEPLOYMENTS / "Dockerfile").read_text()
    install = re.search(r"pip install (.*\\\n.*)", dockerfile)
    assert install
    words = install[1].replace("\\", "").split()
    assert words[:4] == ["--no-cache-dir", "--constraint", "constraints.txt", "--editable"]
    assert words[4] == "'.[cluster]'"
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", word) for word in words[5:])
    # who installs it by hand takes the same
    assert next(word for word in words if word.startswith("Flask-WTF")) in (DEPLOYMENTS / "README.md").read_text()


def test_servers_and_worker_agree_on_addresses_and_credentials() -> None:
    prefect, mlflow, worker = (SERVICES[name]["environment"] for name in ("prefect", "mlflow", "worker"))
    assert worker["PREFECT_API_URL"] == "http://prefect:4200/api"
    assert worker["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
    assert worker["PREFECT_API_AUTH_STRING"] == prefect["PREFECT_SERVER_API_AUTH_STRING"]
    for key in ("USERNAME", "PASSWORD"):
        assert worker[f"MLFLOW_TRACKING_{key}"] == mlflow[f"MLFLOW_AUTH_ADMIN_{key}"]
    databases = re.findall(r"create database (\w+);", (DEPLOYMENTS / "postgres-init.sql").read_text())
    addresses = [prefect["PREFECT_SERVER_DATABASE_CONNECTION_URL"], mlflow["MLFLOW_BACKEND_STORE_URI"]]
    assert [address.rpartition("/")[2] for address in addresses] == databases


def test_every_named_volume_is_declared_and_used() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", [])]
    named = {mount.partition(":")[0] for mount in mounts if not mount.startswith(".")}
    assert named == set(COMPOSE["volumes"])
    assert (DEPLOYMENTS / "postgres-init.sql").exists()


def test_a_stop_leaves_a_checkpoint_the_same_time_in_a_container_and_in_a_unit() -> None:
    assert SERVICES["worker"]["stop_grace_period"] == "5m"
    assert unit(DEPLOYMENTS / "systemd" / "dflash-worker.service")["TimeoutStopSec"] == "300"


# ---------------------------------------------------------------- the servers' own options


def server_commands() -> list[str]:
    return [SERVICES["prefect"]["command"], SERVICES["mlflow"]["command"], *(unit(file)["ExecStart"] for file in UNITS)]


def test_mlflow_understands_every_option_that_it_is_given() -> None:
    cli = pytest.importorskip("mlflow.cli")
    commands = [shlex.split(command.replace("$MLFLOW_SERVER_OPTIONS", "")) for command in server_commands()]
    ours = [words[2:] for words in commands if words[0].endswith("mlflow")]
    assert len(ours) == 2
    for words in ours:
        cli.server.make_context("server", words)
    optional = re.search(r'MLFLOW_SERVER_OPTIONS="(.*)"', (DEPLOYMENTS / "systemd" / "dflash.env.example").read_text())
    assert optional
    cli.server.make_context("server", shlex.split(optional[1]))


def test_prefect_understands_every_option_that_it_is_given() -> None:
    pytest.importorskip("prefect")
    worker = re.search(r"prefect (worker start .*) &", (DEPLOYMENTS / "worker.sh").read_text())
    assert worker
    servers = [shlex.split(command)[1:] for command in server_commands() if "prefect server start" in command]
    assert len(servers) == 2
    for words in ([word for server in servers for word in server], shlex.split(worker[1])):
        shown = subprocess.run(
            [sys.executable, "-m", "prefect", *words[:2], "--help"], capture_output=True, text=True, check=True
        ).stdout
        assert [word for word in words if word.startswith("--") and word not in shown] == []


def test_prefect_reads_the_automation_of_lost_runs() -> None:
    schemas = pytest.importorskip("prefect.events.schemas.automations")
    written = yaml.safe_load((DEPLOYMENTS / "automations.yaml").read_text())["automations"]
    automation = schemas.AutomationCore.model_validate(written[0])
    assert automation.name == "dflash-zombies"
    assert automation.enabled
    assert automation.trigger.posture == schemas.Posture.Proactive
    assert automation.trigger.after == {"prefect.flow-run.heartbeat"}
    # three heartbeats of the worker's 30 s
    assert automation.trigger.within.total_seconds() == 90
    assert SERVICES["worker"]["environment"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert "PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30\n" in (DEPLOYMENTS / "systemd" / "dflash.env.example").read_text()
    assert automation.actions[0].state.value == "CRASHED"
    assert automation.actions[0].message == "missing heartbeats"


# ---------------------------------------------------------------- systemd


def test_a_unit_listens_on_loopback_only() -> None:
    # a worker listens nowhere; Ray does, on every interface, and README.md says what keeps others out
    servers = [unit(file)["ExecStart"] for file in UNITS if file.stem not in ("dflash-worker", "dflash-ray")]
    assert len(servers) == 2
    assert all(re.search(r"--host 127\.0\.0\.1 ", command) for command in servers)


@each_unit
def test_a_unit_starts_what_the_checkout_holds_and_again_after_a_failure(file: Path) -> None:
    service = unit(file)
    assert service["ExecStart"].startswith(("%h/dflash/.venv/bin/", "%h/dflash/deployments/"))
    assert service["Restart"] == "on-failure"
    assert service["EnvironmentFile"] == "%h/.config/dflash.env"


def test_a_stop_of_the_worker_unit_signals_only_the_process_that_waits() -> None:
    service = unit(DEPLOYMENTS / "systemd" / "dflash-worker.service")
    assert service["KillMode"] == "mixed"
    assert service["ExecStart"] == "%h/dflash/deployments/worker.sh"
    assert os.access(DEPLOYMENTS / "worker.sh", os.X_OK)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    (tmp_path / "dflash" / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "dflash" / "deployments").symlink_to(DEPLOYMENTS)
    for name in ("prefect", "mlflow", "ray"):
        (tmp_path / "dflash" / ".venv" / "bin" / name).symlink_to(sys.executable)
    (tmp_path / "run").mkdir(mode=0o700)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--user", *map(str, UNITS)],
        env=os.environ | {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, [line for line in checked.stderr.splitlines() if "dflash" in line]) == (0, [])


def test_the_environment_of_the_units_holds_no_secret_and_can_be_read_by_a_shell(tmp_path: Path) -> None:
    example = DEPLOYMENTS / "systemd" / "dflash.env.example"
    set_by_default = [line for line in example.read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in set_by_default if re.search("PASSWORD|SECRET|AUTH", line)] == []
    switched_on = tmp_path / "dflash.env"
    switched_on.write_text(re.sub(r"^#(?=[A-Z_]+=)", "", example.read_text(), flags=re.MULTILINE))
    shown = subprocess.run(
        ["sh", "-euc", f'. {switched_on}; echo "$MLFLOW_SERVER_OPTIONS $PREFECT_API_AUTH_STRING"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "--app-name basic-auth USER:PASSWORD\n"


# ---------------------------------------------------------------- Ray

TWO_MACHINES = parse(read_file(DEPLOYMENTS / "llama-3.3-70b-2x4gpu.yaml"))
LONGEST_SAMPLE = (
    TWO_MACHINES.data.max_tokens * TWO_MACHINES.target.captured_layers * 8192 * 2
)  # bytes: its width, bfloat16


def ray_nodes() -> list[str]:
    """What the units give to `ray start`: the head's, and another machine's."""
    example = (DEPLOYMENTS / "systemd" / "dflash.env.example").read_text()
    return re.findall(r'^#RAY_NODE="(.*)"$', example, re.MULTILINE)


def option(words: str, name: str) -> str:
    found = re.search(rf"--{name}=(\S+)", words)
    assert found, f"no --{name} in {words}"
    return found[1]


def test_ray_understands_every_option_that_it_is_given() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    by_unit = [
        unit(DEPLOYMENTS / "systemd" / "dflash-ray.service")["ExecStart"].replace("$RAY_NODE", node)
        for node in ray_nodes()
    ]
    by_hand = re.findall(r"^ray start .*$", (DEPLOYMENTS / "README.md").read_text(), re.MULTILINE)
    assert (len(by_unit), len(by_hand)) == (2, 2)
    for command in by_unit + by_hand:
        scripts.start.make_context("start", shlex.split(command)[2:])
        assert "--disable-usage-stats" in command


def test_the_two_machines_are_found_by_private_addresses_and_agree_on_the_head_and_the_store() -> None:
    head, other = ray_nodes()
    assert head.startswith("--head ")
    assert option(other, "address") == f"{option(head, 'node-ip-address')}:{option(head, 'port')}"
    assert option(head, "node-ip-address") != option(other, "node-ip-address")
    assert option(head, "object-store-memory") == option(other, "object-store-memory")
    by_hand = re.findall(r"^ray start (.*)$", (DEPLOYMENTS / "README.md").read_text(), re.MULTILINE)
    assert [set(words.split()) - {"--disable-usage-stats"} for words in by_hand] == [
        set(head.split()),
        set(other.split()),
    ]
    example = (DEPLOYMENTS / "systemd" / "dflash.env.example").read_text()
    assert f"#RAY_AUTH_MODE=token\n#RAY_ADDRESS={option(other, 'address')}\n" in example


def test_the_stores_hold_twice_what_the_queue_of_the_example_holds_at_worst() -> None:
    stores = [option(node, "object-store-memory") for node in ray_nodes()]
    stores += [pod["rayStartParams"]["object-store-memory"] for pod in PODS]
    assert len(stores) == 4
    assert all(int(store) >= 2 * TWO_MACHINES.stream.hs_queue_depth * LONGEST_SAMPLE for store in stores)


# ---------------------------------------------------------------- KubeRay

UNITS_OF_BYTES = {"Gi": 2**30, "Ti": 2**40}


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["template"]["spec"]["containers"]
    return only


def size(text: str) -> int:
    return int(text[:-2]) * UNITS_OF_BYTES[text[-2:]]


def test_the_cluster_is_of_the_rays_version_that_is_tested() -> None:
    pinned = re.search(r"^ray==(.*)$", (DEPLOYMENTS.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert (CLUSTER["apiVersion"], CLUSTER["spec"]["rayVersion"]) == ("ray.io/v1", pinned[1])
    assert len({container(pod)["image"] for pod in PODS}) == 1


def test_the_pods_have_room_for_the_example() -> None:
    pods = [pod for pod in PODS for _ in range(pod.get("replicas", 1))]
    assert len(pods) == 2
    assert workers_fit(TWO_MACHINES, [container(pod)["resources"]["limits"]["nvidia.com/gpu"] for pod in pods])


def test_every_pod_sees_what_a_run_needs_at_the_same_path_on_one_volume_that_all_write() -> None:
    assert VOLUME["spec"]["accessModes"] == ["ReadWriteMany"]
    (mounts, *others) = [container(pod)["volumeMounts"] for pod in PODS]
    assert all(other == mounts for other in others)
    shared = {mount["mountPath"]: mount["subPath"] for mount in mounts if mount["name"] == "dflash"}
    assert len(set(shared.values())) == len(shared)
    for pod in PODS:
        claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["template"]["spec"]["volumes"][:1]]
        assert claims == [VOLUME["metadata"]["name"]]
    # the same places as in a container of compose.yaml
    assert set(shared) == {mount.split(":")[1] for mount in SERVICES["worker"]["volumes"]}
    home = re.search(r"^WORKDIR (.*)$", (DEPLOYMENTS / "Dockerfile").read_text(), re.MULTILINE)
    assert home
    paths = (TWO_MACHINES.run.root, TWO_MACHINES.data.prepared_dir, TWO_MACHINES.regenerate.out)
    assert {f"{home[1]}/{path}" for path in (*paths, str(Path(TWO_MACHINES.data.path).parent))} <= set(shared)


def test_the_object_store_fits_the_shared_memory_of_a_pod_and_that_fits_its_memory() -> None:
    for pod in PODS:
        (shm,) = [volume for volume in pod["template"]["spec"]["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory"
        room = size(shm["emptyDir"]["sizeLimit"])
        assert (
            int(pod["rayStartParams"]["object-store-memory"])
            < room
            < size(container(pod)["resources"]["limits"]["memory"])
        )
        assert {"name": "shm", "mountPath": "/dev/shm"} in container(pod)["volumeMounts"]


def test_only_the_clusters_own_pods_reach_it_and_only_with_the_token() -> None:
    assert CLUSTER["spec"]["authOptions"] == {"mode": "token"}
    assert CLUSTER["spec"]["headGroupSpec"]["serviceType"] == "ClusterIP"
    pods = {"matchLabels": {"ray.io/cluster": CLUSTER["metadata"]["name"]}}
    assert POLICY["spec"]["podSelector"] == pods
    assert POLICY["spec"]["policyTypes"] == ["Ingress"]
    assert POLICY["spec"]["ingress"] == [{"from": [{"podSelector": pods}]}]
    written = (DEPLOYMENTS / "kuberay" / "cluster.yaml").read_text()
    assert re.findall(r"hostPort|hostNetwork|NodePort|LoadBalancer|kind: Ingress|kind: Secret", written) == []


def test_the_worker_of_the_head_has_the_environment_of_composes_and_its_secrets_from_a_secret() -> None:
    head = container(CLUSTER["spec"]["headGroupSpec"])
    environment = {each["name"]: each["value"] for each in head["env"]}
    assert environment.pop("RAY_ADDRESS") == "auto"
    named = SERVICES["worker"]["environment"]
    secret = {name for name, value in named.items() if "${" in value}
    assert environment == {name: value for name, value in named.items() if name not in secret}
    assert head["envFrom"] == [{"secretRef": {"name": "dflash"}}]
    taken = re.search(r"grep -E '(\S+)' deployments/team.env", (DEPLOYMENTS / "README.md").read_text())
    assert taken
    assert {line.rstrip("=") for line in environment_examples() if re.match(taken[1], line)} == secret


def test_the_probes_ask_ports_that_ray_is_told_to_open() -> None:
    head, worker = PODS
    for pod, port in ((head, 6379), (worker, int(worker["rayStartParams"]["node-manager-port"]))):
        for probe in ("readinessProbe", "livenessProbe"):
            assert container(pod)[probe]["tcpSocket"] == {"port": port}


def test_a_stop_leaves_a_checkpoint_the_same_time_in_a_pod() -> None:
    spec = CLUSTER["spec"]["headGroupSpec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 300
    assert spec["shareProcessNamespace"] is True
    assert container(CLUSTER["spec"]["headGroupSpec"])["args"][0].endswith("& exec deployments/worker.sh")


def kuberays_command(pod: dict[str, Any], *, head: bool, address: str) -> str:
    """The `ray start` that KubeRay makes of a group, with less memory and without GPUs."""
    added = {"dashboard-host": "0.0.0.0"} if head else {"address": address}
    added |= {"block": "true", "dashboard-agent-listen-port": "52365", "metrics-export-port": "8080", "num-cpus": "4"}
    values = pod["rayStartParams"] | added | {"object-store-memory": "100000000", "memory": "1000000000"}
    switches = {"true": "--{0}", "false": ""}  # only these options take the word itself: include-dashboard, log-color
    words = [
        switches[value].format(name) if value in switches and name != "include-dashboard" else f"--{name}={value}"
        for name, value in sorted(values.items())
    ]
    return " ".join(["ray", "start", *(["--head"] if head else []), *words])


STANDING_WORKER = """#!/bin/sh
trap 'echo stopped; exit 0' TERM INT
echo started with RAY_ADDRESS=$RAY_ADDRESS
while :; do sleep 0.1; done
"""

NODES_AND_PORTS = """
import socket, sys
import ray
ray.init(logging_level="ERROR")
print(sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]))
for port, node in zip(sys.argv[1::2], sys.argv[2::2]):
    socket.create_connection((node, int(port)), timeout=10).close()
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(machines_impossible()), reason=machines_impossible() or "possible")
def test_the_commands_of_the_pods_make_a_cluster_that_answers_the_probes_and_needs_the_token(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "prefect").write_text(STANDING_WORKER)
    (commands / "prefect").chmod(0o755)
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (
        tempfile.TemporaryDirectory(prefix="pods") as files,  # a short path, for sockets
        contextlib.ExitStack() as logs,
        Machines(count=2, with_ray=False) as machines,
    ):
        token = ["RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={'0123456789abcdef' * 4}"]
        pods = []
        for index, pod in enumerate(PODS):
            start = kuberays_command(pod, head=index == 0, address=machines.address)
            # two pods have no files in common, these machines have
            start += f" --temp-dir={files}/{index} --node-ip-address={machines.ip(index)}"
            given = [f"{each['name']}={each['value']}" for each in container(pod)["env"] if "value" in each]
            said = logs.enter_context((tmp_path / f"pod{index}").open("w"))
            pods.append(
                machines.command(
                    index,
                    [
                        "env",
                        *token,
                        *given,
                        f"PATH={path}",
                        f"KUBERAY_GEN_RAY_START_CMD={start}",
                        "HOME=" + str(tmp_path),
                    ]
                    + container(pod)["command"]
                    + container(pod)["args"],
                    cwd=DEPLOYMENTS.parent,
                    stdout=said,
                    stderr=said,
                    stdin=subprocess.DEVNULL,
                )
            )
            until(lambda: "Ray runtime started" in (tmp_path / f"pod{index}").read_text(), seconds=60)  # noqa: B023
        assert "started with RAY_ADDRESS=auto" in (tmp_path / "pod0").read_text()
        ports = [
            word
            for index, pod in enumerate(PODS)
            for word in (str(container(pod)["livenessProbe"]["tcpSocket"]["port"]), machines.ip(index))
        ]

        def nodes(*environment: str) -> tuple[int, str]:
            asked = machines.command(
                1,
                ["env", *environment, f"RAY_ADDRESS={machines.address}", sys.executable, "-c", NODES_AND_PORTS, *ports],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            said, _ = asked.communicate(timeout=60)
            return asked.returncode, said

        assert nodes(*token) == (0, f"{[machines.ip(0), machines.ip(1)]}\n")
        code, said = nodes("RAY_AUTH_MODE=disabled")
        assert code == 1
        assert "AuthenticationError" in said
        pods[0].terminate()
        assert pods[0].wait(timeout=60) == 0
        assert (tmp_path / "pod0").read_text().splitlines()[-1] == "stopped"


# ---------------------------------------------------------------- worker.sh, for real, around a worker of ten lines

TRAINER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("trainer terminated", flush=True))
print("trainer runs", flush=True)
sys.stdin.read()
time.sleep(1)
print("trainer saved", flush=True)
"""

FLOW = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit("flow terminated"))
trainer = subprocess.Popen([sys.executable, "trainer.py"], stdin=subprocess.PIPE, start_new_session=True)
signal.pause()
"""

# like Prefect's: a flow is `python -m prefect.engine` in a session of its own, and is killed when the worker is told to stop
WORKER = """#!{python}
import pathlib, signal, subprocess, sys, time
first = not pathlib.Path("started").exists()
pathlib.Path("started").touch()
print(" ".join(sys.argv[1:]), flush=True)
print("SIGINT", signal.getsignal(signal.SIGINT) == signal.default_int_handler, flush=True)
if first:
    flow = subprocess.Popen([sys.executable, "-m", "prefect.engine"], start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(flow.kill()))
    while {dies} and "trainer runs" not in pathlib.Path("out").read_text():
        time.sleep(0.05)
    if {dies}:
        sys.exit(3)
signal.pause()
"""


@contextlib.contextmanager
def running_worker(directory: Path, *, dies: bool = False) -> Iterator[subprocess.Popen[str]]:
    """worker.sh with a trainer running under its worker; what they say is in `out`."""
    (directory / "trainer.py").write_text(TRAINER)
    (directory / "prefect").mkdir()
    (directory / "prefect" / "__init__.py").touch()  # so that it comes before the installed one
    (directory / "prefect" / "engine.py").write_text(FLOW)
    commands = directory / "bin"
    commands.mkdir()
    (commands / "prefect").write_text(WORKER.format(python=sys.executable, dies=dies))
    (commands / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.1\n")
    for command in commands.iterdir():
        command.chmod(0o755)
    with (directory / "out").open("w") as out:
        started = subprocess.Popen(
            [DEPLOYMENTS / "worker.sh"],
            cwd=directory,
            env=os.environ | {"PATH": f"{commands}:{os.environ['PATH']}"},
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        deadline = time.monotonic() + 30
        workers = 2 if dies else 1
        while (told := (directory / "out").read_text()).count("SIGINT") < workers or "trainer runs" not in told:
            assert time.monotonic() < deadline, told
            time.sleep(0.05)
        yield started
    finally:
        started.terminate()
        started.wait(timeout=60)


def test_a_stopped_worker_ends_after_the_trainer_has_saved_and_the_trainer_gets_no_signal(tmp_path: Path) -> None:
    with running_worker(tmp_path) as worker:
        worker.terminate()
        assert worker.wait(timeout=60) == 0
    told = (tmp_path / "out").read_text().splitlines()
    assert told[-1] == "trainer saved"
    assert "trainer terminated" not in told


def test_a_worker_that_dies_is_started_again_and_its_flow_goes_on_until_a_stop(tmp_path: Path) -> None:
    with running_worker(tmp_path, dies=True) as worker:
        told = (tmp_path / "out").read_text()
        assert told.count("worker start --pool dflash --type process\n") == 2
        assert "the worker ended with exit code 3" in told
        assert "flow terminated" not in told
        worker.terminate()
        assert worker.wait(timeout=60) == 0
    told = (tmp_path / "out").read_text().splitlines()
    assert told[-2:] == ["flow terminated", "trainer saved"]


def test_the_worker_hears_sigint_and_has_no_limit_of_runs(tmp_path: Path) -> None:
    with running_worker(tmp_path):
        told = (tmp_path / "out").read_text()
    assert "SIGINT True" in told
    assert "--limit" not in told
