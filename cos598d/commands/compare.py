"""`python -m cos598d compare`: a table of runs, from their records alone."""

import argparse
from pathlib import Path

from cos598d.report.load import load_run
from cos598d.report.table import comparison


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run's record; one that goes on, too"
    )
    parser.add_argument("--markdown", action="store_true", help="as Markdown tables")
    parser.add_argument(
        "--each", action="store_true", help="a row for each run (else runs of the same settings share one)"
    )


def run(options: argparse.Namespace) -> int:
    """Print the table and return 0. Raises UserError for a folder without a record that can be read."""
    print(comparison([load_run(folder, unfinished=True) for folder in options.runs], options.markdown, options.each))
    return 0
