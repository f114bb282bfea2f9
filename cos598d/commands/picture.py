"""`cos598d picture`: what each rank did in one step, in lanes of time, and the messages step by step."""

import argparse
import sys
from pathlib import Path

from cos598d.commands.flags import check_output_file, output_written
from cos598d.errors import UsageError
from cos598d.terminal.files import write_whole
from cos598d.terminal.signals import exits_on_sigterm
from cos598d.tools.learn.picture.draw import Picture, StepFrames, draw, letters_and_width
from cos598d.tools.learn.picture.record import events_of_run


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("record", nargs="?", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--sync", metavar="NAME", help="draw a small run with this sync (or FILE.py:CLASS) instead")
    parser.add_argument("--beside", metavar="NAME", help="also draw this sync's lanes, below those of --sync")
    parser.add_argument("--world_size", type=int, default=4, metavar="N", help="ranks of the small run (default: 4)")
    parser.add_argument("--lanes", action="store_true", help="write lanes to FILE.svg, not the messages step by step")
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        metavar="FILE.svg",
        help="write an SVG: the messages step by step if the sync sends any, else lanes",
    )


def run(options: argparse.Namespace) -> int:
    """Print the picture, write the drawing, and return 0.

    Raises UsageError for arguments that do not fit together, and UserError for a run that cannot be drawn.
    """
    _check(options)
    picture, steps = _pictures(options)
    letters, width = letters_and_width()
    print(picture.text(width, letters))
    if steps is not None:
        print(f"\n{steps.text(width, letters)}")
    if options.output is not None:
        drawing = picture.svg() if steps is None or options.lanes else steps.svg()
        with output_written(f"-o {options.output}"):
            write_whole(options.output, drawing)
        print(f"wrote {options.output}", file=sys.stderr)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise UsageError for arguments that do not fit together."""
    if (options.record is None) == (options.sync is None):
        raise UsageError("picture draws a run or a sync. Give a run's folder, or --sync NAME to draw a small run.")
    if options.record is not None and options.beside is not None:
        raise UsageError(f"--beside {options.beside} needs --sync. Give --sync NAME instead of the run's folder.")
    check_output_file("-o", options.output, ".svg")


def _pictures(options: argparse.Namespace) -> tuple[Picture, StepFrames | None]:
    if options.record is not None:
        events, note = events_of_run(options.record)
        return draw(events, title=options.record.resolve().name, note=note), None
    from cos598d.tools.learn.picture.trial import draw_sync

    with exits_on_sigterm():
        return draw_sync(options.sync, options.world_size, options.beside)
