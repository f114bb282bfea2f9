"""`cos598d grade`: a class's submissions one after the other, or one for Gradescope or Classroom 50."""

import argparse
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cos598d.commands.flags import check_output_file
from cos598d.commands.result_flags import add_needed_assignment, add_result_files
from cos598d.errors import UsageError
from cos598d.terminal.printable import printable
from cos598d.terminal.signals import exits_on_sigterm
from cos598d.terminal.words import number_of
from cos598d.tools.grade.scored import NOT_JUDGED, PASSED, exit_code, most, number, total

if TYPE_CHECKING:  # assignments need torch, which takes seconds, and flags that are refused do not
    from cos598d.tools.grade.assignment import Assignment
    from cos598d.tools.grade.folder import Graded

WORDS_WIDTH = 90


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="a class's folder with one folder or Python file per submission; with --gradescope or --classroom50 "
        "one submission",
    )
    add_needed_assignment(parser)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the class's table there, after each submission")
    add_result_files(parser)
    parser.add_argument(
        "--as_root",
        action="store_true",
        help="let submissions run as root if they cannot run as nobody (default: refuse)",
    )


def run(options: argparse.Namespace) -> int:
    """Grade, and return 0, 1 where a submission is wrong, 2 where one could not be judged; of a class only 0 and 2."""
    is_one = options.gradescope is not None or options.classroom50 is not None
    if is_one == (options.csv is not None):
        raise UsageError("give --csv FILE for a class, or --gradescope or --classroom50 for one submission.")
    for flag in ("csv", "gradescope", "classroom50"):
        check_output_file(f"--{flag}", getattr(options, flag))
    if not options.folder.exists():
        raise UsageError(f"{options.folder} does not exist. Give a class's folder, or a submission.")
    _check_imports(options.folder)
    from cos598d.tools.grade.assignment import assignment_of

    assignment = assignment_of(options.assignment)
    with exits_on_sigterm():
        return _one(options, assignment) if is_one else _class(options, assignment)


def _check_imports(folder: Path) -> None:
    """Raise UsageError if this process imports modules from what it grades: a student's psutil.py would run."""
    is_folder = folder.is_dir()
    place = folder.resolve() if is_folder else folder.resolve().parent
    for entry in {Path(each).resolve() for each in sys.path}:
        if entry == place or (is_folder and place in entry.parents):
            raise UsageError(
                f"grade would import modules from {printable(entry, 200)}, which contains submissions. "
                "Start it in another folder."
            )


def _one(options: argparse.Namespace, assignment: "Assignment") -> int:
    from cos598d.tools.grade.result_files import ResultFiles
    from cos598d.tools.grade.submission import grading

    with grading(assignment, options.as_root) as grader:
        results = ResultFiles(assignment, options.gradescope, options.classroom50)
        if grader.remark:
            print(grader.remark)
        end = grader.grade(options.folder, results.add)
    remark = "\n".join(part for part in (end.remark, end.printed and f"It printed:\n{end.printed}") if part)
    scored = results.finish(end.otherwise, remark)
    print(f"{number(total(scored))} of {number(most(scored))} points.")
    for each in scored:
        print(f"{each.status:12}{each.name} ({number(each.points)} of {number(each.most)})")
        if not each.passed:
            print(f"{'':12}{printable(' '.join(each.words.split()), 300)}")
    return exit_code(scored)


def _class(options: argparse.Namespace, assignment: "Assignment") -> int:
    from cos598d.tools.grade.folder import grade_class, names, submissions_in
    from cos598d.tools.grade.submission import grading

    began = time.monotonic()

    def say(graded: "Graded") -> None:
        points = f"{number(total(graded.scored))} of {number(most(graded.scored))}"
        words = textwrap.shorten(printable(graded.words), WORDS_WIDTH, placeholder=" ...")
        line = f"{printable(graded.name, 40):24} {points:>12} {graded.status:11} {graded.seconds:6.1f} s  {words}"
        print(line.rstrip(), flush=True)

    points = assignment.points
    tests = number_of(len(points), "test")
    print(f"{printable(assignment.title, 200)}: {number(sum(points.values()))} points for {tests}")
    submissions, passed_over = submissions_in(options.folder)
    if passed_over:
        print(f"skipped, because submissions are folders and .py files without a leading . or _: {names(passed_over)}")
    with grading(assignment, options.as_root) as grader:
        if grader.remark:
            print(grader.remark)
        graded = grade_class(submissions, grader, assignment, options.csv, say)
    seconds = time.monotonic() - began
    times = [one.seconds for one in graded]
    mean = f"{seconds / len(graded):.1f} s each ({min(times):.1f} to {max(times):.1f})"
    print(f"{number_of(len(graded), 'submission')} in {seconds:.0f} s, {mean}: wrote {options.csv}")
    return NOT_JUDGED if any(exit_code(each.scored) == NOT_JUDGED for each in graded) else PASSED
