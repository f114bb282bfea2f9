"""Means over a run's iterations, in constant memory, that go on where they were saved; exact for whole numbers."""

from collections.abc import Mapping
from typing import Any

from cos598d.records.conventions import WARM_UP


class IterationMeans:
    """Sums by name over the iterations, those of the warm-up apart.

    Seconds are told without the warm-up, where there is more. Bytes are told of all iterations: a sync may send a
    step's weights in the next step, and then a mean without an epoch's first step has more than one step sends.
    """

    def __init__(self) -> None:
        # Of the warm-up and of what follows: how many iterations, and what each name adds up to.
        self._counts = [0, 0]
        self._sums: list[dict[str, float]] = [{}, {}]

    def count(self, iteration: int) -> None:
        """One more iteration is over."""
        self._counts[iteration > WARM_UP] += 1

    def add(self, iteration: int, values: Mapping[str, float]) -> None:
        """Something of this iteration, which may be added to it in parts, and after it is over."""
        sums = self._sums[iteration > WARM_UP]
        for name, value in values.items():
            sums[name] = sums.get(name, 0) + value

    def mean(self, name: str) -> float | int | None:
        """The mean of `name` over all iterations; one without it counts as 0. A whole number where the division has no
        remainder. None of no iterations."""
        return _mean(sum(sums.get(name, 0) for sums in self._sums), sum(self._counts))

    def mean_after_warm_up(self, name: str) -> float | int | None:
        """As `mean`, without the warm-up where iterations follow it."""
        later = self._counts[1] > 0
        return _mean(self._sums[later].get(name, 0), self._counts[later])

    def position(self) -> list[Any]:
        """The sums so far (JSON), for `resume`."""
        return [list(self._counts), [dict(sums) for sums in self._sums]]

    def resume(self, position: list[Any]) -> None:
        """Go on from there."""
        counts, sums = position
        self._counts, self._sums = list(counts), [dict(of) for of in sums]


def _mean(total: float, count: int) -> float | int | None:
    if not count:
        return None
    return total / count if total % count else total // count
