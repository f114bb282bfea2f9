"""A folder of runs that are made one after the other: a folder for each, and beside them how each ended."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.records.conventions import BROKEN_OFF, FAILED, FINISHED, OUTCOMES
from cos598d.records.kinds import TEXT, OneOf, ValueKind
from cos598d.terminal.files import write_json
from cos598d.terminal.printable import printable
from cos598d.tools.report.load import Run, load_entry_run

# What the state says of every run, beside what it is.
ENDED: dict[str, ValueKind] = {"outcome": OneOf(OUTCOMES), "said": TEXT}
LONGEST_SAID = 300
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

    A subclass reads its state into `rows`, a row for each run that was begun, and says in `state` what is written.
    """

    state_file: str

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}

    def state(self) -> Any:
        """What the state file holds, as JSON."""
        return self.rows

    def said(self, place: str) -> str:
        """How an earlier start of this run ended, in words; "" where there was none, or it ended well."""
        row = self.rows.get(place, {})
        return row["said"] if row.get("outcome") in (FAILED, BROKEN_OFF) else ""

    def check_own(self, place: str) -> None:
        """Raise UserError where the folder of the run of that name leads elsewhere."""
        if (self.path / place).is_symlink():
            raise UserError(
                f"{self.path / place} is a link, where a run needs a folder of its own. Remove it, {OTHER_FOLDER}."
            )

    def finished(self, place: str, asked: Mapping[str, Any]) -> Run | None:
        """The run of that name, if its record is there. Raises UserError for one that is damaged, or that its config
        says was another than is `asked` for."""
        folder = self.path / place
        return load_entry_run(folder, place, asked) if (folder / "summary.json").exists() else None

    def note(self, place: str, about: Mapping[str, Any], outcome: str, said: str = "") -> None:
        """Write down how the run of that name ended, with what it is `about`."""
        self.rows[place] = {**about, "outcome": outcome, "said": printable(said, LONGEST_SAID)}
        self.write()

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
