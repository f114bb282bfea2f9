"""The figures of an estimate: tensors as they are sent, a step's cost, a call's load, and the memory of buffers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Sizes = Sequence[tuple[int, int]]  # elements and bytes per element of each tensor


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
class Cost:
    """Calls and bytes of one rank in one step; `calls` is None if a library chooses how many."""

    calls: int | None
    bytes_sent: int
    bytes_received: int


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
