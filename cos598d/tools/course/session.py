"""What `learn` does for a student: lists lessons, writes a page, prints a hint, checks a file."""

import subprocess
import sys
from pathlib import Path

from cos598d.errors import UsageError
from cos598d.terminal.reading import read_plain
from cos598d.terminal.tables import as_text
from cos598d.terminal.words import listed
from cos598d.tools.course import Lesson, all_lessons, lesson_of, progress


def overview(folder: Path) -> str:
    """The lessons in a table, with what is done in this folder and what comes next."""
    lessons = all_lessons()
    states = [progress.status(folder, lesson) for lesson in lessons]
    rows = [["", "lesson", "minutes", ""]]
    for lesson, state in zip(lessons, states, strict=True):
        rows.append([str(lesson.number), lesson.title, str(lesson.minutes), state])
    left = (lesson for lesson, state in zip(lessons, states, strict=True) if state != progress.PASSED)
    following = next(left, None)
    end = f"Next: cos598d learn {following.number}" if following else "All lessons are done."
    return f"{as_text(rows)}\n\n{end}"


def question(lesson: Lesson) -> str:
    """What the lesson asks, and what to do next."""
    command = f"cos598d learn {lesson.number}"
    wanted = "\n".join(f"    {form}" for form in lesson.contract.values())
    return (
        f"Lesson {lesson.number}: {lesson.title} (about {lesson.minutes} minutes)\n\n{lesson.question}\n\n"
        f"Your file must define\n{wanted}\n\n"
        f"{command} --check      checks your file\n{command} --hint       prints the next hint\n"
        f"docs/lessons/lesson{lesson.number}.md explains it."
    )


def write_page(path: Path, lesson: Lesson) -> bool:
    """Write the lesson's file; False if it exists already, which is not changed. Raises UsageError if it cannot."""
    try:
        with path.open("x", encoding="utf-8") as output:
            output.write(lesson.page())
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
    known = progress.known(folder, lesson)
    number = number or min(known.hints + 1, most)
    progress.keep(folder, lesson, progress.Known(known.done, max(known.hints, number)))
    rest = f" ({most - number} more)" if number < most else " (the last)"
    return f"Hint {number} of {most}{rest}: {lesson.hints[number - 1]}"


def check(lesson: Lesson, path: Path, results: Path | None = None) -> bool:
    """Check a file by the lesson's tests, which print the first mistake; whether it passes. Raises UsageError."""
    try:
        number = lesson_of(read_plain(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        how = f"`cos598d learn {lesson.number}` writes the file"
        raise UsageError(f"{path} cannot be read ({reason}). {how}.") from None
    if number not in (None, lesson.number):
        raise UsageError(f"{path} is a file of lesson {number}. Give `cos598d learn {number} --check {path}`.")
    ranks = f"on {listed(lesson.ranks)} rank{'' if lesson.ranks == (1,) else 's'}"
    print(f"checking {path.name} {ranks}", flush=True)
    words = [str(lesson.tests), "-p", "cos598d.tools.exam.plugin", "--file", str(path.resolve())]
    if results:
        words += ["--results", str(results.resolve())]
    is_right = run_tests(words, is_first_only=results is None) == 0
    if is_right:
        folder = path.resolve().parent
        progress.keep(folder, lesson, progress.Known(True, progress.known(folder, lesson).hints))
        print(f"{path.name} passes all tests of lesson {lesson.number}.")
        print(f"Read next: {lesson.read}\nMeasure: {lesson.measure}")
    return is_right


def run_tests(words: list[str], is_first_only: bool = False) -> int:
    """Run pytest on our tests in a process of its own, in a form that shows sentences only; return its exit code."""
    quiet = ["-qq", "--no-header", "--no-summary", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "/"]
    first = ["-x"] if is_first_only else []
    command = [sys.executable, "-m", "pytest", *quiet, "-p", "cos598d.tools.exam.shown", *first, *words]
    return subprocess.run(command, check=False).returncode
