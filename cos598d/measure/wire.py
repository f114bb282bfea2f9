"""The kernel's counters of a network interface: what really travelled, beside what the ledger's formulas say."""

import os
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from cos598d.comm import Communicator
from cos598d.world.meeting import Meeting
from cos598d.world.network import INTERFACE_VARIABLE, interface_facing, interface_of, network_identity


@dataclass(frozen=True)
class Interface:
    """A network interface of this rank's host, and the ranks whose traffic its counters see, in order of rank."""

    name: str
    ranks: tuple[int, ...]


class Counters(NamedTuple):
    """What an interface carried: bytes with all headers, acknowledgements and repeats, and packets.

    On loopback each byte counts as sent and as received. Whatever else the host sends there counts too.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    packets_sent: int = 0
    packets_received: int = 0

    def plus(self, other: "Counters") -> "Counters":
        """The sum, field by field."""
        return Counters(*(a + b for a, b in zip(self, other, strict=True)))

    def less(self, other: "Counters") -> "Counters":
        """The difference, field by field."""
        return Counters(*(a - b for a, b in zip(self, other, strict=True)))


def find_interface(comm: Communicator, meeting: Meeting | None) -> Interface | None:
    """The interface that carries what this rank sends to the others, with the ranks that count on it.

    Between ranks that share all interfaces it is the loopback one: there the kernel delivers whatever goes from one
    address of a host to another, also where gloo was told another. Else it is the first in GLOO_SOCKET_IFNAME, or
    the one that faces rank 0. None for a single rank, or where none is found. Every rank must call it.
    """
    if meeting is None:
        return None
    named = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0] or interface_facing(meeting.identity.master_ip)
    found = comm.exchange([network_identity(), named])
    networks = {network for network, _ in found}
    name = interface_of("127.0.0.1") if len(networks) == 1 else named
    if name is None or not has_counters(name):
        return None
    mine = found[comm.rank]
    return Interface(name, tuple(rank for rank, other in enumerate(found) if len(networks) == 1 or other == mine))


def has_counters(interface: str) -> bool:
    """Whether `interface` can be read now."""
    try:
        read_counters(interface)
    except OSError:
        return False
    return True


def read_counters(interface: str) -> Counters:
    """The counters of `interface` in this process's network namespace, since it came up. OSError: there is none."""
    # As the kernel has them: psutil's own account of wrapped counters would be shared with whoever else asks it.
    found = psutil.net_io_counters(pernic=True, nowrap=False).get(interface)
    if found is None:
        raise OSError(f"the interface {interface} is gone")
    return Counters(found.bytes_sent, found.bytes_recv, found.packets_sent, found.packets_recv)


class WireCounter:
    """What an interface has carried between each `resume` and the next `pause`: `total`, as of the last reading."""

    def __init__(self, interface: Interface):
        self.interface = interface
        self.total = Counters()
        self._last: Counters | None = None

    @property
    def counts(self) -> bool:
        """Whether it is not paused."""
        return self._last is not None

    def resume(self) -> None:
        """Count from now on. Raises OSError as `read_counters`."""
        self._last = read_counters(self.interface.name)

    def pause(self) -> None:
        """Leave out what travels from now on."""
        self._last = None

    def read(self) -> Counters:
        """The sum so far. Raises OSError when the interface is gone or was made anew."""
        now = read_counters(self.interface.name)
        moved = now.less(self._last or now)
        if min(moved) < 0:
            raise OSError(f"the counters of {self.interface.name} went back")
        self.total = self.total.plus(moved)
        self._last = now
        return self.total
