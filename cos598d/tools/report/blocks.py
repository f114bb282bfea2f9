"""The parts of a page, and the page as HTML, as Markdown with separate plots, and as PDF."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from cos598d.errors import WARNING, UserError
from cos598d.terminal.tables import as_markdown, markdown_text
from cos598d.tools.report.disturbed import DISTURBED
from cos598d.tools.report.svg import inline, label_of

MOST_SENTENCES = 5  # above a page's first figure


@dataclass(frozen=True)
class Table:
    """Rows of cells; the first row is the header, and each row's first cell its name."""

    caption: str
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A plot and its caption. `name` is a file's name and the prefix of the plot's ids."""

    name: str
    svg: str
    caption: list[str]


Block = Table | Figure | str


@dataclass(frozen=True)
class Section:
    """A heading and its contents: tables, figures and sentences."""

    title: str
    blocks: Sequence[Block] = ()


@dataclass(frozen=True)
class Headline:
    """The summary of the records: some sentences and a picture. `cautions` come first: different workloads, and bytes
    that were not counted."""

    cautions: list[str]
    sentences: list[str]
    figure: Figure | None


@dataclass(frozen=True)
class Page:
    """A report, section by section; empty sections are left out."""

    title: str
    lead: str
    answer: Headline
    sections: list[Section]


def headline_of(cautions: list[str], sentences: list[str], figure: Figure | None, least: int = 1) -> Headline:
    """A headline of MOST_SENTENCES, including cautions.

    All cautions are kept. Of the other sentences the last ones are left out, but at least `least` are kept.
    """
    return Headline(cautions, sentences[: max(least, MOST_SENTENCES - len(cautions))], figure)


def figures(*found: tuple[str, str | None, list[str]]) -> list[Figure]:
    """Figures of (name, plot, caption), without those that have no plot."""
    return [Figure(name, svg, caption) for name, svg, caption in found if svg is not None]


DATE = "SOURCE_DATE_EPOCH"  # which build tools use as the time


def need(*packages: str) -> None:
    """Raise UserError if a package of a report, such as pandas, is missing, or a system library that it needs."""
    for package in ("pandas", *packages):
        try:
            importlib.import_module(package)
        except ImportError:
            raise UserError(
                f"a report needs {package}, which is not installed. Run `pip install -e '.[report]'` in the "
                "project's folder."
            ) from None
        except OSError:  # weasyprint loads pango when it is imported
            raise UserError(
                "a PDF needs the pango library, which is not installed. Run `apt-get install libpango-1.0-0 "
                "libpangoft2-1.0-0`, or write HTML and print it."
            ) from None


def as_html(page: Page) -> str:
    """One self-contained HTML file: no script, no network, values escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cos598d.tools.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = inline
    environment.tests |= {"table": _is(Table), "figure": _is(Figure), "disturbed": DISTURBED.__eq__}
    return environment.get_template("report.html.jinja").render(page=page)


def as_pdf(html: str) -> bytes:
    """The page as printed. It fetches nothing, and has no date, since subset fonts would contain one."""
    import weasyprint

    before = os.environ.get(DATE)
    os.environ[DATE] = "0"
    try:
        return weasyprint.HTML(string=html, url_fetcher=_refuse).write_pdf(pdf_identifier=b"cos598d")
    finally:
        if before is None:
            del os.environ[DATE]
        else:
            os.environ[DATE] = before


def as_markdown_page(page: Page, folder: str) -> tuple[str, dict[str, str]]:
    """The page's Markdown, and the plots by their names in `folder`, which belongs next to it."""
    parts, files = [f"# {markdown_text(page.title)}", markdown_text(page.lead)], {}
    answer = page.answer
    head: list[Block] = [
        *(f"{WARNING}{one}" for one in answer.cautions),
        " ".join(answer.sentences),
        *([answer.figure] if answer.figure else []),
    ]
    for section in (Section("In short", head), *page.sections):
        parts.append(f"## {markdown_text(section.title)}")
        for block in section.blocks:
            if isinstance(block, Table):
                parts += [markdown_text(block.caption), as_markdown(block.rows)]
            elif isinstance(block, Figure):
                files[f"{block.name}.svg"] = block.svg
                parts += [
                    f"![{markdown_text(label_of(block.svg))}]({quote(folder)}/{block.name}.svg)",
                    *map(markdown_text, block.caption),
                ]
            else:
                parts.append(markdown_text(block))
    return "\n\n".join(parts) + "\n", files


def _is(kind: type) -> Any:
    return lambda block: isinstance(block, kind)


def _refuse(url: str, *_: Any, **__: Any) -> None:
    raise ValueError(f"a report fetches nothing, and {url} was asked for")
