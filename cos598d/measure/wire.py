"""The kernel's counters of an interface, or of this process's sockets: what was really sent, next to formulas."""

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from cos598d.records.conventions import OWN_SOCKETS
from cos598d.world.meeting import Meeting
from cos598d.world.network import INTERFACE_VARIABLE, interface_facing, network_identity

if TYPE_CHECKING:
    from cos598d.comm.group import Ranks


@dataclass(frozen=True)
class Interface:
    """A network interface of this rank's host, and the ranks whose traffic its counters include, in order of rank.

    Its name is OWN_SOCKETS if this process's connections are counted instead.
    """

    name: str
    ranks: tuple[int, ...]


class Counters(NamedTuple):
    """Bytes sent and received, including repeated ones.

    On an interface, they include all headers and acknowledgements, and the host's other traffic. Bytes of a process's
    own sockets exclude both.
    """

    bytes_sent: int = 0
    bytes_received: int = 0

    def plus(self, other: "Counters") -> "Counters":
        """The sum, field by field."""
        return Counters(self[0] + other[0], self[1] + other[1])

    def less(self, other: "Counters") -> "Counters":
        """The difference, field by field."""
        return Counters(self[0] - other[0], self[1] - other[1])


def find_interface(comm: "Ranks", meeting: Meeting | None) -> Interface | None:
    """The interface that carries this rank's messages to the others, with the ranks that count on it.

    Between ranks that share all interfaces, the kernel delivers by loopback, whichever interface gloo uses. Its
    counters include all programs on the host, so each rank counts its own sockets. Otherwise it is the first in
    GLOO_SOCKET_IFNAME, or the one that faces rank 0. None for a single rank or without a match. All ranks must call it.
    """
    if meeting is None:
        return None
    named = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0] or interface_facing(meeting.identity.master_ip)
    found = comm.exchange([network_identity(), named])
    mine = found[comm.rank]
    if all(network == mine[0] for network, _ in found):
        return Interface(OWN_SOCKETS, (comm.rank,)) if OwnSockets.are_told() else None
    if named is None or not has_counters(named):
        return None
    return Interface(named, tuple(rank for rank, other in enumerate(found) if other == mine))


def has_counters(interface: str) -> bool:
    """Whether the counters of `interface` can be read now."""
    try:
        read_counters(interface)
    except OSError:
        return False
    return True


def read_counters(interface: str) -> Counters:
    """The counters of `interface` in this process's network namespace, since it came up. Raises OSError."""
    # The kernel's values: psutil's correction of wrapped counters would be shared with its other users.
    found = psutil.net_io_counters(pernic=True, nowrap=False).get(interface)
    if found is None:
        raise OSError(f"the interface {interface} is gone")
    return Counters(found.bytes_sent, found.bytes_recv)


class OwnSockets:
    """The bytes of this process's TCP connections, by the kernel's counts for each (TCP_INFO; Linux).

    What a connection carries between the last reading and its end is not counted.
    """

    def __init__(self) -> None:
        self._open: dict[str, Counters] = {}  # by the kernel's number of the socket
        self._ended = Counters()

    @staticmethod
    def are_told() -> bool:
        """Whether the kernel reports them."""
        if not FOLDER.exists() or not hasattr(socket, "TCP_INFO"):
            return False
        with socket.socket() as one:
            return len(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO)) >= _SENT + struct.calcsize("=Q")

    def read(self) -> Counters:
        """The sum so far, including connections that have ended."""
        now = dict(_sockets())
        for number in self._open.keys() - now.keys():
            self._ended = self._ended.plus(self._open[number])
        self._open = now
        total = self._ended
        for one in now.values():
            total = total.plus(one)
        return total


FOLDER = Path("/proc/self/fd")
# Offsets in the kernel's struct tcp_info: bytes received and sent (Linux 4.19 and later).
_INFO, _RECEIVED, _SENT = 256, 128, 200


def _sockets() -> Iterator[tuple[str, Counters]]:
    """Every TCP socket of this process, with its number."""
    for entry in os.scandir(FOLDER):
        with contextlib.suppress(OSError):  # closed meanwhile
            number = os.readlink(entry.path)
            if not number.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as own:
                if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
                    continue
                info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO)
                (received,), (sent,) = (struct.unpack_from("=Q", info, place) for place in (_RECEIVED, _SENT))
                yield number, Counters(sent, received)


class WireCounter:
    """What an interface carries between each `resume` and the next `pause`."""

    def __init__(self, interface: Interface):
        self._name = interface.name
        self._now: Callable[[], Counters] = (
            OwnSockets().read if interface.name == OWN_SOCKETS else lambda: read_counters(interface.name)
        )
        self._last: Counters | None = None

    def resume(self) -> None:
        """Count from now on, if it is paused. Raises OSError as `read_counters`."""
        self._last = self._last or self._now()

    def pause(self) -> None:
        """Do not count what is sent from now on."""
        self._last = None

    def read(self) -> Counters | None:
        """Since the last reading; None if it is paused. Raises OSError if the interface is gone, or was made again."""
        if self._last is None:
            return None
        now = self._now()
        moved, self._last = now.less(self._last), now
        if min(moved) < 0:
            raise OSError(f"the counters of {self._name} went back")
        return moved
