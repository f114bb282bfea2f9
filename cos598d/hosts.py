"""Which ranks share a host, as the ranks find out among themselves."""

import os
import socket
from pathlib import Path

from cos598d.comm import Communicator


def host_identity() -> str:
    """What is the same for two processes exactly if they can share memory and need no network.

    The boot of the kernel, the network namespace and the namespace of process ids: a container or a virtual host of an
    emulated cluster counts as a host of its own. Where the system has no /proc it is the host's name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [str(os.stat(f"/proc/self/ns/{space}").st_ino) for space in ("net", "pid")]
    except OSError:  # not Linux
        return socket.gethostname()
    return " ".join((boot, *spaces))


def host_groups(comm: Communicator) -> list[list[int]]:
    """The ranks of each host, in order of rank; hosts in the order of their first ranks. Every rank must call it."""
    groups: dict[str, list[int]] = {}
    for rank, identity in enumerate(comm.exchange(host_identity())):
        groups.setdefault(identity, []).append(rank)
    return list(groups.values())
