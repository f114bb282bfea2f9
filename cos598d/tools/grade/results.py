"""What became of each submission of a class, kept in a file of its own: a later run grades only what is missing."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from cos598d.errors import UserError
from cos598d.terminal.files import own_folder, write_whole
from cos598d.terminal.reading import read_plain
from cos598d.tools.grade.scored import Judged
from cos598d.tools.grade.submission import SubmissionEnd

RESULTS = ".results"  # behind the name of a table: the folder of the results that it is made of


@dataclass(frozen=True)
class Result:
    """What became of the submission `name`. `files` and `assignment` are the digests of what was judged, and by what;
    `seconds` is what it took, and `graded` when it was, as UTC."""

    name: str
    files: str
    assignment: str
    judged: tuple[Judged, ...]
    end: SubmissionEnd
    seconds: float
    graded: str


class KeptResults:
    """The results in a folder, which the first one makes."""

    def __init__(self, folder: Path):
        self._folder = folder

    def get(self, name: str, files: str, assignment: str) -> Result | None:
        """The result of these files by this assignment; None where there is none."""
        try:
            found = msgspec.convert(json.loads(read_plain(self._path(name), follows=False)), Result)
        except (OSError, ValueError, RecursionError):
            return None
        return found if (found.name, found.files, found.assignment) == (name, files, assignment) else None

    def keep(self, result: Result) -> None:
        """Write it, whole or not at all. Raises UserError."""
        try:
            own_folder(self._folder)
            write_whole(self._path(result.name), json.dumps(asdict(result)))
        except OSError as error:
            raise UserError(f"{self._folder} cannot be written ({error.strerror}). Check its folder.") from None

    def _path(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()[:20]}.json"
