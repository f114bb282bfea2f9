"""The flags that `check`, `audit` and `grade` share, and where their results go. Loads nothing heavy."""

import argparse
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from cos598d.commands.flags import check_output_file, output_written
from cos598d.errors import UsageError
from cos598d.terminal.files import write_json

FILES = ("gradescope", "classroom50")
MOST_RANKS = 16


def add_result_files(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the files."""
    group = parser.add_argument_group("for teachers")
    group.add_argument(
        "--gradescope", type=Path, metavar="FILE", help="write Gradescope's results.json there, after each test"
    )
    group.add_argument(
        "--classroom50", type=Path, metavar="FILE", help="write Classroom 50's result.json there, after each test"
    )


def add_needed_assignment(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the assignment, for commands that need one."""
    parser.add_argument(
        "--assignment",
        required=True,
        metavar="FILE.toml",
        help="the assignment's file, or a kind with its defaults: sync, script, lesson or tests",
    )


def add_assignment(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the points, for commands that do not need it."""
    parser.add_argument(
        "--assignment",
        metavar="FILE.toml",
        help="points, visibility and tests for --gradescope or --classroom50 (default: 1 point per test)",
    )


def wants_files(options: argparse.Namespace) -> bool:
    """Whether one of the files is wanted. Raises UsageError for one that cannot be written, and for an assignment
    without one."""
    for name in FILES:
        check_output_file(f"--{name}", getattr(options, name))
    is_wanted = any(getattr(options, name) is not None for name in FILES)
    if options.assignment is not None and not is_wanted:
        raise UsageError(
            "--assignment only sets points for --gradescope and --classroom50. Give one of them, or leave it out."
        )
    return is_wanted


def read_world_sizes(text: str) -> list[int]:
    """ "2,3,4" as numbers, each once, in order. Raises UsageError."""
    try:
        sizes = sorted({int(word) for word in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or not 1 <= sizes[0] <= sizes[-1] <= MOST_RANKS:
        raise UsageError(
            f"--world_sizes {text} is not valid. Give numbers from 1 to {MOST_RANKS} with commas, such as 2,3,4."
        )
    return sizes


def read_names(text: str, known: Iterable[str], what: str) -> list[str]:
    """The names in `text`, each once: those of tests or cases, as `what` says. Raises UsageError for an unknown one."""
    names, known = list(dict.fromkeys(text.split(","))), list(known)
    for name in names:
        if name not in known:
            flag = "claims" if what == "test" else f"{what}s"
            raise UsageError(f"--{flag} {name}: there is no such {what}. The {what}s are {', '.join(known)}.")
    return names


def check_seconds(seconds: float, what: str) -> None:
    """Raise UsageError unless --seconds can be the time limit of a test or a case, as `what` says."""
    if not 0 < seconds < 10_000:
        raise UsageError(f"--seconds {seconds:g} is no time limit of a {what}. Give a number above 0 and below 10000.")


def add_json(parser: argparse.ArgumentParser, instead: str) -> None:
    """Add --json, which `printer` and `give_result` obey; `instead` is what it may replace."""
    parser.add_argument(
        "--json", metavar="FILE", help=f"also write the result as JSON; -: print it instead of the {instead}"
    )


def printer(json_file: str | None) -> Callable[[str], None]:
    """The function that prints a command's lines as they come: nothing where standard output has the JSON."""
    return (lambda _: None) if json_file == "-" else partial(print, flush=True)


def give_result(json_file: str | None, result: dict[str, Any]) -> None:
    """Do with a result what --json says: print it for "-", write it into a file, or nothing. Raises UserError."""
    if json_file == "-":
        print(json.dumps(result, indent=2))
    elif json_file:
        with output_written(f"--json {json_file}"):
            write_json(json_file, result)
