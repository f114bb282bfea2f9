"""`cos598d picture`: what each rank did in one step of a sync, in lanes of time, and its messages step by step."""

import argparse
import sys
from pathlib import Path

from cos598d.commands.flags import check_output_file, output_written
from cos598d.errors import UsageError
from cos598d.terminal.files import write_whole
from cos598d.terminal.signals import exits_on_sigterm

MOST_RANKS = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("--sync", required=True, metavar="NAME", help="a built-in sync, or FILE.py:CLASS")
    parser.add_argument("--world_size", type=int, default=4, metavar="N", help="ranks (default: 4)")
    parser.add_argument("--lanes", action="store_true", help="write lanes to FILE.svg, not the messages step by step")
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        metavar="FILE.svg",
        help="write an SVG: the messages step by step if the sync sends any, else lanes",
    )


def run(options: argparse.Namespace) -> int:
    """Print the picture, write the drawing, and return 0. Raises UserError for a sync that fails."""
    check_output_file("-o", options.output, ".svg")
    if not 2 <= options.world_size <= MOST_RANKS:
        raise UsageError(f"--world_size {options.world_size} cannot be drawn. Give 2 to {MOST_RANKS} ranks.")
    from cos598d.tools.picture import lanes, steps  # they load torch
    from cos598d.tools.picture.of_sync import calls_of, looks_of

    own = options.sync
    path, _, kind = own.rpartition(":")
    name = f"{Path(path).resolve()}:{kind}" if path else own
    if path and not Path(path).is_file():
        raise UsageError(f"{path}: no such file. Give FILE.py:CLASS relative to {Path.cwd()}, or in full.")
    with exits_on_sigterm():
        found = lanes.bars(calls_of(name, options.world_size))
        looks = looks_of(name, options.world_size)
    title = f"One step of {own} on {options.world_size} ranks"
    print(f"{title}\n{lanes.sentence(found)}")
    drawing = lanes.svg(found, title)
    if looks:
        moves = steps.moves_of(looks)
        print(f"\nOne gradient, message by message\n{steps.in_letters(looks, moves, 4)}")
        drawing = drawing if options.lanes else steps.svg(looks, moves, 4, f"{title}, message by message")
    if options.output is not None:
        with output_written(f"-o {options.output}"):
            write_whole(options.output, drawing)
        print(f"wrote {options.output}", file=sys.stderr)
    return 0
