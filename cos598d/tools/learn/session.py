"""What `learn` does for a student: lists lessons, writes a page, prints a hint, checks a file. Torch loads late."""

import os
import secrets
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cos598d.errors import UsageError, UserError
from cos598d.terminal.tables import as_text
from cos598d.terminal.words import listed
from cos598d.tools.learn import progress, told
from cos598d.tools.learn.lessons import Lesson, all_lessons, check_golf
from cos598d.tools.learn.student import first_mistake, read_file

if TYPE_CHECKING:
    from cos598d.tools.learn.checking import Golf
    from cos598d.tools.learn.lessons.golf import Stroke
    from cos598d.tools.learn.picture import Picture
    from cos598d.tools.learn.picture.curves import Curves
    from cos598d.tools.learn.picture.draw import StepFrames
    from cos598d.tools.learn.picture.probe import Recorded

WARM = ["torch._dynamo", "cos598d.tools.learn.ranks"]  # modules that a rank has loaded when it is forked
RANKS = 4  # of a picture
ROUNDS = 5  # of golf


def overview(folder: Path) -> str:
    """The lessons in a table, with what is done in this folder and what comes next."""
    lessons = all_lessons()
    states = [progress.status(folder, lesson) for lesson in lessons]
    rows = [["", "lesson", "minutes", ""]]
    rows += [
        [str(lesson.number), lesson.title, str(lesson.minutes), state]
        for lesson, state in zip(lessons, states, strict=True)
    ]
    following = next((each for each, state in zip(lessons, states) if not state.startswith(progress.PASSED)), None)
    if following is None:
        return f"{as_text(rows)}\n\nAll lessons are done."
    return f"{as_text(rows)}\n\nNext: cos598d learn {following.number}"


def question(lesson: Lesson) -> str:
    """What the lesson asks, and what to do next."""
    command = f"cos598d learn {lesson.number}"
    wanted = "\n".join(f"    {form}" for form in lesson.contract.values())
    drawn = "a step" if ranks_drawn(lesson) == 1 else f"a step on {RANKS} ranks, and the answer's"
    picture = f"\n{command} --picture    draws {drawn}" if lesson.has_picture else ""
    return (
        f"Lesson {lesson.number}: {lesson.title} (about {lesson.minutes} minutes)\n\n{lesson.question}\n\n"
        f"Your file must define\n{wanted}\n\n"
        f"{command} --check      checks your file\n{command} --hint       prints the next hint{picture}"
    )


def write_page(path: Path, lesson: Lesson) -> bool:
    """Write the lesson's file; False if it exists already, which is not changed. Raises UsageError if it cannot."""
    try:
        with path.open("x", encoding="utf-8") as output:
            line = progress.hint_line(lesson, progress.hints_told(path.parent, lesson))
            output.write(f"{lesson.page().rstrip()}\n\n\n{line}\n")
    except FileExistsError:
        return False
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}). Use a folder in which you can write.") from None
    return True


def hint(folder: Path, lesson: Lesson, number: int | None) -> str:
    """The hint of that number, from 1; None: the one after the last that was printed in this folder."""
    most = len(lesson.hints)
    if number is not None and not 1 <= number <= most:
        raise UsageError(f"--hint {number} does not exist in lesson {lesson.number}. Give a number from 1 to {most}.")
    number = number or min(progress.hints_told(folder, lesson) + 1, most)
    noted = f"\n(noted in {lesson.file_name})" if progress.keep_hint(folder, lesson, number) else ""
    rest = f" ({most - number} more)" if number < most else " (the last)"
    return f"Hint {number} of {most}{rest}: {lesson.hints[number - 1]}{noted}"


def check_file(lesson: Lesson, path: Path, say: Callable[[str], None], nonce: int | None = None) -> dict[str, Any]:
    """Check the file and report each step to `say`; return the result (JSON), as `Marking.result`.

    Raises UsageError if the file cannot be read or is another lesson's. The file runs in processes of its own.
    """
    source = read_file(path, lesson)
    if first_mistake(source, path, lesson.page()) is None:
        say(told.begins(path.name, lesson.ranks))
        warm_up(lesson)
    from cos598d.tools.learn.marking import Marking

    marking = Marking(lesson, path, source, secrets.randbits(32) if nonce is None else nonce)
    marking.run(say)
    result = marking.result()
    if result["passed"]:
        progress.keep_passed(path, lesson, source)
    return result


def golf(lesson: Lesson, path: Path, say: Callable[[str], None]) -> str | None:
    """Check the file; then measure it and the answer in turn, keep its score, and return the board as text.

    Returns None for a file that does not pass. Raises UsageError for a lesson without a board, UserError for a file
    that fails, or changes, while it is measured; then nothing is kept.
    """
    check_golf(lesson)
    result = check_file(lesson, path, say)
    if not result["passed"]:
        say(told.verdict(result, lesson))
        return None
    course, digest = cast("Golf", lesson.load_checks().golf), progress.digest_of(read_file(path, lesson))
    with progress.golf_scores(path.parent, lesson, course.least) as scores:
        say(told.golf_begins(path.name, course, ROUNDS))
        score, answers, share = measured(lesson, path)
        if progress.digest_of(read_file(path, lesson)) != digest:
            raise UserError(f"{path} has changed while it was measured. Give the command again.")
        board = told.golf_board(lesson, course, score, answers, scores, share)
        scores.append(score)
    return board


