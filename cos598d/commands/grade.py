"""`cos598d grade`: a class's submissions, or one for Gradescope or Classroom 50."""

import argparse
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cos598d.commands.flags import check_at_least_one, check_output_file
from cos598d.commands.result_flags import add_needed_assignment, add_result_files
from cos598d.errors import WARNING, UsageError
from cos598d.terminal.printable import printable
from cos598d.terminal.signals import exits_on_sigterm
from cos598d.terminal.words import number_of
from cos598d.tools.grade.scored import NOT_JUDGED, PASSED, exit_code, most, number, total
from cos598d.tools.learn.lessons import check_golf

if TYPE_CHECKING:  # assignments need torch, which takes seconds, and flags that are refused do not
    from cos598d.tools.grade.assignment import Assignment
    from cos598d.tools.grade.grades import Graded
    from cos598d.tools.learn.lessons import Lesson

WORDS_WIDTH = 90
MOST_PAIRS = 20
OF_CLASS = ("parallel", "only", "regrade", "regrade_all", "roster", "feedback", "similar", "board")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="a class's folder, with one folder or Python file per submission; with --gradescope or --classroom50, "
        "one submission",
    )
    add_needed_assignment(parser)
    of_class = parser.add_argument_group("for a class")
    of_class.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write the class's table to FILE after each submission; the folder FILE.results keeps the results, so "
        "that a later run does not grade them again",
    )
    of_class.add_argument(
        "--parallel",
        type=int,
        metavar="N",
        help="grade N submissions at the same time, each with its own processes, network and temporary files "
        "(default: one after the other; these are shared)",
    )
    of_class.add_argument("--only", action="append", default=[], metavar="NAME", help="grade only this submission")
    of_class.add_argument(
        "--regrade",
        action="append",
        default=[],
        metavar="NAME",
        help="grade this submission again, and all that have no result yet",
    )
    of_class.add_argument("--regrade_all", action="store_true", help="grade all submissions again")
    of_class.add_argument(
        "--roster",
        type=Path,
        metavar="FILE.csv",
        help="table of the students: columns id, name, email, section; submissions are named by id, email, or the part "
        "of the email before the @",
    )
    of_class.add_argument(
        "--feedback",
        type=Path,
        metavar="FOLDER",
        help="write a page for each student to FOLDER, with a picture of the step",
    )
    of_class.add_argument(
        "--board",
        type=Path,
        metavar="FILE",
        help="measure submissions that pass, and write a CSV table there, by bytes and then by seconds "
        "as multiples of the answer's",
    )
    of_class.add_argument("--similar", action="store_true", help="list pairs of similar submissions, for you to read")
    add_result_files(parser)
    parser.add_argument(
        "--as_root",
        action="store_true",
        help="let submissions run as root if they cannot run as the user nobody (default: refuse)",
    )


def run(options: argparse.Namespace) -> int:
    """Grade, and return 0, 1 if a submission is wrong, 2 if one could not be judged; for a class only 0 or 2."""
    is_one = options.gradescope is not None or options.classroom50 is not None
    if is_one == (options.csv is not None):
        raise UsageError(
            "grade needs one kind of results. Give --csv FILE for a class, or --gradescope FILE or --classroom50 FILE "
            "for one submission."
        )
    check_at_least_one("--parallel", options.parallel)
    given = next((name for name in OF_CLASS if getattr(options, name)), None)
    if is_one and given:
        raise UsageError(
            f"--{given} is for a class. Leave it out, or give --csv FILE instead of --gradescope and --classroom50."
        )
    for flag in ("csv", "gradescope", "classroom50", "board"):
        check_output_file(f"--{flag}", getattr(options, flag))
    if not options.folder.exists():
        raise UsageError(f"{options.folder} does not exist. Give a class's folder, or a submission.")
    _check_imports(options.folder)
    from cos598d.tools.grade.assignment import assignment_of

    assignment = assignment_of(options.assignment)
    if options.board is not None:
        _golfed_lesson(assignment)
        if options.board.resolve() == options.csv.resolve():
            raise UsageError(f"--board {options.board} is the table's file. Give it another one.")
    with exits_on_sigterm():
        if is_one:
            return _one(options, assignment)
        from cos598d.tools.grade.grades import KeptResults

        with KeptResults(options.csv).locked():
            return _class(options, assignment)


def _check_imports(folder: Path) -> None:
    """Raise UsageError if this process imports modules from what it grades: a student's psutil.py would run."""
    is_folder = folder.is_dir()
    place = folder.resolve() if is_folder else folder.resolve().parent
    for entry in {Path(each).resolve() for each in sys.path}:
        if entry == place or (is_folder and place in entry.parents):
            raise UsageError(
                f"Python would import modules from {printable(entry, 200)}, which contains submissions. "
                "Run grade in another folder."
            )


