"""A sweep's folder: what was asked for there, and how each of its runs ended, so that a later call goes on."""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError, UserError
from cos598d.records.conventions import BROKEN_OFF, FAILED, FINISHED, LEFT_OUT
from cos598d.records.kinds import COUNT, NOT_NEGATIVE, SIZE, TEXT, Fields, ListOf, MapOf, Of, OrNone
from cos598d.records.schema import is_as_read, read
from cos598d.terminal.printable import printable
from cos598d.tools.report.load import AnotherRun, Run
from cos598d.tools.report.sweep_entries import SweepEntry
from cos598d.tools.sweep.folder import ENDED, OTHER_FOLDER, RunsFolder
from cos598d.tools.sweep.ground import check_ground
from cos598d.tools.sweep.plan import Combination, combine

STATE, LOGS = "sweep.json", "logs"
REMEDY = "Give another --runs_dir"
ROW = Fields(
    {"settings": MapOf(TEXT), "seed": COUNT, "seconds": OrNone(NOT_NEGATIVE), **ENDED}, {"parallel": OrNone(SIZE)}
)
ASKED = {
    "axes": MapOf(ListOf(TEXT, least=1)),
    "seeds": ListOf(COUNT, least=1),
    "flags": MapOf(Of("a value of a flag", (str, int, float, type(None)))),
    "rate": TEXT,
    "launch": OrNone(TEXT),
}
KIND = Fields({**ASKED, "combinations": MapOf(ROW)})
MOST_RUNS = 100_000  # of one sweep; a state that asks for more was not written by one
NOT_BEGUN = "it has not been run yet."
LONGEST_SHOWN = 100  # characters of a value in a sentence


def read_sweep(path: Path) -> list[SweepEntry]:
    """The entries of the sweep in a folder, by its state alone. Raises UserError for a state that is damaged."""
    remedy = "Start the sweep again"
    found = read(path / STATE, KIND, remedy)
    if math.prod([len(found["seeds"]), *map(len, found["axes"].values())]) > MOST_RUNS:
        raise UserError(f"{path / STATE} asks for more than {MOST_RUNS:,} runs, so it is damaged. {remedy}.")
    try:
        combinations = combine(found["axes"], found["flags"], found["seeds"], found["rate"])
    except (UsageError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path / STATE} is not a possible sweep ({printable(error, 200)}). {remedy}.") from None
    return SweepFolder(path, found).entries(combinations)


