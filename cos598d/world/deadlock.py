"""Ranks that wait for each other forever: what each waits for, and whether the other will ever send it."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cos598d.terminal.printable import printable

PATIENCE_SECONDS = 1.0  # how long a rank waits before it asks its neighbours
SENTENCE = (
    "rank {first} waits for {what} and rank {second} for {instead}, forever. All ranks must call the same "
    "layers, in the same order and as often."
)


class Waiting(NamedTuple):
    """A rank waits in exchange `number` of a tag, for `what`, since that time of the monotonic clock."""

    tag: int
    number: int
    what: str
    since: float


class DeadlockDetector:
    """What this rank waits for, among exchanges of messages in which every rank sends to every other.

    The n-th exchange of a tag pairs with the other ranks' n-th of that tag. A waiting rank begins no exchange.
    1. A rank that has waited for PATIENCE_SECONDS tells its neighbours in the watchdog's tree in which exchange it
       waits.
    2. A neighbour that also waits, and has not begun that exchange, answers with the exchange in which it waits itself.
    3. If the first rank has not begun that one either, neither will ever continue: it reports that and ends the run.
    A slow rank is not mistaken for this: it does not wait, or has begun the exchange in question. If all ranks wait
    in exchanges, but not all in the same, two neighbours differ. A rank that waits in another kind of call reports
    nothing here; the process group's timeout then ends the run.

    One thread begins and waits; another, the watchdog's, asks. This costs a microsecond per wait.
    """

    def __init__(self):
        self._begun: Counter[int] = Counter()
        self._waiting: Waiting | None = None
        self._told: Waiting | None = None

    def begin(self, tag: int) -> int:
        """Begin an exchange. Return its number among those of the tag, from 1."""
        self._begun[tag] += 1
        return self._begun[tag]

    def wait(self, tag: int, number: int, what: str) -> None:
        """Record that this rank waits in that exchange, until `go_on`. After an error the record stays."""
        self._waiting = Waiting(tag, number, what, time.monotonic())

    def go_on(self) -> None:
        """Record that what this rank waited for has arrived."""
        self._waiting = None

    @property
    def what(self) -> str:
        """A phrase for what this rank waits for; "" if it does not wait."""
        waiting = self._waiting
        return waiting.what if waiting else ""

    def overdue(self) -> Sequence | None:
        """The question to the neighbours, once for each long wait: tag, number and phrase."""
        waiting = self._waiting
        if waiting is None or waiting is self._told or time.monotonic() < waiting.since + PATIENCE_SECONDS:
            return None
        self._told = waiting
        return waiting[:3]

    def instead_of(self, asked: Sequence) -> Sequence | None:
        """What this rank waits for, as in `overdue`, if it has not begun what another rank `asked` for."""
        waiting = self._waiting  # first: while this rank waits, the set of begun exchanges does not change
        return waiting[:3] if waiting and self._begun[asked[0]] < asked[1] else None

    def sentence(self, rank: int, other: int, asked: Sequence, instead: Sequence) -> str:
        """The error, if this `rank` still waits for what it `asked` for, and the other rank for `instead`.

        "" if this rank has begun what the other one waits for.
        """
        waiting = self._waiting
        if waiting is None or list(waiting[:2]) != list(asked[:2]) or self._begun[instead[0]] >= instead[1]:
            return ""
        (first, what), (second, others) = sorted([(rank, waiting.what), (other, str(instead[2]))])
        return printable(SENTENCE.format(first=first, what=what, second=second, instead=others))
