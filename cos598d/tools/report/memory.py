"""A rank's memory between steps and at the peak of one, by category: counted, by formula, and their difference."""

from collections.abc import Mapping, Sequence
from typing import Any

from cos598d.records.conventions import WITH_ACTIVATIONS
from cos598d.records.run import EXPECTED, MOMENTS, UNSAID, Summary
from cos598d.tools.report.numbers import megabytes

CATEGORIES = ("parameters", "gradients", "optimizer", "buckets")
WORDS = {"between_steps": "between steps", "peak": "at a step's peak"}
ACTIVATED = "at the peak with activations"
COUNTED_NOTE = (
    "MB of tensors on the rank that holds most, counted in one step of the warm-up. Off formula: how far the total is "
    "from what the strategy predicts for that rank, if a step uses every parameter. What it predicts has a row of its "
    "own only if it differs."
)


def memory_rows(runs: Sequence[Summary]) -> list[list[str]]:
    """A header and, for each run that counted its memory, the rows of `held_rows`; [] if none did."""
    known = [run for run in runs if set(MOMENTS) <= set(run.get("memory") or {})]
    activated = any(any(run["memory"].get(WITH_ACTIVATIONS, ())) for run in known)  # older records do not have it
    categories = (*CATEGORIES, *(["activations"] if activated else []))
    has_gpu = any(None not in run["memory"]["gpu_peak_bytes"] for run in known)
    rows = []
    for run in known:
        found = run["memory"]
        peaks = [megabytes(max(found["process_peak_bytes"]))]
        if has_gpu:
            peaks.append(megabytes(max((peak or 0 for peak in found["gpu_peak_bytes"]), default=0)))
        for cells in held_rows(found, categories):
            ends = peaks if cells[0] == WORDS["peak"] else ["-"] * len(peaks)
            rows.append([run["run"], *cells, *ends])
    head = ["run", *held_head(categories), "process's peak", *(["GPU's peak"] if has_gpu else [])]
    return [head, *rows] if rows else []


def memory_note(runs: Sequence[Summary]) -> str:
    """The meaning of those rows, and why a formula is missing."""
    reasons = unsaid({run["run"]: run["memory"] for run in runs if run.get("memory")})
    sentences = [COUNTED_NOTE, "Memory inside a library counts only in the process's peak."]
    return " ".join([*sentences, *(f"{reason}." for reason in reasons)])


def held_head(categories: Sequence[str] = CATEGORIES) -> tuple[str, ...]:
    """The columns of `held_rows`."""
    return ("held", *categories, "total", "off formula")


def held_rows(found: Mapping[str, Any], categories: Sequence[str] = CATEGORIES) -> list[list[str]]:
    """The columns of `held_head`: for each moment a row of what is counted, and one of the formula if that differs."""
    rows = []
    for moment, words in WORDS.items():
        rank = fullest(found[moment])
        held = found[moment][rank]
        if not held:
            continue
        expected = (found.get(EXPECTED[moment]) or {rank: None})[rank]
        cells = _cells(held, categories)
        rows.append([words, *cells, _apart(held, expected)])
        if expected and _cells(expected, categories) != cells:
            rows.append(["by formula", *_cells(expected, categories), ""])
    if "activations" in categories and any(activated := found.get(WITH_ACTIVATIONS, ())):
        rows.append([ACTIVATED, *_cells(activated[fullest(activated)], categories), "-"])
    return rows


def unsaid(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """For the memories of records, by name: why some formula is missing, each reason once."""
    names: dict[str, list[str]] = {}
    for name, found in records.items():
        for reason in dict.fromkeys(found.get(UNSAID, ())):
            if reason:
                names.setdefault(reason, []).append(name)
    return [f"A dash for {', '.join(those)}: {reason}" for reason, those in names.items()]


def fullest(by_rank: Sequence[Mapping[str, int]]) -> int:
    """The rank that holds most."""
    return max(range(len(by_rank)), key=lambda rank: sum(by_rank[rank].values()))


def _cells(held: Mapping[str, int], categories: Sequence[str]) -> list[str]:
    return [*(megabytes(held[name]) if name in held else "-" for name in categories), megabytes(sum(held.values()))]


def _apart(held: Mapping[str, int], expected: Mapping[str, int] | None) -> str:
    """By how much the counted bytes exceed the predicted ones, in the categories of the formula."""
    if not expected or not sum(expected.values()):
        return "-"
    more = round(sum(held[name] for name in expected if name in held) / sum(expected.values()) - 1, 3)
    return f"{more:+.1%}" if more else "0.0%"
