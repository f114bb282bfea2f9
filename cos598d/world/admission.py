"""How rank 0 admits the others: who has come, whether all want the same run, and the verdict that lets them begin."""

import json
import socket
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from cos598d.terminal.printable import printable
from cos598d.world.channel import make_key, numbered
from cos598d.world.exit import LOST_RANK
from cos598d.world.identity import Identity
from cos598d.world.server import LATER, Connection, StoreServer

POLL_SECONDS = 0.02


class Admission(NamedTuple):
    """What every rank hears at the end of the rendezvous: why there is no run, or where each rank is.

    `hosts[r]` is the number of rank r's host, in the order in which hosts have their first ranks: numbers, since every
    rank hears of every other. `elsewhere` is an address in another network than rank 0's from which some rank has come;
    empty where there is none. `run_key` is known only to those who have met. `is_late` tells somebody who comes when
    the run has begun.
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


class AdmissionServer(StoreServer):
    """Rank 0's server while ranks arrive, and the store that serves them afterwards.

    `mine` is what rank 0 was started with; all others are compared with it (empty: rank 0 has failed). The main
    thread waits for `changed`, that all have come or something is wrong, looks at `objection` and `missing()`, and
    gives a verdict.
    """

    def __init__(self, identity: Identity, listener: socket.socket, mine: dict[str, Any]):
        super().__init__(listener, make_key(identity.secret, "meeting", identity.run_id), identity.world_size)
        self.objection = ""
        self.changed = threading.Event()
        self._identity = identity
        self._arrived = {0: _Arrival(None, "", mine)}
        self._lost: set[int] = set()
        self._asked: list[tuple[Connection, int]] = []
        self._told: set[int] = set()
        self._verdict: Admission | None = None

    def missing(self) -> list[int]:
        """The ranks that have not come yet. When all have come but one was lost again, that is an objection."""
        missing = [rank for rank in range(self.world_size) if rank not in self._arrived]
        if not missing and self._lost and not self.objection:
            self.objection = LOST_RANK.format(rank=", ".join(map(str, sorted(self._lost))))
        return missing

    def verdict(self, run_key: str) -> Admission:
        """The verdict that all may begin."""
        arrivals = [self._arrived[rank] for rank in range(self.world_size)]
        mine = arrivals[0].facts["network"]
        elsewhere = (arrival.address for arrival in arrivals if arrival.facts["network"] != mine)
        _, hosts = numbered([arrival.facts["host"] for arrival in arrivals])
        return Admission("", hosts, next(elsewhere, ""), run_key)

    def begin(self, verdict: Admission) -> None:
        """Let all begin. From now on whoever comes must know the run's key, or hears that it is too late."""

        def begin() -> None:
            self.acceptor.keys = (*self.acceptor.keys, make_key(self._identity.secret, verdict.run_key))
            self.acceptor.expected = 0
            for arrival in self._arrived.values():
                if arrival.connection:
                    arrival.connection.make_member()
            self._give(verdict)

        self.call(begin)

    def close_with(self, verdict: Admission, expected: Collection[int], deadline: float) -> None:
        """Tell those who came, and those of `expected` who come before `deadline`, why there is no run."""
        self.call(lambda: self._give(verdict))
        while not self._told.issuperset(expected) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.stop()

    def on_arrive(self, connection: Connection, number: int, facts: dict[str, Any]) -> Any:
        """A rank has come, with what it was started with; it hears the verdict."""
        rank = connection.rank
        if self._verdict:
            self._told.add(rank)
            return self._verdict if self._verdict.sentence else Admission(self._too_late(rank), is_late=True)
        difference = _difference(rank, facts, self._arrived[0].facts)
        before = self._arrived.get(rank)
        self._asked.append((connection, number))
        if difference or (before and rank not in self._lost):
            self.objection = self.objection or difference or f"{self._twice(rank)}: start all ranks anew."
        else:
            self._lost.discard(rank)
            self.let_stay(connection)
            self._arrived[rank] = _Arrival(connection, connection.socket.getpeername()[0], facts)
        self.acceptor.expected = self.world_size - len(self._arrived)
        if self.objection or not self.acceptor.expected:
            self.changed.set()
        return LATER

    def on_object(self, connection: Connection, number: int, sentence: str) -> None:
        """A rank says why the run cannot begin."""
        if not self._verdict:
            self.objection = self.objection or printable(sentence)
            self.changed.set()

    def on_leave(self, connection: Connection, number: int) -> None:
        """A rank goes before the verdict; it may be started and come again."""
        if not self._verdict and self._arrived_by(connection):
            del self._arrived[connection.rank]
            self.make_guest(connection)

    def on_gone(self, connection: Connection) -> None:
        """A rank that had come ended without a word: that counts once all have come, unless it was started again."""
        if not self._verdict and self._arrived_by(connection):
            self._lost.add(connection.rank)

    def _arrived_by(self, connection: Connection) -> bool:
        arrival = self._arrived.get(connection.rank)
        return arrival is not None and arrival.connection is connection

    def _give(self, verdict: Admission) -> None:
        self._verdict = verdict
        self.answer_all(self._asked, json.dumps(verdict))
        self._told.update(connection.rank for connection, _ in self._asked)

    def _twice(self, rank: int) -> str:
        return f"rank {rank} was started twice for {self._identity.endpoint}"

    def _too_late(self, rank: int) -> str:
        if rank < self.world_size:
            return f"{self._twice(rank)}, where the run has begun."
        return f"the run at {self._identity.endpoint} has begun, with ranks 0 to {self.world_size - 1}."


def _difference(rank: int, theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """How rank `rank` (`theirs`) was started otherwise than rank 0 (`mine`); "" where they agree, or rank 0 failed."""
    if not mine:
        return ""
    if theirs["world_size"] != mine["world_size"]:
        return (
            f"rank {rank} was started with --world_size {int(theirs['world_size'])} and rank 0 with "
            f"{mine['world_size']}: every rank needs the same."
        )
    for flag in sorted(mine["facts"].keys() | theirs["facts"].keys()):
        its, own = theirs["facts"].get(flag), mine["facts"].get(flag)
        if its != own:
            sentence = f"rank {rank} was started with --{flag} {its} and rank 0 with {own}: every rank needs the same."
            return printable(sentence)
    if not 0 < rank < mine["world_size"] or not all(isinstance(theirs[name], str) for name in ("host", "network")):
        raise ValueError("not a rank of ours")
    return ""
