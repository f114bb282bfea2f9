"""The pictures of what ranks did, for the terminal and as drawings: lanes next to a reference's, and the messages of a
collective step by step."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from cos598d.tools.learn.events import Event
from cos598d.tools.learn.picture.film import ending, film
from cos598d.tools.learn.picture.frames import Held, StepFrame, at_first, chunks_of, frames, ranks_of
from cos598d.tools.learn.picture.lanes import RankTimelines, timeline
from cos598d.tools.learn.picture.lanes_svg import TimelinePart, lanes_svg
from cos598d.tools.learn.picture.messages import MEMORY, Message
from cos598d.tools.learn.picture.text import BLOCKS, Letters, in_colour, lanes_text, letters_for, steps_text
from cos598d.tools.learn.picture.words import differences, reading


@dataclass(frozen=True)
class Picture:
    """Lanes in time of your own ranks and, if there is a `reference`, of its ranks on the same scale."""

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
        # The text on how to read lanes comes once, above the first.
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
    """The picture of these events, in any order. Raises ValueError if there are none, or one has no time.

    Names in them are shown escaped and shortened. `note` is printed with the lanes.
    """
    if not own:
        raise ValueError("there are no events to draw")
    return Picture(timeline(own), timeline(reference) if reference else None, title, reference_title, note)


def letters_and_width(stream: TextIO | None = None) -> tuple[Letters, int]:
    """The letters and width for `stream` (else standard output): blocks if its encoding has them, colours on a terminal
    unless NO_COLOR is set, and the terminal's width."""
    stream = stream or sys.stdout
    letters = letters_for(getattr(stream, "encoding", None))
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if letters == BLOCKS and stream.isatty() and not plain:
        letters = in_colour(letters)
    return letters, shutil.get_terminal_size().columns


def wrapped(paragraphs: Sequence[str], width: int) -> list[str]:
    """The texts that are not empty, in lines of that width."""
    import textwrap

    return [textwrap.fill(words, max(width, 40)) for words in paragraphs if words]


OF_MEMORY = "Nothing is sent. A message here means that a rank reads what another has written into shared memory."


@dataclass(frozen=True)
class StepFrames:
    """The frames of one tensor's messages; `held` is what every rank has before them, `unit` what one is called."""

    title: str
    note: str
    held: Held
    frames: tuple[StepFrame, ...]
    unit: str

    def text(self, width: int, letters: Letters) -> str:
        """For a terminal `width` letters wide."""
        head = [self.title, *([textwrap.fill(self.note, width)] if self.note else [])]
        end = textwrap.fill(ending(self.held, self.frames, self.unit), width)
        return "\n".join([*head, steps_text(self.frames, self.held, width, letters, self.unit), end])

    def svg(self, name: str = "steps") -> str:
        """As one SVG file; `name`, of letters and hyphens, begins its ids and classes."""
        return film(name, self.title, self.held, self.frames, self.note, self.unit)


def steps_of(messages: Sequence[Message], title: str, note: str = "") -> StepFrames:
    """The steps of one tensor's messages, at least one. Raises ValueError if they cannot be drawn."""
    unit = "message"
    if messages[0].medium == MEMORY:
        unit, note = "reading", " ".join(filter(None, (OF_MEMORY, note)))
    held = at_first(ranks_of(messages), len(chunks_of(messages)))
    return StepFrames(title, note, held, tuple(frames(messages)), unit)
