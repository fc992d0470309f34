"""Machines on one Linux host: network namespaces on a switch of their own, each a Ray node with its own address.

`with Machines(count=2) as machines: driver = machines.command(0, [sys.executable, "driver.py"])`. A machine reaches the
others and nothing else; the host reaches none of them. They share the host's files, its name, /dev/shm and process ids.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PORT = 6379  # the head's; every port is free in a namespace
GATEWAY = "10.77.0.254"
START_SECONDS = 120  # a node takes about 3, several on a busy host more
NUMBERS = itertools.count()


def machines_impossible() -> str:
    """Why there can be no machines here; empty where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (iproute2)"
    try:
        with Machines(count=1, with_ray=False) as machines:
            machines.command(0, ["true"]).wait()
    except RuntimeError as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


class Machines:
    """`count` machines, the first of them Ray's head; machine i offers 1000 of the resource `machine<i>`.

    `environment` goes to the nodes and to every command, for Ray's settings (RAY_health_check_period_ms=...).
    """

    def __init__(
        self,
        count: int = 2,
        cpus: int = 4,
        object_store_bytes: int = 200_000_000,
        environment: dict[str, str] | None = None,
        with_ray: bool = True,
    ):
        self.count, self._cpus, self._object_store_bytes, self._with_ray = count, cpus, object_store_bytes, with_ray
        # Without a word on it, a head demands the token of ~/.ray/auth_token where some ray.init() has left one, and
        # the other nodes do not send it.
        self._environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", **(environment or {})}
        self._name = f"machines-{os.getpid()}-{next(NUMBERS)}"
        self._directory = Path("/tmp", self._name)  # a short one: the path of a socket may have 107 bytes
        self._nodes: dict[int, subprocess.Popen] = {}
        self.address = f"{self.ip(0)}:{PORT}"

    def __enter__(self) -> "Machines":
        clear_leftovers()
        self._directory.mkdir()
        try:
            self._make_switch()
            self.start(0)
            for index in range(1, self.count):
                self._begin(index)
            for index in range(1, self.count):
                self._wait_for_node(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for index in range(self.count):
            self.kill(index)
        if self._switch in namespaces():
            ip("netns", "del", self._switch)
        shutil.rmtree(self._directory)

    def ip(self, index: int) -> str:
        """The address of a machine, also after a new start."""
        return f"10.77.0.{index + 1}"

    def log(self, index: int) -> str:
        """What `ray start` said there."""
        return self._log(index).read_text()

    def command(self, index: int, argv: list[str], env: dict[str, str] | None = None, **popen) -> subprocess.Popen:
        """A process on a machine, in a session of its own; `ray.init()` in it joins the cluster."""
        environment = {**(os.environ if env is None else env), **self._environment, "RAY_ADDRESS": self.address}
        if not self._with_ray:
            del environment["RAY_ADDRESS"]
        argv = ["ip", "netns", "exec", self._namespace(index), *argv]  # which execs: the pid is the command's
        return subprocess.Popen(argv, env=environment, start_new_session=True, **popen)

    def processes(self, index: int) -> list[tuple[int, str]]:
        """Process id and command line of all that lives on a machine; Ray's workers read `ray::Actor.method`."""
        if self._namespace(index) not in namespaces():
            return []
        found = []
        for pid in pids_in(self._namespace(index)):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
                continue
            found.append((pid, words.replace(b"\0", b" ").decode(errors="replace").strip()))
        return found

    def cut(self, seconds: float) -> None:
        """Returns after so long, in which no packet passed between machines, and none of them was told."""
        for index in range(self.count):
            self._unplug(index)
        try:
            time.sleep(seconds)
        finally:
            for index in range(self.count):
                self._plug(index)

    def kill(self, index: int) -> None:
        """A power cut: all processes of a machine end by SIGKILL, and the others get no packet that says so."""
        if self._namespace(index) not in namespaces():
            return
        if self._port(index) in ip("-n", self._switch, "-o", "link"):
            self._unplug(index)
        kill_all(self._namespace(index))
        if index in self._nodes:
            self._nodes.pop(index).wait()
        # The kernel still repeats the last packets of the dead; they must not come out when the machine is back.
        if self._port(index) in ip("-n", self._switch, "-o", "link"):
            ip("-n", self._switch, "link", "del", self._port(index))
        ip("netns", "del", self._namespace(index))

    def start(self, index: int) -> None:
        """A fresh node on a machine that was killed, under the same address; returns once the cluster has it."""
        self._begin(index)
        self._wait_for_node(index)

    # ---------------------------------------------------------------- the network

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _namespace(self, index: int) -> str:
        return f"{self._name}-{index}"

    def _port(self, index: int) -> str:
        return f"port{index}"

    def _plug(self, index: int) -> None:
        ip("-n", self._switch, "link", "set", self._port(index), "master", "switch")

    def _unplug(self, index: int) -> None:
        """Takes a port off the bridge; it stays up, so that the machine sees no dead link."""
        ip("-n", self._switch, "link", "set", self._port(index), "nomaster")

    def _make_switch(self) -> None:
        """A bridge in a namespace, where no firewall of the host sees its packets; it is the machines' gateway to nowhere.

        Without a gateway Ray would not find the machine's own address. A gateway that forwards says at once that there is
        no way; a name server is then not waited for (10 s in torch's init_process_group).
        """
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self._switch, "addr", "add", f"{GATEWAY}/24", "dev", "switch")
        ip("-n", self._switch, "link", "set", "switch", "up")
        settings = "cd /proc/sys/net/ipv4; echo 1 > ip_forward; echo 0 > icmp_ratelimit"
        ip("netns", "exec", self._switch, "sh", "-c", settings)

    def _make_machine(self, index: int) -> None:
        switch, machine, port = self._switch, self._namespace(index), self._port(index)
        card = f"02:00:0a:4d:00:{index + 1:02x}"  # the same after a new start: the others remember it
        ip("netns", "add", machine)
        ip("-n", machine, "link", "set", "lo", "up")
        peer = ["peer", "name", "eth0", "address", card, "netns", machine]
        ip("-n", switch, "link", "add", port, "type", "veth", *peer)
        ip("-n", switch, "link", "set", port, "up")
        self._plug(index)
        ip("-n", machine, "addr", "add", f"{self.ip(index)}/24", "dev", "eth0")
        ip("-n", machine, "link", "set", "eth0", "up")
        ip("-n", machine, "route", "add", "default", "via", GATEWAY)

    # ---------------------------------------------------------------- Ray

    def _log(self, index: int) -> Path:
        return self._directory / f"{index}.log"

    def _begin(self, index: int) -> None:
        self._make_machine(index)
        if not self._with_ray:
            return
        ray = str(Path(sys.executable).with_name("ray"))
        where = ["--head", f"--port={PORT}", "--include-dashboard=false", "--disable-usage-stats"]
        if index > 0:
            where = [f"--address={self.address}"]
        argv = [ray, "start", "--block", *where, f"--node-ip-address={self.ip(index)}"]
        argv += [f"--num-cpus={self._cpus}", f"--object-store-memory={self._object_store_bytes}"]
        argv += [f'--resources={{"machine{index}": 1000}}', f"--temp-dir={self._directory / str(index)}"]
        with open(self._log(index), "w") as log:
            self._nodes[index] = self.command(index, argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _wait_for_node(self, index: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        # `ray start` says so once the cluster lists the node.
        while self._with_ray and "Ray runtime started" not in self.log(index):
            if self._nodes[index].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no Ray node on machine {index}; `ray start` says:\n{self.log(index)}")
            time.sleep(0.05)


def namespaces() -> list[str]:
    """Names of the host's network namespaces."""
    return [line.split()[0] for line in ip("netns", "list").splitlines()]


def pids_in(namespace: str) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", namespace).split()]


def kill_all(namespace: str) -> None:
    """Returns once no process is left there."""
    while pids := pids_in(namespace):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def clear_leftovers() -> None:
    """Ends the machines of test processes that were killed before they could."""
    for namespace in namespaces():
        kind, _, rest = namespace.partition("-")
        owner, _, _ = rest.partition("-")
        if kind == "machines" and not Path("/proc", owner).exists():
            kill_all(namespace)
            ip("netns", "del", namespace)
    for directory in Path("/tmp").glob("machines-*-*"):
        if not Path("/proc", directory.name.split("-")[1]).exists():
            shutil.rmtree(directory)


def ip(*words: str) -> str:
    """What the program ip says; fails with its own words."""
    ended = subprocess.run(["ip", *words], capture_output=True, text=True)
    if ended.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {ended.stderr.strip()}")
    return ended.stdout
