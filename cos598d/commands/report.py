"""`cos598d report`: a page of runs and benches, or a lab's report to fill in, only from their files."""

import argparse
import importlib
import sys
from pathlib import Path

from cos598d.commands.flags import check_output_file, output_written
from cos598d.errors import UsageError, UserError
from cos598d.terminal.files import write_whole
from cos598d.tools.report.lab import lab_page


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="folder that train, bench or sweep wrote, or a bench's file",
    )
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        metavar="FILE",
        help="file to write (default: report.html, or report.md with --lab)",
    )
    parser.add_argument(
        "--lab",
        type=Path,
        metavar="FOLDER",
        help="instead: write the lab's report, for you to fill in, with tables of the four tasks' runs in FOLDER",
    )


def run(options: argparse.Namespace) -> int:
    """Write the page and return 0. Raises UserError for a run that cannot be read, or a missing package."""
    if bool(options.runs) == (options.lab is not None):
        raise UsageError("report needs either folders of runs, or --lab FOLDER. Give one of the two.")
    output = options.output or Path("report.md" if options.lab else "report.html")
    check_output_file("-o", output, ".md" if options.lab else ".html")
    if options.lab and output.exists():  # you may have written in it
        raise UsageError(f"-o {output} exists already and is not overwritten. Give another name.")
    text = lab_page(options.lab) if options.lab else _page(options.runs)
    with output_written(f"-o {output}"):
        write_whole(output, text)
    print(f"wrote {output}", file=sys.stderr)
    return 0


def _page(paths: list[Path]) -> str:
    need()
    from cos598d.tools.report.page import build_page

    return build_page(paths)


def need() -> None:
    """Raise UserError if a package of the report is not installed."""
    for package in ("pandas", "matplotlib", "jinja2"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise UserError(
                f"a report needs {package}, which is not installed. Run `pip install -e '.[report]'` in the "
                "project's folder."
            ) from None
