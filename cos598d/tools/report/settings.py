"""What runs have in common, what they differ in, and which of them make a series."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol, TypeVar

from cos598d.records.conventions import FLOOR
from cos598d.records.quantities import quantity
from cos598d.tools.report.disturbed import is_disturbed
from cos598d.tools.report.load import Run
from cos598d.tools.report.references import same_setting

# What need not be alike in runs of other numbers of ranks: a rank alone has other threads, and no network.
OF_THE_RANKS = frozenset(("ranks", "threads a rank", "ranks on a machine", "rate", "delay", "offload"))
SWEPT = ("examples a step", "rate", "delay")
# What an axis of a swept setting counts, and how much of it is 1.
UNITS = {
    "examples a step": ("examples a step", 1),
    "examples on each rank": ("examples on each rank", 1),
    "rate": ("Mbit/s", 1e6),
    "delay": ("delay in ms", 1e-3),
}

AnyRecord = TypeVar("AnyRecord", bound="HasSetting")


class HasSetting(Protocol):
    """A run's or a bench's, as far as its setting goes."""

    @property
    def facts(self) -> dict[str, Any]:
        """Its setting by the page's words."""


def differences(records: Sequence[HasSetting]) -> list[str]:
    """The words of the setting in which the records are not all alike."""
    found = [record.facts for record in records]
    return [word for word in found[0] if any(one[word] != found[0][word] for one in found)]


def comparable(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs with a mean, in groups that differ in nothing that the page knows of but the sync and its own options."""
    free = frozenset(("sync", "bucket MB", "compression", "bucket views", "steps between averages"))
    groups = alike_but_for([run for run in runs if run.seconds["mean"]], free)
    # Runs of other lengths are other work.
    planned = [[run.summary["step"].get("planned") for run in group] for group in groups]
    return [
        [run for run, own in zip(group, plans, strict=True) if own == plan]
        for group, plans in zip(groups, planned, strict=True)
        for plan in dict.fromkeys(plans)
    ]


def sweeps(runs: Sequence[Run]) -> dict[str, list[list[Run]]]:
    """For each of SWEPT the series of runs that differ in it alone, by its value; each of two values or more.

    Runs that were disturbed are left out.
    """
    counted = [
        run for run in runs if run.seconds["mean"] and run.summary["world_size"] > 1 and not is_disturbed(run.summary)
    ]
    found = {word: in_series(counted, word, frozenset()) for word in SWEPT}
    return {word: series for word, series in found.items() if series}


def scaling(runs: Sequence[Run]) -> list[tuple[Run, list[Run]]]:
    """Each sync's runs on several ranks, by their number, with the run of one rank that they are measured against."""
    alone = [run for run in runs if run.summary["world_size"] == 1 and run.seconds["mean"]]
    found: dict[tuple, tuple[Run, list[Run]]] = {}
    for run in runs:
        bases = [one for one in alone if _key(one, OF_THE_RANKS | {"sync"}) == _key(run, OF_THE_RANKS | {"sync"})]
        # Of several the one of the same length.
        base = next((one for one in bases if same_setting(run.summary, one.summary)), bases[0] if bases else None)
        if base is None or run.summary["world_size"] == 1 or not run.seconds["mean"] or run.summary["sync"] == FLOOR:
            continue
        # Runs over other links, or of another cast on the hosts, are series of their own.
        key = (base.name, *_key(run, frozenset(("ranks", "threads a rank", "ranks on a machine"))))
        found.setdefault(key, (base, []))[1].append(run)
    return [(base, sorted(series, key=lambda run: run.summary["world_size"])) for base, series in found.values()]


def value_in(record: HasSetting, word: str) -> float:
    """The setting of a record of a sweep, in what its axis counts."""
    return (swept_value(record, word) or 0.0) / UNITS[word][1]


def swept_value(record: HasSetting, word: str) -> float | None:
    """The number behind a setting: examples, bits a second, seconds."""
    return quantity(record.facts[word])


def alike_but_for(records: Sequence[AnyRecord], free: frozenset[str]) -> list[list[AnyRecord]]:
    """The records in groups that differ in nothing that the page knows of but in what is `free`."""
    groups: dict[tuple, list[AnyRecord]] = {}
    for record in records:
        groups.setdefault(_key(record, free), []).append(record)
    return list(groups.values())


def in_series(records: Sequence[AnyRecord], word: str, free: frozenset[str]) -> list[list[AnyRecord]]:
    """Records that differ in their `word`, and in what is `free`, alone, by its value; each of two values or more."""
    groups: dict[tuple, dict[float, AnyRecord]] = {}
    for record in records:
        value = swept_value(record, word)
        if value is not None:
            groups.setdefault(_key(record, free | {word}), {}).setdefault(value, record)
    return [[group[value] for value in sorted(group)] for group in groups.values() if len(group) > 1]


def series_name(series: Sequence[Run], all_series: Sequence[Sequence[Run]]) -> str:
    """The sync, and what else tells this series from the others of its figure."""
    own, found = series[0].facts, [one[0].facts for one in all_series]
    varies = set(differences(series)) | {"sync", "ranks", "threads a rank", "ranks on a machine"}
    words = [word for word in own if word not in varies and any(one[word] != own[word] for one in found)]
    return ", ".join([own["sync"], *(f"{word} {own[word]}" for word in words if own[word] is not None)])


def places_words(places: Sequence[Mapping[str, Any]]) -> str:
    """ "ranks 0-1 on n1 (cpu), rank 2 on n2 (cpu)": neighbours that share a node."""
    words, first = [], 0
    for node, group in groupby(places, key=lambda place: place.get("node")):
        devices = [str(place.get("device")) for place in group]
        last = first + len(devices) - 1
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        words.append(f"{ranks} on {node} ({', '.join(dict.fromkeys(devices))})")
        first = last + 1
    return ", ".join(words) or "-"


def _key(record: HasSetting, free: frozenset[str]) -> tuple:
    return tuple(str(value) for word, value in record.facts.items() if word not in free)
