"""Handed-in gradients compared with the right ones, tensor by tensor, up to rounding."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

# Rounding differs with the order of summation; a real mistake is orders of magnitude larger. Relative to the tensor's
# largest gradient on any rank.
TOLERANCE = 3e-6

Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Local:
    """The ranks' own gradients in a step: `parts[k][r]` is rank r's in its k-th micro-batch."""

    parts: Sequence[Sequence[Gradients]]

    @functools.cached_property
    def ranks(self) -> list[Gradients]:
        """Each rank's gradients, summed over its micro-batches."""
        return [functools.reduce(_add, of_rank) for of_rank in zip(*self.parts, strict=True)]

    @functools.cached_property
    def mean(self) -> Gradients:
        """The mean over ranks. Ranks without a gradient count as zero; if no rank has one it is None."""
        total = functools.reduce(_add, self.ranks)
        return {name: None if tensor is None else tensor / len(self.ranks) for name, tensor in total.items()}


@dataclass(frozen=True)
class Comparison:
    """The gradients at one moment, next to the right ones. `run` and `step` identify the moment.

    facts: what may distinguish this step from others of its run: a phrase, and whether it holds.
    """

    run: str
    step: int
    local: Local
    found: Sequence[Gradients]
    right: Gradients
    facts: Mapping[str, bool] = field(default_factory=dict)

    @functools.cached_property
    def wrong(self) -> list[list[str]]:
        """For each rank the names of the wrong tensors, in the model's order."""
        return [[name for name in self.right if self._is_wrong(rank, name)] for rank in range(len(self.found))]

    def off(self, rank: int, name: str) -> torch.Tensor:
        """Which elements of a tensor are wrong on a rank, bool (elements,), if there are found and right ones."""
        found, right = self.pair(rank, name)
        return ~((found - right).abs() <= TOLERANCE * self.scale(name)).flatten()

    def pair(self, rank: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A tensor's found and right values on a rank, in float64, if there is a gradient and should be one."""
        found, right = self.found[rank][name], self.right[name]
        if found is None or right is None:
            raise ValueError(f"{name} is None")
        return found.double(), right.double()

    def _is_wrong(self, rank: int, name: str) -> bool:
        found, right = self.found[rank][name], self.right[name]
        return found is not right if found is None or right is None else bool(self.off(rank, name).any())

    def scale(self, name: str) -> float:
        """The largest element of any rank's own gradient."""
        own = (gradients[name] for gradients in self.local.ranks)
        return max((gradient.abs().max().item() for gradient in own if gradient is not None), default=0.0)


def agrees(found: torch.Tensor | None, right: torch.Tensor | None, scale: float) -> bool:
    """Whether they are equal up to rounding at that scale. NaN is equal to nothing."""
    if found is None or right is None:
        return found is right
    return bool((found - right).abs().max() <= TOLERANCE * scale)


def difference(found: torch.Tensor | None, right: torch.Tensor | None) -> float:
    """The largest difference of an element; infinite if one of them is missing or not finite."""
    if found is None or right is None:
        return 0.0 if found is right else float("inf")
    worst = (found - right).abs().max().item()
    return worst if worst == worst else float("inf")  # noqa: PLR0124 - NaN


def _add(one: Gradients, other: Gradients) -> Gradients:
    def both(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
        return b if a is None else a if b is None else a + b

    return {name: both(tensor, other[name]) for name, tensor in one.items()}
