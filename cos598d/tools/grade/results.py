"""The result of each submission of a class in a file of its own, so that a later run grades only what is missing."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from cos598d.errors import UsageError, UserError
from cos598d.terminal.files import own_folder, write_whole
from cos598d.terminal.locks import locked
from cos598d.terminal.reading import parse_json, read_plain
from cos598d.tools.grade.scored import Judged
from cos598d.tools.grade.submission import SubmissionEnd

RESULTS = ".results"  # after the name of a table: the folder of the results that it is made of


@dataclass(frozen=True)
class Result:
    """The result of the submission `name`. `files` and `assignment` are digests of what was judged ("": unknown) and by
    which assignment; `seconds` is how long it took, and `graded` the time, as UTC."""

    name: str
    files: str
    assignment: str
    judged: tuple[Judged, ...]
    end: SubmissionEnd
    seconds: float
    graded: str


class KeptResults:
    """The results of a table, in the folder next to it, which the first one makes."""

    def __init__(self, table: Path):
        self._table, self._folder = table, table.with_name(table.name + RESULTS)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other graders from this table within the block. Raises UsageError if one is using it."""
        with self._writing():
            own_folder(self._folder)
        with locked(self._folder) as is_ours:
            if not is_ours:
                raise UsageError(f"another grader is using {self._table}. Wait, or give --csv another file.")
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # not if there are results
                    self._folder.rmdir()

    def get(self, name: str, assignment: str) -> Result | None:
        """The newest result of this submission by this assignment; None without one."""
        try:
            data = read_plain(self._path(name), follows=False)
            found = msgspec.convert(parse_json(data.decode()), Result)
        except (OSError, ValueError):
            return None
        return found if (found.name, found.assignment) == (name, assignment) else None

    def keep(self, result: Result) -> None:
        """Write it, complete or not at all. Raises UserError."""
        with self._writing():
            own_folder(self._folder)
            write_whole(self._path(result.name), json.dumps(asdict(result)))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"{self._folder} cannot be written ({error.strerror}). Check its folder.") from None

    def _path(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()[:20]}.json"
