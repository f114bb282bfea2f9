"""`cos598d learn`: the course. Lists its lessons, writes a lesson's file, prints hints, checks a file."""

import argparse
import sys
from pathlib import Path

from cos598d.commands.flags import check_output_file, output_written
from cos598d.commands.result_flags import give_result, printer
from cos598d.errors import UsageError
from cos598d.terminal.files import write_together
from cos598d.terminal.signals import exits_on_sigterm
from cos598d.tools.learn import session, told
from cos598d.tools.learn.lessons import Lesson, get_lesson

NEXT, OWN = 0, Path()  # a flag that was given without a value


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("lesson", type=int, nargs="?", metavar="N", help="number of the lesson (default: list all)")
    parser.add_argument(
        "--check",
        type=Path,
        nargs="?",
        const=OWN,
        metavar="FILE",
        help="check a lesson's file (default: lessonN.py in this folder)",
    )
    parser.add_argument(
        "--hint", type=int, nargs="?", const=NEXT, metavar="K", help="print hint K (default: one more each time)"
    )
    parser.add_argument(
        "--picture",
        type=Path,
        nargs="?",
        const=OWN,
        metavar="FILE.svg",
        help="draw one step of your file and one of the answer, on 4 ranks; with FILE.svg, also write it there, and "
        "your ring's messages to FILE-steps.svg",
    )
    parser.add_argument(
        "--golf",
        type=Path,
        nargs="?",
        const=OWN,
        metavar="FILE",
        help="check a lesson's file, and measure its bytes and seconds next to the answer's",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="with --check: also write the result as JSON; -: print it instead of the text"
    )


def run(options: argparse.Namespace) -> int:
    """List the lessons, or do what is asked with one; return 0, or 1 for a file that does not pass.

    Raises UsageError for arguments that cannot work and for a file that does not exist.
    """
    if options.json and options.check is None:
        raise UsageError("--json writes the result of --check. Give both, or leave --json out.")
    if options.lesson is None:
        if any(each is not None for each in (options.check, options.hint, options.picture, options.golf)):
            flags = "--check, --hint, --picture and --golf"
            raise UsageError(f"{flags} need a lesson. Give its number, as in `learn 3 --check`.")
        print(session.overview(Path()))
        return 0
    lesson = get_lesson(options.lesson)
    if options.golf is not None:
        if any(each is not None for each in (options.check, options.hint, options.picture)):
            raise UsageError("--golf checks the file itself. Give --check, --hint and --picture in another command.")
        with exits_on_sigterm():
            path = Path(lesson.file_name) if options.golf == OWN else options.golf
            board = session.golf(lesson, path, printer(None))
        if board is not None:
            print(f"\n{board}")
        return 0 if board is not None else 1
    if options.hint is not None:
        if options.check is not None or options.picture is not None:
            raise UsageError("--hint only prints a hint. Give --check and --picture in a command of their own.")
        print(session.hint(Path(), lesson, options.hint or None))
        return 0
    path = Path(lesson.file_name) if options.check in (None, OWN) else options.check
    if options.picture is not None:
        check_output_file("--picture", None if options.picture == OWN else options.picture, ".svg")
    code = 0 if options.check is None else check(lesson, path, options.json)
    if options.picture is not None:
        _draw(lesson, path, options.picture)
    if options.check is not None or options.picture is not None:
        return code
    is_new = session.write_page(path, lesson)
    print(session.question(lesson))
    print(f"\nwrote {path}: fill it in." if is_new else f"\n{path} exists already and was not changed.")
    return 0


def _draw(lesson: Lesson, path: Path, output: Path) -> None:
    """Print the picture, and write it if `output` names a file."""
    from cos598d.tools.learn.picture.draw import letters_and_width

    if lesson.has_picture and path.is_file():
        on = f" and one of the answer, on {session.RANKS} ranks" if session.ranks_drawn(lesson) > 1 else ""
        print(f"drawing a step of {path.name}{on}", file=sys.stderr, flush=True)
    with exits_on_sigterm():
        session.warm_up(lesson)
        picture, steps = session.picture_of(lesson, path)
    letters, width = letters_and_width()
    print(f"\n{picture.text(width, letters)}")
    if steps is not None:
        print(f"\n{steps.text(width, letters)}")
    if output == OWN:
        return
    drawings = {output: picture.svg()}
    if steps is not None:
        drawings[output.with_name(f"{output.stem}-steps.svg")] = steps.svg()
    with output_written(f"--picture {output}"):
        write_together(drawings)
    for file in drawings:
        print(f"wrote {file}", file=sys.stderr)


def check(lesson: Lesson, path: Path, json_file: str | None) -> int:
    """Check a lesson's file and print, or write, the result; 0 if it passes, else 1. Raises UsageError."""
    check_output_file("--json", json_file)
    say = printer(json_file)
    with exits_on_sigterm():
        result = session.check_file(lesson, path, say)
    say(told.verdict(result, lesson))
    give_result(json_file, result)
    return 0 if result["passed"] else 1
