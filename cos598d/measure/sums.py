"""Exact means of whole numbers over a run's iterations, flat in memory, that go on where they were saved."""

from collections.abc import Mapping
from typing import Any

from cos598d.records.conventions import WARM_UP


class ExactMeans:
    """Sums by name over the iterations, those of the warm-up apart: means leave it out where there is more."""

    def __init__(self) -> None:
        # Of the warm-up and of what follows: how many iterations, and what each name adds up to.
        self._counts = [0, 0]
        self._sums: list[dict[str, int]] = [{}, {}]

    def count(self, iteration: int) -> None:
        """One more iteration is over."""
        self._counts[iteration > WARM_UP] += 1

    def add(self, iteration: int, values: Mapping[str, int]) -> None:
        """Something of this iteration, which may be added to it in parts, and after it is over."""
        sums = self._sums[iteration > WARM_UP]
        for name, value in values.items():
            sums[name] = sums.get(name, 0) + value

    def mean(self, name: str) -> float | int | None:
        """The mean of `name`, where an iteration without it counts as 0; whole where it comes out even. None of no
        iterations."""
        later = self._counts[1] > 0
        if not self._counts[later]:
            return None
        total, count = self._sums[later].get(name, 0), self._counts[later]
        return total / count if total % count else total // count

    def position(self) -> list[Any]:
        """The sums so far (JSON), for `resume`."""
        return [list(self._counts), [dict(sums) for sums in self._sums]]

    def resume(self, position: list[Any]) -> None:
        """Go on from there."""
        counts, sums = position
        self._counts, self._sums = list(counts), [dict(of) for of in sums]
