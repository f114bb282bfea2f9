"""Which ranks share a host or a network interface, as the ranks find out among themselves."""

import os

from cos598d.comm import Communicator
from cos598d.interfaces import VARIABLE, interface_facing, network_identity, owner_of
from cos598d.measure.wire import Interface, has_counters
from cos598d.meeting import Meeting


def host_identity() -> str:
    """What is the same for two processes exactly if they can share memory and need no network.

    The boot of the kernel, the network namespace and the namespace of process ids: a container or a virtual host of an
    emulated cluster counts as a host of its own. Where the system has no /proc it is the host's name.
    """
    return network_identity("pid")


def host_groups(comm: Communicator) -> list[list[int]]:
    """The ranks of each host, in order of rank; hosts in the order of their first ranks. Every rank must call it."""
    groups: dict[str, list[int]] = {}
    for rank, identity in enumerate(comm.exchange(host_identity())):
        groups.setdefault(identity, []).append(rank)
    return list(groups.values())


def find_interface(comm: Communicator, meeting: Meeting | None) -> Interface | None:
    """The interface that carries what this rank sends to the others, with the ranks that count on it.

    Between ranks that share all interfaces it is the loopback one: there the kernel delivers whatever goes from one
    address of a host to another, also where gloo was told another. Else it is the first in GLOO_SOCKET_IFNAME, or
    the one that faces rank 0. None for a single rank, or where none is found. Every rank must call it.
    """
    if meeting is None:
        return None
    named = os.environ.get(VARIABLE, "").split(",")[0] or interface_facing(meeting.identity.master_ip)
    found = comm.exchange([network_identity(), named])
    networks = {network for network, _ in found}
    name = owner_of("127.0.0.1") if len(networks) == 1 else named
    if name is None or not has_counters(name):
        return None
    mine = found[comm.rank]
    return Interface(name, tuple(rank for rank, other in enumerate(found) if len(networks) == 1 or other == mine))
