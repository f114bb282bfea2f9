"""What a page is made of, whatever it is rendered to."""

from collections.abc import Sequence
from dataclasses import dataclass

MOST_SENTENCES = 5  # above a page's first figure


@dataclass(frozen=True)
class Table:
    """Rows of words, the first the head and each row's first cell its name."""

    caption: str
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A plot, and what it shows. `name` is a file's name and the prefix of the plot's ids."""

    name: str
    svg: str
    caption: list[str]


Block = Table | Figure | str


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it: tables, figures and sentences."""

    title: str
    blocks: Sequence[Block] = ()


@dataclass(frozen=True)
class Headline:
    """What the records come to: some sentences and a picture. `cautions` tell, before any of it is read, what is not
    the same work, and what was not counted."""

    cautions: list[str]
    sentences: list[str]
    figure: Figure | None


@dataclass(frozen=True)
class Page:
    """What a report says, section by section; sections without anything to say are left out."""

    title: str
    lead: str
    answer: Headline
    sections: list[Section]


def headline_of(cautions: list[str], sentences: list[str], figure: Figure | None, least: int = 1) -> Headline:
    """A headline of MOST_SENTENCES, cautions among them.

    Of the cautions none is left out; of the other sentences the last ones, except for the `least`.
    """
    return Headline(cautions, sentences[: max(least, MOST_SENTENCES - len(cautions))], figure)


def figures(*found: tuple[str, str | None, list[str]]) -> list[Figure]:
    """Figures of (name, plot, caption), those left out that have nothing to plot."""
    return [Figure(name, svg, caption) for name, svg, caption in found if svg is not None]
