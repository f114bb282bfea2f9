"""What a page is made of, whatever it is rendered to."""

from collections.abc import Sequence
from dataclasses import dataclass, field


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


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it: tables, figures and sentences."""

    title: str
    blocks: list[Table | Figure | str] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    """What a report says, section by section; sections without anything to say are left out."""

    title: str
    lead: str
    sections: list[Section]


def figures(*found: tuple[str, str | None, list[str]]) -> list[Figure]:
    """Figures of (name, plot, caption), those left out that have nothing to plot."""
    return [Figure(name, svg, caption) for name, svg, caption in found if svg is not None]
