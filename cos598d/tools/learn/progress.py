"""The progress of the course in a folder: a small file next to the lessons' files, which you may delete."""

import hashlib
from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.terminal.files import write_json
from cos598d.terminal.reading import read_json, read_plain
from cos598d.tools.learn.lessons import Lesson

PLACE = Path(".cos598d") / "lessons.json"
PASSED, CHANGED, BEGUN, NOT_BEGUN = "done", "done, changed since", "started", ""


def status(folder: Path, lesson: Lesson) -> str:
    """The lesson's status in this folder: one of the four above."""
    note = _of(folder, lesson)
    name, digest = note.get("file"), note.get("sha256")
    if not isinstance(name, str) or not isinstance(digest, str):
        return BEGUN if (folder / lesson.file_name).exists() else NOT_BEGUN
    try:
        source = read_plain(folder / Path(name).name)
    except (OSError, ValueError):
        return PASSED  # the file went, what was learned stays
    return PASSED if digest_of(source) == digest else CHANGED


def keep_passed(path: Path, lesson: Lesson, source: bytes) -> None:
    """Note that the file passed. Raises UserError if that cannot be written."""
    _keep(path.resolve().parent, lesson, {"file": path.name, "sha256": digest_of(source)})


def hints_told(folder: Path, lesson: Lesson) -> int:
    """The number of the last hint that was printed in this folder; 0 for none."""
    number = _of(folder, lesson).get("hints")
    return number if type(number) is int and 0 <= number <= len(lesson.hints) else 0


def keep_hint(folder: Path, lesson: Lesson, number: int) -> None:
    """Note that the hint was printed. Raises UserError if that cannot be written."""
    _keep(folder, lesson, {"hints": max(number, hints_told(folder, lesson))})


def digest_of(source: bytes) -> str:
    """The digest of a file's content."""
    return hashlib.sha256(source).hexdigest()


def _keep(folder: Path, lesson: Lesson, facts: dict[str, Any]) -> None:
    known = _read(folder)
    known[str(lesson.number)] = _of(folder, lesson) | facts
    try:
        write_json(folder / PLACE, known)
    except OSError as error:
        raise UserError(
            f"{folder / PLACE} cannot be written ({error.strerror}). Use a folder in which you can write."
        ) from None


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
