"""What a sweep's table and page are made of: an entry for each run, of one combination of values and one seed."""

from collections.abc import Mapping
from dataclasses import dataclass

from cos598d.records.conventions import FINISHED
from cos598d.report.load import Run


@dataclass(frozen=True)
class SweepEntry:
    """One run of a sweep: how it ended, one of OUTCOMES; its run if it is finished, else what was said of it.

    `settings` has the value of each axis as the user wrote it, in the order of the axes, without the seed.
    """

    settings: Mapping[str, str]
    seed: int
    outcome: str = FINISHED
    said: str = ""
    run: Run | None = None
