"""A sweep's runs as its table and page take them: by combinations of the axes' values, each with one run a seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cos598d.records.conventions import FINISHED
from cos598d.records.quantities import quantity
from cos598d.terminal.words import listed
from cos598d.tools.report.load import Run

# Axes that are no flags of a run: examples on each rank, hosts x ranks on each, and the links between the hosts.
BATCH, SETUP, DELAY, RATE = "batch", "setup", "delay", "rate"
LINKS = (DELAY, RATE)
ALONE = "1x1"  # the set-up of one process


@dataclass(frozen=True)
class SweepEntry:
    """One run of a sweep: how it ended, one of OUTCOMES; its run if it is finished, else what was said of it.

    `settings` has the value of each axis as the user wrote it, in the order of the axes, without the seed. An axis that
    means nothing to this run is not in it. `parallel` is how many runs were made at a time with it, itself included.
    """

    settings: Mapping[str, str]
    seed: int
    outcome: str = FINISHED
    said: str = ""
    run: Run | None = None
    parallel: int = 1


@dataclass(frozen=True)
class SeedGroup:
    """The entries that differ in their seeds alone."""

    settings: Mapping[str, str]
    entries: Sequence[SweepEntry]

    @property
    def runs(self) -> list[Run]:
        """Those that are finished."""
        return [entry.run for entry in self.entries if entry.run]

    def words(self, axes: Sequence[str]) -> str:
        """Its values of these axes: "batch 4 and setup 2x2"."""
        return listed([f"{axis} {self.settings[axis]}" for axis in axes if axis in self.settings])


def combinations_of(entries: Sequence[SweepEntry]) -> list[SeedGroup]:
    """The entries by their settings, in the order of the first of each."""
    found: dict[tuple, list[SweepEntry]] = {}
    for entry in entries:
        found.setdefault(tuple(entry.settings.items()), []).append(entry)
    return [SeedGroup(group[0].settings, group) for group in found.values()]


def axes_of(combinations: Sequence[SeedGroup]) -> dict[str, list[str]]:
    """The values of each axis: numbers in their order, words in the user's."""
    found: dict[str, list[str]] = {}
    for one in combinations:
        for axis, word in one.settings.items():
            if word not in found.setdefault(axis, []):
                found[axis].append(word)
    for words in found.values():
        numbers = {word: number_behind(word) for word in words}
        if None not in numbers.values():
            words.sort(key=lambda word: numbers[word] or 0.0)
    return found


def varying(axes: Mapping[str, Sequence[str]]) -> list[str]:
    """The axes that have more than one value."""
    return [axis for axis, words in axes.items() if len(words) > 1]


def number_behind(word: str) -> float | None:
    """The number that a value is: of "2e-5", "10ms" (seconds), "1gbit" (bits a second); None of a word."""
    try:
        number = float(word)
    except ValueError:
        return quantity(word)
    return number if math.isfinite(number) else None
