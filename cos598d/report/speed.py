"""Examples a second by the clock of the iterations and by the wall, whose difference is what measuring costs."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from cos598d.records.run import Summary
from cos598d.report.repeats import members

SPEED_NOTE = (
    "examples/s: by the clocks of rank 0's iterations, and by the wall, with recording between them; no warm-up."
)


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
