"""The folder of a table of strategies: later calls add strategies and epochs to it, but no other flags."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cos598d.config import SYNC_FIELDS, config_from
from cos598d.errors import UsageError, UserError
from cos598d.records.kinds import POSITIVE, SIZE, TEXT, Fields, MapOf, OrNone
from cos598d.records.run import CONFIG, RANKS, REMEDY, read_object
from cos598d.records.schema import read
from cos598d.terminal.printable import printable
from cos598d.tools.report.repeats import PLACES
from cos598d.tools.report.strategies import ALL_GPUS, BASELINE, StrategyResult
from cos598d.tools.runs.folder import ENDED, RunsFolder
from cos598d.tools.runs.planned import PlannedRun

ONE_PROCESS = (BASELINE, ALL_GPUS)
ROW = Fields({"label": TEXT, "ranks": RANKS, "epochs": POSITIVE, **ENDED}, {"parallel": OrNone(SIZE)})
# The settings in which a run of the table may differ.
OWN = PLACES | {"label", "sync", "num_train_epochs", "save_model", "save_epochs", *SYNC_FIELDS}


class StrategiesFolder(RunsFolder):
    """The runs of a table, including those of earlier calls. `damage`: what is wrong with an earlier call's state."""

    state_file = "strategies.json"

    def __init__(self, path: Path):
        super().__init__(path)
        self.damage = ""
        try:
            self.rows = read(path / self.state_file, MapOf(ROW), REMEDY)
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
