"""What a step costs: a sync lists its calls once, and its bytes and the cost model's input follow from that.

A sync's classmethod `calls(step)` lists the gradients' calls of one step, in order: which tensors are sent together, by
which collective, and among which ranks. This list is used by

    GradientSync.expected    for the exact calls and bytes of one rank, which tests compare with its ledger
    cos598d/cost/calls.py    for the load of each call on the links and the ranks of any number of hosts
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cos598d.comm.gloo import bytes_moved, ring_segments

if TYPE_CHECKING:
    from cos598d.sync.options import SyncOptions

Sizes = Sequence[tuple[int, int]]  # elements and bytes per element of each tensor


@dataclass(frozen=True)
class Cost:
    """Calls and bytes of one rank in one step; `calls` is None if a library chooses how many."""

    calls: int | None
    bytes_sent: int
    bytes_received: int


NOTHING = Cost(0, 0, 0)


@dataclass(frozen=True)
class Load:
    """The load of one call on links and ranks.

    steps           messages that wait for one another
    link_bytes      bytes that pass one direction of the busiest link one after another
    mean_bytes      sent and received by a rank, the mean over the ranks
    busiest_bytes   sent and received by the rank that moves most
    segments        pieces of at most 1 MiB that pass the link two at a time, as in gloo's rings; 0: whole messages
    waits           delays in addition to those of steps and segments: for messages that a receiver is ready
    copied_bytes    read and written by a rank in memory that ranks share
    """

    steps: int
    link_bytes: float
    mean_bytes: float
    busiest_bytes: float
    segments: int = 0
    waits: int = 0
    copied_bytes: float = 0.0


class Collective:
    """How a call moves a payload among n ranks, n > 1. `op` is the library's function for it."""

    op: str

    def moved(self, payload: int, element_bytes: int, ranks: int, rank: int) -> tuple[int, int]:
        """The exact bytes that `rank` sends and receives for `payload` bytes. A root is rank 0."""
        return bytes_moved(self.op, payload, ranks, rank)

    def load(self, payload: float, ranks: int, factor: float = 1.0) -> Load:
        """The load of `payload` bytes on links and ranks, if a codec makes `factor` of them."""
        raise NotImplementedError

    def payload(self, sent: float, ranks: int) -> float:
        """The payload for which a rank sends `sent` bytes, averaged over the ranks."""
        return 2 * sent / self.load(1.0, ranks).mean_bytes


@dataclass(frozen=True)
class Even(Collective):
    """A collective in which every rank sends and receives the same amount.

    steps(n)      messages that wait for one another
    share(n)      numerator and denominator of a rank's sent bytes, as a share of the payload
    segmented     whether it is one of gloo's rings, which move their bytes in segments
    """

    op: str
    steps: Callable[[int], int]
    share: Callable[[int], tuple[int, int]]
    segmented: bool = False

    def load(self, payload: float, ranks: int, factor: float = 1.0) -> Load:
        numerator, denominator = self.share(ranks)
        sent = numerator / denominator * payload * factor
        steps = self.steps(ranks)
        segments = steps * ring_segments(self.payload(sent, ranks), ranks) if self.segmented else 0
        return Load(steps, sent, 2 * sent, 2 * sent, segments)

    def payload(self, sent: float, ranks: int) -> float:
        numerator, denominator = self.share(ranks)
        return sent * denominator / numerator


def both_ways(ranks: int) -> tuple[int, int]:
    """A reduce-scatter and an all-gather: 2(n-1)/n of the payload."""
    return 2 * (ranks - 1), ranks


def ring_steps(ranks: int) -> int:
    """The steps of a reduce-scatter and an all-gather around a ring."""
    return 2 * (ranks - 1)


ALL_REDUCE = Even("all_reduce", ring_steps, both_ways, segmented=True)


@dataclass(frozen=True)
class Tensor:
    """The properties of a trainable tensor that determine how it is sent."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int

    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes per element."""
        return self.bytes // max(1, self.numel())

    def of_rows(self, rows: int) -> "Tensor":
        """The same tensor with this many rows; a single number is a row."""
        if not self.shape:
            return self
        return Tensor(self.name, (rows, *self.shape[1:]), self.dtype, self.bytes // max(1, self.shape[0]) * rows)


@dataclass(frozen=True)
class Step:
    """What the calls of one step depend on.

    tensors   the trainable ones, in the model's order, all of them used
    options   the sync's
    hosts     the ranks of each host
    arrival   the tensors in the order in which backward computes their gradients
    touched   the share of a large embedding's rows that some rank looks up; None: not known before the step
    """

    tensors: Sequence[Tensor]
    options: "SyncOptions"
    hosts: Sequence[Sequence[int]]
    arrival: Sequence[Tensor]
    touched: float | None = None


@dataclass(frozen=True)
class CollectiveCall:
    """One call of a step, as a sync predicts it.

    collective   how it moves its payload
    tensors      those whose gradients are sent together
    members      the ranks that take part, in their order; None: all
    share        the share of the gradients' rows that is sent
    agreed       bytes in addition by which ranks agree on these rows, waited for together with them
    copied       bytes in addition that every rank reads and writes in memory shared by its host's ranks
    """

    collective: Collective
    tensors: Sequence[Tensor]
    members: Sequence[int] | None = None
    share: float = 1
    agreed: int = 0
    copied: float = 0

    @property
    def travelling(self) -> list[Tensor]:
        """The tensors as they are sent; if only a share is sent, with that many rows."""
        if self.share == 1:
            return list(self.tensors)
        return [tensor.of_rows(round(self.share * tensor.shape[0])) for tensor in self.tensors]

    @property
    def gradient_bytes(self) -> float:
        """Bytes sent of the gradients."""
        return sum(tensor.bytes for tensor in self.tensors) * self.share

    @property
    def payload(self) -> float:
        """All bytes sent."""
        return self.gradient_bytes + self.agreed

    def moved(self, ranks: int, rank: int) -> tuple[int, int]:
        """The exact bytes that `rank` sends and receives."""
        members = range(ranks) if self.members is None else self.members
        if len(members) < 2 or rank not in members:
            return 0, 0
        element_bytes = max(1, *(tensor.element_size() for tensor in self.tensors))
        return self.collective.moved(round(self.gradient_bytes), element_bytes, len(members), members.index(rank))


def cost_of(travels: Sequence[CollectiveCall], ranks: int, rank: int) -> Cost:
    """The cost of all calls of a step on one of several ranks."""
    moved = [travel.moved(ranks, rank) for travel in travels]
    return Cost(len(moved), sum(sent for sent, _ in moved), sum(received for _, received in moved))


@dataclass(frozen=True)
class Buffers:
    """The memory that a sync keeps next to the model's gradients.

    groups    for each buffer the tensors whose gradients it has room for; none: gradients stay where they are
    at_once   whether a gradient moves into its buffer, without a copy left, as soon as backward has computed it;
              else all gradients still exist next to the buffers when backward ends
    scratch   bytes in addition
    unsaid    why there is no prediction, as a phrase that follows "A dash for NAME: "; "" if there is one
    """

    groups: Sequence[Sequence[Tensor]] = ()
    at_once: bool = False
    scratch: int = 0
    unsaid: str = ""

    @property
    def bytes(self) -> int:
        """All bytes."""
        return sum(tensor.bytes for group in self.groups for tensor in group) + self.scratch
