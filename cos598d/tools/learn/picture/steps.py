"""A collective step by step, from its messages: for the terminal, and as an animated drawing."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from cos598d.tools.learn.picture.film import ending, film
from cos598d.tools.learn.picture.frames import Held, StepFrame, at_first, chunks_of, frames, ranks_of
from cos598d.tools.learn.picture.messages import MEMORY, Message
from cos598d.tools.learn.picture.text import Letters, steps_text

OF_MEMORY = "Nothing is sent: a message here is a rank's reading of what another has written into shared memory."


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
    """The steps of one tensor's messages, at least one. Raises ValueError where they cannot be drawn."""
    unit = "message"
    if messages[0].medium == MEMORY:
        unit, note = "reading", " ".join(filter(None, (OF_MEMORY, note)))
    held = at_first(ranks_of(messages), len(chunks_of(messages)))
    return StepFrames(title, note, held, tuple(frames(messages)), unit)
