"""An all-reduce of numbers that identify their ranks, which shows what its messages did.

Rank r begins with BASE**r in every element. So a sum says of each rank how often its number is in it, and what came in
was added, or took the place of what was there, as the tensor shows afterwards.
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from cos598d.comm.ledger import size_in_bytes
from cos598d.tools.check.evidence import BadEvidence, Evidence
from cos598d.tools.learn.events import Event, from_rows
from cos598d.tools.learn.picture.messages import Message, MessageEnd, join_ends

BASE, ELEMENTS = 16.0, 48  # which 2, 3 and 4 ranks divide
TENSOR = "the tensor"


class MessageProbe:
    """One rank's side: both ends of its messages, and looks at its tensor before and after each of them."""

    def __init__(self, rank: int):
        self.rank, self.tensor = rank, torch.full((ELEMENTS,), BASE**rank)
        self._ends: list[MessageEnd] = []
        self._looks: list[tuple[float, list[float]]] = []

    def look(self) -> None:
        """What the tensor holds now."""
        self._looks.append((time.perf_counter(), self.tensor.tolist()))

    def ended(self, is_sent: bool, peer: int, part: torch.Tensor, started: float) -> None:
        """A message was waited for, which sent `part`, or has come in there."""
        place = (part.data_ptr() - self.tensor.data_ptr()) // self.tensor.element_size()
        begin = place if 0 <= place < ELEMENTS else None
        about = (begin, part.numel(), size_in_bytes(part), 0, started, time.perf_counter())
        self._ends.append(MessageEnd(self.rank, peer, TENSOR, is_sent, *about))
        self.look()

    def to_json(self) -> dict[str, Any]:
        """What `Seen` is made from."""
        return {"ends": [asdict(end) for end in self._ends], "looks": [list(look) for look in self._looks]}


@dataclass(frozen=True)
class Looks:
    """A rank's looks: their moments, in order, and what the tensor held at each."""

    moments: Sequence[float]
    values: Sequence[Sequence[float]]

    def before(self, moment: float) -> Sequence[float]:
        """What it held at the last look up to that moment."""
        return self.values[max(bisect_right(self.moments, moment) - 1, 0)]

    def since(self, moment: float) -> Sequence[Sequence[float]]:
        """What it held at the looks from that moment on."""
        return self.values[bisect_left(self.moments, moment) :]


def messages_of(notes: Sequence[Any]) -> list[Message]:
    """The messages of all ranks, in order of rank, from what `Probe.to_json` gave; none where none were sent.

    Raises ValueError, with a reason, where they cannot be shown as steps, and for what is no such note: a student's
    process wrote it.
    """
    try:
        ends = [MessageEnd(**end) for each in notes for end in each["ends"]]
        seen = [_seen(each["looks"]) for each in notes]
        return [_as_seen(message, seen) for message in join_ends(ends)]
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError):
        raise ValueError("a rank reported something other than its messages") from None


def _seen(looks: Sequence[Any]) -> Looks:
    return Looks([float(look[0]) for look in looks], [list(map(float, look[1])) for look in looks])


def _as_seen(message: Message, seen: Sequence[Looks]) -> Message:
    """The message with what its receiver did with it."""
    part = slice(message.begin, message.end)
    came = seen[message.sender].before(message.sent)[part]
    had = seen[message.receiver].before(message.expected)[part]
    for held in seen[message.receiver].since(message.arrived):
        if held[part] == came:
            return replace(message, adds=False)
        if held[part] == [one + other for one, other in zip(had, came, strict=True)]:
            return replace(message, adds=True)
    where = f"elements {message.begin} to {message.end - 1}"
    raise ValueError(
        f"what rank {message.sender} sent of {where} to rank {message.receiver} was neither added to what was there "
        "nor put in its place"
    )


RECORD = "record"  # the name of the record for a picture, next to the checks' names


@dataclass(frozen=True)
class Recorded:
    """All ranks' events, in order of start; the messages of one all-reduce, if the lesson has any, in order of sending.

    `unsaid` is why there are none although some were sent. `curves` are rank 0's, of a lesson that has some, as JSON.
    """

    events: list[Event]
    messages: list[Message]
    unsaid: str = ""
    curves: dict[str, Any] = field(default_factory=dict)


def recorded(evidence: Sequence[Evidence]) -> Recorded:
    """What the ranks handed in, in order of rank. Raises BadEvidence, or ValueError, for what cannot be read."""
    events: list[Event] = []
    try:
        return Recorded([], [], curves=evidence[0].reported(RECORD, "curves", dict))
    except BadEvidence:  # a lesson with lanes
        pass
    for each in evidence:
        events += [row for row in from_rows(each.reported(RECORD, "events", list)) if row.rank == each.rank]
    events.sort(key=lambda event: event.start)
    try:
        notes = [each.reported(RECORD, "messages", dict) for each in evidence]
    except BadEvidence:  # a lesson without messages
        return Recorded(events, [])
    try:
        return Recorded(events, messages_of(notes))
    except ValueError as error:
        return Recorded(events, [], str(error))
