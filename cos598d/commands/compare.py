"""`cos598d compare`: a table of runs, or whether two of them are equal, only from their files."""

import argparse
import math
from pathlib import Path

from cos598d.errors import UsageError
from cos598d.tools.report.equal import PARTS, compare_equal
from cos598d.tools.report.records import load_run, own_names
from cos598d.tools.report.tables import brief, detailed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, which may still be running")
    parser.add_argument("--verbose", action="store_true", help="print every table: ratios, times, bytes, memory")
    section = parser.add_argument_group("regression tests")
    section.add_argument(
        "--assert_equal",
        action="store_true",
        help="instead: compare two finished runs; exit with 0 if they are equal, else with 1 and the first difference",
    )
    section.add_argument(
        "--within", type=float, metavar="X", help="allowed difference of losses and metrics (default: 0, bit-identical)"
    )
    section.add_argument("--of", metavar="PART,PART", help=f"compare only these (default: {','.join(PARTS)})")


def run(options: argparse.Namespace) -> int:
    """Print the table, or the verdict, and return the exit code. Raises UserError for a run that cannot be read."""
    if options.assert_equal:
        return _assert_equal(options)
    for name in ("within", "of"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} is for --assert_equal. Add it, or leave --{name} out.")
    runs = [load_run(*place) for place in zip(options.runs, own_names(options.runs), strict=True)]
    print((detailed if options.verbose else brief)(runs))
    return 0


def _assert_equal(options: argparse.Namespace) -> int:
    if len(options.runs) != 2:
        raise UsageError(f"--assert_equal compares two runs, and {len(options.runs)} were given. Give two.")
    if options.verbose:
        raise UsageError("--verbose is for the table. Leave out --verbose, or --assert_equal.")
    within = 0.0 if options.within is None else options.within
    if not (math.isfinite(within) and within >= 0):
        raise UsageError(f"--within {within:g} is not valid. Give a number of at least 0.")
    parts = PARTS if options.of is None else tuple(options.of.split(","))
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"--of {options.of}: unknown part {part!r}. Choose from {', '.join(PARTS)}.")
    is_equal, sentence = compare_equal(options.runs, within, parts)
    print(sentence)
    return 0 if is_equal else 1
