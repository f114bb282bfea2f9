"""The page of runs, sweeps and benches: one HTML file, without a script, that loads nothing."""

from collections.abc import Sequence
from pathlib import Path

import jinja2

from cos598d.errors import UserError
from cos598d.records.bench import FILE_NAME, Bench, read_bench
from cos598d.records.conventions import SUMMARY
from cos598d.records.unfinished import is_unfinished
from cos598d.tools.report.benches import fastest_in, remarks
from cos598d.tools.report.cells import texts
from cos598d.tools.report.figures import as_image, style
from cos598d.tools.report.records import Run, load_run, own_names
from cos598d.tools.report.sections import bench_sections, run_sections
from cos598d.tools.report.verdict import fastest, warnings


def build_page(paths: Sequence[Path]) -> str:
    """The page of the records in these folders and files; every value is escaped. Raises UserError for a record that
    cannot be read."""
    runs, benches = load_records([folder for path in paths for folder in runs_in(path)])
    names = [*(run.name for run in runs), *benches]
    answers = [fastest(runs), *(f"{name}. {said}" for name, one in benches.items() if (said := fastest_in(one)))]
    with style():
        sections = [
            (section.title, section.tables, [as_image(one) for draw in section.figures if (one := draw()) is not None])
            for section in (*run_sections(runs), *bench_sections(benches))
        ]
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("cos598d.tools.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters["texts"] = texts
    return templates.get_template("report.html.jinja").render(
        title=f"cos598d report: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
        warnings=[*warnings(runs), *(f"{name}: {said}." for name, one in benches.items() for said in remarks(one))],
        answers=[*filter(None, answers)],
        sections=[(title, tables, images) for title, tables, images in sections if images or any(r for _, r in tables)],
    )


def runs_in(path: Path) -> list[Path]:
    """The folders of the finished runs in a sweep's folder, or the folder itself if it is no sweep's."""
    if (path / SUMMARY).exists() or not path.is_dir():
        return [path]
    return sorted(found.parent for found in [*path.glob(f"*/{SUMMARY}"), *path.glob(f"repeat*/*/{SUMMARY}")]) or [path]


def load_records(paths: Sequence[Path]) -> tuple[list[Run], dict[str, Bench]]:
    """The runs and the benches in the order given, with unique names. Raises UserError for other folders."""
    folders = [path.parent if path.name == FILE_NAME and path.is_file() else path for path in paths]
    runs, benches = [], {}
    for folder, name in zip(folders, own_names(folders), strict=True):
        if folder.is_file() or (folder / FILE_NAME).exists():  # `bench --json` gives its file any name
            benches[name] = read_bench(folder)[1]
        elif folder.is_dir() and not (folder / SUMMARY).exists() and not is_unfinished(folder):
            raise UserError(
                f"{folder} has neither {SUMMARY} nor {FILE_NAME}. Give the folder of a finished run, or of a bench."
            )
        else:
            runs.append(load_run(folder, name))
    return runs, benches
