"""The emulated network in the kernel: created, shaped, inspected and removed by `ip` and `tc`.

Each host is a network namespace with one veth interface. Its other end is a port of the switch, a namespace with a
bridge. Both ends of a link are shaped by a token bucket filter. So sending and receiving are limited independently, as
on a full-duplex Ethernet link. Nothing is created outside the namespaces, and the kernel removes everything with them.

The switch's namespace is created first and removed last. It has a mark, the alias of its loopback: the cluster, and the
call that created it. Without it the hosts are not ours, whatever their names: they are never removed.
"""

import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

from cos598d.errors import UserError
from cos598d.records.quantities import rate_words
from cos598d.terminal.printable import printable
from cos598d.tools.cluster.plan import INTERFACE, MOST_HOSTS, Cluster, address, hardware_address

# A packet that the kernel has not cut yet holds up to 64 KiB. A smaller bucket would make the filter cut it, and the
# links' counters would show other numbers of packets (and headers) than a machine with offloads.
BURST_BYTES = 70_000
# The longest wait of a packet before a link: a longer queue is cut off, as in a switch.
QUEUE_SECONDS = 0.2
LEAST_QUEUE_BYTES = 1_000_000
SECONDS_TO_END = 3.0
BRIDGE = "bridge0"


class Network:
    """A cluster's objects in the kernel. With `show`, every command is printed to standard error before it runs."""

    def __init__(self, cluster: Cluster, show: bool = False):
        self.cluster, self.show = cluster, show
        self._made: str | None = None  # the mark of what this object has created

    def build(self) -> None:
        """Create the namespaces, links and limits. If that fails, remove them again, and raise UserError."""
        cluster = self.cluster
        check_rights()
        if there := named_namespaces(cluster.name):
            if read_mark(cluster.switch):
                down = f"End it with `cos598d cluster down --name {cluster.name}`"
                raise UserError(f"a cluster named {cluster.name} is up already. {down}, or choose another --name.")
            raise UserError(
                f"there is a network namespace {there[0]} that no cluster of ours made. Choose another --name, or "
                f"remove it with `ip netns delete {there[0]}` if nobody needs it."
            )
        # It has its mark before its name, so that it is never without. Its creator owns the name: two at once cannot.
        made = secrets.token_hex(8)
        mark = json.dumps(asdict(cluster) | {"made": made})
        self._run("unshare", "--net", "sh", "-c", MAKE, "sh", mark, cluster.switch)
        self._made = made
        try:
            if not self.needs_own_switch:
                self._ip("-n", cluster.switch, "link", "add", BRIDGE, "type", "bridge", "mcast_snooping", "0")
                self._ip("-n", cluster.switch, "link", "set", BRIDGE, "up")
            for host in cluster.numbers:
                self._add_host(host)
        except BaseException:
            self.remove()
            raise

    def _add_host(self, host: int) -> None:
        cluster, space, port = self.cluster, self.cluster.namespace(host), self.cluster.port(host)
        self._ip("netns", "add", space)
        for where in (space, cluster.switch):
            # Otherwise the kernel sends packets to find routers, and the counters count them.
            self._run("ip", "netns", "exec", where, "sh", "-c", QUIET)
        self._ip(
            *("-n", cluster.switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE),
            *("address", hardware_address(host), "netns", space),
        )
        self._ip("-n", space, "link", "set", "lo", "up")
        self._ip("-n", space, "address", "add", f"{address(host)}/24", "dev", INTERFACE)
        if not cluster.offload:
            for where, interface in ((space, INTERFACE), (cluster.switch, port)):
                self._ip("-n", where, "link", "set", interface, "gso_max_segs", "1")
        if not self.needs_own_switch:
            self._ip("-n", cluster.switch, "link", "set", port, "master", BRIDGE)
        self._ip("-n", cluster.switch, "link", "set", port, "up")
        self._ip("-n", space, "link", "set", INTERFACE, "up")
        self.set_rate(host, cluster.rate)

    def set_rate(self, host: int, rate: float | None) -> None:
        """Limit both directions of a host's link to `rate` bits per second, or not at all."""
        for space, interface in self._ends(host):
            here = ("-n", space, "qdisc", "replace", "dev", interface)
            kinds = [row["kind"] for row in self._disciplines(space, interface) if row.get("root")]
            limits = [] if rate is None else _bucket(rate)
            if kinds == ["tbf"] and limits:  # in place: packets waiting in it keep waiting
                self._tc("-n", space, "qdisc", "change", "dev", interface, "root", "handle", "1:", "tbf", *limits)
                continue
            if kinds in (["tbf"], ["netem"]):
                self._tc("-n", space, "qdisc", "delete", "dev", interface, "root")
            if limits:
                self._tc(*here, "root", "handle", "1:", "tbf", *limits)
            if interface == INTERFACE and self.cluster.delay and not self.needs_own_switch:
                parent = ("root",) if rate is None else ("parent", "1:1")
                self._tc(*here, *parent, "netem", "delay", f"{self.cluster.delay * 1e6:.0f}us", "limit", "100000")

    def set_connected(self, host: int, connected: bool) -> None:
        """Disconnect a host, or connect it again. Nobody is notified: packets are lost from then on."""
        state = "up" if connected else "down"
        self._ip("-n", self.cluster.switch, "link", "set", self.cluster.port(host), state)

    @functools.cached_property
    def needs_own_switch(self) -> bool:
        """Whether our own program must carry the packets: there is a delay, and this kernel has no netem."""
        return bool(self.cluster.delay) and not has_netem()

    def _ends(self, host: int) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.cluster.namespace(host), INTERFACE), (self.cluster.switch, self.cluster.port(host))

    def _disciplines(self, space: str, interface: str) -> list[dict[str, Any]]:
        return json.loads(_output("tc", "-n", space, "-j", "qdisc", "show", "dev", interface) or "[]")

    def facts(self, host: int) -> dict[str, Any]:
        """The state of a host: its address, current rate, bytes sent and received, and its processes' ids."""
        space = self.cluster.namespace(host)
        link = json.loads(_output("ip", "-n", space, "-s", "-j", "link", "show", "dev", INTERFACE))[0]
        rates = [row["options"]["rate"] * 8 for row in self._disciplines(space, INTERFACE) if row["kind"] == "tbf"]
        return {
            "host": host,
            "address": address(host),
            "rate": rate_words(rates[0] if rates else None),
            "connected": link["operstate"] == "UP",
            "bytes_sent": link["stats64"]["tx"]["bytes"],
            "bytes_received": link["stats64"]["rx"]["bytes"],
            "processes": processes(space),
        }

    def remove(self) -> int:
        """End what still runs in the cluster's namespaces and remove them. Return how many there were.

        If this object has created a cluster, a later one of its name stays. Without a switch of ours nothing is ours.
        """
        made = read_mark(self.cluster.switch).get("made")
        mine = named_namespaces(self.cluster.name) if made and self._made in (None, made) else []
        end_processes([process for space in mine for process in processes(space)])
        for space in mine:
            self._ip("netns", "delete", space)
        return len(mine)

    def _ip(self, *words: str) -> None:
        self._run("ip", *words)

    def _tc(self, *words: str) -> None:
        self._run("tc", *words)

    def _run(self, *words: str) -> None:
        if self.show:
            print("$", *words, file=sys.stderr)
        _output(*words)


