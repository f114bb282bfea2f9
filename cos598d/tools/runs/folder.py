"""A folder of many runs: a folder for each, and a state file with the request and how each ended.

A later call with the same arguments continues there: finished runs are not made again.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError, UserError
from cos598d.records.conventions import BROKEN_OFF, FAILED, FINISHED, OUTCOMES
from cos598d.records.kinds import COUNT, NOT_NEGATIVE, SIZE, TEXT, Fields, MapOf, Of, OneOf, OrNone, ValueKind
from cos598d.records.old_schema import is_as_read, read
from cos598d.terminal.files import write_json
from cos598d.terminal.printable import printable
from cos598d.tools.report.load import AnotherRun, Run, load_entry_run
from cos598d.tools.runs.plan import PlannedRun

# What the state has for every run in addition to its description.
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
    """Convert errors of a full disk or of missing write permission into UserErrors that explain how to continue."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} cannot be written ({error.strerror}). Finished runs are kept. Make room, or "
            "check the folder's rights, and repeat the command."
        ) from None


class RunsFolder:
    """The runs of a command, including those of earlier calls, by the names of their folders.

    `rows` has a row for each run that was started. A subclass reads them, and defines in `state` what is written.
    """

    state_file: str
    refuses_strangers = False  # whether a finished run that no call has made here is kept, and ends this call

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}

    def state(self) -> Any:
        """The content of the state file, as JSON."""
        return self.rows

    def about(self, one: PlannedRun, seconds: float | None, parallel: int | None) -> dict[str, Any]:
        """The state's fields for a run, apart from how it ended: its seconds, made with `parallel` at a time."""
        return {"settings": dict(one.settings), "seed": one.seed, "seconds": seconds, "parallel": parallel}

    def begin(self, one: PlannedRun, parallel: int = 1) -> None:
        """Record that the run starts, one of `parallel` at a time. Until more is known, it counts as interrupted."""
        earlier = self.rows.get(one.place, {})
        if earlier.get("outcome") != FINISHED:  # it may continue from what was made then
            parallel = max(parallel, earlier.get("parallel") or 1)
        self._note(one, BROKEN_OFF, "it was broken off.", None, parallel)

    def end(self, one: PlannedRun, outcome: str, said: str = "", seconds: float | None = None) -> None:
        """Record how the run ended, and its total seconds if they are known."""
        self._note(one, outcome, said, seconds, self.rows.get(one.place, {}).get("parallel"))

    def seconds(self, one: PlannedRun) -> float | None:
        """The seconds of the finished run, if an earlier call has recorded them."""
        return self.rows.get(one.place, {}).get("seconds")

    def said(self, one: PlannedRun) -> str:
        """How an earlier attempt of this run ended, as a phrase; "" if there was none, or it ended well."""
        row = self.rows.get(one.place, {})
        return row["said"] if row.get("outcome") in (FAILED, BROKEN_OFF) else ""

    def run_of(self, one: PlannedRun) -> Run | None:
        """The run, if its record exists. Raises UserError for a damaged one, and AnotherRun."""
        folder = self.path / one.place
        return load_entry_run(folder, one.place, asked_of(one)) if (folder / "summary.json").exists() else None

    def look(self, one: PlannedRun) -> tuple[Run | None, str]:
        """The run, if its complete record exists; otherwise None, and why the existing files are to be replaced.

        Raises UserError for a folder that leads elsewhere, and, if strangers are refused, for a finished run that no
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
        """Write the state file, completely or not at all. Raises UserError if that fails."""
        with writing(self.path):
            write_json(self.path / self.state_file, self.state())

    def outcome(self, place: str, asked: Mapping[str, Any]) -> tuple[str, str, Run | None]:
        """How the run with that name ended, as a word and a sentence, and its record if it is finished.

        A run whose record cannot be read any more has failed.
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
    """The values of this run in its config, since a folder may be another run's."""
    return {**one.values, "label": one.label, "world_size": one.setup.world_size}


class AskedFolder(RunsFolder):
    """A folder in which a later call must ask for the same as the first.

    `what` is the command's name for all runs, which is also in the state file's name. `asked` is the call's request as
    JSON: values of `kinds`. `rows_name` is the field of the runs.
    """

    what: str
    kinds: Mapping[str, ValueKind] = {"flags": FLAGS}
    rows_name = "runs"
    refuses_strangers = True

    def __init__(self, path: Path, asked: Mapping[str, Any], what: str = ""):
        """Raises UserError for a folder with other contents, and UsageError for that of other runs."""
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
        """The content of the state file, as JSON."""
        return {**self.asked, self.rows_name: self.rows}


class _NotGiven:
    def __repr__(self) -> str:
        return "not given"


_NOT_GIVEN = _NotGiven()


def _differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    """The differences, by name, with the found and the requested values."""
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
    """Two different values as different texts: of long ones, the part where they begin to differ."""
    texts = [",".join(map(str, value)) if isinstance(value, list) else str(value) for value in (before, now)]
    if texts[0] == texts[1]:
        texts = [repr(before), repr(now)]
    begin = 0
    if max(map(len, texts)) > LONGEST_SHOWN:
        begin = max(0, len(os.path.commonprefix(texts)) - LONGEST_SHOWN // 4)
    was, is_now = (("... " if begin else "") + printable(text[begin:], LONGEST_SHOWN) for text in texts)
    return was, is_now
