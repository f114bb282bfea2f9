"""The notes that every rank makes of its calls, before it makes them, and what they show if ranks did not end."""

import itertools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cos598d.terminal.printable import printable
from cos598d.terminal.words import number_of

BEGIN, END, WAITS, RAISED, CHECK, CHANGED = "begin", "end", "waits", "raised", "check", "changed"
MEET, MET, THREADS, DROPPED = "meet", "met", "threads", "dropped"
MOST_NOTES = 60_000
LONGEST_NAME = 200
COLLECTIVES = ("all_reduce", "broadcast", "gather", "scatter", "reduce", "all_gather")
OTHER_END = {"send": "receive", "receive": "send"}
SAME_CALLS = "every rank must make the same calls"


class Notes:
    """Writes them into a file at once, so that they survive the process."""

    def __init__(self, descriptor: int):
        self._descriptor, self._count = descriptor, 0

    def write(self, *note: Any) -> None:
        """One note (JSON); shapes may be torch's."""
        self._count += 1
        if self._count <= MOST_NOTES:
            values = [list(each) if isinstance(each, tuple) else each for each in note]
            os.write(self._descriptor, json.dumps(values).encode() + b"\n")


@dataclass
class Noted:
    """A call that a rank began: in which check, by which of the student's lines, and whether it ended."""

    check: str
    op: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    peer: int | None
    line: int
    is_over: bool = False
    blocks: bool = False  # the rank waits for it from its start
    waits_in: int = 0  # the line of its wait, if that is another one
    changed_before: int = 0  # the line of its wait, if its tensor was changed before
    has_raised: bool = False  # making it, or waiting for it, ended in an exception
    is_dropped: bool = False  # its result is gone, and nothing waited for it

    @property
    def is_waited_for(self) -> bool:
        """Whether something waits, or has waited, for the call."""
        return self.blocks or self.waits_in > 0

    @property
    def alike(self) -> tuple:
        """What must be equal on all ranks for a collective."""
        return self.op, self.shape, self.dtype, self.peer

    def words(self, file: str) -> str:
        """The call as text: "all_reduce of hidden.weight (7x7 float32) in lesson3.py line 12"."""
        to = {"send": f" to rank {self.peer}", "receive": f" from rank {self.peer}"}.get(self.op, "")
        op = {"receive": "recv"}.get(self.op, self.op)
        shape = "x".join(map(str, self.shape)) or "1"
        line = f", {file} line {self.line}" if self.line else ""
        if self.waits_in not in (0, self.line):
            line += f", waited for in line {self.waits_in}"
        return printable(f"comm.{op} of {self.tensor}{to} ({shape} {self.dtype}{line})")


@dataclass
class CallTrace:
    """All notes of one rank.

    check       the last one that was begun
    meetings    how many exchanges of small values it has begun; is_meeting: the last is not over
    is_alone    whether no other thread of the file's ever ran
    is_whole    whether nothing is missing because there was too much or it could not be read
    """

    calls: list[Noted] = field(default_factory=list)
    check: str = ""
    meetings: int = 0
    is_meeting: bool = False
    is_alone: bool = True
    is_whole: bool = True

    def of(self, check: str) -> list[Noted]:
        """The calls of one check."""
        return [call for call in self.calls if call.check == check]

    @property
    def stuck_in(self) -> Noted | None:
        """The call that the rank waits for, if any: the last one waited for that is not over.

        A call that was only started is not a wait, and neither is one that ended in an exception.
        """
        waiting = [call for call in self.calls if call.is_waited_for and not (call.is_over or call.has_raised)]
        return waiting[-1] if waiting else None


def read_trace(data: bytes) -> CallTrace:
    """A rank's notes, up to where they were cut off. They may be anything."""
    trace = CallTrace()
    calls: dict[Any, Noted] = {}
    lines = data.splitlines()
    trace.is_whole = len(lines) < MOST_NOTES
    for line in lines:
        try:
            kind, *rest = json.loads(line)
            if kind == CHECK:
                trace.check = str(rest[0])
            elif kind == BEGIN:
                number, op, tensor, shape, dtype, peer, at, blocks = rest
                sizes = tuple(int(size) for size in shape)
                peer = None if peer is None else int(peer)
                about = (str(op), str(tensor), sizes, str(dtype), peer, int(at))
                calls[number] = Noted(trace.check, *about, blocks=bool(blocks))
                trace.calls.append(calls[number])
            elif kind == WAITS:
                calls[rest[0]].waits_in = int(rest[1]) or calls[rest[0]].line or 1
            elif kind == END:
                calls[rest[0]].is_over = True
            elif kind == CHANGED:
                calls[rest[0]].changed_before = int(rest[1]) or 1
            elif kind == DROPPED:
                calls[rest[0]].is_dropped = True
            elif kind == RAISED:
                calls[rest[0]].has_raised = True
            elif kind == MEET:
                trace.meetings, trace.is_meeting = trace.meetings + 1, True
            elif kind == MET:
                trace.is_meeting = False
            elif kind == THREADS:
                trace.is_alone = False
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
            trace.is_whole = False
            break
    return trace


