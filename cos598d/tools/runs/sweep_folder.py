"""A sweep's folder: its axes and seeds, and its runs as entries of the table and the page."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError, UserError
from cos598d.records.conventions import BROKEN_OFF, FAILED, LEFT_OUT
from cos598d.records.kinds import COUNT, TEXT, Fields, ListOf, MapOf, OrNone
from cos598d.records.quantities import delay_words, rate_words
from cos598d.records.schema import read
from cos598d.terminal.printable import printable
from cos598d.tools.report.load import AnotherRun, Run
from cos598d.tools.report.sweep_entries import DELAY, RATE, SweepEntry
from cos598d.tools.runs.folder import FLAGS, ROW, AskedFolder, asked_of
from cos598d.tools.runs.plan import combine
from cos598d.tools.runs.planned import PlannedRun

MOST_RUNS = 100_000  # of one sweep; a state with more was not written by one
NOT_BEGUN = "it has not been run yet."


class SweepFolder(AskedFolder):
    """The runs of a sweep. `asked` is the call's request as JSON: the values of `kinds`."""

    what = "sweep"
    kinds = {
        "axes": MapOf(ListOf(TEXT, least=1)),
        "seeds": ListOf(COUNT, least=1),
        "flags": FLAGS,
        "rate": TEXT,
        "launch": OrNone(TEXT),
    }
    rows_name = "combinations"

    def run_of(self, one: PlannedRun) -> Run | None:
        """The run, if its record exists. Raises UserError for a damaged one, and AnotherRun."""
        found = super().run_of(one)
        if found:
            self._check_ground(found, one)
        return found

    def entries(self, runs: Iterable[PlannedRun]) -> list[SweepEntry]:
        """The entries of the table and the page, in the order of the runs."""
        return [self._entry(one) for one in runs]

    def _entry(self, one: PlannedRun) -> SweepEntry:
        if one.place in self.rows:
            outcome, said, run = self.outcome(one.place, asked_of(one))
            try:
                if run:
                    self._check_ground(run, one)
            except UserError as error:
                outcome, said, run = FAILED, str(error), None
            return SweepEntry(one.settings, one.seed, outcome, said, run, self.rows[one.place].get("parallel") or 1)
        if one.refused:
            return SweepEntry(one.settings, one.seed, LEFT_OUT, one.refused)
        return SweepEntry(one.settings, one.seed, BROKEN_OFF, NOT_BEGUN)

    def _check_ground(self, run: Run, one: PlannedRun) -> None:
        """Raise AnotherRun for a record of other hosts, or of other links, than the run should have.

        If the user's own template has started the ranks, only axes define what the links should be.
        """
        is_launched = self.asked["launch"] is not None
        network = run.environment.get("network") or {}
        found: dict[str, Any] = {"ranks_on_host": _most_on_a_node(run.environment), **network}
        asked: dict[str, Any] = {}
        if "hosts" not in found:
            asked["ranks_on_host"] = one.setup.ranks_per_host
        elif one.setup.hosts > 1 or is_launched:  # emulated hosts are on one machine, which has all ranks
            asked["hosts"] = one.setup.hosts
        if "hosts" in found and one.setup.hosts > 1:
            links = {RATE: rate_words(one.rate), DELAY: delay_words(one.delay)}
            asked |= {name: words for name, words in links.items() if name in one.settings or not is_launched}
        for name, value in asked.items():
            if found.get(name) != value:
                raise AnotherRun(
                    f"{self.path / one.place} is another run: its {name} is {printable(found.get(name), 60)} and "
                    f"should be {value}, for set-up {one.setup}"
                )


def read_sweep(path: Path) -> list[SweepEntry]:
    """The entries of the sweep in a folder, from its state only. Raises UserError for a damaged state."""
    remedy, state = "Start the sweep again", path / "sweep.json"
    found = read(state, Fields({**SweepFolder.kinds, SweepFolder.rows_name: MapOf(ROW)}), remedy)
    if math.prod([len(found["seeds"]), *map(len, found["axes"].values())]) > MOST_RUNS:
        raise UserError(f"{state} asks for more than {MOST_RUNS:,} runs, so it is damaged. {remedy}.")
    try:
        runs = combine(found["axes"], found["flags"], found["seeds"], found["rate"])
    except (UsageError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{state} is of no sweep that can be ({printable(error, 200)}). {remedy}.") from None
    return SweepFolder(path, found).entries(runs)


def _most_on_a_node(environment: Mapping[str, Any]) -> int:
    """The number of ranks on the node with most of them, by SLURM's names if any; in older records rank 0's."""
    places = environment.get("places")
    if not isinstance(places, list) or not all(isinstance(place, dict) for place in places) or not places:
        return environment["ranks_on_host"]
    return max(Counter(str(place.get("node")) for place in places).values())
