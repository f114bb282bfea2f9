"""Ranks that wait for each other forever: what one waits for, and whether another one is ever going to send it."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cos598d.terminal.printable import printable

PATIENCE_SECONDS = 1.0  # before a rank that waits asks its neighbours
SENTENCE = (
    "rank {first} waits for {what} and rank {second} for {instead}, forever. All ranks must call the same "
    "layers, in the same order and as often."
)


class Waiting(NamedTuple):
    """That a rank waits in its `number`-th exchange of a tag, for `what`, since a moment of the monotonic clock."""

    tag: int
    number: int
    what: str
    since: float


class DeadlockDetector:
    """What this rank waits for among exchanges of messages, in each of which every rank sends to every other.

    The n-th exchange of a tag meets the other ranks' n-th of that tag, and a rank that waits begins none.
    1. A rank that has waited for PATIENCE_SECONDS tells its neighbours in the watchdog's tree in which exchange.
    2. A neighbour that waits too, and has not begun that one, answers with the exchange in which it waits itself.
    3. Has the first rank not begun that one either, then neither will ever go on: it says so and ends the run.
    A rank that is merely slow is not taken for one that never comes: it does not wait, or has begun what is asked for.
    Where all ranks wait in exchanges, and not all in the same, some two neighbours differ. A rank that waits in another
    kind of call says nothing here; then it is the process group's timeout that ends them.

    One thread begins and waits; another, the watchdog's, asks. To wait costs a microsecond more.
    """

    def __init__(self):
        self._begun: Counter[int] = Counter()
        self._waiting: Waiting | None = None
        self._told: Waiting | None = None

    def begin(self, tag: int) -> int:
        """This rank begins an exchange; return its number among those of the tag, from 1."""
        self._begun[tag] += 1
        return self._begun[tag]

    def wait(self, tag: int, number: int, what: str) -> None:
        """From here on this rank waits in that exchange, until `go_on`; after an error it still says so."""
        self._waiting = Waiting(tag, number, what, time.monotonic())

    def go_on(self) -> None:
        """What this rank waited for is there."""
        self._waiting = None

    @property
    def what(self) -> str:
        """What this rank waits for, in words; nothing where it does not wait."""
        waiting = self._waiting
        return waiting.what if waiting else ""

    def overdue(self) -> Sequence | None:
        """What to ask the neighbours, once for each wait that is long: tag, number and words."""
        waiting = self._waiting
        if waiting is None or waiting is self._told or time.monotonic() < waiting.since + PATIENCE_SECONDS:
            return None
        self._told = waiting
        return waiting[:3]

    def instead_of(self, asked: Sequence) -> Sequence | None:
        """What this rank waits for, as in `overdue`, where it has not begun what another rank `asked` for."""
        waiting = self._waiting  # first: while it waits, what is begun stays as it is
        return waiting[:3] if waiting and self._begun[asked[0]] < asked[1] else None

    def sentence(self, rank: int, other: int, asked: Sequence, instead: Sequence) -> str:
        """Why neither goes on, where this `rank` still waits for what it `asked` for, and the other for `instead`.

        Nothing where this rank has begun what the other one waits for.
        """
        waiting = self._waiting
        if waiting is None or list(waiting[:2]) != list(asked[:2]) or self._begun[instead[0]] >= instead[1]:
            return ""
        (first, what), (second, others) = sorted([(rank, waiting.what), (other, str(instead[2]))])
        return printable(SENTENCE.format(first=first, what=what, second=second, instead=others))
