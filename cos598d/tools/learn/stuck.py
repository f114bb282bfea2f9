"""Whether ranks wait for each other forever, from their notes while they run, so that the check need not wait too."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from cos598d.tools.check.notes import COLLECTIVES, OTHER_END, CallTrace, Noted, read_trace
from cos598d.tools.check.spawn import CALLS, RETURNED, bytes_of
from cos598d.tools.check.supervisor import MOST_FILE_BYTES


class StuckRanks:
    """Reads a world's notes whenever it is called, and returns whether its ranks wait forever.

    They do if each rank waits for something that another one has not begun, or has ended. A rank that waits begins
    nothing, and a rank notes each call before it begins. So this is proof, however slow the machine is. If every rank
    waits but this is not certain, they get `seconds` without a note; a message takes a millisecond.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._seen: tuple[object, ...] = ()
        self._since, self._all_wait, self._is_judged = 0.0, False, False

    def __call__(self, folder: Path, world_size: int) -> bool:
        """Whether the ranks whose files are in `folder` are stuck."""
        files = [folder / f"{CALLS}{rank}" for rank in range(world_size)]
        answers = [folder / f"answer{rank}.json" for rank in range(world_size)]
        seen = tuple(_size(file) for file in (*files, *answers))
        if seen != self._seen:  # they continue
            self._seen, self._since, self._is_judged = seen, time.monotonic(), False
            return False
        if not self._is_judged:
            traces = [read_trace(bytes_of(file, MOST_FILE_BYTES)) for file in files]
            ended = [_has_returned(answer) for answer in answers]
            self._is_judged, self._all_wait = True, all_wait(traces, ended)
            if self._all_wait and never_go_on(traces, ended):
                return True
        return self._all_wait and time.monotonic() > self._since + self._seconds


def all_wait(traces: Sequence[CallTrace], ended: Sequence[bool]) -> bool:
    """Whether every rank that has not `ended` waits in a call or an exchange, and there is such a rank."""
    waiting = [
        trace.is_alone and trace.is_whole and (trace.is_meeting or trace.stuck_in is not None) for trace in traces
    ]
    return not all(ended) and all(waits or over for waits, over in zip(waiting, ended, strict=True))


def never_go_on(traces: Sequence[CallTrace], ended: Sequence[bool]) -> bool:
    """Whether each of these ranks, all of which wait or have `ended`, waits for what another one has not begun."""
    return all(over or _is_in_vain(rank, traces) for rank, over in enumerate(ended))


def _is_in_vain(rank: int, traces: Sequence[CallTrace]) -> bool:
    """Whether what this rank waits for needs something that another rank has not begun."""
    trace = traces[rank]
    if trace.is_meeting:
        return any(other.meetings < trace.meetings for other in traces)
    call = trace.stuck_in
    if call is None or 0 in call.shape:  # a call with an empty tensor may end without the others
        return False
    if call.op in OTHER_END:
        return _is_message_in_vain(rank, call, traces)
    own = _collectives(trace)
    place = next(place for place, each in enumerate(own) if each is call)
    return any(not _meets(call, _collectives(traces[other])[place:]) for other in _needed(call, rank, len(traces)))


def _is_message_in_vain(rank: int, call: Noted, traces: Sequence[CallTrace]) -> bool:
    """Whether the rank at the message's other end has begun fewer than this one has: they meet in their order."""
    own = [each for each in traces[rank].calls if (each.op, each.peer) == (call.op, call.peer)]
    number = 1 + next(place for place, each in enumerate(own) if each is call)
    if call.peer is None or not 0 <= call.peer < len(traces):
        return False
    theirs = [each for each in traces[call.peer].calls if (each.op, each.peer) == (OTHER_END[call.op], rank)]
    return len(theirs) < number


def _collectives(trace: CallTrace) -> list[Noted]:
    return [call for call in trace.calls if call.op in COLLECTIVES]


def _meets(call: Noted, theirs: Sequence[Noted]) -> bool:
    """Whether another rank has begun a collective of the same place and kind."""
    return bool(theirs) and (theirs[0].op, theirs[0].peer) == (call.op, call.peer)


def _needed(call: Noted, rank: int, size: int) -> list[int]:
    """The ranks without which gloo's algorithm for this call does not end on this one."""
    others = [other for other in range(size) if other != rank]
    if call.op in ("broadcast", "gather", "scatter") and rank != call.peer:
        return [other for other in others if other == call.peer]
    if call.op == "reduce" and rank != call.peer:  # what it sends may be gone before the others have come
        return []
    if call.op == "broadcast":  # down a binomial tree: the root waits only for its own children
        return [other for other in others if ((other - rank) % size).bit_count() == 1]
    return others


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1


def _has_returned(answer: Path) -> bool:
    """Whether a rank has ended well, by its own answer."""
    try:
        return bool(json.loads(bytes_of(answer, MOST_FILE_BYTES))["how"] == RETURNED)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
