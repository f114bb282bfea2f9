"""A folder of many runs: a folder for each, and beside them what was asked for and how each ended.

A later call with the same words goes on there: what is finished is not made again.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError, UserError
from cos598d.records.conventions import BROKEN_OFF, FAILED, FINISHED, OUTCOMES
from cos598d.records.kinds import COUNT, NOT_NEGATIVE, SIZE, TEXT, Fields, MapOf, Of, OneOf, OrNone, ValueKind
from cos598d.records.schema import is_as_read, read
from cos598d.terminal.files import write_json
from cos598d.terminal.printable import printable
from cos598d.tools.report.load import AnotherRun, Run, load_entry_run
from cos598d.tools.runs.planned import PlannedRun

# What the state says of every run, beside what it is.
ENDED: dict[str, ValueKind] = {"outcome": OneOf(OUTCOMES), "said": TEXT}
ROW = Fields(
    {"settings": MapOf(TEXT), "seed": COUNT, "seconds": OrNone(NOT_NEGATIVE), **ENDED}, {"parallel": OrNone(SIZE)}
)
FLAGS = MapOf(Of("a value of a flag", (str, int, float, type(None))))
LONGEST_SAID = 300
LONGEST_SHOWN = 100  # characters of a value in a sentence
REMEDY = "Give another --runs_dir"
OTHER_FOLDER = "or give another --runs_dir"


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Let what a full disk, or no right to write, does to a folder of runs be a UserError that says how to go on."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} cannot be written ({error.strerror}). Finished runs are kept. Make room, or "
            "check the folder's rights, and repeat the command."
        ) from None


class RunsFolder:
    """The runs of a command, those of earlier calls too, by the names of their folders.

    `rows` has a row for each run that was begun. A subclass reads them, and says in `state` what is written.
    """

    state_file: str
    refuses_strangers = False  # whether a finished run that no call has made here stays, and ends this one

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}

    def state(self) -> Any:
        """What the state file holds, as JSON."""
        return self.rows

    def about(self, one: PlannedRun, seconds: float | None, parallel: int | None) -> dict[str, Any]:
        """What the state says of a run beside how it ended: it took so many seconds, made with so many at a time."""
        return {"settings": dict(one.settings), "seed": one.seed, "seconds": seconds, "parallel": parallel}

    def begin(self, one: PlannedRun, parallel: int = 1) -> None:
        """Write down that the run is begun, one of so many at a time: until more is known, it was broken off."""
        earlier = self.rows.get(one.place, {})
        if earlier.get("outcome") != FINISHED:  # it may go on from what was made then
            parallel = max(parallel, earlier.get("parallel") or 1)
        self._note(one, BROKEN_OFF, "it was broken off.", None, parallel)

    def end(self, one: PlannedRun, outcome: str, said: str = "", seconds: float | None = None) -> None:
        """Write down how the run ended, and after how many seconds in all if that is known."""
        self._note(one, outcome, said, seconds, self.rows.get(one.place, {}).get("parallel"))

    def seconds(self, one: PlannedRun) -> float | None:
        """The seconds that the finished run took, if an earlier call has noted them."""
        return self.rows.get(one.place, {}).get("seconds")

    def said(self, one: PlannedRun) -> str:
        """How an earlier start of this run ended, in words; "" where there was none, or it ended well."""
        row = self.rows.get(one.place, {})
        return row["said"] if row.get("outcome") in (FAILED, BROKEN_OFF) else ""

    def run_of(self, one: PlannedRun) -> Run | None:
        """The run, if its record is there. Raises UserError for one that is damaged, and AnotherRun."""
        folder = self.path / one.place
        return load_entry_run(folder, one.place, asked_of(one)) if (folder / "summary.json").exists() else None

    def look(self, one: PlannedRun) -> tuple[Run | None, str]:
        """The run, if its record is there, whole; or None, and why what is there is to be made again.

        Raises UserError for a folder that leads elsewhere, and where strangers are refused for a finished run that no
        call has made here.
        """
        if (self.path / one.place).is_symlink():
            raise UserError(
                f"{self.path / one.place} is a link, where a run needs a folder of its own. Remove it, {OTHER_FOLDER}."
            )
        try:
            return self.run_of(one), ""
        except AnotherRun as error:
            if self.refuses_strangers and not self.said(one):
                raise UserError(f"{error.what}. It was not changed. Remove it, {OTHER_FOLDER}.") from None
            return None, str(error)
        except UserError as error:
            return None, str(error)

    def write(self) -> None:
        """Write the state file, whole or not at all. Raises UserError where it cannot be."""
        with writing(self.path):
            write_json(self.path / self.state_file, self.state())

    def outcome(self, place: str, asked: Mapping[str, Any]) -> tuple[str, str, Run | None]:
        """How the run of that name ended, in a word and in a sentence, and its record if it is finished.

        One whose record cannot be read any more has failed.
        """
        row = self.rows[place]
        if row["outcome"] != FINISHED:
            return row["outcome"], row["said"], None
        try:
            return FINISHED, row["said"], load_entry_run(self.path / place, place, asked)
        except UserError as error:
            return FAILED, str(error), None

    def _note(self, one: PlannedRun, outcome: str, said: str, seconds: float | None, parallel: int | None) -> None:
        ended = {"outcome": outcome, "said": printable(said, LONGEST_SAID)}
        self.rows[one.place] = self.about(one, seconds, parallel) | ended
        self.write()


def asked_of(one: PlannedRun) -> dict[str, Any]:
    """What the config of this run says of it, whose folder might have been another's."""
    return {**one.values, "label": one.label, "world_size": one.setup.world_size}