def _bucket(rate: float) -> list[str]:
    """tc's arguments for a token bucket of `rate` bits per second."""
    queue = max(LEAST_QUEUE_BYTES, int(rate / 8 * QUEUE_SECONDS))
    return ["rate", f"{rate:.0f}bit", "burst", str(BURST_BYTES), "limit", str(queue)]


MAKE = 'ip link set lo alias "$1" && exec ip netns attach "$2" $$'
QUIET = "for f in /proc/sys/net/ipv6/conf/*/disable_ipv6; do [ ! -w $f ] || echo 1 > $f; done"


def load(name: str) -> Cluster:
    """The existing cluster with that name. Raises UserError if there is none."""
    check_rights()
    mark = read_mark(Cluster(name=name).switch)
    if not mark:
        raise UserError(f"no cluster named {name} is up. Make one with `cos598d cluster up --name {name}`.")
    return Cluster(**{field: value for field, value in mark.items() if field != "made"})


def read_mark(space: str) -> dict[str, Any]:
    """A namespace's mark: the fields of its Cluster, and `made`; {} if it has none."""
    try:
        link = json.loads(_output("ip", "-n", space, "-j", "link", "show", "dev", "lo"))[0]
        mark = json.loads(link["ifalias"])
    except (UserError, LookupError, ValueError):  # no mark of ours, or no such namespace
        return {}
    return mark if isinstance(mark, dict) and "made" in mark else {}


def namespaces() -> list[str]:
    """The names of all named network namespaces on this machine."""
    return [row["name"] for row in json.loads(_output("ip", "-j", "netns", "list") or "[]")]


def named_namespaces(name: str) -> list[str]:
    """The namespaces with the names of this cluster: hosts in their order, the switch last."""
    cluster, there = Cluster(hosts=MOST_HOSTS, name=name), set(namespaces())
    return [space for space in (*map(cluster.namespace, cluster.numbers), cluster.switch) if space in there]


def processes(space: str) -> list[int]:
    """The ids of the processes whose network is this namespace."""
    return [int(word) for word in _output("ip", "netns", "pids", space).split()]


def end_processes(ids: list[int]) -> None:
    """End processes that are not our children: with SIGTERM, then after some seconds with SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in ids:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + SECONDS_TO_END
        while ids and time.monotonic() < deadline:
            ids = [process for process in ids if _runs(process)]
            time.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def has_netem() -> bool:
    """Whether this kernel can delay packets itself."""
    # In a namespace without a name, which ends with the command.
    words = ("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def check_rights() -> None:
    """Raise UserError if no cluster can be created: not Linux, no `ip` and `tc`, not root."""
    if not sys.platform.startswith("linux"):
        raise UserError(
            "an emulated cluster needs Linux's network namespaces. Use Linux, or a virtual machine with it."
        )
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("setpriv", "util-linux"), ("unshare", "util-linux")):
        if not shutil.which(tool):
            raise UserError(f"an emulated cluster needs the command {tool}. Install {package}.")
    if os.geteuid() != 0:
        raise UserError("an emulated cluster needs root's rights to make network namespaces. Run this with sudo.")


def _output(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"`{' '.join(words)}` failed: {printable(' '.join(done.stderr.split())) or 'no reason given'}. Fix what "
            "it names, then try again."
        )
    return done.stdout
