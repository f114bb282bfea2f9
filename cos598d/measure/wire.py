"""The kernel's count of the bytes of this process's TCP connections: what was really sent, next to formulas."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path("/proc/self/fd")
# Offsets in the kernel's struct tcp_info: bytes received and sent (Linux 4.19 and later).
_INFO, _RECEIVED, _SENT = 256, 128, 200


class Counters(NamedTuple):
    """Bytes sent and received, including repeated ones, without headers and acknowledgements."""

    bytes_sent: int = 0
    bytes_received: int = 0

    def plus(self, other: "Counters") -> "Counters":
        """The sum, field by field."""
        return Counters(self[0] + other[0], self[1] + other[1])

    def less(self, other: "Counters") -> "Counters":
        """The difference, field by field."""
        return Counters(self[0] - other[0], self[1] - other[1])


class WireCounter:
    """What this process's TCP connections carry between each `resume` and the next `pause`.

    The kernel counts for each connection (TCP_INFO; Linux), so no other program's bytes are among them, whether ranks
    share a host or not. What a connection carries between the last reading and its end is not counted.
    """

    def __init__(self) -> None:
        self._open: dict[str, Counters] = {}  # by the kernel's number of the socket
        self._ended = Counters()
        self._last: Counters | None = None

    @staticmethod
    def is_told() -> bool:
        """Whether the kernel reports the bytes of a connection."""
        if not FOLDER.exists() or not hasattr(socket, "TCP_INFO"):
            return False
        with socket.socket() as one:
            return len(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO)) >= _SENT + struct.calcsize("=Q")

    def resume(self) -> None:
        """Count from now on, if it is paused."""
        self._last = self._last or self._now()

    def pause(self) -> None:
        """Do not count what is sent from now on."""
        self._last = None

    def read(self) -> Counters | None:
        """Since the last reading; None if it is paused."""
        if self._last is None:
            return None
        now = self._now()
        moved, self._last = now.less(self._last), now
        return moved

    def _now(self) -> Counters:
        """The sum so far, including connections that have ended."""
        now = dict(_sockets())
        for number in self._open.keys() - now.keys():
            self._ended = self._ended.plus(self._open[number])
        self._open = now
        total = self._ended
        for one in now.values():
            total = total.plus(one)
        return total


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