class AskedFolder(RunsFolder):
    """A folder in which a later call must ask for the same as the first.

    `what` is the command's word for all runs, which names the state file too. `asked` is what the call asks for, as
    JSON: values of `kinds`. `rows_name` is the field of the runs.
    """

    what: str
    kinds: Mapping[str, ValueKind] = {"flags": FLAGS}
    rows_name = "runs"
    refuses_strangers = True

    def __init__(self, path: Path, asked: Mapping[str, Any], what: str = ""):
        """Raises UserError for a folder of something else, and UsageError for that of other runs."""
        super().__init__(path)
        self.what = what or self.what
        self.state_file = f"{self.what}.json"
        self.asked = {name: asked[name] for name in self.kinds}
        try:
            found = read(path / self.state_file, Fields({**self.kinds, self.rows_name: MapOf(ROW)}), REMEDY)
        except FileNotFoundError:
            if any(path.iterdir()):
                raise UserError(
                    f"--runs_dir {path} is not empty and has no {self.what}. Choose another folder."
                ) from None
            return
        for name, before, now in _differences(found, self.asked):
            was, is_now = _apart(before, now)
            raise UsageError(
                f"{path} was made by {self.what} with other arguments ({name}: {was} there, {is_now} here). Give the "
                f"same arguments again, {OTHER_FOLDER}."
            )
        self.rows = found[self.rows_name]

    def state(self) -> Any:
        """What the state file holds, as JSON."""
        return {**self.asked, self.rows_name: self.rows}


class _NotGiven:
    def __repr__(self) -> str:
        return "not given"


_NOT_GIVEN = _NotGiven()


def _differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    """What differs, in words, with the values that were found and are asked for."""
    pairs: list[tuple[str, Any, Any]] = []
    if "axes" in asked:
        if list(found["axes"]) != list(asked["axes"]):
            yield "the axes", list(found["axes"]), list(asked["axes"])
        pairs += [(f"the axis {name}", found["axes"].get(name), words) for name, words in asked["axes"].items()]
        pairs.append(("the seeds", found["seeds"], asked["seeds"]))
    flags, own = found["flags"], asked["flags"]
    pairs += [(f"--{name}", flags.get(name, _NOT_GIVEN), own.get(name, _NOT_GIVEN)) for name in {**flags, **own}]
    others = [name for name in asked if name not in ("axes", "seeds", "flags")]
    pairs += [(f"--{name}", found[name] or _NOT_GIVEN, asked[name] or _NOT_GIVEN) for name in others]
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
