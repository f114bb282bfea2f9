"""`cos598d learn`: the course. Lists its lessons, writes a lesson's file, prints hints, checks a file."""

import argparse
from pathlib import Path

from cos598d.commands.flags import check_output_file
from cos598d.errors import UsageError
from cos598d.terminal.signals import exits_on_sigterm
from cos598d.tools.course import get_lesson, session

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
        "--results", type=Path, metavar="FILE", help="with --check: also write every test's result as JSON"
    )


def run(options: argparse.Namespace) -> int:
    """List the lessons, or do what is asked with one; return 0, or 1 for a file that does not pass.

    Raises UsageError for arguments that cannot work and for a file that does not exist.
    """
    if options.results and options.check is None:
        raise UsageError("--results writes the results of --check. Give both, or leave --results out.")
    if options.lesson is None:
        if options.check is not None or options.hint is not None:
            raise UsageError("--check and --hint need a lesson. Give its number, as in `learn 3 --check`.")
        print(session.overview(Path()))
        return 0
    lesson = get_lesson(options.lesson)
    if options.hint is not None:
        if options.check is not None:
            raise UsageError("--hint only prints a hint. Give --check in a command of its own.")
        print(session.hint(Path(), lesson, options.hint or None))
        return 0
    path = Path(lesson.file_name) if options.check in (None, OWN) else options.check
    if options.check is not None:
        check_output_file("--results", options.results)
        with exits_on_sigterm():
            return 0 if session.check(lesson, path, options.results) else 1
    is_new = session.write_page(path, lesson)
    print(session.question(lesson))
    print(f"\nwrote {path}: fill it in." if is_new else f"\n{path} exists already and was not changed.")
    return 0
