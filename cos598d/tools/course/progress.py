"""The progress of the course in a folder: a small file next to the lessons' files, which you may delete."""

from pathlib import Path
from typing import Annotated

import msgspec

from cos598d.errors import UserError
from cos598d.terminal.files import write_json
from cos598d.tools.course import Lesson

PLACE = Path(".cos598d") / "course.json"
PASSED, BEGUN, NOT_BEGUN = "done", "started", ""


class Known(msgspec.Struct):
    """Of a lesson: whether a file has passed, and the number of the last hint that was printed."""

    done: bool = False
    hints: Annotated[int, msgspec.Meta(ge=0)] = 0


def known(folder: Path, lesson: Lesson) -> Known:
    """What was noted of a lesson in this folder, as far as it can be read."""
    return _read(folder).get(str(lesson.number), Known())


def keep(folder: Path, lesson: Lesson, now: Known) -> None:
    """Note this of a lesson. Raises UserError if it cannot be written."""
    place = folder / PLACE
    try:
        place.parent.mkdir(exist_ok=True)
        write_json(place, msgspec.to_builtins(_read(folder) | {str(lesson.number): now}))
    except OSError as error:
        raise UserError(f"{place} cannot be written ({error.strerror}). Use a folder in which you can write.") from None


def status(folder: Path, lesson: Lesson) -> str:
    """The lesson's status in this folder: one of the three above."""
    if known(folder, lesson).done:
        return PASSED  # the file may go, what was learned stays
    return BEGUN if (folder / lesson.file_name).exists() else NOT_BEGUN


def _read(folder: Path) -> dict[str, Known]:
    try:
        return msgspec.json.decode((folder / PLACE).read_bytes(), type=dict[str, Known])
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return {}
