"""The picture of what ranks did, beside that of a reference: for the terminal, and as a drawing."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from cos598d.tools.learn.events import Event
from cos598d.tools.learn.picture.lanes import RankTimelines, timeline
from cos598d.tools.learn.picture.lanes_svg import TimelinePart, lanes_svg
from cos598d.tools.learn.picture.text import BLOCKS, Letters, in_colour, lanes_text, letters_for
from cos598d.tools.learn.picture.words import differences, reading


@dataclass(frozen=True)
class Picture:
    """Lanes in time of one's own ranks, and of the `reference`'s on the same scale, where there is one."""

    own: RankTimelines
    reference: RankTimelines | None
    title: str
    reference_title: str
    note: str = ""

    @property
    def sentence(self) -> str:
        """What differs from the reference; nothing without one."""
        if self.reference is None:
            return ""
        return differences(self.own, self.reference, self.title, self.reference_title)

    def text(self, width: int, letters: Letters) -> str:
        """For a terminal `width` letters wide."""
        lines = [(self.own, self.title)]
        if self.reference is not None:
            lines.append((self.reference, self.reference_title))
        seconds = max(line.seconds for line, _ in lines)
        # How lanes are read is said once, above the first.
        notes = [reading([line for line, _ in lines]), *("" for _ in lines[1:])]
        parts = [
            lanes_text(line, title, seconds, width, letters, note)
            for (line, title), note in zip(lines, notes, strict=True)
        ]
        return "\n\n".join([*parts, *wrapped([self.note, self.sentence], width)])

    def svg(self, name: str = "lanes") -> str:
        """As one SVG file; `name`, of letters and hyphens, begins its ids and classes."""
        parts = [TimelinePart(self.own, self.title, self.note)]
        if self.reference is not None:
            parts.append(TimelinePart(self.reference, self.reference_title))
        return lanes_svg(name, parts, self.sentence)


def draw(
    own: Sequence[Event],
    reference: Sequence[Event] = (),
    title: str = "yours",
    reference_title: str = "the reference",
    note: str = "",
) -> Picture:
    """The picture of these events, whatever their order. Raises ValueError where there are none, or one is at no time.

    Names in them are shown escaped and shortened. `note` is said with the lanes.
    """
    if not own:
        raise ValueError("there are no events to draw")
    return Picture(timeline(own), timeline(reference) if reference else None, title, reference_title, note)


def letters_and_width(stream: TextIO | None = None) -> tuple[Letters, int]:
    """What fits where `stream` (else standard output) goes: blocks where its encoding has them, colours on a terminal
    unless NO_COLOR is set, and the terminal's width."""
    stream = stream or sys.stdout
    letters = letters_for(getattr(stream, "encoding", None))
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if letters == BLOCKS and stream.isatty() and not plain:
        letters = in_colour(letters)
    return letters, shutil.get_terminal_size().columns


def wrapped(paragraphs: Sequence[str], width: int) -> list[str]:
    """Those that say something, in lines of that width."""
    import textwrap

    return [textwrap.fill(words, max(width, 40)) for words in paragraphs if words]
