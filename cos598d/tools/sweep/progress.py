"""How long a sweep will still take, from the runs that have ended."""

from collections.abc import Sequence
from statistics import fmean

from cos598d.tools.sweep.plan import Combination


class Progress:
    """The seconds that runs took, and those that the others will take.

    A run takes as long as the mean of those that have ended: with the same settings, else with the same set-up, else of
    all.
    """

    def __init__(self, parallel: int):
        self._parallel = parallel
        self._known: list[tuple[Combination, float]] = []

    def add(self, one: Combination, seconds: float) -> None:
        """A run has ended well, after so many seconds in all."""
        self._known.append((one, seconds))

    def left(self, others: Sequence[Combination]) -> float | None:
        """Seconds until these runs, too, have ended; None where none has ended so far."""
        if not self._known:
            return None
        return sum(self._expected(one) for one in others) / min(self._parallel, max(1, len(others)))

    def _expected(self, one: Combination) -> float:
        alike = [known for known in self._known if known[0].settings == one.settings]
        near = alike or [known for known in self._known if known[0].setup == one.setup] or self._known
        return fmean(seconds for _, seconds in near)


def seconds_words(seconds: float) -> str:
    """A duration to read: "40 s", "12 min", "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
