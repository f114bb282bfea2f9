"""Who is connected with whom on the line that tells of lost ranks: a star up to 33 ranks, a tree of such stars above.

Rank r has the children 32 r + 1 to 32 r + 32, so a rank has at most 33 lines, and word of 1,024 ranks takes four steps
from any to any. A rank with children listens for them, at its own address, only until they have come.
"""

import json
import selectors
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

from cos598d.errors import UserError
from cos598d.world.channel import Door, Frames, connect, make_key
from cos598d.world.doorway import listen
from cos598d.world.meeting import Meeting
from cos598d.world.secret import new_secret

FAN_OUT = 32
CONNECT_SECONDS = 10.0  # all have just met: whoever does not connect at once is gone
LARGEST_MESSAGE = 1 << 16


class Peer(NamedTuple):
    """The other end of a line."""

    rank: int
    frames: Frames


class Missing(UserError):
    """Children that did not come; `lines` are those that did."""

    def __init__(self, ranks: list[int], lines: Mapping[socket.socket, Peer]):
        super().__init__(f"no line to {ranks}")
        self.ranks, self.lines = ranks, lines


def parent_of(rank: int) -> int | None:
    """The rank above; None for rank 0."""
    return (rank - 1) // FAN_OUT if rank else None


def children_of(rank: int, world_size: int) -> range:
    """The ranks below, next to this one."""
    return range(FAN_OUT * rank + 1, min(FAN_OUT * rank + FAN_OUT, world_size - 1) + 1)


def open_lines(meeting: Meeting) -> dict[socket.socket, Peer]:
    """Connect this rank with its parent and its children, each of which proves that it has met the others.

    Strangers, and whoever comes a second time, are dropped. Raises Missing where children do not come, UserError where
    the parent cannot be reached.
    """
    rank = meeting.identity.rank
    children, parent = children_of(rank, meeting.identity.world_size), parent_of(rank)
    lines: dict[socket.socket, Peer] = {}
    listener = None
    if children:
        listener, nonce = listen(meeting.address, 0), new_secret()
        place = [meeting.address, listener.getsockname()[1], nonce]
        meeting.store.set(f"lifeline/{rank}", json.dumps(place))
    if parent is not None:
        address, port, parents_nonce = json.loads(meeting.store.get(f"lifeline/{parent}"))
        key = make_key(meeting.secret, "lifeline", parents_nonce)
        try:
            line, frames = connect((address, port), key, rank, CONNECT_SECONDS, LARGEST_MESSAGE)
        except OSError as error:
            raise UserError(f"no lifeline to rank {parent} at {address}:{port}: {error}.") from None
        lines[line] = Peer(parent, frames)
    if listener:
        _receive(listener, make_key(meeting.secret, "lifeline", nonce), set(children), lines)
    return lines


def _receive(listener: socket.socket, key: bytes, expected: set[int], lines: dict[socket.socket, Peer]) -> None:
    deadline = time.monotonic() + CONNECT_SECONDS
    with selectors.DefaultSelector() as selector:
        door = Door(listener, key, selector, LARGEST_MESSAGE, len(expected))
        try:
            while expected:
                if time.monotonic() > deadline:
                    raise Missing(sorted(expected), lines)
                for ready, _ in selector.select(min(door.sweep(), 0.5)):
                    admitted = door.admit(ready.fileobj)
                    if not admitted:
                        continue
                    line, rank, frames, _ = admitted
                    if rank in expected:
                        expected.discard(rank)
                        lines[line] = Peer(rank, frames)
                    else:
                        line.close()
        finally:
            door.close()
