"""Which ranks share a host, as the ranks find out among themselves."""

from cos598d.comm.communicator import Communicator
from cos598d.world.network import network_identity


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
