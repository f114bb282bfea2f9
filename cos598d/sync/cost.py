"""The calls of a step, which a sync lists once: its bytes and the cost model's input follow from that.

A sync's classmethod `calls(step)` lists the gradients' calls of one step, in order: which tensors are sent together, by
which collective, and among which ranks. This list is used by

    GradientSync.expected    for the exact calls and bytes of one rank, which tests compare with its ledger
    cos598d/cost/calls.py    for the load of each call on the links and the ranks of any number of hosts

What only an estimate needs is imported in the methods that compute it: to read or use a sync, you need none of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cos598d.sync.estimate import Load, Tensor
    from cos598d.sync.options import SyncOptions


class Collective:
    """How a call moves a payload among n ranks, n > 1. `op` is the library's function for it."""

    op: str

    def moved(self, payload: int, element_bytes: int, ranks: int, rank: int) -> tuple[int, int]:
        """The exact bytes that `rank` sends and receives for `payload` bytes. A root is rank 0."""
        from cos598d.comm.gloo import bytes_moved

        return bytes_moved(self.op, payload, ranks, rank)

    def load(self, payload: float, ranks: int, factor: float = 1.0) -> "Load":
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

    def load(self, payload: float, ranks: int, factor: float = 1.0) -> "Load":
        from cos598d.comm.gloo import ring_segments
        from cos598d.sync.estimate import Load

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
class Step:
    """What the calls of one step depend on.

    tensors   the trainable ones, in the model's order, all of them used
    options   the sync's
    hosts     the ranks of each host
    arrival   the tensors in the order in which backward computes their gradients
    touched   the share of a large embedding's rows that some rank looks up; None: not known before the step
    """

    tensors: Sequence["Tensor"]
    options: "SyncOptions"
    hosts: Sequence[Sequence[int]]
    arrival: Sequence["Tensor"]
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
    tensors: Sequence["Tensor"]
    members: Sequence[int] | None = None
    share: float = 1
    agreed: int = 0
    copied: float = 0

    @property
    def travelling(self) -> list["Tensor"]:
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


def __getattr__(name: str) -> Any:
    """The classes of `estimate`, for a file of your own that imports them from here, as it once had to."""
    from cos598d.sync import estimate

    if name in ("Buffers", "Cost", "Load", "Sizes", "Tensor"):
        return getattr(estimate, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
