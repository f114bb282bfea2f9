"""Reduce-scatter and all-gather by direct exchange of messages: every rank sends (n-1)/n of what there is, no more."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from cos598d.comm.communicator import Communicator
from cos598d.comm.messages import Messages, Places, PointToPointCollective, PostedReceives
from cos598d.records.conventions import PARAMETERS

# What is added may still be in the processor's cache, and a rank that is ahead need not wait for its neighbours.
SEGMENT_BYTES, IN_FLIGHT = 2 << 20, 4


@dataclass
class Segment:
    """A segment of one sum: `own` goes into `into`, with the others' that land in `landings`, (ranks - 1, elements).

    `pieces` are what the others get of it.
    """

    call: PointToPointCollective
    messages: Messages
    pieces: Places
    own: torch.Tensor
    landings: list[torch.Tensor]
    into: torch.Tensor
    adds: bool
    scratch: torch.Tensor
    ends: Callable[[], None]


class _Coming(NamedTuple):
    """What others will send of a segment: `landings`, (ranks - 1, elements) in `scratch`, are ready for it."""

    tag: int
    expected: PostedReceives
    landings: list[torch.Tensor]
    scratch: torch.Tensor


class ReduceScatters:
    """Sums over the ranks, of which each rank gets its own part, several under way at a time.

    1. Rank r sends part k of its tensor to rank k, for every k but its own, and receives n-1 copies of its own part.
    2. When they are there it adds them and its own, in order of rank: so a sum does not depend on who adds it.
    Parts are sent in segments. `IN_FLIGHT` of them are under way at most, so scratch is `IN_FLIGHT` (n-1) segments,
    however large the tensors; to start one more is to wait for the oldest. Every rank starts the same sums in the same
    order. Where that is told beforehand (`expect`), scratch that is free is ready for what others send of the sums to
    come. Rank r sends (n-1)/n S, and receives as much; gloo's reduce_scatter is the ring of its all_reduce, and
    sends twice that.
    """

    def __init__(self, comm: Communicator, longest: Mapping[torch.dtype, int] | None = None):
        """`longest`: elements of the longest part of what will be summed, by dtype, where that is known: each piece of
        scratch will do for all of it, so that there are no more of them than segments under way."""
        self._comm, self._longest = comm, longest or {}
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}  # scratch, (ranks - 1, elements of a segment)
        self._under_way: deque[Segment] = deque()
        self._coming: deque[_Coming] = deque()
        self._expected: deque[tuple[torch.Tensor, int, int, int]] = deque()  # like, longest, own elements, tag

    def expect(self, sums: Iterable[tuple[torch.Tensor, Sequence[int], int]]) -> None:
        """The next sums that will be started: a tensor like theirs, lengths and tag of each."""
        if not self._comm.messages_have_tags or self._comm.world_size == 1:
            return
        for like, lengths, tag in sums:
            own, count = lengths[self._comm.rank], segment_count(lengths[0], like.element_size())
            for k in range(count):  # as tensor_split cuts
                self._expected.append((like, lengths[0], own // count + (k < own % count), tag))
        self._make_ready()

    def start(
        self,
        name: str,
        flat: torch.Tensor,
        lengths: Sequence[int],
        into: torch.Tensor,
        *,
        tag: int = 0,
        adds: bool = False,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the sum of every rank's `flat`, (elements,), of which this rank's part goes `into`, (own elements,).

        lengths: the elements of each rank's part, the longest first. `into` may be the own part of `flat` itself.
        `adds`: to what is in `into` already. `then` is called when the sum is there and `flat` may be changed.
        """
        rank = self._comm.rank
        count = segment_count(lengths[0], flat.element_size())  # the longest part's, so that all ranks cut all alike
        parts = [part.tensor_split(count) for part in flat.split(list(lengths))]
        call = self._comm.compose("reduce_scatter", flat, name)

        def end() -> None:
            call.end()
            then()

        for k, target in enumerate(into.tensor_split(count)):
            if len(self._under_way) == IN_FLIGHT:
                self._end_first()
            own = parts[rank][k]
            pieces = [(parts[other][k], other) for other in self._comm.others if len(parts[other][k])]
            ends = end if k == count - 1 else _nothing
            if self._coming:
                coming = self._coming.popleft()
                assert coming.tag == tag, "another sum was expected"
                landings, scratch = coming.landings, coming.scratch
                messages = call.start(self.sent(pieces, scratch), (), tag, coming.expected)
            else:
                landings, scratch = self.land(flat, lengths[0], len(own))
                messages = call.start(self.sent(pieces, scratch), self._receives(landings), tag)
            self._under_way.append(Segment(call, messages, pieces, own, landings, target, adds, scratch, ends))

    def drain(self) -> None:
        """Block until all sums that were started are there; what was sent may then be changed."""
        while self._under_way:
            self._end_first()

    def land(self, like: torch.Tensor, longest: int, own: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Where `own` elements of each other rank land, and the scratch that they land in; `longest`: the elements of
        the sum's longest part."""
        elements = min(SEGMENT_BYTES // like.element_size(), max(longest, self._longest.get(like.dtype, 0)))
        scratch = self.take_scratch(like, self._comm.world_size - 1, elements)
        return [row[:own] for row in scratch], scratch

    def take_scratch(self, like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """A piece of scratch of such numbers, (rows, at least so many columns), until its segment is summed."""
        free = self._free.setdefault(like.dtype, [])
        for place, scratch in enumerate(free):
            if scratch.shape[1] >= columns:
                return free.pop(place)
        return like.new_empty(rows, columns)

    def sent(self, pieces: Places, scratch: torch.Tensor) -> Places:
        """The messages in which the pieces travel."""
        return pieces

    def terms(self, segment: Segment) -> list[torch.Tensor]:
        """The others' pieces of a segment that has come, (ranks - 1, elements), to be written to."""
        return segment.landings

    def tensors(self) -> list[torch.Tensor]:
        """The scratch that is kept."""
        free = [scratch for kept in self._free.values() for scratch in kept]
        coming = [each.scratch for each in self._coming]
        return free + coming + [segment.scratch for segment in self._under_way]

    def _make_ready(self) -> None:
        """Be ready for as much of what is expected as there may be scratch for."""
        while self._expected and len(self._under_way) + len(self._coming) < IN_FLIGHT:
            like, longest, own, tag = self._expected.popleft()
            landings, scratch = self.land(like, longest, own)
            self._coming.append(
                _Coming(tag, PostedReceives(self._comm, self._receives(landings), tag), landings, scratch)
            )

    def _receives(self, landings: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        rank = self._comm.rank
        return [(landings[other - (other > rank)], other) for other in self._comm.others if len(landings[0])]

    def _end_first(self) -> None:
        segment = self._under_way.popleft()
        segment.messages.wait()
        terms = self.terms(segment)
        if len(segment.own):
            _add_up(segment, terms, self._comm.rank)
        self._free[segment.scratch.dtype].append(segment.scratch)
        self._make_ready()
        segment.ends()


def segment_count(longest: int, element_bytes: int) -> int:
    """In how many segments parts travel, of which the longest has so many elements."""
    return max(1, -(-longest // (SEGMENT_BYTES // element_bytes)))


def _nothing() -> None:
    """A sum that has more segments to come."""


def _add_up(segment: Segment, others: Sequence[torch.Tensor], rank: int) -> None:
    """`into` becomes the sum in order of rank; whatever is summed before own part's turn is in one of the `others`."""
    into, terms = segment.into, list(others)
    terms.insert(rank, segment.own)
    if segment.adds:
        for term in terms:
            into += term
        return
    total = terms[0]
    for place, term in enumerate(terms[1:], start=1):
        # Own part may be `into` itself: nothing else is written there before own part is in the sum.
        total = torch.add(total, term, out=into if place >= rank else total)
    if len(terms) == 1 and total.data_ptr() != into.data_ptr():
        into.copy_(total)


class WeightGather:
    """An all-gather of weights: every rank's part, in place, in `flat` of each.

    Every rank sends its part to the n-1 others straight from the tensor and receives theirs into it: nothing is copied.
    """

    def __init__(
        self,
        comm: Communicator,
        name: str,
        flat: torch.Tensor,
        lengths: Sequence[int],
        tag: int,
        purpose: str = PARAMETERS,
    ):
        """`flat`, (elements,), is the weights; lengths: the elements of each rank's part."""
        self._comm, self._name, self._flat, self._tag, self._purpose = comm, name, flat, tag, purpose
        self._parts = flat.split(list(lengths))
        self._expected: PostedReceives | None = None
        self._call: PointToPointCollective | None = None

    def expect(self) -> None:
        """The others' parts may come from now on: nobody reads the weights until they have."""
        if self._expected is None and self._comm.messages_have_tags:
            self._expected = PostedReceives(self._comm, self._coming(), self._tag)

    @property
    def is_expected(self) -> bool:
        """Whether the others' parts may come, and it has not been started."""
        return self._expected is not None

    def start(self) -> Self:
        """This rank's part is as it should be: send it."""
        expected, self._expected = self._expected, None
        self._call = self._comm.compose("all_gather", self._flat, self._name, purpose=self._purpose)
        sends = [(own, other) for other in self._comm.others for own in self.messages(self._comm.rank)]
        self._messages = self._call.start(sends, self._coming() if expected is None else (), self._tag, expected)
        return self

    def messages(self, rank: int) -> list[torch.Tensor]:
        """What that rank sends to every other one; also where it lands."""
        return [self._parts[rank]] if len(self._parts[rank]) else []

    def _coming(self) -> list[tuple[torch.Tensor, int]]:
        return [(theirs, other) for other in self._comm.others for theirs in self.messages(other)]

    def wait(self) -> None:
        """Block until the weights are there, and their own part may be changed. May be called more than once."""
        call, self._call = self._call, None  # an error is raised once, not again by whoever tidies up after it
        if call is not None:
            self._messages.wait()
            call.end()