def measured(lesson: Lesson, path: Path, answer: str = "") -> tuple[progress.GolfScore, progress.GolfScore, float]:
    """The scores of a file that passes and of the answer, measured in turn; and the share of the processors that other
    programs took meanwhile. `answer` is the answer's text, where its folder is hidden. Raises UserError as `stroke`."""
    digest = progress.digest_of(read_file(path, lesson))
    own: list[Stroke] = []
    reference: list[Stroke] = []
    for number in range(ROUNDS):
        for is_own in (True, False) if number % 2 else (False, True):
            (own if is_own else reference).append(stroke(lesson, path if is_own else None, answer))
    share = _taken_by_others([*own, *reference], lesson.load_checks().golf.ranks)  # type: ignore[union-attr]
    mine = _score(path.name, digest, own, reference, share)
    return mine, _score("the answer", "", reference, reference, share), share


def stroke(lesson: Lesson, path: Path | None, answer: str = "") -> "Stroke":
    """One measurement of a file, or of the answer. Raises UserError where it fails, or the answer is left out."""
    from cos598d.tools.learn.marking import Marking

    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            path = Path(folder) / lesson.file_name
            path.write_text(answer or lesson.answer(), encoding="utf-8")
        return Marking(lesson, path, read_file(path, lesson), secrets.randbits(32)).golf()


def _score(
    file: str, digest: str, own: "Sequence[Stroke]", reference: "Sequence[Stroke]", share: float
) -> progress.GolfScore:
    seconds = [each.seconds for each in own]
    ratio = statistics.median(one / other.seconds for one, other in zip(seconds, reference, strict=True))
    sent = max(each.bytes for each in own)
    return progress.GolfScore(
        file, digest, sent, statistics.median(seconds), min(seconds), max(seconds), ratio, share > 0
    )


def _taken_by_others(strokes: "Sequence[Stroke]", ranks: int) -> float:
    """The share of the processors that other programs took meanwhile; 0 where they took none, or it is not known."""
    from cos598d.tools.report.disturbed import LEAST_SECONDS, share_of_others

    found: list[tuple[float, float] | None] = []
    for rank in range(ranks):
        rows = [each.host[rank] for each in strokes]
        passed = sum(row["seconds"] for row in rows)
        busy = sum(row["host_cpu_percent"] / 100 * row["seconds"] for row in rows)
        own = sum(row["process_cpu_seconds"] for row in rows)
        found.append((busy / passed, own / passed) if passed >= LEAST_SECONDS else None)
    return share_of_others(found, {"cores": os.cpu_count(), "ranks_on_host": ranks, "threads_per_rank": 1}) or 0.0


def ranks_drawn(lesson: Lesson) -> int:
    """On how many ranks a step is drawn."""
    return 1 if lesson.curves else RANKS


def picture_of(lesson: Lesson, path: Path) -> "tuple[Picture | Curves, StepFrames | None]":
    """One step of the file on 4 ranks and one of the answer; and the steps of the file's messages, if it sends any.

    For a lesson in which no rank waits for another: the curves of its step.

    Raises UsageError for a lesson without a picture, and UserError if the file fails or the answer is not installed.
    """
    from cos598d.tools.learn.picture import draw
    from cos598d.tools.learn.picture.curves import Curves
    from cos598d.tools.learn.picture.draw import steps_of
    from cos598d.tools.learn.picture.words import name_of

    own = record_file(lesson, path, ranks_drawn(lesson))
    if own and own.curves:
        try:
            return Curves.from_json(own.curves, path.name), None
        except ValueError as error:
            raise UserError(f"{path} cannot be drawn: {error}.") from None
    if not own or not own.events:
        raise UserError(f"{path} cannot be drawn, because it fails. Run --check to see why.")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.py"
        answer.write_text(lesson.answer(), encoding="utf-8")
        reference = record_file(lesson, answer)
    note = f"No steps are drawn: {name_of(own.unsaid, 200)}." if own.unsaid else ""
    steps = None
    if own.messages:
        try:
            steps = steps_of(own.messages, f"{name_of(path.name)} on {RANKS} ranks, step by step")
        except ValueError as error:
            note = f"No steps are drawn: {error}."
    beside = reference.events if reference else []
    return draw(own.events, beside, title=path.name, reference_title="the answer", note=note), steps


def record_file(lesson: Lesson, path: Path, size: int = RANKS) -> "Recorded | None":
    """What the file does in one step on `size` ranks; None if it fails. Raises UsageError."""
    source = read_file(path, lesson)
    from cos598d.tools.learn.marking import Marking

    if lesson.load_checks().record is None:
        known = listed([each.number for each in all_lessons() if each.has_picture])
        raise UsageError(
            f"--picture cannot draw lesson {lesson.number}, which has no picture. Lessons {known} have one."
        )
    return Marking(lesson, path, source, secrets.randbits(32)).record(size)


def warm_up(lesson: Lesson) -> None:
    """Start the server that ranks are forked from; it loads what the lesson needs while this process does."""
    from cos598d.tools.check.spawn import preload

    preload([*WARM, lesson.checks_module])
