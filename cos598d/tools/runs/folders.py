"""The folders of a sweep and of a table of strategies, and their runs as entries of a table and a page."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cos598d.config import SYNC_FIELDS, config_from
from cos598d.errors import UsageError, UserError
from cos598d.records.conventions import BROKEN_OFF, FAILED, LEFT_OUT
from cos598d.records.kinds import COUNT, POSITIVE, SIZE, TEXT, Fields, ListOf, MapOf, OrNone
from cos598d.records.old_schema import read
from cos598d.records.quantities import delay_words, rate_words
from cos598d.records.run import CONFIG, RANKS, REMEDY, read_object
from cos598d.terminal.printable import printable
from cos598d.tools.report.load import AnotherRun, Run
from cos598d.tools.report.references import PLACES
from cos598d.tools.report.strategies import ALL_GPUS, BASELINE, StrategyResult
from cos598d.tools.report.sweep_entries import DELAY, RATE, SweepEntry
from cos598d.tools.runs.folder import ENDED, FLAGS, ROW, AskedFolder, RunsFolder, asked_of
from cos598d.tools.runs.plan import PlannedRun, combine

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


ONE_PROCESS = (BASELINE, ALL_GPUS)
STRATEGY_ROW = Fields({"label": TEXT, "ranks": RANKS, "epochs": POSITIVE, **ENDED}, {"parallel": OrNone(SIZE)})
# The settings in which a run of the table may differ.
OWN = PLACES | {"label", "sync", "num_train_epochs", "save_model", "save_epochs", *SYNC_FIELDS}


class StrategiesFolder(RunsFolder):
    """The runs of a table, including those of earlier calls. `damage`: what is wrong with an earlier call's state."""

    state_file = "strategies.json"

    def __init__(self, path: Path):
        super().__init__(path)
        self.damage = ""
        try:
            self.rows = read(path / self.state_file, MapOf(STRATEGY_ROW), REMEDY)
        except FileNotFoundError:
            if any(path.iterdir()):
                raise UserError(
                    f"--runs_dir {path} is not empty and has no table of strategies. Choose another folder."
                ) from None
        except (UserError, OSError) as error:
            self.damage = str(error) if isinstance(error, UserError) else f"{error.filename}: {error.strerror}"

    def about(self, one: PlannedRun, seconds: float | None, parallel: int | None) -> dict[str, Any]:
        """The table's state for a run, apart from how it ended; `parallel` only if it was made with others."""
        shared = {"parallel": parallel} if (parallel or 1) > 1 else {}
        return {"label": one.label, "ranks": one.setup.world_size, "epochs": one.values["num_train_epochs"], **shared}

    def check_flags(self, runs: Iterable[PlannedRun], values: Mapping[str, Any], ranks: int) -> None:
        """Raise UsageError if a finished run, of this call or of an earlier one, had other flags than those given now.

        A run that cannot be read is not finished, and is skipped.
        """
        asked = {name: value for name, value in asdict(config_from(values)).items() if name not in OWN}
        labels = {one.place: one.label for one in runs} | {place: row["label"] for place, row in self.rows.items()}
        for place, label in labels.items():
            try:
                found = read_object(self.path / place / "config.json", CONFIG) or {}
            except UserError:
                continue
            for name, value in {**asked, "world_size": 1 if label in ONE_PROCESS else ranks}.items():
                if name in found and found[name] != value:
                    raise UsageError(
                        f"{self.path / place} was made with {name} {printable(found[name], 60)}, and this command has "
                        f"{value}. Give the same flags again, or another --runs_dir."
                    )

    def entries(self) -> list[StrategyResult]:
        """All rows of the table, by epochs and in the order of the calls, the baseline first."""
        found = [self._entry(place, row) for place, row in self.rows.items()]
        return sorted(found, key=lambda entry: (entry.epochs, entry.label != BASELINE))

    def _entry(self, place: str, row: Mapping[str, Any]) -> StrategyResult:
        about = (row["label"], row["ranks"], row["epochs"])
        asked = dict(zip(("label", "world_size", "num_train_epochs"), about, strict=True))
        return StrategyResult(*about, *self.outcome(place, asked), parallel=row.get("parallel") or 1)
