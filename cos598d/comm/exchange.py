"""Reduce-scatter and all-gather by direct exchange of messages: every rank sends only (n-1)/n of the data."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from cos598d.comm.communicator import Communicator
from cos598d.comm.messages import Messages, Places, PointToPointCollective, PostedReceives
from cos598d.records.conventions import PARAMETERS

# Small segments may still be in the CPU's cache when they are added; several let a rank run ahead of others.
SEGMENT_BYTES, IN_FLIGHT = 2 << 20, 4


@dataclass
class Segment:
    """A segment of one sum. `own`, plus the others' terms in `landings`, (ranks - 1, elements), goes into `into`.

    `pieces` are what this rank sends to the others.
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
    """The receives for a segment: `landings`, (ranks - 1, elements) in `scratch`, are ready for it."""

    tag: int
    expected: PostedReceives
    landings: list[torch.Tensor]
    scratch: torch.Tensor


class ReduceScatters:
    """Sums over the ranks of which each rank gets its own part, several at a time.

    1. Rank r sends part k of its tensor to rank k, for every other k, and receives n-1 copies of its own part.
    2. When they have arrived, it adds them and its own in order of rank, so that a sum does not depend on which rank
       adds it.
    Parts are sent in segments. At most `IN_FLIGHT` of them are being sent, so scratch is `IN_FLIGHT` (n-1) segments,
    however large the tensors are. Starting one more waits for the oldest. Every rank starts the same sums in the same
    order. If they are announced (`expect`), free scratch can receive in advance what others send of the next sums.
    Rank r sends (n-1)/n S, and receives as much. gloo's reduce_scatter is its all_reduce's ring, and sends twice that.
    """

    def __init__(self, comm: Communicator, longest: Mapping[torch.dtype, int] | None = None):
        """`longest`: elements of the longest part of what will be summed, by dtype, if that is known. Each piece of
        scratch then fits all sums, so that there are no more pieces than segments being sent."""
        self._comm, self._longest = comm, longest or {}
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}  # scratch, (ranks - 1, elements of a segment)
        self._under_way: deque[Segment] = deque()
        self._coming: deque[_Coming] = deque()
        self._expected: deque[tuple[torch.Tensor, int, int, int]] = deque()  # like, longest, own elements, tag

    def expect(self, sums: Iterable[tuple[torch.Tensor, Sequence[int], int]]) -> None:
        """Announce the sums that will be started next: a tensor like theirs, lengths and tag of each."""
        if not self._comm.messages_have_tags or self._comm.world_size == 1:
            return
        for like, lengths, tag in sums:
            own, count = lengths[self._comm.rank], segment_count(lengths[0], like.element_size())
            for k in range(count):  # split as by tensor_split
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
        """Start the sum of every rank's `flat`, (elements,). This rank's part of it goes `into`, (own elements,).

        lengths: the elements of each rank's part, the longest first. `into` may be this rank's own part of `flat`.
        `adds`: to the current values of `into`. `then` is called when the sum is complete and `flat` may be changed.
        """
        rank = self._comm.rank
        # the longest part's, so that all ranks split all parts alike
        count = segment_count(lengths[0], flat.element_size())
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
        """Block until all started sums are complete. Their tensors may then be changed."""
        while self._under_way:
            self._end_first()

    def land(self, like: torch.Tensor, longest: int, own: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Where `own` elements of each other rank arrive, and the scratch that contains these places. `longest`: the
        elements of the sum's longest part."""
        elements = min(SEGMENT_BYTES // like.element_size(), max(longest, self._longest.get(like.dtype, 0)))
        scratch = self.take_scratch(like, self._comm.world_size - 1, elements)
        return [row[:own] for row in scratch], scratch

    def take_scratch(self, like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """A piece of scratch like `like`, (rows, at least `columns`), in use until its segment is summed."""
        free = self._free.setdefault(like.dtype, [])
        for place, scratch in enumerate(free):
            if scratch.shape[1] >= columns:
                return free.pop(place)
        return like.new_empty(rows, columns)

    def sent(self, pieces: Places, scratch: torch.Tensor) -> Places:
        """The messages that carry the pieces."""
        return pieces

    def terms(self, segment: Segment) -> list[torch.Tensor]:
        """The others' pieces of a received segment, (ranks - 1, elements). They may be overwritten."""
        return segment.landings

    def tensors(self) -> list[torch.Tensor]:
        """The scratch tensors."""
        free = [scratch for kept in self._free.values() for scratch in kept]
        coming = [each.scratch for each in self._coming]
        return free + coming + [segment.scratch for segment in self._under_way]

    def _make_ready(self) -> None:
        """Post as many of the expected receives as scratch allows."""
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
    """The number of segments of each part, if the longest part has `longest` elements."""
    return max(1, -(-longest // (SEGMENT_BYTES // element_bytes)))


def _nothing() -> None:
    """For all segments of a sum except the last."""


def _add_up(segment: Segment, others: Sequence[torch.Tensor], rank: int) -> None:
    """Put the sum, in order of rank, into `into`. Terms before this rank's own are added up in one of the `others`."""
    into, terms = segment.into, list(others)
    terms.insert(rank, segment.own)
    if segment.adds:
        for term in terms:
            into += term
        return
    total = terms[0]
    for place, term in enumerate(terms[1:], start=1):
        # This rank's part may be `into` itself: write there only after it has been added.
        total = torch.add(total, term, out=into if place >= rank else total)
    if len(terms) == 1 and total.data_ptr() != into.data_ptr():
        into.copy_(total)


class WeightGather:
    """An all-gather of weights: every rank's part, in place, in `flat` on each.

    Every rank sends its part to the n-1 others from the tensor, and receives theirs into it: nothing is copied.
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
        """`flat`, (elements,), has the weights; lengths: the elements of each rank's part."""
        self._comm, self._name, self._flat, self._tag, self._purpose = comm, name, flat, tag, purpose
        self._parts = flat.split(list(lengths))
        self._expected: PostedReceives | None = None
        self._call: PointToPointCollective | None = None

    def expect(self) -> None:
        """Post the receives: nobody may read the weights until they have arrived."""
        if self._expected is None and self._comm.messages_have_tags:
            self._expected = PostedReceives(self._comm, self._coming(), self._tag)

    @property
    def is_expected(self) -> bool:
        """Whether the receives are posted, but `start` has not been called."""
        return self._expected is not None

    def start(self) -> Self:
        """Send this rank's part, which is final."""
        expected, self._expected = self._expected, None
        self._call = self._comm.compose("all_gather", self._flat, self._name, purpose=self._purpose)
        sends = [(own, other) for other in self._comm.others for own in self.messages(self._comm.rank)]
        self._messages = self._call.start(sends, self._coming() if expected is None else (), self._tag, expected)
        return self

    def messages(self, rank: int) -> list[torch.Tensor]:
        """The tensors that this rank sends to every other one; also those that receive them."""
        return [self._parts[rank]] if len(self._parts[rank]) else []

    def _coming(self) -> list[tuple[torch.Tensor, int]]:
        return [(theirs, other) for other in self._comm.others for theirs in self.messages(other)]

    def wait(self) -> None:
        """Block until all weights have arrived and this rank's part may be changed. May be called more than once."""
        call, self._call = self._call, None  # an error is raised once, not again during cleanup
        if call is not None:
            self._messages.wait()
            call.end()
