"""`cos598d autograder`: a zip for Gradescope that grades an assignment."""

import argparse
from pathlib import Path

from cos598d.commands.flags import check_output_file, output_written
from cos598d.commands.grade import add_assignment
from cos598d.terminal.files import write_whole


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    add_assignment(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("autograder.zip"),
        metavar="FILE",
        help="write the zip there (default: autograder.zip)",
    )


def run(options: argparse.Namespace) -> int:
    """Write the zip and return 0. Raises UserError if that cannot be done."""
    check_output_file("--output", options.output)
    from cos598d.tools.grade.platforms import autograder

    content = autograder(options.assignment)
    with output_written(options.output):
        write_whole(options.output, content)
    print(f"wrote {options.output} ({len(content) / 1e6:.1f} MB): upload it as the assignment's autograder")
    return 0
