"""The progress of the course in a folder: small files next to the lessons' files, which you may delete."""

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cos598d.errors import UserError
from cos598d.terminal.files import own_folder, write_json, write_whole
from cos598d.terminal.locks import locked
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import read_json, read_plain
from cos598d.tools.learn.lessons import Lesson

PLACE, BOARD = Path(".cos598d") / "lessons.json", Path(".cos598d") / "golf.json"
MOST_KEPT = 200  # scores of a lesson
_HINTS = re.compile(rb"^# cos598d hints shown:[^\n]*\n?", flags=re.MULTILINE)
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


def keep_hint(folder: Path, lesson: Lesson, number: int) -> bool:
    """Note that the hint was printed, also in the lesson's file if it exists; whether it does.

    Raises UserError if that cannot be written.
    """
    path = folder / lesson.file_name
    try:
        source = read_plain(path)
    except (OSError, ValueError):
        source = None
    shown = max(number, hints_told(folder, lesson), hints_in(source or b"", lesson) or 0)
    _keep(folder, lesson, {"hints": shown})
    if source is None:
        return False
    kept = _HINTS.sub(b"", source)
    end = b"\r\n" if b"\r\n" in kept else b"\n"
    with _writing(path):
        write_whole(path.resolve(), kept.rstrip() + 3 * end + hint_line(lesson, shown).encode() + end)
    return True


def hint_line(lesson: Lesson, shown: int) -> str:
    """The last line of a lesson's file: how many hints were shown, with a code that belongs to this number."""
    code = digest_of(b"hints %d of lesson %d" % (shown, lesson.number))[:12]
    return f"# cos598d hints shown: {shown} of {len(lesson.hints)} ({code})"


def hints_in(source: bytes, lesson: Lesson) -> int | None:
    """How many hints were shown by the line in a file; None where it is missing or was changed."""
    lines = [line.decode(errors="replace").rstrip() for line in _HINTS.findall(source)]
    known = [shown for shown in range(len(lesson.hints) + 1) if hint_line(lesson, shown) in lines]
    return max(known) if known and len(set(lines)) == len(known) else None


def digest_of(source: bytes) -> str:
    """The digest of a file's content."""
    return hashlib.sha256(source).hexdigest()


_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Above = Annotated[float, msgspec.Meta(gt=0)]


@dataclass(frozen=True)
class GolfScore:
    """What a file, whose content has this digest, took in one call of `--golf`: the bytes of the rank that sends most,
    the median, least and most seconds of its rounds, and the median of how many times the reference's these are."""

    file: str
    sha256: str
    bytes: _Bytes
    seconds: _Above
    least: _Above
    most: _Above
    ratio: _Above
    is_busy: bool = False  # other programs took a share of the processors


@contextlib.contextmanager
def golf_scores(folder: Path, lesson: Lesson, least: int) -> Iterator[list[GolfScore]]:
    """The lesson's older scores in this folder; what the block adds is kept if it ends well.

    Raises UserError for a file that is no board, such as one with fewer bytes than `least`, the lesson's limit, and
    where another program has the board.
    """
    place, number = folder / BOARD, str(lesson.number)
    with _writing(place):
        own_folder(place.parent)
    with locked(place.parent) as is_ours:
        if not is_ours:
            raise UserError(f"another --golf is at work in {folder}, and each would slow down the other. Wait for it.")
        try:
            boards = msgspec.convert(read_json(place), dict[str, list[GolfScore]])
            low = next((score.bytes for score in boards.get(number, []) if score.bytes < least), None)
            if low is not None:
                raise ValueError(f"{low:,} bytes are below the limit of lesson {number}, {least:,}")
        except FileNotFoundError:
            boards = {}
        except (OSError, ValueError) as error:  # msgspec's too
            raise UserError(
                f"{place} is no board, or was damaged ({printable(error, 200)}). Delete it: it only has older scores."
            ) from None
        scores = boards.setdefault(number, [])
        yield scores
        del scores[:-MOST_KEPT]
        with _writing(place):
            write_json(place, {name: [asdict(each) for each in every] for name, every in boards.items()})


@contextlib.contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{place} cannot be written ({error.strerror}). Use a folder in which you can write.") from None


def _keep(folder: Path, lesson: Lesson, facts: dict[str, Any]) -> None:
    known = _read(folder)
    known[str(lesson.number)] = _of(folder, lesson) | facts
    with _writing(folder / PLACE):
        write_json(folder / PLACE, known)


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
