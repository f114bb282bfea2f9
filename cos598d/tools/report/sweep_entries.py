"""A sweep's runs as one long table, a row for each run and figure; its points are groups of that table's rows."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cos598d.records.conventions import FINISHED
from cos598d.records.quantities import quantity
from cos598d.terminal.words import listed
from cos598d.tools.report.disturbed import TOLERANCE, most_speed_up
from cos598d.tools.report.epochs import epoch_seconds, last_loss, metrics_of
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import plain, seconds
from cos598d.tools.report.references import is_disturbed
from cos598d.tools.report.strategies import sent_bytes

if TYPE_CHECKING:
    from pandas import DataFrame

# Axes that are not flags of a run: examples on each rank, hosts x ranks on each, and the links between the hosts.
BATCH, SETUP, DELAY, RATE = "batch", "setup", "delay", "rate"
LINKS = (DELAY, RATE)
ALONE = "1x1"  # the set-up of one process
# Figures of a run in addition to its metrics. SECONDS exist only for runs that were not disturbed.
LOSS, TRAINING_LOSS, SECONDS, ALL_SECONDS = "validation_loss", "training loss", "seconds per epoch", "s/epoch"
SPEED_UP, SENT = "speed-up", "sent MB/it"
# The long table's own columns. An axis is a flag, in lower case.
ENTRY, SEED, METRIC, VALUE = "Entry", "Seed", "Metric", "Value"
OWN_COLUMNS = [ENTRY, SEED, METRIC, VALUE]


@dataclass(frozen=True)
class SweepEntry:
    """One run of a sweep: how it ended, one of OUTCOMES; its run if it is finished, otherwise its last message.

    `settings` has the value of each axis as the user wrote it, in the order of the axes, without the seed. An axis
    without effect on this run is not in it. `parallel` is how many runs were made at a time, including this one.
    """

    settings: Mapping[str, str]
    seed: int
    outcome: str = FINISHED
    said: str = ""
    run: Run | None = None
    parallel: int = 1

    @property
    def words(self) -> str:
        """ "batch 4, setup 2x2"."""
        return ", ".join(f"{axis} {word}" for axis, word in self.settings.items())


@dataclass(frozen=True)
class Point:
    """The results of one combination over its seeds: their mean, minimum and maximum, and their number."""

    settings: Mapping[str, str]
    mean: float
    least: float
    most: float
    seeds: int

    def overlaps(self, other: "Point") -> bool:
        """Whether the two ranges have a value in common."""
        return self.least <= other.most and other.least <= self.most

    def words(self, axes: Iterable[str]) -> str:
        """Its values of these axes: "batch 4 and setup 2x2"."""
        return listed([f"{axis} {self.settings[axis]}" for axis in axes if axis in self.settings])


@dataclass(frozen=True)
class Measure:
    """A figure of the long table, by its title, and how it is shown."""

    title: str

    @property
    def is_better_high(self) -> bool:
        """Whether a larger value is better."""
        return not self.title.startswith((LOSS, TRAINING_LOSS, SECONDS, ALL_SECONDS))

    @property
    def begins_at_zero(self) -> bool:
        """Whether its figures begin at zero."""
        return self.title in (SECONDS, SPEED_UP)

    def shown(self, value: float) -> str:
        """One of its values as text."""
        if self.title == SENT:
            return f"{value / 1e6:,.2f}"
        if self.title in (SECONDS, SPEED_UP, ALL_SECONDS):
            return seconds(value) if self.title == SECONDS else plain(value)
        return f"{value:.4f}"


def long_table(entries: Sequence[SweepEntry]) -> "DataFrame":
    """A row for each finished run and figure: the axes' values (missing if an axis has no effect on the run), the
    entry's index, its seed, and the figure's name and value. Metrics and losses are of the last epoch."""
    import pandas

    rows = []
    for place, entry in enumerate(entries):
        if entry.run is None:
            continue
        run = entry.run
        found = {name: run.summary["epochs"][-1][name] for name in metrics_of(run)}
        found |= {TRAINING_LOSS: last_loss(run), ALL_SECONDS: epoch_seconds(run), SENT: sent_bytes(run.summary)}
        found |= {} if is_disturbed(run.summary) else {SECONDS: epoch_seconds(run)}
        own = {**entry.settings, ENTRY: place, SEED: entry.seed}
        rows += [{**own, METRIC: name, VALUE: value} for name, value in found.items() if value is not None]
    axes = list(dict.fromkeys(axis for entry in entries for axis in entry.settings))
    table = pandas.DataFrame(rows, columns=[*axes, *OWN_COLUMNS])
    ratios = speed_ups(entries, table)
    possible = ratios[ratios["ratio"] <= TOLERANCE * ratios["most"]] if len(ratios) else ratios
    if possible.empty:
        return table
    named = possible.assign(**{METRIC: SPEED_UP, VALUE: possible["ratio"]})
    return pandas.concat([table, named[table.columns]], ignore_index=True)


def speed_ups(entries: Sequence[SweepEntry], table: "DataFrame") -> "DataFrame":
    """The seconds of set-up 1x1, with the same other settings and the same seed, divided by a run's own, as `ratio`;
    the entry of that run as `alone`, and the largest possible ratio as `most`."""
    timed = table[table[METRIC] == SECONDS]
    if SETUP not in table or timed.empty:
        return timed.iloc[:0].assign(ratio=[], alone=[], most=[])
    others = [axis for axis in table.columns if axis not in (SETUP, *LINKS, *OWN_COLUMNS)]
    alone = timed[timed[SETUP] == ALONE].rename(columns={VALUE: "bases", ENTRY: "alone"})
    found = timed[timed[SETUP] != ALONE].merge(alone[[*others, SEED, "bases", "alone"]], on=[*others, SEED])
    runs = [entries[place].run for place in found[ENTRY]]
    most = [most_speed_up(run.summary, run.environment) for run in runs if run]
    return found.assign(ratio=found["bases"] / found[VALUE], most=most)


def points_of(table: "DataFrame", measure: Measure) -> list[Point]:
    """The measure of each combination that has it, over its seeds, in the order of the table."""
    axes = [axis for axis in table.columns if axis not in OWN_COLUMNS]
    groups = table[table[METRIC] == measure.title].groupby(axes, sort=False, dropna=False)[VALUE]
    found = groups.agg(["mean", "min", "max", "count"]).reset_index()
    return [
        Point(_settings(row, axes), row["mean"], row["min"], row["max"], row["count"])
        for row in found.to_dict("records")
    ]


def metric_measures(table: "DataFrame") -> list[Measure]:
    """The task's metrics, the main one first, and the validation loss."""
    others = (TRAINING_LOSS, SECONDS, ALL_SECONDS, SENT, SPEED_UP)
    names = [name for name in dict.fromkeys(table[METRIC]) if name not in others]
    return [Measure(name) for name in sorted(names, key=lambda name: name.startswith(LOSS))]


def axes_of(settings: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    """The values of each axis: numbers sorted, words in the user's order."""
    found: dict[str, list[str]] = {}
    for one in settings:
        for axis, word in one.items():
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
    """A value as a number: "2e-5", "10ms" (seconds), "1gbit" (bits per second); None for a word."""
    try:
        number = float(word)
    except ValueError:
        return quantity(word)
    return number if math.isfinite(number) else None


def _settings(row: Mapping[str, object], axes: Sequence[str]) -> dict[str, str]:
    return {axis: word for axis in axes if isinstance(word := row[axis], str)}
