"""From events to lanes in time: what each rank computed, which calls it was in, and who waited for whom."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from cos598d.tools.learn.events import CALL, COMPUTE, RECEIVE, SEND, Event

MOST_RANKS, MOST_ROWS = 16, 8
# A moment passes before the wait for a call, even if it comes at once: that is no computing during the call.
LEAST_BESIDE = 0.1
COMPUTING, WAITING, CALLING, MESSAGE = "computing", "waiting", "calling", "message"
MEANINGS = {
    COMPUTING: "computes",
    WAITING: "waits for another rank",
    CALLING: "in a call that all have entered",
    MESSAGE: "sends or receives",
}


@dataclass(frozen=True)
class Bar:
    """A stretch of a lane, in seconds since the first event: a rank computes, has entered a call and waits for the
    last rank to do so, is in one that all have entered, or sends or receives a message outside of any call; for that
    too it waits at first, for the rank at the other end.

    `number` is the call's in its timeline, from 1; 0 for what is none.
    """

    kind: str
    name: str
    start: float
    end: float
    bytes: int = 0
    number: int = 0


@dataclass(frozen=True)
class RankLane:
    """One rank's time: what it computed, and its calls in as many rows as are under way at once, at most MOST_ROWS:
    then the last one `is_crowded` by all that found no other."""

    rank: int
    computed: tuple[Bar, ...]
    rows: tuple[tuple[Bar, ...], ...]
    is_crowded: bool = False


@dataclass(frozen=True)
class DrawnCollective:
    """A collective of all ranks: when each entered, by rank, and `began`, when the last one did; None where ranks are
    `missing`: then it never began."""

    number: int
    name: str
    bytes: int
    entered: dict[int, float] = field(hash=False)
    missing: tuple[int, ...]

    @property
    def began(self) -> float | None:
        return None if self.missing else max(self.entered.values())

    @property
    def last(self) -> int:
        """The rank that entered last."""
        return max(self.entered, key=lambda rank: self.entered[rank])

    @property
    def first(self) -> int:
        """The rank that entered first."""
        return min(self.entered, key=lambda rank: self.entered[rank])

    @property
    def longest_wait(self) -> float:
        """Seconds from the first rank's entry to the last one's."""
        return self.entered[self.last] - self.entered[self.first]


@dataclass(frozen=True)
class Arrow:
    """A message, from when its sender began to when its receiver had it."""

    sender: int
    receiver: int
    left: float
    arrived: float
    bytes: int


@dataclass(frozen=True)
class RankTimelines:
    """What all ranks did. `alone`: ends of messages of which the other end is not recorded. `left_out`: ranks beyond
    the first MOST_RANKS, which have no lane."""

    seconds: float
    lanes: tuple[RankLane, ...]
    meetings: tuple[DrawnCollective, ...]
    arrows: tuple[Arrow, ...]
    alone: int = 0
    left_out: int = 0

    @property
    def ranks(self) -> list[int]:
        return [lane.rank for lane in self.lanes]

    @property
    def kinds(self) -> set[str]:
        """The kinds of bars that there are."""
        return {bar.kind for lane in self.lanes for row in (lane.computed, *lane.rows) for bar in row}


def timeline(events: Sequence[Event]) -> RankTimelines:
    """The lanes of these events, whatever their order.

    A call of one name is taken to meet the other ranks' calls of that name, the first the first and so on; it begins
    when the last rank enters it. Raises ValueError for a moment that is no finite number.
    """
    if not all(math.isfinite(moment) for event in events for moment in (event.start, event.end)):
        raise ValueError("an event's moment is no finite number")
    ranks = sorted({event.rank for event in events})
    drawn = ranks[:MOST_RANKS]
    events = sorted((event for event in events if event.rank in drawn), key=lambda event: (event.start, event.end))
    first = min((event.start for event in events), default=0.0)
    last = max((event.end for event in events), default=0.0)
    meetings, number_of = _meetings(events, drawn, first)
    arrows, alone, ready = _arrows(events, first)
    lanes = tuple(_lane(rank, events, meetings, number_of, ready, first) for rank in drawn)
    return RankTimelines(max(last - first, 1e-9), lanes, meetings, arrows, alone, len(ranks) - len(drawn))


def computed_beside(lane: RankLane) -> int:
    """During how many calls of a lane its rank computed, for LEAST_BESIDE of the call's time or longer."""
    begins: list[float] = []
    ends: list[float] = []
    for bar in sorted(lane.computed, key=lambda bar: bar.start):
        if ends and bar.start <= ends[-1]:
            ends[-1] = max(ends[-1], bar.end)
        else:
            begins.append(bar.start)
            ends.append(bar.end)
    before = [0.0, *accumulate(end - begin for begin, end in zip(begins, ends, strict=True))]

    def computed_until(moment: float) -> float:
        place = bisect_right(begins, moment)
        return before[place] - max(0.0, ends[place - 1] - moment) if place else 0.0

    seconds: dict[int, float] = defaultdict(float)
    beside: dict[int, float] = defaultdict(float)
    for bar in (bar for row in lane.rows for bar in row if bar.number):
        seconds[bar.number] += bar.end - bar.start
        beside[bar.number] += computed_until(bar.end) - computed_until(bar.start)
    return sum(beside[number] >= LEAST_BESIDE * seconds[number] for number in seconds)


