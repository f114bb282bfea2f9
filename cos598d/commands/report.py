"""`cos598d report`: a page of runs and benches, or a lab's report to fill in, only from their files."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cos598d.commands.flags import check_output_file, output_written
from cos598d.errors import UsageError, UserError
from cos598d.records.bench import FILE_NAME
from cos598d.records.conventions import SUMMARY
from cos598d.records.run import live_folder
from cos598d.terminal.files import write_together, write_whole
from cos598d.tools.report.benches import Bench, load_bench
from cos598d.tools.report.blocks import Page, as_html, as_markdown_page, as_pdf, need
from cos598d.tools.report.lab import lab_page
from cos598d.tools.report.load import Run, load_run_as, own_names


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="folder that train, bench or sweep wrote",
    )
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        metavar="FILE",
        help="file to write: .html, .pdf, or .md with its plots in a folder next to it (default: report.html, or "
        "report.md with --lab)",
    )
    parser.add_argument(
        "--lab",
        type=Path,
        metavar="FOLDER",
        help="instead: write the lab's report, for you to fill in, with plots of the four tasks' runs in FOLDER",
    )


def run(options: argparse.Namespace) -> int:
    """Write the page and return 0. Raises UserError for a run that cannot be read, or a missing package."""
    if bool(options.runs) == (options.lab is not None):
        raise UsageError("report needs either folders of runs, or --lab FOLDER. Give one of the two.")
    if options.lab is not None:
        return _lab(options.lab, options.output or Path("report.md"))
    output = options.output or Path("report.html")
    check_output_file("-o", output, ".html", ".pdf", ".md")
    ending = output.suffix.lower()
    need("jinja2", "matplotlib", *(["weasyprint"] if ending == ".pdf" else []))
    page = _page_of(options.runs)
    try:
        if ending == ".md":
            beside = output.with_name(f"{output.stem}_files")
            text, files = as_markdown_page(page, beside.name)
            write_together({beside / name: svg for name, svg in files.items()} | {output: text})
        else:
            html = as_html(page)
            write_whole(output, html if ending == ".html" else as_pdf(html))
    except OSError as error:
        raise UserError(
            f"-o {output}: {error.filename or output} cannot be written ({error.strerror}), and an earlier page is "
            "unchanged. Make room there, or choose another path."
        ) from None
    print(f"wrote {output}", file=sys.stderr)
    return 0


def _lab(folder: Path, output: Path) -> int:
    """Write the lab's report and return 0. An existing file is not overwritten, since you may have written in it."""
    check_output_file("-o", output, ".md")
    if output.exists():
        raise UsageError(f"-o {output} exists already and is not overwritten. Give another name.")
    text = lab_page(folder)
    with output_written(f"-o {output}"):
        write_whole(output, text)
    print(f"wrote {output}", file=sys.stderr)
    return 0


def _page_of(paths: Sequence[Path]) -> Page:
    """The page of runs and benches; the folder of a sweep stands for its runs. Raises UserError for other folders."""
    from cos598d.tools.report.page import build_page

    return build_page(*load_records([one for path in paths for one in runs_in(path)]))


def runs_in(path: Path) -> list[Path]:
    """The folders of the finished runs in a sweep's folder, or the folder itself if it is no sweep's."""
    if (path / SUMMARY).exists() or not path.is_dir():
        return [path]
    return sorted(found.parent for found in [*path.glob(f"*/{SUMMARY}"), *path.glob(f"repeat*/*/{SUMMARY}")]) or [path]


def load_records(paths: Sequence[Path]) -> tuple[list[Run], list[Bench]]:
    """The runs and the benches, in the order given, each with a unique name. Raises UserError for other folders."""
    folders = [path.parent if path.name == FILE_NAME and path.is_file() else path for path in paths]
    runs, benches = [], []
    for folder, name in zip(folders, own_names(folders), strict=True):
        if folder.is_file() or (folder / FILE_NAME).exists():  # `bench --json` gives its file any name
            benches.append(load_bench(folder, name))
        elif folder.is_dir() and not (folder / "summary.json").exists() and not live_folder(folder):
            raise UserError(
                f"{folder} has neither summary.json nor {FILE_NAME}. Give the folder of a finished run, or of a bench."
            )
        else:
            runs.append(load_run_as(folder, name, unfinished=True))
    return runs, benches
