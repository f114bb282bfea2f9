"""Which ranks the watchdog connects: all with rank 0 up to 33 ranks, in larger worlds a tree of such stars.

Rank r has the children 32 r + 1 to 32 r + 32, so a rank has at most 33 neighbours, and among 1,024 ranks news takes at
most four steps. A rank with children listens for them, at its own address, only until they have come.
"""

import json
import selectors
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

from cos598d.errors import UserError
from cos598d.world.channel import Frames, make_key
from cos598d.world.endpoint import listen
from cos598d.world.handshake import Acceptor, connect
from cos598d.world.meeting import Meeting
from cos598d.world.secret import new_secret

FAN_OUT = 32
CONNECT_SECONDS = 10.0  # all have just met: a rank that does not connect now is gone
LARGEST_MESSAGE = 1 << 16
PURPOSE = "lifeline"  # in the names of keys in the store, and in the keys of connections


class Neighbour(NamedTuple):
    """The rank at the other end of a connection, and the frames of its messages."""

    rank: int
    frames: Frames


class MissingChildren(Exception):
    """The children of `ranks` did not come; `connections` are to the neighbours that did."""

    def __init__(self, ranks: list[int], connections: Mapping[socket.socket, Neighbour]):
        super().__init__(ranks)
        self.ranks, self.connections = ranks, connections


def parent_of(rank: int) -> int | None:
    """The rank above; None for rank 0."""
    return (rank - 1) // FAN_OUT if rank else None


def children_of(rank: int, world_size: int) -> range:
    """The ranks below, next to this one."""
    return range(FAN_OUT * rank + 1, min(FAN_OUT * rank + FAN_OUT, world_size - 1) + 1)


def connect_neighbours(meeting: Meeting) -> dict[socket.socket, Neighbour]:
    """Connect this rank with its parent and its children, each of which proves that it has met the others.

    Strangers, and whoever comes a second time, are dropped. Raises MissingChildren where children do not come, and
    UserError where the parent cannot be reached.
    """
    rank = meeting.identity.rank
    children, parent = children_of(rank, meeting.identity.world_size), parent_of(rank)
    connections: dict[socket.socket, Neighbour] = {}
    listener = None
    if children:
        listener, nonce = listen(meeting.address, 0), new_secret()
        place = [meeting.address, listener.getsockname()[1], nonce]
        meeting.store.set(f"{PURPOSE}/{rank}", json.dumps(place))
    if parent is not None:
        address, port, parents_nonce = json.loads(meeting.store.get(f"{PURPOSE}/{parent}"))
        key = make_key(meeting.secret, PURPOSE, parents_nonce)
        try:
            connection, frames = connect((address, port), key, rank, CONNECT_SECONDS, LARGEST_MESSAGE)
        except OSError as error:
            raise UserError(f"rank {parent}'s watchdog at {address}:{port} cannot be reached: {error}.") from None
        connections[connection] = Neighbour(parent, frames)
    if listener:
        _accept_children(listener, make_key(meeting.secret, PURPOSE, nonce), set(children), connections)
    return connections


def _accept_children(
    listener: socket.socket, key: bytes, expected: set[int], connections: dict[socket.socket, Neighbour]
) -> None:
    deadline = time.monotonic() + CONNECT_SECONDS
    with selectors.DefaultSelector() as selector:
        acceptor = Acceptor(listener, key, selector, LARGEST_MESSAGE, len(expected))
        try:
            while expected:
                if time.monotonic() > deadline:
                    raise MissingChildren(sorted(expected), connections)
                for ready, _ in selector.select(min(acceptor.sweep(), 0.5)):
                    accepted = acceptor.advance(ready.fileobj)
                    if not accepted:
                        continue
                    if accepted.rank in expected:
                        expected.discard(accepted.rank)
                        connections[accepted.connection] = Neighbour(accepted.rank, accepted.frames)
                    else:
                        accepted.connection.close()
        finally:
            acceptor.close()
