"""Which ranks the watchdog connects: all with rank 0 up to 33 ranks, in larger worlds a tree of such stars.

Rank r has the children 32 r + 1 to 32 r + 32. So a rank has at most 33 neighbours, and among 1,024 ranks news takes at
most four steps. A rank with children listens for them, at its own address, only until they have connected.
"""

import contextlib
import json
import queue
import time

from cos598d.errors import UserError
from cos598d.world.connection import Acceptor, Connection, connect, make_key
from cos598d.world.endpoint import listen
from cos598d.world.meeting import Meeting
from cos598d.world.secret import new_secret

FAN_OUT = 32
CONNECT_SECONDS = 10.0  # all ranks have just met: one that does not connect now is lost
LARGEST_MESSAGE = 1 << 16
PURPOSE = "lifeline"  # in the names of keys in the store, and in the keys of connections


def parent_of(rank: int) -> int | None:
    """The parent of a rank; None for rank 0."""
    return (rank - 1) // FAN_OUT if rank else None


def children_of(rank: int, world_size: int) -> range:
    """The children of a rank."""
    return range(FAN_OUT * rank + 1, min(FAN_OUT * rank + FAN_OUT, world_size - 1) + 1)


def connect_neighbours(meeting: Meeting) -> tuple[list[Connection], list[int]]:
    """Connect this rank with its parent and its children. Each of them proves that it has met the others.

    Return the connections, and the children that have not connected in time. Strangers and repeated connections are
    dropped. Raises UserError if the parent cannot be reached.
    """
    rank = meeting.identity.rank
    expected, parent = set(children_of(rank, meeting.identity.world_size)), parent_of(rank)
    connections: list[Connection] = []
    with contextlib.ExitStack() as stack:
        if expected:
            listener, nonce = listen(meeting.address, 0), new_secret()
            came: queue.SimpleQueue[Connection] = queue.SimpleQueue()
            key = make_key(meeting.secret, PURPOSE, nonce)
            acceptor = Acceptor(listener, key, LARGEST_MESSAGE, len(expected), came.put)
            acceptor.start()
            stack.callback(acceptor.close)
            place = [meeting.address, listener.getsockname()[1], nonce]
            meeting.store.set(f"{PURPOSE}/{rank}", json.dumps(place))
        if parent is not None:
            connections.append(_connect_parent(meeting, parent))
        deadline = time.monotonic() + CONNECT_SECONDS
        while expected:
            try:
                connection = came.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if connection.rank in expected:
                expected.discard(connection.rank)
                acceptor.settle(connection)
                connections.append(connection)
            else:
                connection.close()
    return connections, sorted(expected)


def _connect_parent(meeting: Meeting, parent: int) -> Connection:
    address, port, nonce = json.loads(meeting.store.get(f"{PURPOSE}/{parent}"))
    key = make_key(meeting.secret, PURPOSE, nonce)
    try:
        connection = connect((address, port), key, meeting.identity.rank, CONNECT_SECONDS, LARGEST_MESSAGE)
    except OSError as error:
        raise UserError(
            f"rank {parent}'s watchdog at {address}:{port} cannot be reached ({error}). Open that address between "
            "the hosts."
        ) from None
    connection.rank = parent
    return connection