def _meetings(
    events: Sequence[Event], ranks: Sequence[int], first: float
) -> tuple[tuple[DrawnCollective, ...], dict[int, int]]:
    """The calls that ranks made together, and the number of the call that each event is part of, by its identity."""
    count: dict[tuple[int, str], int] = defaultdict(int)
    calls: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        if event.kind == CALL:
            place = count[event.rank, event.name]
            count[event.rank, event.name] += 1
            calls.setdefault((event.name, place), []).append(event)
    meetings: list[DrawnCollective] = []
    number_of: dict[int, int] = {}
    for number, ((name, _), made) in enumerate(calls.items(), start=1):
        entered = {event.rank: event.start - first for event in made}
        missing = tuple(rank for rank in ranks if rank not in entered)
        meetings.append(DrawnCollective(number, name, max(event.bytes for event in made), entered, missing))
        number_of.update((id(event), number) for event in made)
    return tuple(meetings), number_of


def _arrows(events: Sequence[Event], first: float) -> tuple[tuple[Arrow, ...], int, dict[int, float]]:
    """Sends and receives of a pair of ranks, the first put to the first; how many have no other end; and when both
    ends of each had begun, by the event's identity."""
    ends: dict[str, dict[tuple, list[Event]]] = {SEND: defaultdict(list), RECEIVE: defaultdict(list)}
    for event in events:
        if event.kind in ends:
            pair = (event.rank, event.peer) if event.kind == SEND else (event.peer, event.rank)
            ends[event.kind][pair].append(event)
    arrows, alone = [], 0
    ready: dict[int, float] = {}
    for key in {**ends[SEND], **ends[RECEIVE]}:
        sent, received = ends[SEND][key], ends[RECEIVE][key]
        alone += abs(len(sent) - len(received))
        for out, come in zip(sent, received):
            arrows.append(Arrow(out.rank, come.rank, out.start - first, max(out.start, come.end) - first, out.bytes))
            ready[id(out)] = ready[id(come)] = max(out.start, come.start) - first
    arrows.sort(key=lambda arrow: (arrow.left, arrow.arrived, arrow.sender, arrow.receiver))
    return tuple(arrows), alone, ready


def _lane(
    rank: int,
    events: Sequence[Event],
    meetings: Sequence[DrawnCollective],
    number_of: dict[int, int],
    ready: dict[int, float],
    first: float,
) -> RankLane:
    mine = [event for event in events if event.rank == rank]
    computed = tuple(
        Bar(COMPUTING, event.name, event.start - first, event.end - first) for event in mine if event.kind == COMPUTE
    )
    calls = [event for event in mine if event.kind == CALL]
    starts, ends = [call.start for call in calls], list(accumulate((call.end for call in calls), max))
    stretches: list[tuple[float, float, list[Bar]]] = []
    for event in calls:
        start, end = event.start - first, event.end - first
        meeting = meetings[number_of[id(event)] - 1]
        began = end if meeting.began is None else min(max(start, meeting.began), end)
        pieces = ((WAITING, start, began), (CALLING, began, end))
        bars = [Bar(kind, event.name, a, b, event.bytes, meeting.number) for kind, a, b in pieces if b > a]
        stretches.append((start, end, bars))
    for event in mine:
        before = bisect_right(starts, event.start)
        is_in_call = before > 0 and ends[before - 1] >= event.end
        if event.kind in (SEND, RECEIVE) and not is_in_call:
            start, end = event.start - first, event.end - first
            both = min(max(start, ready.get(id(event), end)), end)
            pieces = ((WAITING, start, both), (MESSAGE, both, end))
            bars = [Bar(kind, event.name, a, b, event.bytes) for kind, a, b in pieces if b > a]
            stretches.append((start, end, bars))
    return RankLane(rank, computed, *_in_rows(stretches))


def _in_rows(stretches: list[tuple[float, float, list[Bar]]]) -> tuple[tuple[tuple[Bar, ...], ...], bool]:
    """Each stretch in the first row that is free then; if none is, in the last one; and whether that happened."""
    rows: list[list[Bar]] = []
    free: list[float] = []
    is_crowded = False
    for start, end, bars in sorted(stretches, key=lambda stretch: stretch[:2]):
        place = next((row for row, moment in enumerate(free) if moment <= start), len(rows))
        if place == len(rows) and len(rows) < MOST_ROWS:
            rows.append([])
            free.append(0.0)
        is_crowded |= place == len(rows)
        place = min(place, len(rows) - 1)
        rows[place] += bars
        free[place] = max(free[place], end)
    return tuple(map(tuple, rows)), is_crowded
