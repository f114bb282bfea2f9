"""The flags that `check`, `audit` and `grade` share, and where their results go. Loads nothing heavy."""

import argparse
import json
from pathlib import Path
from typing import Any

from cos598d.commands.flags import check_output_file
from cos598d.errors import UsageError, UserError
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


def give_result(place: str | None, result: dict[str, Any]) -> None:
    """Do with a result what --json says: print it for "-", write it into a file, or nothing. Raises UserError."""
    if place == "-":
        print(json.dumps(result, indent=2))
    elif place:
        try:
            write_json(place, result)
        except OSError as error:
            raise UserError(f"--json {place} cannot be written ({error.strerror}). Give another path.") from None
