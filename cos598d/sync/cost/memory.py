"""What a sync keeps in memory from step to step, stated beforehand as its calls are."""

from collections.abc import Sequence
from dataclasses import dataclass

from cos598d.sync.cost import Tensor


@dataclass(frozen=True)
class Buffers:
    """The memory that a sync keeps beside the model's gradients.

    groups    for each buffer the tensors whose gradients it has a place for; none: gradients stay where they are
    at_once   whether a gradient moves to its place, and leaves no other behind, as soon as backward has computed it;
              else all are still there beside the buffers when backward ends
    scratch   bytes beside them
    unsaid    why nothing of this can be said beforehand, in words that follow "-"; "" where it is said
    """

    groups: Sequence[Sequence[Tensor]] = ()
    at_once: bool = False
    scratch: int = 0
    unsaid: str = ""

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(tensor.bytes for group in self.groups for tensor in group) + self.scratch
