"""The phases of an iteration, and examples a second by its clock and by the wall, which measuring sets apart."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from cos598d.records.conventions import CHECKPOINT, PHASES
from cos598d.records.run import Summary
from cos598d.tools.report.repeats import members

SPEED_NOTE = (
    "examples/s: by the clocks of rank 0's iterations, and by the wall, with recording between them; no warm-up."
)


def phases_of(runs: Sequence[Summary]) -> list[str]:
    """The phases to show of these runs: that of checkpoints where one of them has written any."""
    has_saved = any(run["phases"][f"seconds_{CHECKPOINT}"] for run in runs)
    return [phase for phase in PHASES if phase != CHECKPOINT or has_saved]


def speed_rows(runs: Sequence[Summary]) -> list[list[str]]:
    """A head and a row for each run whose record says it; nothing where none does, as older ones do not."""
    rows = []
    for run in runs:
        found = [one.get("wall") or {} for one in members(run)]
        values = [_mean([one.get(f"examples_per_second_{of}") for one in found]) for of in ("clock", "wall")]
        share = _mean([one.get("share_off_the_clock") for one in found])
        if None not in (*values, share):
            rows.append([run["run"], *(f"{value:.4g}" for value in values), f"{share:.1%}"])
    return [["run", "examples/s", "by the wall", "off the clock"], *rows] if rows else []


def _mean(values: Sequence[Any]) -> float | None:
    return None if any(not isinstance(value, int | float) for value in values) else fmean(values)
