"""What a sweep measures of each combination, over its seeds: metrics, losses, an epoch's seconds, and speed-up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from cos598d.tools.report.disturbed import TOLERANCE, is_disturbed, most_speed_up
from cos598d.tools.report.load import Run, is_number
from cos598d.tools.report.numbers import plain, seconds
from cos598d.tools.report.strategies import epoch_seconds, last_loss, metrics_of
from cos598d.tools.report.sweep_entries import ALONE, LINKS, SETUP, SeedGroup

LOSS, SPEED_UP = "validation_loss", "speed-up"


class Spread(NamedTuple):
    """What a combination's seeds come to: their mean, the least and the most of them, and how many they are."""

    mean: float
    least: float
    most: float
    seeds: int

    def overlaps(self, other: "Spread") -> bool:
        """Whether the two ranges have a value in common."""
        return self.least <= other.most and other.least <= self.most


@dataclass(frozen=True)
class Measure:
    """One figure of a run. `by_seed` gives a combination's by seed, of those that have it; `words` writes one."""

    title: str
    by_seed: Callable[[SeedGroup], Mapping[int, float]]
    words: Callable[[float], str]
    is_better_high: bool = True
    begins_at_zero: bool = False

    def spread(self, one: SeedGroup) -> Spread | None:
        """Over the combination's seeds; None where none of them has it."""
        return spread_of(list(self.by_seed(one).values()))


def spread_of(values: Sequence[float]) -> Spread | None:
    """Mean, least and most; None of nothing."""
    return Spread(fmean(values), min(values), max(values), len(values)) if values else None


def metric_measures(combinations: Sequence[SeedGroup]) -> list[Measure]:
    """Of the last epoch: the task's metrics, the first of them the one that it is known by, and the validation loss."""
    names = dict.fromkeys(name for one in combinations for run in one.runs for name in metrics_of(run))
    return [_metric(name) for name in sorted(names, key=lambda name: name.startswith(LOSS))]


def training_loss() -> Measure:
    """Of the last whole epoch."""
    return Measure("training loss", lambda one: _by_seed(one, last_loss), _four, is_better_high=False)


def seconds_measure(with_disturbed: bool = False) -> Measure:
    """Of a whole epoch's training; of runs that were disturbed only where asked."""
    return Measure(
        "seconds an epoch",
        lambda one: _by_seed(one, epoch_seconds if with_disturbed else _own_seconds),
        seconds,
        is_better_high=False,
        begins_at_zero=True,
    )


def speed_up(combinations: Sequence[SeedGroup]) -> Measure:
    """The seconds of set-up 1x1, with the same other settings and the same seed, over a combination's own.

    Ratios with a run that was disturbed are left out, and those that are more than there is to gain.
    """

    def by_seed(one: SeedGroup) -> Mapping[int, float]:
        return {
            seed: ratio
            for seed, (_, _, ratio, most) in speed_ups(one, combinations).items()
            if ratio <= TOLERANCE * most
        }

    return Measure(SPEED_UP, by_seed, plain, begins_at_zero=True)


def speed_ups(one: SeedGroup, combinations: Sequence[SeedGroup]) -> dict[int, tuple[str, str, float, float]]:
    """By seed, as `impossible_remark` takes it, what `speed_up` is made of."""
    base = base_of(one, combinations)
    if base is None or base is one:
        return {}
    alone, bases = _by_seed(base, _own_seconds), {entry.seed: entry.run for entry in base.entries if entry.run}
    own, runs = _by_seed(one, _own_seconds), {entry.seed: entry.run for entry in one.entries if entry.run}
    return {
        seed: (
            *(runs[seed].name, bases[seed].name, alone[seed] / own[seed]),
            most_speed_up(runs[seed].summary, runs[seed].environment),
        )
        for seed in own
        if seed in alone
    }


def base_of(one: SeedGroup, combinations: Sequence[SeedGroup]) -> SeedGroup | None:
    """The combination of set-up 1x1 that has this one's other settings, but for the links that it has none of."""

    def others(settings: Mapping[str, str]) -> dict[str, str]:
        return {axis: word for axis, word in settings.items() if axis not in (SETUP, *LINKS)}

    alone = (found for found in combinations if found.settings.get(SETUP) == ALONE)
    return next((found for found in alone if others(found.settings) == others(one.settings)), None)


def _metric(name: str) -> Measure:
    return Measure(name, lambda one: _by_seed(one, _last(name)), _four, is_better_high=not name.startswith(LOSS))


def _last(name: str) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value = run.summary["epochs"][-1].get(name)
        return value if is_number(value) else None

    return read


def _by_seed(one: SeedGroup, read: Callable[[Run], float | None]) -> Mapping[int, float]:
    found = {entry.seed: read(entry.run) for entry in one.entries if entry.run}
    return {seed: value for seed, value in found.items() if value is not None}


def _own_seconds(run: Run) -> float | None:
    return None if is_disturbed(run.summary) else epoch_seconds(run)


def _four(value: float) -> str:
    return f"{value:.4f}"
