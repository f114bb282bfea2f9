"""What the calls of all ranks show: those that ranks do not make alike, and what ranks wait for that never comes."""

import itertools
import math
from collections.abc import Sequence

from cos598d.tools.exam.notes import COLLECTIVES, Noted, Trace

SAME_CALLS = "every rank must make the same calls"
Told = tuple[str, int]  # a sentence, and its line


def unlike(traces: Sequence[Trace], file: str, is_over: bool) -> Told | None:
    """The first collective, or message, of which ranks do not make the same. `is_over`: no rank makes more calls."""
    made = [_collectives(trace) for trace in traces]
    for calls in itertools.zip_longest(*made):
        first = calls[0]
        for rank, here in enumerate(calls):
            if here and first and here.alike != first.alike:
                both = f"rank 0 is in {first.words(file)} while rank {rank} is in {here.words(file)}"
                if here.op == first.op and here.peer != first.peer:
                    both += f", with the roots {first.peer} and {here.peer}"
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


def _collectives(trace: Trace) -> list[Noted]:
    return [call for call in trace.calls if call.op in COLLECTIVES]