def _one(options: argparse.Namespace, assignment: "Assignment") -> int:
    from cos598d.tools.grade.result_files import ResultFiles
    from cos598d.tools.grade.submission import grading

    with grading(assignment, options.as_root) as grader:
        results = ResultFiles(assignment, options.gradescope, options.classroom50)
        if grader.remark:
            print(f"{WARNING}{grader.remark}")
        end = grader.grade(options.folder, results.add)
    remark = "\n".join(part for part in (end.remark, end.printed and f"It printed:\n{end.printed}") if part)
    scored = results.finish(end.otherwise, remark)
    print(f"{number(total(scored))} of {number(most(scored))} points.")
    for each in scored:
        print(f"{each.status:12}{each.name} ({number(each.points)} of {number(each.most)})")
        if not each.passed:
            print(f"{'':12}{printable(' '.join(each.words.split()), 300)}")
    return exit_code(scored)


def _golfed_lesson(assignment: "Assignment") -> "Lesson":
    """The lesson whose submissions are measured. Raises UsageError for an assignment that has none."""
    from cos598d.tools.grade.kinds.lesson import LessonKind

    if not isinstance(assignment.kind, LessonKind):
        raise UsageError("--board needs an assignment of one lesson. Leave it out, or grade each lesson by itself.")
    check_golf(assignment.kind.lesson, "--board")
    return assignment.kind.lesson


def _class(options: argparse.Namespace, assignment: "Assignment") -> int:
    from cos598d.tools.grade.folder import SubmittedClass, names, submissions_in
    from cos598d.tools.grade.grades import write_board
    from cos598d.tools.grade.handed_in import read_roster, similar_pairs
    from cos598d.tools.grade.submission import grading

    began = time.monotonic()
    times: list[float] = []

    def say(graded: "Graded") -> None:
        points = f"{number(graded.points)} of {number(most(graded.scored))} pts"
        words = textwrap.shorten(printable(graded.words), WORDS_WIDTH, placeholder=" ...")
        seconds = graded.result.seconds
        line = f"{printable(graded.result.name, 40):24} {points:>12}  {graded.status:11} {seconds:6.1f} s  {words}"
        print(line.rstrip(), flush=True)
        times.append(seconds)

    points = assignment.points
    most_points = number(sum(points.values()))
    word = "point" if most_points == "1" else "points"
    tests = number_of(len(points), "test")
    print(f"{printable(assignment.title, 200)}: {most_points} {word} for {tests}")
    submissions, passed_over = submissions_in(options.folder, options.feedback)
    if passed_over:
        print(f"skipped: {names(passed_over)} (submissions are folders and .py files, without . or _ at the start)")
    students = read_roster(options.roster) if options.roster else []
    submitted = SubmittedClass(submissions, assignment, options.csv, students, options.feedback)
    only = submitted.chosen("--only", options.only) or {path.name for path in submissions}
    again = only if options.regrade_all else submitted.chosen("--regrade", options.regrade)
    wanted = (only - submitted.known.keys()) | again
    if submitted.strangers:
        print(f"not in {options.roster}: {names(submitted.strangers)}")
    if submitted.absent:
        print(f"handed in nothing: {names([student.id for student in submitted.absent])}")
    if len(wanted) < len(submissions):
        print(f"already graded: {len(submitted.known)} of {number_of(len(submissions), 'submission')}")
    is_drawn = options.feedback is not None
    lesson = _golfed_lesson(assignment) if options.board else None
    answer = lesson.answer() if lesson else ""
    with grading(assignment, options.as_root, options.parallel is not None, is_drawn, answer) as grader:
        if grader.remark:
            print(f"{WARNING}{grader.remark}")
        graded = submitted.grade(wanted, grader, options.parallel or 1, say)
    seconds = time.monotonic() - began
    each = f", {seconds / len(times):.1f} s each ({min(times):.1f} to {max(times):.1f})" if times else ""
    print(f"{number_of(len(times), 'submission')} in {seconds:.0f} s{each}: wrote {options.csv}")
    if lesson:
        on_board = write_board(options.board, graded, lesson.load_checks().least)
        left = [each.result.name for each in graded if each.status == "passed" and each.result.end.golf is None]
        remark = f"; passed, but not measured: {names(left)} (add --regrade NAME)" if left else ""
        print(f"wrote {options.board}: {number_of(on_board, 'submission')}{remark}")
    if options.similar:
        pairs = similar_pairs({path.name: path for path in submissions}, assignment.kind.given())
        found = number_of(len(pairs), "pair")
        print(f"similar except for names and comments: {found} (no proof of copying until you read them)")
        for share, one, other in pairs[:MOST_PAIRS]:
            print(f"  {share:4.0%}  {printable(one, 40)}  {printable(other, 40)}")
    return NOT_JUDGED if any(exit_code(each.scored) == NOT_JUDGED for each in graded) else PASSED
