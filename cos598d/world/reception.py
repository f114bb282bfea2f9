"""How rank 0 receives the others: who has come, whether all want the same run, and the verdict that lets them begin."""

import socket
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from cos598d.terminal.printable import printable
from cos598d.world.channel import make_key
from cos598d.world.launch import Identity, place_of
from cos598d.world.server import LATER, Line, Server

SILENCE = "lost rank {rank}, which ended without a word (killed, or its host is gone)."
POLL_SECONDS = 0.02


class Verdict(NamedTuple):
    """What every rank hears at the end of the meeting: why there is no run, or of each rank where it is.

    `addresses[r]` is where rank r's connection came from, `run_key` what only those know who have met.
    """

    sentence: str = ""
    hosts: list[str] = []
    networks: list[str] = []
    addresses: list[str] = []
    run_key: str = ""


class _Arrival(NamedTuple):
    line: Line | None  # None: rank 0 itself
    address: str
    facts: dict[str, Any]


class Reception(Server):
    """The meeting point while ranks arrive, and what they are served by afterwards.

    `mine` is what rank 0 was started with, which all others are compared with (empty: rank 0 has failed). The main
    thread waits for `changed`, looks at `objection` and `missing()`, and gives a verdict.
    """

    def __init__(self, identity: Identity, listener: socket.socket, mine: dict[str, Any], seconds: float):
        super().__init__(listener, make_key(identity.secret, "meeting", identity.run_id), identity.world_size)
        self.objection = ""
        self.changed = threading.Event()
        self._identity, self._seconds = identity, seconds
        self._arrived = {0: _Arrival(None, "", mine)}
        self._lost: set[int] = set()
        self._asked: list[tuple[Line, int]] = []
        self._told: set[int] = set()
        self._verdict: Verdict | None = None

    def missing(self) -> list[int]:
        """The ranks that have not come yet. When there are none left, but one was lost, that is an objection."""
        missing = [rank for rank in range(self.world_size) if rank not in self._arrived]
        if not missing and self._lost and not self.objection:
            self.objection = SILENCE.format(rank=", ".join(map(str, sorted(self._lost))))
        return missing

    def verdict(self, run_key: str) -> Verdict:
        """The verdict that all may begin."""
        arrivals = [self._arrived[rank] for rank in range(self.world_size)]
        hosts, networks = ([arrival.facts[name] for arrival in arrivals] for name in ("host", "network"))
        return Verdict("", hosts, networks, [arrival.address for arrival in arrivals], run_key)

    def begin(self, verdict: Verdict) -> None:
        """Let all begin. From now on whoever comes must know the run's key, or is told why it is too late."""

        def begin() -> None:
            self.door.keys = (*self.door.keys, make_key(self._identity.secret, verdict.run_key))
            self.door.expected = 0
            for arrival in self._arrived.values():
                if arrival.line:
                    arrival.line.make_member()
            self._give(verdict)

        self.call(begin)

    def close_with(self, verdict: Verdict, expected: Collection[int], deadline: float) -> None:
        """Tell those who came, and until `deadline` those of `expected` who come yet, why there is no run."""
        self.call(lambda: self._give(verdict))
        while not self._told.issuperset(expected) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.stop()

    def on_arrive(self, line: Line, number: int, facts: dict[str, Any]) -> Any:
        """A rank has come, with what it was started with; it hears the verdict."""
        if self._verdict:
            self._told.add(line.rank)
            return self._verdict if self._verdict.sentence else Verdict(self._too_late(line.rank))
        difference = _difference(line.rank, facts, self._arrived[0].facts)
        before = self._arrived.get(line.rank)
        self._asked.append((line, number))
        if difference or (before and line.rank not in self._lost):
            self.objection = self.objection or difference or self._twice(line.rank)
        else:
            self._lost.discard(line.rank)
            line.is_guest = False
            self._arrived[line.rank] = _Arrival(line, line.connection.getpeername()[0], facts)
        self.door.expected = self.world_size - len(self._arrived)
        self.changed.set()
        return LATER

    def on_object(self, line: Line, number: int, sentence: str) -> None:
        """A rank says why the run cannot begin."""
        if not self._verdict:
            self.objection = self.objection or printable(sentence)
            self.changed.set()

    def on_leave(self, line: Line, number: int) -> None:
        """A rank goes again before the verdict; started anew it is no second one."""
        if not self._verdict and self._has_come_by(line):
            del self._arrived[line.rank]
            self.make_guest(line)

    def on_gone(self, line: Line) -> None:
        """A rank that had come is gone without a word: noticed when all have come, unless it is started anew."""
        if not self._verdict and self._has_come_by(line):
            self._lost.add(line.rank)

    def _has_come_by(self, line: Line) -> bool:
        arrival = self._arrived.get(line.rank)
        return arrival is not None and arrival.line is line

    def _give(self, verdict: Verdict) -> None:
        self._verdict = verdict
        for line, number in self._asked:
            self.answer(line, number, verdict)
            self._told.add(line.rank)

    def _twice(self, rank: int) -> str:
        return f"rank {rank} was started twice for {place_of(self._identity)}: start all ranks anew."

    def _too_late(self, rank: int) -> str:
        if rank < self.world_size:
            return f"rank {rank} was started twice for {place_of(self._identity)}, where the run has begun."
        return f"the run at {place_of(self._identity)} has begun, with ranks 0 to {self.world_size - 1}."


def _difference(rank: int, theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """What rank `rank` (`theirs`) was started with and rank 0 (`mine`) not; "" where they agree, or rank 0 failed."""
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
        raise ValueError("none of ours")
    return ""
