"""A sweep's folder: what was asked for there, and how each of its runs ended, so that a later call goes on."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError, UserError
from cos598d.records.conventions import BROKEN_OFF, LEFT_OUT
from cos598d.records.kinds import COUNT, NOT_NEGATIVE, TEXT, Fields, ListOf, MapOf, Of, OrNone
from cos598d.records.schema import read
from cos598d.report.load import Run
from cos598d.report.sweep_entries import SweepEntry
from cos598d.sweep.folder import ENDED, RunsFolder
from cos598d.sweep.plan import Combination
from cos598d.terminal.printable import printable

STATE, LOGS = "sweep.json", "logs"
REMEDY = "so give another --runs_dir"
ROW = Fields({"settings": MapOf(TEXT), "seed": COUNT, "seconds": OrNone(NOT_NEGATIVE), **ENDED})
ASKED = {
    "axes": MapOf(ListOf(TEXT, least=1)),
    "seeds": ListOf(COUNT, least=1),
    "flags": MapOf(Of("a value of a flag", (str, int, float, type(None)))),
    "rate": TEXT,
    "launch": OrNone(TEXT),
}
NOT_BEGUN = "it has not been run yet."


class SweepFolder(RunsFolder):
    """The runs of a sweep. `asked` is what the call asks for, as JSON: the values of ASKED's fields."""

    state_file = STATE

    def __init__(self, path: Path, asked: Mapping[str, Any]):
        """Raises UserError for a folder of something else, and UsageError for that of another sweep."""
        super().__init__(path)
        self._asked = {name: asked[name] for name in ASKED}
        try:
            found = read(path / STATE, Fields({**ASKED, "combinations": MapOf(ROW)}), REMEDY)
        except FileNotFoundError:
            if any(path.iterdir()):
                raise UserError(
                    f"--runs_dir {path} is not empty, and no sweep is in it: choose another folder."
                ) from None
            return
        self._check_same(found)
        self.rows = found["combinations"]

    def state(self) -> Any:
        """What the state file holds, as JSON."""
        return {**self._asked, "combinations": self.rows}

    def begin(self, one: Combination) -> None:
        """Write down that the run is begun: until more is known, it was broken off."""
        self._note(one, BROKEN_OFF, "it was broken off.")

    def end(self, one: Combination, outcome: str, said: str = "", seconds: float | None = None) -> None:
        """Write down how the run ended, and after how many seconds in all."""
        self._note(one, outcome, said, seconds)

    def seconds(self, one: Combination) -> float | None:
        """The seconds that the finished run took, if an earlier call has noted them."""
        return self.rows.get(one.label, {}).get("seconds")

    def run_of(self, one: Combination) -> Run | None:
        """The combination's run, if its record is there. Raises UserError for one that is damaged, or another's."""
        return self.finished(one.label, self._asked_of(one))

    def is_finished(self, one: Combination) -> bool:
        """Whether the combination's run is there, whole."""
        try:
            return self.run_of(one) is not None
        except UserError:
            return False

    def entries(self, combinations: Iterable[Combination]) -> list[SweepEntry]:
        """What the table and the page are made of, in the order of the combinations."""
        return [self._entry(one) for one in combinations]

    def _note(self, one: Combination, outcome: str, said: str, seconds: float | None = None) -> None:
        about = {"settings": dict(one.settings), "seed": one.seed, "seconds": seconds}
        self.note(one.label, about, outcome, said)

    def _entry(self, one: Combination) -> SweepEntry:
        if one.label in self.rows:
            return SweepEntry(one.settings, one.seed, *self.outcome(one.label, self._asked_of(one)))
        if one.refused:
            return SweepEntry(one.settings, one.seed, LEFT_OUT, one.refused)
        return SweepEntry(one.settings, one.seed, BROKEN_OFF, NOT_BEGUN)

    @staticmethod
    def _asked_of(one: Combination) -> dict[str, Any]:
        """What the config of this run says of it, whose folder might have been another's."""
        return {**one.values, "label": one.label, "world_size": one.setup.world_size}

    def _check_same(self, found: Mapping[str, Any]) -> None:
        """Raise UsageError where the sweep that is there was asked for in other words, with the first that differ."""
        for name, before, now in _differences(found, self._asked):
            raise UsageError(
                f"{self.path} is a sweep with {name} {before}, and {now} is asked for now: give the same words again, "
                "or another --runs_dir."
            )


def _differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    if list(found["axes"]) != list(asked["axes"]):
        yield "the axes", _listed(found["axes"]), _listed(asked["axes"])
    for name in asked["axes"]:
        if found["axes"][name] != asked["axes"][name]:
            yield f"the axis {name}", _listed(found["axes"][name]), _listed(asked["axes"][name])
    if found["seeds"] != asked["seeds"]:
        yield "the seeds", _listed(found["seeds"]), _listed(asked["seeds"])
    for name in dict.fromkeys([*found["flags"], *asked["flags"]]):
        before, now = (
            printable(values[name], 100) if name in values else "none" for values in (found["flags"], asked["flags"])
        )
        if before != now:
            yield f"--{name}", before, now
    for name in ("rate", "launch"):
        if found[name] != asked[name]:
            yield f"--{name}", printable(found[name] or "none", 100), printable(asked[name] or "none", 100)


def _listed(values: Iterable[Any] | Sequence[Any]) -> str:
    return printable(",".join(map(str, values)) or "none", 100)
