"""What records have in common, in what they differ, and which of them form a series."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from cos598d.records.conventions import FLOOR
from cos598d.records.quantities import quantity
from cos598d.tools.report.load import Run
from cos598d.tools.report.references import same_setting

# May differ between runs of different numbers of ranks: a single rank has other threads, and no network.
OF_THE_RANKS = frozenset(("ranks", "threads per rank", "ranks per machine", "rate", "delay", "offload"))
# The unit of an axis of a swept setting, and the factor to it.
UNITS = {
    "examples per step": ("examples per step", 1),
    "examples on each rank": ("examples on each rank", 1),
    "rate": ("Mbit/s", 1e6),
    "delay": ("delay in ms", 1e-3),
}

AnyRecord = TypeVar("AnyRecord", bound="HasSetting")


class HasSetting(Protocol):
    """The part of a run or bench that has its setting."""

    @property
    def facts(self) -> dict[str, Any]:
        """Its setting, by the page's names."""


def differences(records: Sequence[HasSetting]) -> list[str]:
    """The names of the settings in which the records differ."""
    found = [record.facts for record in records]
    return [word for word in found[0] if any(one[word] != found[0][word] for one in found)]


def alike_but_for(records: Sequence[AnyRecord], free: frozenset[str]) -> list[list[AnyRecord]]:
    """The records in groups that differ only in the `free` settings."""
    import pandas

    if not records:
        return []
    facts = [{word: str(value) for word, value in record.facts.items() if word not in free} for record in records]
    groups = pandas.DataFrame(facts).groupby(list(facts[0]), sort=False)
    return [[records[place] for place in group.index] for _, group in groups]


def comparable(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs with a mean, in groups that differ only in the sync and its own options."""
    free = frozenset(("sync", "bucket MB", "compression", "bucket views", "steps between averages"))
    found = []
    for group in alike_but_for([run for run in runs if run.seconds["mean"]], free):
        # Runs of different lengths are different work.
        plans = [run.summary["step"].get("planned") for run in group]
        found += [[run for run, own in zip(group, plans) if own == plan] for plan in dict.fromkeys(plans)]
    return found


def in_series(
    records: Sequence[AnyRecord], words: Sequence[str], free: frozenset[str] = frozenset()
) -> dict[str, list[list[AnyRecord]]]:
    """For each setting in `words`, the series of records that differ only in it and in the `free` ones, ordered by its
    value; each of at least two values."""
    found: dict[str, list[list[AnyRecord]]] = {}
    for word in words:
        for group in alike_but_for([one for one in records if quantity(one.facts[word]) is not None], free | {word}):
            by_value = {value_in(record, word): record for record in reversed(group)}
            if len(by_value) > 1:
                found.setdefault(word, []).append([by_value[value] for value in sorted(by_value)])
    return found


def scaling(runs: Sequence[Run]) -> list[tuple[Run, list[Run]]]:
    """Each sync's runs on several ranks, by their number, with the run of one rank as the baseline."""
    found: dict[str, tuple[Run, list[Run]]] = {}
    for group in alike_but_for([run for run in runs if run.seconds["mean"]], OF_THE_RANKS | {"sync"}):
        alone = [run for run in group if run.summary["world_size"] == 1]
        for run in group if alone else []:
            if run.summary["world_size"] > 1 and run.summary["sync"] != FLOOR:
                # Of several, the one with the same length.
                base = next((one for one in alone if same_setting(run.summary, one.summary)), alone[0])
                found.setdefault(base.name, (base, []))[1].append(run)
    # Runs over other links, or with ranks placed otherwise on the hosts, are separate series.
    ranks = frozenset(("ranks", "threads per rank", "ranks per machine"))
    return [
        (base, sorted(series, key=lambda run: run.summary["world_size"]))
        for base, of_base in found.values()
        for series in alike_but_for(of_base, ranks)
    ]


def value_in(record: HasSetting, word: str) -> float:
    """The setting of a record of a sweep, in its axis' unit."""
    return (quantity(record.facts[word]) or 0.0) / UNITS[word][1]
