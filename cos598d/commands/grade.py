"""`cos598d grade`: a class's submissions, or one for Gradescope."""

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

from cos598d.commands.flags import check_at_least_one, check_output_file, output_written
from cos598d.errors import WARNING, UsageError
from cos598d.terminal.files import write_json
from cos598d.terminal.printable import printable
from cos598d.terminal.signals import exits_on_sigterm

WIDTH = 90


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument(
        "place", type=Path, metavar="PLACE", help="a class's folder (with --csv), or one submission's file or folder"
    )
    add_assignment(parser)
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write the class's table to FILE; the folder FILE.results keeps each result, so that a later run does not "
        "grade it again",
    )
    parser.add_argument("--parallel", type=int, metavar="N", help="grade N submissions of a class at the same time")
    parser.add_argument(
        "--container", default="", metavar="IMAGE", help="judge each submission in a container (docker or podman)"
    )
    parser.add_argument("--gradescope", type=Path, metavar="FILE", help="write Gradescope's results.json there")


def add_assignment(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the assignment."""
    parser.add_argument(
        "--assignment",
        required=True,
        metavar="FILE.toml",
        help="the assignment's file, or what it tests, with its defaults: lesson3, sync or script",
    )


def run(options: argparse.Namespace) -> int:
    """Grade. Returns 0 for a class; for one submission 0 if it has all points, else 1."""
    is_one = options.gradescope is not None
    if is_one == (options.csv is not None):
        raise UsageError(
            "grade needs one kind of results. Give --csv FILE for a class, or --gradescope FILE for one submission."
        )
    check_at_least_one("--parallel", options.parallel)
    check_output_file("--csv", options.csv)
    check_output_file("--gradescope", options.gradescope)
    if not options.place.exists():
        raise UsageError(f"{options.place} does not exist. Give a class's folder, or a submission.")
    from cos598d.tools.grade.assignment import assignment_of
    from cos598d.tools.grade.judging import REMARK

    assignment = assignment_of(options.assignment)
    if not options.container and not is_one:
        print(f"{WARNING}{REMARK}", file=sys.stderr)
    with exits_on_sigterm():
        return _one(options, assignment) if is_one else _class(options, assignment)


def _one(options: argparse.Namespace, assignment: Any) -> int:
    from cos598d.tools.grade.judging import judge
    from cos598d.tools.grade.submissions import points_of

    file = options.place / assignment.file_name if options.place.is_dir() else options.place
    results = judge(file, assignment, options.container)
    with output_written(f"--gradescope {options.gradescope}"):
        write_json(options.gradescope, results)
    for name, points, most, words in points_of(results):
        print(f"{name}: {points:g} of {most:g}")
        if words:
            print(textwrap.indent(printable(words, 1000, keep="\n"), "    "))
    if not results["tests"]:
        print(results["output"])
    most = sum(test["max_score"] for test in results["tests"])
    print(f"{results['score']:g} of {most:g} points.")
    return 0 if results["tests"] and results["score"] == most else 1


def _class(options: argparse.Namespace, assignment: Any) -> int:
    from cos598d.tools.grade.submissions import grade_class, submissions_in, write_table

    found, missing = submissions_in(options.place, assignment.file_name)
    for name in missing:
        print(f"{printable(name, 40):24} has no {assignment.file_name}")

    def say(name: str, results: dict[str, Any]) -> None:
        most = sum(test["max_score"] for test in results["tests"])
        words = textwrap.shorten(printable(str(results["output"])), WIDTH, placeholder=" ...")
        print(f"{printable(name, 40):24} {results['score']:g} of {most:g} points  {words}".rstrip(), flush=True)

    kept = options.csv.with_name(f"{options.csv.name}.results")
    rows = grade_class(found, assignment, kept, options.parallel or 1, options.container, say)
    with output_written(f"--csv {options.csv}"):
        write_table(options.csv, rows)
    print(f"wrote {options.csv}: {len(rows)} submissions")
    return 0
