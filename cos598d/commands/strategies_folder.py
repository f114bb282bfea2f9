"""The folder of a table of strategies: what has been run there, how it ended, and with which flags."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cos598d.config import SYNC_FIELDS, config_from
from cos598d.errors import UsageError, UserError
from cos598d.records.kinds import POSITIVE, TEXT, Fields, MapOf
from cos598d.records.run import CONFIG, RANKS, REMEDY, read_object
from cos598d.records.schema import read
from cos598d.terminal.printable import printable
from cos598d.tools.report.load import Run
from cos598d.tools.report.repeats import PLACES
from cos598d.tools.report.strategies import ALL_GPUS, BASELINE, StrategyResult
from cos598d.tools.sweep.folder import ENDED, RunsFolder

ONE_PROCESS = (BASELINE, ALL_GPUS)
ROW = Fields({"label": TEXT, "ranks": RANKS, "epochs": POSITIVE, **ENDED})
# What a run of the table may have of its own.
OWN = PLACES | {"label", "sync", "num_train_epochs", "save_model", "save_epochs", *SYNC_FIELDS}


@dataclass(frozen=True)
class PlannedRun:
    """One run of the table: its ranks, and the flags that are its own; in `refused` why it cannot run here."""

    label: str
    ranks: int
    epochs: float
    values: Mapping[str, Any]
    refused: str = ""

    @property
    def place(self) -> str:
        """Its folder's name, and its own in the table's state."""
        return f"{self.label}-e{self.epochs:g}"

    @property
    def about(self) -> dict[str, Any]:
        """What the table's state says of it, beside how it ended."""
        return {"label": self.label, "ranks": self.ranks, "epochs": self.epochs}


class TableFolder(RunsFolder):
    """The runs of a table, those of earlier calls too."""

    state_file = "strategies.json"

    def __init__(self, path: Path):
        super().__init__(path)
        self.damage = ""  # what is wrong with the state that an earlier call left
        try:
            self.rows = read(path / self.state_file, MapOf(ROW), REMEDY)
        except FileNotFoundError:
            if any(path.iterdir()):
                raise UserError(
                    f"--runs_dir {path} is not empty and has no table of strategies. Choose another folder."
                ) from None
        except (UserError, OSError) as error:
            self.damage = str(error) if isinstance(error, UserError) else f"{error.filename}: {error.strerror}"

    def check_flags(self, plans: Iterable[PlannedRun], values: Mapping[str, Any], ranks: int) -> None:
        """Raise UsageError where a finished run, of this call or of an earlier one, had other flags than are given now.

        What cannot be read is not finished, and differs in nothing.
        """
        asked = {name: value for name, value in asdict(config_from(values)).items() if name not in OWN}
        labels = {plan.place: plan.label for plan in plans} | {place: row["label"] for place, row in self.rows.items()}
        for place, label in labels.items():
            try:
                found = read_object(self.path / place / "config.json", CONFIG) or {}
            except UserError:
                continue
            for name, value in {**asked, "world_size": 1 if label in ONE_PROCESS else ranks}.items():
                if name in found and found[name] != value:
                    raise UsageError(
                        f"{self.path / place} is a finished run with {name} {printable(found[name], 60)}, and this "
                        f"command asks for {value}. Give the same flags again, or another --runs_dir."
                    )

    def finished_run(self, plan: PlannedRun) -> Run | None:
        """The plan's run, if there is one. Raises UserError for one whose record is damaged."""
        return self.finished(plan.place, {**plan.values, **_asked(plan.label, plan.ranks, plan.epochs)})

    def entries(self) -> list[StrategyResult]:
        """All that the table has to show, by epochs and in the order of the calls, the baseline first."""
        found = [self._entry(place, row) for place, row in self.rows.items()]
        return sorted(found, key=lambda entry: (entry.epochs, entry.label != BASELINE))

    def _entry(self, place: str, row: Mapping[str, Any]) -> StrategyResult:
        about = (row["label"], row["ranks"], row["epochs"])
        return StrategyResult(*about, *self.outcome(place, _asked(*about)))


def _asked(label: str, ranks: int, epochs: float) -> dict[str, Any]:
    """What the config of a run of the table says of it, whose folder might have been another's."""
    return {"label": label, "world_size": ranks, "num_train_epochs": epochs}
