"""The progress of the course in a folder: a small file next to the lessons' files, which you may delete."""

import hashlib
from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.terminal.files import write_json
from cos598d.terminal.reading import read_json, read_plain
from cos598d.tools.course import Lesson

PLACE = Path(".cos598d") / "course.json"
PASSED, CHANGED, BEGUN, NOT_BEGUN = "done", "done, changed since", "started", ""


def status(folder: Path, lesson: Lesson) -> str:
    """The lesson's status in this folder: one of the four above."""
    digest = _of(folder, lesson).get("sha256")
    try:
        source = read_plain(folder / lesson.file_name)
    except (OSError, ValueError):
        return PASSED if digest else NOT_BEGUN  # the file went, what was learned stays
    return BEGUN if not digest else PASSED if _digest(source) == digest else CHANGED


def keep_passed(path: Path, lesson: Lesson) -> None:
    """Note that the file passed. Raises UserError if that cannot be written."""
    _keep(path.resolve().parent, lesson, {"sha256": _digest(read_plain(path))})


def hints_told(folder: Path, lesson: Lesson) -> int:
    """The number of the last hint that was printed in this folder; 0 for none."""
    number = _of(folder, lesson).get("hints")
    return number if type(number) is int and 0 <= number <= len(lesson.hints) else 0


def keep_hint(folder: Path, lesson: Lesson, number: int) -> None:
    """Note that the hint was printed."""
    _keep(folder, lesson, {"hints": max(number, hints_told(folder, lesson))})


def _digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()


def _keep(folder: Path, lesson: Lesson, facts: dict[str, Any]) -> None:
    known = _read(folder)
    known[str(lesson.number)] = _of(folder, lesson) | facts
    place = folder / PLACE
    try:
        place.parent.mkdir(exist_ok=True)
        write_json(place, known)
    except OSError as error:
        raise UserError(f"{place} cannot be written ({error.strerror}). Use a folder in which you can write.") from None


def _of(folder: Path, lesson: Lesson) -> dict[str, Any]:
    note = _read(folder).get(str(lesson.number))
    return note if isinstance(note, dict) else {}


def _read(folder: Path) -> dict[str, Any]:
    """What was noted, as far as it can be read."""
    try:
        known = read_json(folder / PLACE)
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
