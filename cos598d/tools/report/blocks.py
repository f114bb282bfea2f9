"""The parts of a page, for every format."""

from collections.abc import Sequence
from dataclasses import dataclass

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