class SweepFolder(RunsFolder):
    """The runs of a sweep. `asked` is what the call asks for, as JSON: the values of ASKED's fields."""

    state_file = STATE

    def __init__(self, path: Path, asked: Mapping[str, Any]):
        """Raises UserError for a folder of something else, and UsageError for that of another sweep."""
        super().__init__(path)
        self._asked = {name: asked[name] for name in ASKED}
        try:
            found = read(path / STATE, KIND, REMEDY)
        except FileNotFoundError:
            if any(path.iterdir()):
                raise UserError(f"--runs_dir {path} is not empty and has no sweep. Choose another folder.") from None
            return
        self._check_same(found)
        self.rows = found["combinations"]

    def state(self) -> Any:
        """What the state file holds, as JSON."""
        return {**self._asked, "combinations": self.rows}

    def begin(self, one: Combination, parallel: int = 1) -> None:
        """Write down that the run is begun, one of so many at a time: until more is known, it was broken off."""
        earlier = self.rows.get(one.label, {})
        if earlier.get("outcome") != FINISHED:  # it may go on from what was made then
            parallel = max(parallel, earlier.get("parallel") or 1)
        self._note(one, BROKEN_OFF, "it was broken off.", parallel=parallel)

    def end(self, one: Combination, outcome: str, said: str = "", seconds: float | None = None) -> None:
        """Write down how the run ended, and after how many seconds in all if that is known."""
        self._note(one, outcome, said, seconds, self.rows.get(one.label, {}).get("parallel"))

    def seconds(self, one: Combination) -> float | None:
        """The seconds that the finished run took, if an earlier call has noted them."""
        return self.rows.get(one.label, {}).get("seconds")

    def run_of(self, one: Combination) -> Run | None:
        """The combination's run, if its record is there. Raises UserError for one that is damaged, and AnotherRun."""
        found = self.finished(one.label, self._asked_of(one))
        if found:
            check_ground(found, one, self.path / one.label, self._is_launched)
        return found

    def look(self, one: Combination) -> tuple[Run | None, str]:
        """The combination's run, if its record is there, whole; or None, and why what is there is to be made anew.

        Raises UserError for a folder that leads elsewhere, and for a finished run that this sweep has not made.
        """
        self.check_own(one.label)
        try:
            return self.run_of(one), ""
        except AnotherRun as error:
            if not self.said(one.label):
                raise UserError(f"{error.what}. It was not changed. Remove it, {OTHER_FOLDER}.") from None
            return None, str(error)
        except UserError as error:
            return None, str(error)

    def entries(self, combinations: Iterable[Combination]) -> list[SweepEntry]:
        """What the table and the page are made of, in the order of the combinations."""
        return [self._entry(one) for one in combinations]

    @property
    def _is_launched(self) -> bool:
        return self._asked["launch"] is not None

    def _note(
        self, one: Combination, outcome: str, said: str, seconds: float | None = None, parallel: int | None = None
    ) -> None:
        about = {"settings": dict(one.settings), "seed": one.seed, "seconds": seconds, "parallel": parallel}
        self.note(one.label, about, outcome, said)

    def _entry(self, one: Combination) -> SweepEntry:
        if one.label in self.rows:
            outcome, said, run = self.outcome(one.label, self._asked_of(one))
            try:
                if run:
                    check_ground(run, one, self.path / one.label, self._is_launched)
            except UserError as error:
                outcome, said, run = FAILED, str(error), None
            return SweepEntry(one.settings, one.seed, outcome, said, run, self.rows[one.label].get("parallel") or 1)
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
            was, is_now = _apart(before, now)
            raise UsageError(
                f"{self.path} is a sweep with {name} {was}, and this command asks for {is_now}. Give the same "
                f"arguments again, {OTHER_FOLDER}."
            )


class _NotGiven:
    def __repr__(self) -> str:
        return "none"


_NOT_GIVEN = _NotGiven()


def _differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    """What differs, in words, with the values that were found and are asked for."""
    if list(found["axes"]) != list(asked["axes"]):
        yield "the axes", list(found["axes"]), list(asked["axes"])
    pairs = [(f"the axis {name}", found["axes"].get(name), words) for name, words in asked["axes"].items()]
    pairs.append(("the seeds", found["seeds"], asked["seeds"]))
    flags, own = found["flags"], asked["flags"]
    pairs += [(f"--{name}", flags.get(name, _NOT_GIVEN), own.get(name, _NOT_GIVEN)) for name in {**flags, **own}]
    pairs += [(f"--{name}", found[name] or _NOT_GIVEN, asked[name] or _NOT_GIVEN) for name in ("rate", "launch")]
    for name, before, now in pairs:
        if not is_as_read(before, now):
            yield name, before, now


def _apart(before: Any, now: Any) -> tuple[str, str]:
    """Two values that differ, in words that do: of long ones the part in which they begin to."""
    texts = [",".join(map(str, value)) if isinstance(value, list) else str(value) for value in (before, now)]
    if texts[0] == texts[1]:
        texts = [repr(before), repr(now)]
    begin = 0
    if max(map(len, texts)) > LONGEST_SHOWN:
        begin = max(0, len(os.path.commonprefix(texts)) - LONGEST_SHOWN // 4)
    was, is_now = (("... " if begin else "") + printable(text[begin:], LONGEST_SHOWN) for text in texts)
    return was, is_now
