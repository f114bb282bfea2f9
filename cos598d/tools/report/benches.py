"""The bench's records on the page: candidates measured side by side, and sweeps of benches that differ in one thing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.records.bench import read_record
from cos598d.records.conventions import DDP, FLOOR, FLOORS
from cos598d.records.facts import OF_BENCHES, collect
from cos598d.terminal.printable import printable
from cos598d.tools.report.bench_table import (
    SPARSE_FLOOR_NOTE,
    best_capacity,
    candidate_rows,
    capacity_rows,
    disturbance,
    has_sparse_floor,
    memory_note,
    memory_rows,
    message_fit,
    message_rows,
    other_averages,
    remarks,
    seconds_of,
)
from cos598d.tools.report.bytes_from import is_in_ledger
from cos598d.tools.report.settings import in_series

SWEPT = ("examples on each rank", "rate", "delay")


@dataclass(frozen=True)
class CandidateSeconds:
    """A candidate's seconds: the median and its quartiles, those not hidden, and the ratio to DDP with its interval."""

    label: str
    seconds: float
    quartiles: tuple[float, float]
    exposed: float | None
    ratio: float | None
    interval: tuple[float, float] | None
    bytes_sent: float | None  # by the rank that sends most; None where a library tells nobody
    is_same_work: bool  # its gradient is DDP's average, as far as the record can tell


@dataclass(frozen=True)
class Bench:
    """What the page needs of one bench. `tables`: a note and its rows, in the order of the page."""

    name: str
    facts: dict[str, Any]
    environment: dict[str, Any]
    candidates: tuple[CandidateSeconds, ...]
    tables: tuple[tuple[str, list[list[str]]], ...]
    remarks: tuple[str, ...]
    is_disturbed: bool  # by other programs on its machine
    has_norms: bool  # of the averaged gradients, so that they could be compared with DDP's

    def measured(self, label: str) -> CandidateSeconds:
        """The candidate of this label, which was measured."""
        return next(one for one in self.candidates if one.label == label)

    def candidate(self, label: str) -> CandidateSeconds | None:
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
    # Before there were others, a bench computed in fp32.
    setting = {"precision": "fp32"} | found["setting"] | {"seconds_of": seconds_of(found)}
    places = {"setting": setting, "network": environment.get("network") or {}, "environment": environment}
    facts = collect(OF_BENCHES, places)
    candidates = found["candidates"]
    tables = []
    if "message_size" in found:
        tables.append((f"Messages: {message_fit(found['message_size'])}.", message_rows(found["message_size"])))
    if candidates:
        note = f"Seconds {seconds_of(found)}, medians over the rounds. Ratios: medians of those within each round, and "
        note += "their 95 % intervals. Exposed: the median less that of none, and the 95 % interval of the differences "
        note += "within each round. MB: of the rank that sends most."
        note += f" {SPARSE_FLOOR_NOTE}" if has_sparse_floor(found) else ""
        tables.append((note, candidate_rows(found)))
    if "memory" in found:
        tables.append((memory_note(found), memory_rows(found)))
    if "bucket_mb" in found:
        tables.append((f"Capacities of buckets: {best_capacity(found)}.", capacity_rows(found)))
    return Bench(
        name,
        facts,
        environment,
        tuple(_candidate(candidate, found) for candidate in candidates),
        tuple(tables),
        tuple(remarks(found)),
        bool(disturbance(found)),
        other_averages(found) is not None,
    )


def _candidate(candidate: dict[str, Any], found: dict[str, Any]) -> CandidateSeconds:
    label = candidate["label"]
    summary, labels = found["summary"][label], {candidate["label"] for candidate in found["candidates"]}
    for figure, reference in (("seconds_exposed", FLOOR), ("ratio_to_ddp", DDP)):
        if (summary[figure] is None) == (reference in labels):
            raise ValueError(f"{label} has no {figure}, or {reference} was not measured")
    ratio = summary["ratio_to_ddp"] or {"median": None, "interval_95": None}
    interval = ratio["interval_95"]
    low, high = summary["seconds_quartiles"]
    return CandidateSeconds(
        printable(label),
        summary["seconds_median"],
        (low, high),
        summary["seconds_exposed"],
        None if label == DDP else ratio["median"],
        None if label == DDP or interval is None else (interval[0], interval[1]),
        max(found["traffic"][label]["bytes_sent"]) if is_in_ledger(candidate) else None,
        label not in (other_averages(found) or ()),
    )


def sweeps(benches: Sequence[Bench]) -> dict[str, list[list[Bench]]]:
    """For each of SWEPT the series of benches with DDP that differ in it alone, but for their rounds."""
    with_ddp = [bench for bench in benches if bench.candidate(DDP)]
    found = {word: in_series(with_ddp, word, frozenset(("rounds",))) for word in SWEPT}
    return {word: series for word, series in found.items() if series}


def common_labels(series: Sequence[Bench]) -> list[str]:
    """The candidates that every bench of a series has, but for DDP and the floor, slowest first."""
    return [
        one.label
        for one in sorted(series[0].candidates, key=lambda one: -one.seconds)
        if one.label not in (*FLOORS, DDP) and all(bench.candidate(one.label) for bench in series)
    ]
