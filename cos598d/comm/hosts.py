"""Which ranks share a host, as the ranks find out from each other."""

from cos598d.comm.communicator import Communicator
from cos598d.world.network import network_identity


def host_groups(comm: Communicator) -> list[list[int]]:
    """The ranks of each host, in order of rank; hosts in the order of their first ranks. Every rank must call it.

    Ranks share a host if they can share memory and need no network. A container, or a virtual host of an emulated
    cluster, counts as a host of its own: it has another namespace of process ids.
    """
    groups: dict[str, list[int]] = {}
    for rank, identity in enumerate(comm.exchange(network_identity("pid"))):
        groups.setdefault(identity, []).append(rank)
    return list(groups.values())
