"""The emulated network in the kernel: created and shaped by `ip` and `tc`.

Each host is a network namespace with one veth interface. Its other end is a port of the switch, a namespace with a
bridge. Both ends of a link are shaped by a token bucket filter. So sending and receiving are limited independently, as
on a full-duplex Ethernet link.

The process that makes them gets mounts of its own, in which /run/netns has only this cluster's names. So nobody else's
network is touched, and the kernel removes all of it with the last process inside.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import sys

from cos598d.errors import UserError
from cos598d.terminal.printable import printable
from cos598d.tools.cluster.plan import INTERFACE, SWITCH, Cluster, address, hardware_address, namespace, port

# A packet that the kernel has not cut yet holds up to 64 KiB. A smaller bucket would make the filter cut it, and the
# links' counters would show other numbers of packets (and headers) than a machine with offloads.
BURST_BYTES = 70_000
# The longest wait of a packet before a link: a longer queue is cut off, as in a switch.
QUEUE_SECONDS = 0.2
LEAST_QUEUE_BYTES = 1_000_000
BRIDGE = "bridge0"
NAMES = "/run/netns"  # where `ip` keeps the names of namespaces
CLONE_NEWNS = 0x00020000  # from linux/sched.h; Python has no name for it before 3.12
QUIET = "for f in /proc/sys/net/ipv6/conf/*/disable_ipv6; do [ ! -w $f ] || echo 1 > $f; done"


class Network:
    """A cluster's objects in the kernel. With `show`, every command is printed to standard error before it runs."""

    def __init__(self, cluster: Cluster, show: bool = False):
        self.cluster, self.show = cluster, show

    def build(self) -> None:
        """Create the namespaces, links and limits. Raises UserError if that fails; they end with this process."""
        check_rights()
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            reason = os.strerror(ctypes.get_errno())
            raise UserError(f"this process gets no mounts of its own ({reason}). Run it with root's full rights.")
        os.makedirs(NAMES, exist_ok=True)
        self._run("mount", "--make-rprivate", "/")
        self._run("mount", "-t", "tmpfs", "none", NAMES)
        self._run("ip", "netns", "add", SWITCH)
        if not self.needs_own_switch:
            self._run("ip", "-n", SWITCH, "link", "add", BRIDGE, "type", "bridge", "mcast_snooping", "0")
            self._run("ip", "-n", SWITCH, "link", "set", BRIDGE, "up")
        for host in self.cluster.numbers:
            self._add_host(host)

    def _add_host(self, host: int) -> None:
        space = namespace(host)
        self._run("ip", "netns", "add", space)
        for where in (space, SWITCH):
            # Otherwise the kernel sends packets to find routers, and the counters count them.
            self._run("ip", "netns", "exec", where, "sh", "-c", QUIET)
        self._run(
            *("ip", "-n", SWITCH, "link", "add", port(host), "type", "veth", "peer", "name", INTERFACE),
            *("address", hardware_address(host), "netns", space),
        )
        self._run("ip", "-n", space, "link", "set", "lo", "up")
        self._run("ip", "-n", space, "address", "add", f"{address(host)}/24", "dev", INTERFACE)
        for where, interface in ((space, INTERFACE), (SWITCH, port(host))):
            self._limit(where, interface)
        if not self.needs_own_switch:
            self._run("ip", "-n", SWITCH, "link", "set", port(host), "master", BRIDGE)
        self._run("ip", "-n", SWITCH, "link", "set", port(host), "up")
        self._run("ip", "-n", space, "link", "set", INTERFACE, "up")

    def _limit(self, space: str, interface: str) -> None:
        """Limit what this end of a link sends to its rate, and delay what a host sends."""
        rate, parent = self.cluster.rate, ["root"]
        add = ("tc", "-n", space, "qdisc", "add", "dev", interface)
        if rate is not None:
            queue = max(LEAST_QUEUE_BYTES, int(rate / 8 * QUEUE_SECONDS))
            sizes = ("burst", str(BURST_BYTES), "limit", str(queue))
            self._run(*add, "root", "handle", "1:", "tbf", "rate", f"{rate:.0f}bit", *sizes)
            parent = ["parent", "1:1"]
        if interface == INTERFACE and self.cluster.delay and not self.needs_own_switch:
            delay = f"{self.cluster.delay * 1e6:.0f}us"
            self._run(*add, *parent, "netem", "delay", delay, "limit", "100000")

    @functools.cached_property
    def needs_own_switch(self) -> bool:
        """Whether our own program must carry the packets: there is a delay, and this kernel has no netem."""
        return bool(self.cluster.delay) and not has_netem()

    def _run(self, *words: str) -> None:
        if self.show:
            print("$", *words, file=sys.stderr)
        run(*words)


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
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux"), ("unshare", "util-linux")):
        if not shutil.which(tool):
            raise UserError(f"an emulated cluster needs the command {tool}. Install {package}.")
    if os.geteuid() != 0:
        raise UserError("an emulated cluster needs root's rights to make network namespaces. Run this with sudo.")


def run(*words: str) -> None:
    """Run a command that prints nothing. Raises UserError with its error if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"`{' '.join(words)}` failed: {printable(' '.join(done.stderr.split())) or 'no reason given'}. Fix what "
            "it names, then try again."
        )
