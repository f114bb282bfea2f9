"""Whether two finished runs are equal, and otherwise the first place where they differ: for regression tests."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cos598d.records.conventions import NOT_METRICS
from cos598d.records.unfinished import read_summary
from cos598d.terminal.printable import printable
from cos598d.tools.report.records import Run, load_run, own_names

LOSSES, METRICS, TOTALS = PARTS = ("losses", "metrics", "totals")
# What is not compared of an epoch: seconds, and the bytes of the kernel's counters.
LEFT_OUT = (NOT_METRICS - {"loss", "iterations", "last_iteration"}).union(
    ("training",), (f"{kind}_bytes_{way}" for kind in ("counted", "predicted") for way in ("sent", "received"))
)
ABSENT = object()


def compare_equal(folders: Sequence[Path], within: float = 0.0, parts: Sequence[str] = PARTS) -> tuple[bool, str]:
    """Whether two runs are equal in the PARTS, and a sentence that says so, or where they first differ.

    losses: of every iteration. metrics: of every epoch, of the evaluations inside it, and its mean loss. totals: the
    iterations, and calls and bytes by purpose, on every rank. Losses and metrics may differ by `within`, totals not at
    all. Raises UserError for a record that cannot be read, or of a run that is not finished.
    """
    for folder in folders:
        read_summary(folder)
    first, second = (load_run(*place) for place in zip(folders, own_names(folders), strict=True))
    for part in parts:
        mine, theirs = (_part(run, part) for run in (first, second))
        for place, one, other in differences(mine, theirs, within * (part != TOTALS)):
            return False, f"not equal: {place} is {_shown(one)} in {first.name} and {_shown(other)} in {second.name}."
    how = f"equal within {within:g}" if within else "bit-identical"
    compared = f"{len(first.summary.losses)} iterations: {', '.join(parts)}"
    return True, f"{first.name} and {second.name} are {how} ({compared})."


def differences(mine: Any, theirs: Any, within: float = 0.0, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The differences of two JSON values, in order: the place as text, and both values, ABSENT for a missing one."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in mine | theirs:
            inside = f"{place}, {name}" if place else str(name)
            yield from differences(mine.get(name, ABSENT), theirs.get(name, ABSENT), within, inside)
    elif isinstance(mine, list) and isinstance(theirs, list):
        for number in range(max(len(mine), len(theirs))):
            one, other = (of[number] if number < len(of) else ABSENT for of in (mine, theirs))
            yield from differences(one, other, within, f"{place} {number + 1}")
    elif isinstance(mine, float | int) and isinstance(theirs, float | int):
        if not abs(mine - theirs) <= within:
            yield place, mine, theirs
    elif mine != theirs:
        yield place, mine, theirs


def _part(run: Run, part: str) -> dict[str, Any]:
    summary = run.summary
    if part == LOSSES:
        return {"the loss of iteration": summary.losses}
    if part == TOTALS:
        purposes = msgspec.to_builtins(summary.ledger.get("by_purpose", {}))
        own = {f"calls for {name}": sums for name, sums in purposes.items()}
        return {"the number of iterations": summary.iterations, **own}
    tables = {"epoch": summary.epochs, "the evaluation": summary.evaluations}
    return {
        place: [{name: value for name, value in row.items() if name not in LEFT_OUT} for row in rows]
        for place, rows in tables.items()
    }


def _shown(value: Any) -> str:
    return "not there" if value is ABSENT else printable(value, 60)
