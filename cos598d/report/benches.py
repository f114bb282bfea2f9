"""The bench's records on the page: candidates measured side by side, and sweeps of benches that differ in one thing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cos598d.bench.record import read_record
from cos598d.bench.table import best_capacity, candidate_rows, capacity_rows, message_fit, message_rows, remarks
from cos598d.errors import UserError
from cos598d.report.load import is_number, printable
from cos598d.report.units import quantity

FLOOR, DDP = "none", "ddp"
# Word for the page, and where the value is: in the record's setting, its network or its environment.
FACTS = (
    ("ranks", "setting", "world_size"),
    ("rate", "network", "rate"),
    ("delay", "network", "delay"),
    ("offload", "network", "offload"),
    ("examples on each rank", "setting", "batch"),
    ("tokens", "setting", "tokens"),
    ("model", "setting", "model"),
    ("with the optimizer", "setting", "step"),
    ("backend", "setting", "backend"),
    ("device", "environment", "device"),
    ("processor", "environment", "processor"),
    ("cores", "environment", "cores"),
    ("threads a rank", "setting", "threads_per_rank"),
    ("ranks on a machine", "environment", "ranks_on_host"),
    ("rounds", "setting", "rounds"),
)
SWEPT = ("examples on each rank", "rate", "delay")


@dataclass(frozen=True)
class Candidate:
    """A candidate's seconds: the median and its quartiles, those not hidden, and the ratio to DDP with its interval."""

    label: str
    seconds: float
    quartiles: tuple[float, float]
    exposed: float | None
    ratio: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Bench:
    """What the page needs of one bench. `tables`: a note and its rows, in the order of the page."""

    name: str
    facts: dict[str, Any]
    environment: dict[str, Any]
    candidates: tuple[Candidate, ...]
    tables: tuple[tuple[str, list[list[str]]], ...]
    remarks: tuple[str, ...]

    def candidate(self, label: str) -> Candidate | None:
        """The candidate of this label, if it was measured."""
        return next((one for one in self.candidates if one.label == label), None)


def load_bench(path: Path, name: str) -> Bench:
    """The bench in a folder or its file. Raises UserError naming the file that cannot be read."""
    file, found = read_record(path)
    try:
        return _bench(name, found)
    except (KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__} {error}): measure again.") from None


def _bench(name: str, found: dict[str, Any]) -> Bench:
    environment = found["environment"]
    places = {"setting": found["setting"], "network": environment.get("network") or {}, "environment": environment}
    facts = {word: places[place].get(key) for word, place, key in FACTS}
    if not all(value is None or isinstance(value, str) or is_number(float(value)) for value in facts.values()):
        raise ValueError("a fact of its setting is no number")
    candidates = found["candidates"]
    labels = {candidate["label"] for candidate in candidates}
    tables = []
    if "message_size" in found:
        tables.append((f"Messages: {message_fit(found['message_size'])}.", message_rows(found["message_size"])))
    if candidates:
        note = "Seconds of the slowest rank, medians over the rounds. Ratios: medians of those within each round, and "
        note += "their 95 % intervals. Exposed: the median less that of none. MB: of the rank that sends most."
        tables.append((note, candidate_rows(found)))
    if "bucket_mb" in found:
        tables.append((f"Capacities of buckets: {best_capacity(found)}.", capacity_rows(found)))
    return Bench(
        name,
        facts,
        environment,
        tuple(_candidate(candidate["label"], labels, found["summary"]) for candidate in candidates),
        tuple(tables),
        tuple(remarks(found)),
    )


def _candidate(label: str, labels: set[str], summaries: dict[str, Any]) -> Candidate:
    summary = summaries[label]
    for figure, reference in (("seconds_exposed", FLOOR), ("ratio_to_ddp", DDP)):
        if (summary[figure] is None) == (reference in labels):
            raise ValueError(f"{label} has no {figure}, or {reference} was not measured")
    ratio = summary["ratio_to_ddp"] or {"median": None, "interval_95": None}
    interval = ratio["interval_95"]
    numbers = [summary["seconds_median"], *summary["seconds_quartiles"], *(interval or [])]
    numbers += [value for value in (summary["seconds_exposed"], ratio["median"]) if value is not None]
    least = min(summary["seconds_median"], 1.0 if ratio["median"] is None else ratio["median"])
    if not all(map(is_number, numbers)) or least <= 0:
        raise ValueError(f"{label} has figures that no measurement can have")
    low, high = summary["seconds_quartiles"]
    return Candidate(
        printable(label),
        summary["seconds_median"],
        (low, high),
        summary["seconds_exposed"],
        None if label == DDP else ratio["median"],
        None if label == DDP or interval is None else (interval[0], interval[1]),
    )


def differences(benches: Sequence[Bench]) -> list[str]:
    """The words of the setting in which the benches are not all alike."""
    return [word for word, *_ in FACTS if any(bench.facts[word] != benches[0].facts[word] for bench in benches)]


def sweeps(benches: Sequence[Bench]) -> dict[str, list[list[Bench]]]:
    """For each of SWEPT the series of benches that differ in it alone (and their rounds), each of two or more."""
    found = {}
    for word in SWEPT:
        groups: dict[tuple, dict[float, Bench]] = {}
        for bench in benches:
            value = swept_value(bench, word)
            if value is not None and bench.candidate(DDP):
                key = tuple(str(fact) for other, fact in bench.facts.items() if other not in (word, "rounds"))
                groups.setdefault(key, {}).setdefault(value, bench)
        series = [[group[value] for value in sorted(group)] for group in groups.values() if len(group) > 1]
        if series:
            found[word] = series
    return found


def swept_value(bench: Bench, word: str) -> float | None:
    """The number behind a setting: examples, bits a second, seconds."""
    return quantity(bench.facts[word])


def common_labels(series: Sequence[Bench]) -> list[str]:
    """The candidates that every bench of a series has, but for DDP and the floor, slowest first."""
    return [
        one.label
        for one in sorted(series[0].candidates, key=lambda one: -one.seconds)
        if one.label not in (FLOOR, DDP) and all(bench.candidate(one.label) for bench in series)
    ]