@dataclass(frozen=True)
class Unlike:
    """Where ranks did not make the same collective: a phrase with the rank and its line."""

    rank: int
    line: int
    words: str


def unlike(traces: Sequence[CallTrace], check: str, file: str, is_over: bool) -> Unlike | None:
    """The first collective in which a rank differs from rank 0; None if all made the same.

    A call that others did not reach counts only if the world `is_over`; otherwise it was ended before. Names are the
    student's own. If only they differ, for tensors of equal shape, ranks mix up tensors.
    """
    made = [[call for call in trace.of(check) if call.op not in OTHER_END] for trace in traces]
    is_over = is_over and all(trace.is_whole for trace in traces)  # otherwise some calls were made but not noted
    for calls in itertools.zip_longest(*made):
        first = calls[0]
        for rank, here in enumerate(calls):
            if here and first and (here.alike, here.tensor) != (first.alike, first.tensor):
                there = f"rank 0 is in {first.words(file)} while rank {rank} is in {here.words(file)}"
                return Unlike(rank, here.line, f"{there}: {SAME_CALLS} in the same order")
            if is_over and (here is None) != (first is None):
                call, caller, other = (here, rank, 0) if here else (first, 0, rank)
                words = f"rank {caller} calls {call.words(file)}, and rank {other} never does"
                return Unlike(caller, call.line, f"{words}: {SAME_CALLS}")
    return None


def misfit(traces: Sequence[CallTrace], check: str, file: str) -> Unlike | None:
    """The first message whose two ends differ in length or dtype; None if all match.

    gloo ends a process that receives more than it has room for, and leaves the rest of a larger tensor unchanged.
    """
    for rank, trace in enumerate(traces):
        received: dict[int, list[Noted]] = {}
        for call in trace.of(check):
            if call.op == "receive" and call.peer is not None and 0 <= call.peer < len(traces):
                received.setdefault(call.peer, []).append(call)
        for peer, receives in received.items():
            sends = [each for each in traces[peer].of(check) if (each.op, each.peer) == ("send", rank)]
            for come, out in zip(receives, sends):
                if (come.dtype, math.prod(come.shape)) != (out.dtype, math.prod(out.shape)):
                    words = f"rank {peer} sends by {out.words(file)}, and rank {rank} receives it by {come.words(file)}"
                    why = "receive into a tensor of the same dtype (torch.empty_like)"
                    if come.dtype == out.dtype:
                        why = "both ends of a message must have the same length, so be the same part"
                    return Unlike(rank, come.line, f"{words}: {why}")
    return None


def standstill(traces: Sequence[CallTrace], file: str) -> Unlike | None:
    """What each rank waits for if a world did not end; None if no rank waits for a call."""
    stuck = [(rank, trace.stuck_in) for rank, trace in enumerate(traces)]
    waiting = [(rank, call) for rank, call in stuck if call is not None]
    if not waiting:
        return None
    for rank, trace in enumerate(traces):
        sends = [call for call in trace.calls if call.op == "send" and not (call.is_over or call.is_waited_for)]
        dropped = [call for call in sends if call.is_dropped]
        if dropped or len(sends) > 1:  # the rank may be about to wait for one that it keeps
            send = (dropped or sends)[0]
            words = f"rank {rank} began {send.words(file)} and did not wait for it"
            return Unlike(
                rank, send.line, f"{words}: it may never arrive, so keep what isend returns, and call its wait()"
            )
    if len(waiting) < len(traces):
        away = next(rank for rank, call in stuck if call is None)
        rank, call = waiting[0]
        return Unlike(
            rank, call.line, f"rank {rank} waits in {call.words(file)}, and rank {away} never makes that call"
        )
    told = " while ".join(f"rank {rank} waits in {call.words(file)}" for rank, call in waiting[:2])
    others = number_of(len(waiting) - 2, "other rank")
    more = f" and {others} wait{'s' if len(waiting) == 3 else ''} too" if len(waiting) > 2 else ""
    kinds = {call.op for _, call in waiting}
    why = {"send": "all send and none receives", "receive": "none sends"}.get("".join(kinds), "no two calls match")
    return Unlike(waiting[0][0], waiting[0][1].line, f"{told}{more}: {why}, so they wait forever")
