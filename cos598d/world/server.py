"""How rank 0 admits the others: which ranks have arrived, whether all want the same run, and the verdict to begin.

Then it serves the keys by which they communicate. Every connection has its own thread, so none waits for another.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from cos598d.terminal.printable import printable
from cos598d.world.connection import Acceptor, Connection, hang_up, make_key
from cos598d.world.exit import lost_rank
from cos598d.world.identity import Identity
from cos598d.world.store import KeyTable

# Bytes of a message to the server: from a connection that is not a member yet, and from a rank of the world.
LARGEST_ARRIVAL, LARGEST_REQUEST = 1 << 18, 1 << 30
OPEN_TO_ALL = ("arrive", "leave", "object")
POLL_SECONDS = 0.02
_OWN_PORT = "Give each run a --master_port of its own."


class Admission(NamedTuple):
    """The result of the rendezvous for every rank: why there is no run, or where each rank is.

    `hosts[r]` is the number of rank r's host, in the order in which hosts have their first ranks. These are short
    numbers, since every rank gets one for every other. `elsewhere` is the address of some rank in another network than
    rank 0's; empty if there is none. Only ranks that have met know the `run_key`. `is_late` is for a rank that arrives
    after the run has begun.
    """

    sentence: str = ""
    hosts: list[int] = []
    elsewhere: str = ""
    run_key: str = ""
    is_late: bool = False


class _Arrival(NamedTuple):
    connection: Connection | None  # None: rank 0 itself
    address: str
    facts: dict[str, Any]


class RendezvousServer:
    """Rank 0's server at `listener`: it serves every rank that proves the secret, and drops all other connections.

    `mine` is what rank 0 was started with. All others are compared with it (empty: rank 0 has failed). The main thread
    waits until `changed` signals that all have arrived or something is wrong. It then reads `objection` and
    `missing()`, and gives a verdict. Before that a connection may only arrive, leave or object. Afterwards every rank
    that has arrived is a member of the world and may use the `table`. So may new connections that prove the run's key.
    """

    def __init__(self, identity: Identity, listener: socket.socket, mine: dict[str, Any]):
        self.world_size, self.table = identity.world_size, KeyTable()
        listens_at = listener.getsockname()[0]
        self.address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listens_at, listens_at)  # for rank 0 itself
        self.objection = ""
        self.changed = threading.Event()
        self._identity = identity
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._members: set[Connection] = set()
        self._arrived = {0: _Arrival(None, "", mine)}
        self._lost: set[int] = set()
        self._asked: list[Connection] = []
        self._told: set[int] = set()
        self._verdict: Admission | None = None
        key = make_key(identity.secret, "meeting", identity.run_id)
        self.acceptor = Acceptor(listener, key, LARGEST_ARRIVAL, self.world_size - 1, self._serve)

    def start(self) -> None:
        """Start to serve."""
        self.acceptor.start()

    def stop(self) -> None:
        """Stop serving: every connection ends."""
        self.acceptor.close()
        self.table.close()
        with self._lock:
            for connection in self._connections:
                hang_up(connection.socket)  # its thread closes it

    def missing(self) -> list[int]:
        """The ranks that have not arrived yet. If all have, but one was lost again, that is an objection."""
        with self._lock:
            missing = [rank for rank in range(self.world_size) if rank not in self._arrived]
            if not missing and self._lost and not self.objection:
                self.objection = lost_rank(", ".join(map(str, sorted(self._lost))))
            return missing

    def begin(self, run_key: str) -> Admission | None:
        """Let all begin, and return their result; None if one of them has left again.

        From now on a new connection must prove the run's key, or gets an error.
        """
        with self._lock:
            if len(self._arrived) < self.world_size:
                return None
            arrivals = [self._arrived[rank] for rank in range(self.world_size)]
            mine = arrivals[0].facts["network"]
            elsewhere = (arrival.address for arrival in arrivals if arrival.facts["network"] != mine)
            numbers = {host: k for k, host in enumerate(dict.fromkeys(arrival.facts["host"] for arrival in arrivals))}
            hosts = [numbers[arrival.facts["host"]] for arrival in arrivals]
            verdict = self._verdict = Admission("", hosts, next(elsewhere, ""), run_key)
            self.acceptor.keys = (*self.acceptor.keys, make_key(self._identity.secret, run_key))
            for arrival in arrivals:
                if arrival.connection:
                    self._make_member(arrival.connection)
        self._give(verdict)
        return verdict

    def close_with(self, verdict: Admission, expected: Collection[int], deadline: float) -> None:
        """Tell the ranks that arrived, and those of `expected` that arrive before `deadline`, why there is no run."""
        self._give(verdict)
        while not self._told.issuperset(expected) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.stop()

    def _serve(self, connection: Connection) -> None:
        """Answer the requests of a connection, in a thread of its own, until it ends."""
        with self._lock:
            self._connections.add(connection)
            if connection.key > 0:  # the run's key: a further connection of a rank that has met the others
                self._make_member(connection)
        with contextlib.suppress(Exception):  # whatever it sent, only the sender's connection ends
            while True:
                (operation, *arguments), data = connection.receive(connection.deadline)
                if operation in OPEN_TO_ALL:
                    with self._lock:
                        answer = getattr(self, f"_on_{operation}")(connection, *arguments)
                    if operation == "leave":
                        break
                    if answer is not None:
                        connection.send(answer)
                        if operation == "arrive":
                            self._told.add(connection.rank)
                elif connection in self._members:
                    connection.send(*self.table.answer(operation, arguments, data))
                else:
                    break
        self.acceptor.settle(connection)
        with self._lock:
            self._connections.discard(connection)
            self._members.discard(connection)
            self._asked = [other for other in self._asked if other is not connection]
            arrival = self._arrived.get(connection.rank)
            if not self._verdict and arrival and arrival.connection is connection:
                self._lost.add(connection.rank)  # which counts unless it is restarted
        connection.socket.close()

    def _make_member(self, connection: Connection) -> None:
        self._members.add(connection)
        connection.largest = LARGEST_REQUEST
        self.acceptor.settle(connection)

    def _on_arrive(self, connection: Connection, facts: dict[str, Any]) -> Admission | None:
        """A rank has arrived, with what it was started with. It gets the verdict, maybe later."""
        rank = connection.rank
        if self._verdict:
            return self._verdict if self._verdict.sentence else Admission(self._too_late(rank), is_late=True)
        difference = _difference(rank, facts, self._arrived[0].facts)
        self._asked.append(connection)
        if difference or (rank in self._arrived and rank not in self._lost):
            self.objection = self.objection or difference or f"{self._twice(rank)}. Start all ranks again."
        else:
            self._lost.discard(rank)
            self._arrived[rank] = _Arrival(connection, connection.socket.getpeername()[0], facts)
            self.acceptor.settle(connection)
        self._count()
        return None

    def _on_object(self, connection: Connection, sentence: str) -> str:
        """A rank reports why the run cannot begin."""
        if not self._verdict:
            self.objection = self.objection or printable(sentence)
            self.changed.set()
        return "heard"

    def _on_leave(self, connection: Connection) -> None:
        """The rank of this connection leaves before the verdict; it may be started and arrive again."""
        arrival = self._arrived.get(connection.rank)
        if not self._verdict and arrival and arrival.connection is connection:
            del self._arrived[connection.rank]
            self._lost.discard(connection.rank)
            self._count()

    def _count(self) -> None:
        self.acceptor.expected = self.world_size - len(self._arrived)
        if self.objection or not self.acceptor.expected:
            self.changed.set()

    def _give(self, verdict: Admission) -> None:
        with self._lock:
            self._verdict = verdict
            asked, self._asked = self._asked, []
            self._told.update(connection.rank for connection in asked)
        for connection in asked:
            with contextlib.suppress(OSError):  # gone since it asked
                connection.send_now(verdict)

    def _twice(self, rank: int) -> str:
        return f"rank {rank} was started twice for {self._identity.endpoint}"

    def _too_late(self, rank: int) -> str:
        if rank < self.world_size:
            return f"{self._twice(rank)}, and the run has already begun. {_OWN_PORT}"
        return f"the run at {self._identity.endpoint} has begun, with ranks 0 to {self.world_size - 1}. {_OWN_PORT}"


def _difference(rank: int, theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """How rank `rank` (`theirs`) was started differently from rank 0 (`mine`); "" if they agree, or rank 0 failed."""
    if not mine:
        return ""
    if theirs["world_size"] != mine["world_size"]:
        return (
            f"rank {rank} was started with --world_size {int(theirs['world_size'])} and rank 0 with "
            f"{mine['world_size']}. Give every rank the same."
        )
    for flag in sorted(mine["facts"].keys() | theirs["facts"].keys()):
        its, own = theirs["facts"].get(flag), mine["facts"].get(flag)
        if its != own:
            sentence = f"rank {rank} was started with --{flag} {its} and rank 0 with {own}. Give every rank the same."
            return printable(sentence)
    if not 0 < rank < mine["world_size"] or not all(isinstance(theirs[name], str) for name in ("host", "network")):
        raise ValueError("not a rank of ours")
    return ""
