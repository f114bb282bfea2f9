"""What the calls of all ranks show: those that ranks do not make alike, and what ranks wait for that never comes."""

import itertools
import math
from collections.abc import Sequence

from cos598d.tools.exam.notes import COLLECTIVES, Noted, Trace

SAME_CALLS = "every rank must make the same calls"
_OTHER_END = {"send": "recv", "recv": "send"}
Told = tuple[str, int]  # a sentence, and its line


def unlike(traces: Sequence[Trace], file: str, is_over: bool) -> Told | None:
    """The first collective, or message, of which ranks do not make the same. `is_over`: no rank makes more calls."""
    made = [_collectives(trace) for trace in traces]
    for calls in itertools.zip_longest(*made):
        first = calls[0]
        for rank, here in enumerate(calls):
            if here and first and here.alike != first.alike:
                both = f"rank 0 is in {first.words(file)} while rank {rank} is in {here.words(file)}"
                return f"{both}: {SAME_CALLS} in the same order", here.line
            if is_over and (here is None) != (first is None):
                call, caller, other = (here, rank, 0) if here else (first, 0, rank)
                assert call is not None
                return f"rank {caller} calls {call.words(file)}, and rank {other} never does: {SAME_CALLS}", call.line
    for rank, peer in itertools.permutations(range(len(traces)), 2):
        comes = [call for call in traces[rank].calls if (call.op, call.peer) == ("recv", peer)]
        outs = [call for call in traces[peer].calls if (call.op, call.peer) == ("send", rank)]
        for come, out in zip(comes, outs, strict=False):
            if (come.dtype, math.prod(come.shape)) != (out.dtype, math.prod(out.shape)):
                why = "both ends of a message must have the same length, so be the same part"
                if come.dtype != out.dtype:
                    why = "receive into a tensor of the same dtype (torch.empty_like)"
                both = f"rank {peer} sends by {out.words(file)}, and rank {rank} receives it by {come.words(file)}"
                return f"{both}: {why}", come.line
    return None


def standstill(traces: Sequence[Trace], file: str) -> Told | None:
    """What ranks wait for if they did not end; None if none waits."""
    waiting = [(rank, trace.stuck_in) for rank, trace in enumerate(traces) if trace.stuck_in]
    if not waiting:
        return None
    for rank, trace in enumerate(traces):
        lost = [call for call in trace.calls if call.op == "send" and not (call.is_over or call.waits)]
        if lost:
            why = "it may never arrive, so keep what isend returns, and call its wait()"
            return f"rank {rank} began {lost[0].words(file)} and did not wait for it: {why}", lost[0].line
    rank, call = waiting[0]
    assert call is not None
    if len(waiting) < len(traces):
        away = next(other for other, trace in enumerate(traces) if not trace.stuck_in)
        return f"rank {rank} waits in {call.words(file)}, and rank {away} never makes that call", call.line
    told = " while ".join(f"rank {rank} waits in {each.words(file)}" for rank, each in waiting[:2] if each)
    ops = {each.op for _, each in waiting if each}
    why = "all send and none receives" if ops == {"send"} else "none sends" if ops == {"recv"} else "no two calls match"
    return f"{told}: {why}, so they wait forever", call.line


def never_go_on(traces: Sequence[Trace], have_ended: Sequence[bool]) -> bool:
    """Whether each rank has ended, or waits for something that another rank has not begun.

    A rank that waits begins nothing, and a rank tells each call before it begins it. So this is proof, however slow the
    machine is.
    """
    return all(over or _is_in_vain(rank, traces) for rank, over in enumerate(have_ended))


def _is_in_vain(rank: int, traces: Sequence[Trace]) -> bool:
    """Whether what this rank waits for needs something that another rank has not begun."""
    call = traces[rank].stuck_in
    if call is None or 0 in call.shape:  # a call with an empty tensor may end without the others
        return False
    if call.op in _OTHER_END:
        return _is_message_in_vain(rank, call, traces)
    place = next(place for place, each in enumerate(_collectives(traces[rank])) if each is call)
    return any(not _meets(call, _collectives(traces[other])[place:]) for other in _needed(call, rank, len(traces)))


def _is_message_in_vain(rank: int, call: Noted, traces: Sequence[Trace]) -> bool:
    """Whether the rank at the message's other end has begun fewer than this one: they meet in their order."""
    own = [each for each in traces[rank].calls if (each.op, each.peer) == (call.op, call.peer)]
    number = 1 + next(place for place, each in enumerate(own) if each is call)
    if call.peer is None or not 0 <= call.peer < len(traces):
        return False
    theirs = [each for each in traces[call.peer].calls if (each.op, each.peer) == (_OTHER_END[call.op], rank)]
    return len(theirs) < number


def _collectives(trace: Trace) -> list[Noted]:
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
