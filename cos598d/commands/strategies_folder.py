"""The folder of a table of strategies: what has been run there, how it ended, and with which flags."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cos598d.config import SYNC_FIELDS, config_from
from cos598d.errors import UsageError, UserError
from cos598d.files import write_json
from cos598d.records.conventions import BROKEN_OFF, FAILED, FINISHED, OUTCOMES
from cos598d.records.kinds import POSITIVE, TEXT, Fields, MapOf, OneOf
from cos598d.records.run import CONFIG, RANKS, REMEDY, read_object
from cos598d.records.schema import read
from cos598d.report.load import Run
from cos598d.report.repeats import PLACES
from cos598d.report.strategies import ALL_GPUS, BASELINE, Entry, load_entry_run
from cos598d.terminal.printable import printable

ONE_PROCESS = (BASELINE, ALL_GPUS)
STATE = "strategies.json"
ROW = Fields({"label": TEXT, "ranks": RANKS, "epochs": POSITIVE, "outcome": OneOf(OUTCOMES), "said": TEXT})
# What a run of the table may have of its own.
OWN = PLACES | {"label", "sync", "num_train_epochs", "save_model", "save_epochs", *SYNC_FIELDS}


@dataclass(frozen=True)
class Plan:
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


class TableFolder:
    """The runs of a table, those of earlier calls too: each in a folder of its own, and beside them how it ended."""

    def __init__(self, path: Path):
        self.path = path
        self.damage = ""  # what is wrong with the state that an earlier call left
        try:
            self._rows: dict[str, dict[str, Any]] = read(path / STATE, MapOf(ROW), REMEDY)
        except (UserError, OSError) as error:
            self._rows = {}
            self.damage = str(error) if isinstance(error, UserError) else ""

    def check_flags(self, plans: Iterable[Plan], values: Mapping[str, Any], ranks: int) -> None:
        """Raise UsageError where a finished run, of this call or of an earlier one, had other flags than are given now.

        What cannot be read is not finished, and differs in nothing.
        """
        asked = {name: value for name, value in asdict(config_from(values)).items() if name not in OWN}
        labels = {plan.place: plan.label for plan in plans} | {place: row["label"] for place, row in self._rows.items()}
        for place, label in labels.items():
            try:
                found = read_object(self.path / place / "config.json", CONFIG) or {}
            except UserError:
                continue
            for name, value in {**asked, "world_size": 1 if label in ONE_PROCESS else ranks}.items():
                if name in found and found[name] != value:
                    raise UsageError(
                        f"{self.path / place} is a finished run with {name} {printable(found[name], 60)}, and {value} "
                        "is asked for now: give the same flags again, or another --runs_dir."
                    )

    def said(self, plan: Plan) -> str:
        """How an earlier call's run of this plan ended, in words; "" where there was none, or it ended well."""
        row = self._rows.get(plan.place, {})
        return row["said"] if row.get("outcome") in (FAILED, BROKEN_OFF) else ""

    def finished(self, plan: Plan) -> Run | None:
        """The plan's run, if there is one. Raises UserError for one whose record is damaged."""
        place = self.path / plan.place
        if not (place / "summary.json").exists():
            return None
        return load_entry_run(place, plan.place, {**plan.values, **_asked(plan.label, plan.ranks, plan.epochs)})

    def note(self, plan: Plan, outcome: str, said: str = "") -> None:
        """Write down how the plan's run ended."""
        row = {"label": plan.label, "ranks": plan.ranks, "epochs": plan.epochs}
        self._rows[plan.place] = row | {"outcome": outcome, "said": printable(said, 300)}
        write_json(self.path / STATE, self._rows)

    def entries(self) -> list[Entry]:
        """All that the table has to show, by epochs and in the order of the calls, the baseline first."""
        found = [self._entry(place, row) for place, row in self._rows.items()]
        return sorted(found, key=lambda entry: (entry.epochs, entry.label != BASELINE))

    def _entry(self, place: str, row: Mapping[str, Any]) -> Entry:
        entry = Entry(**{name: row[name] for name in ROW.needed})
        if entry.outcome != FINISHED:
            return entry
        try:
            asked = _asked(entry.label, entry.ranks, entry.epochs)
            return replace(entry, run=load_entry_run(self.path / place, place, asked))
        except UserError as error:  # an earlier call's, which was not asked for in this one
            return replace(entry, outcome=FAILED, said=str(error))


def _asked(label: str, ranks: int, epochs: float) -> dict[str, Any]:
    """What the config of a run of the table says of it, whose folder might have been another's."""
    return {"label": label, "world_size": ranks, "num_train_epochs": epochs}
