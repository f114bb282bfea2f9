"""Lanes and steps as text for a terminal, in block characters or only in ASCII."""

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cos598d.terminal.colours import BLUE, ORANGE, VERMILLION
from cos598d.terminal.words import number_of
from cos598d.tools.learn.picture.frames import Held, StepFrame, in_letters
from cos598d.tools.learn.picture.lanes import CALLING, COMPUTING, MEANINGS, MESSAGE, WAITING, Bar, RankTimelines
from cos598d.tools.learn.picture.words import left_out, name_of, of_meeting, size, time

LEAST_WIDTH, MOST_CALLS = 40, 12


@dataclass(frozen=True)
class Letters:
    """The letters for each kind of bar. `colours`: a colour such as "#0072B2" for each letter, if the terminal has
    colours."""

    computing: str
    waiting: str
    calling: str
    message: str
    arrow: str
    colours: tuple[tuple[str, str], ...] = ()

    def of(self, kind: str) -> str:
        """A bar's letter."""
        letters = {COMPUTING: self.computing, WAITING: self.waiting, CALLING: self.calling, MESSAGE: self.message}
        return letters[kind]


BLOCKS = Letters("█", "░", "▓", "▒", "→")
ASCII = Letters("#", ".", "=", "-", "->")


def in_colour(letters: Letters) -> Letters:
    """The same letters, in colour."""
    return replace(
        letters, colours=((letters.computing, BLUE), (letters.waiting, ORANGE), (letters.calling, VERMILLION))
    )


def letters_for(encoding: str | None) -> Letters:
    """Block characters where the encoding has them, else ASCII."""
    try:
        f"{BLOCKS.computing}{BLOCKS.waiting}{BLOCKS.calling}{BLOCKS.message}{BLOCKS.arrow}".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def lanes_text(line: RankTimelines, title: str, seconds: float, width: int, letters: Letters, note: str = "") -> str:
    """The lanes over so many `seconds`, `note` above them and the calls by number below, `width` letters wide."""
    width = max(width, LEAST_WIDTH)
    label = max((len(f"rank {rank}") for rank in line.ranks), default=6) + 2
    columns = width - label
    rows = textwrap.wrap(f"{name_of(title)}: {number_of(len(line.lanes), 'rank')}", width)
    rows += [each for words in (legend(line, letters), note) for each in textwrap.wrap(words, width)]
    rows.append(" " * label + _axis(seconds, columns))
    for lane in line.lanes:
        name = f"rank {lane.rank}".ljust(label)
        for row in (lane.computed, *lane.rows):
            rows.append((name + _row(row, seconds, columns, letters)).rstrip())
            name = " " * label
    rows += [each for words in left_out(line) for each in textwrap.wrap(words, width)]
    digits = len(str(min(len(line.meetings), MOST_CALLS)))
    for meeting in line.meetings[:MOST_CALLS]:
        rows += textwrap.wrap(
            f"{meeting.number:{digits}} {of_meeting(meeting)}", width, subsequent_indent=" " * (digits + 1)
        )
    if len(line.meetings) > MOST_CALLS:
        rows.append(f"{' ' * digits} and {number_of(len(line.meetings) - MOST_CALLS, 'call')} more")
    rows += textwrap.wrap(_pairs(line, letters), width, subsequent_indent="  ")
    return "\n".join(_coloured(row, letters) for row in rows)


def legend(line: RankTimelines, letters: Letters) -> str:
    """What the letters mean that these lanes have."""
    return ", ".join(f"{letters.of(kind)} {meaning}" for kind, meaning in MEANINGS.items() if kind in line.kinds)


def steps_text(frames: Sequence[StepFrame], first: Held, width: int, letters: Letters, unit: str = "message") -> str:
    """The steps one by one: what is sent, and which ranks' gradients each rank then has summed, chunk by chunk."""
    width = max(width, LEAST_WIDTH)
    rows = [*_held(first, "at first", width)]
    for frame in frames:
        moves = ", ".join(
            f"{move.sender}{letters.arrow}{move.receiver} {parts(move.first, move.last)}" for move in frame.moves
        )
        total = sum(move.bytes for move in frame.moves)
        adds = {move.adds for move in frame.moves}
        done = "added" if adds == {True} else "copied" if adds == {False} else "added or copied"
        count = f"{number_of(len(frame.moves), unit)} {done}"
        head = f"step {frame.step} of {len(frames)}: {count}, {size(total)}: {moves}"
        rows += textwrap.wrap(head, width, subsequent_indent="  ", break_on_hyphens=False)
        rows += _held(frame.held, "", width)
    return "\n".join(rows)


def parts(first: int, last: int) -> str:
    """Chunks [first, last) in words."""
    return f"part {first}" if last - first == 1 else f"parts {first}-{last - 1}"


def ticks(seconds: float, most: int) -> list[float]:
    """Round moments from 0 on, at most `most` of them, within so many seconds."""
    step = 10.0 ** math.floor(math.log10(seconds / max(1, most - 1)))
    step = next(step * factor for factor in (1, 2, 5, 10) if step * factor * (most - 1) >= seconds * 0.999)
    return [number * step for number in range(int(seconds / step) + 1)]


def _axis(seconds: float, columns: int) -> str:
    """Moments over the columns at which they are."""
    text = ""
    for moment in ticks(seconds, max(2, columns // 12)):
        place = int(moment / seconds * columns)
        word = time(moment) if moment else "0"
        if place >= len(text) + (1 if text else 0) and place + len(word) <= columns:
            text = text.ljust(place) + word
    return text


def _row(bars: Sequence[Bar], seconds: float, columns: int, letters: Letters) -> str:
    """A line of letters: each bar over its columns, at least one; a call's number in the middle if it fits."""
    cells = [" "] * columns
    for bar in bars:
        begin = min(int(bar.start / seconds * columns), columns - 1)
        end = max(begin + 1, min(round(bar.end / seconds * columns), columns))
        cells[begin:end] = letters.of(bar.kind) * (end - begin)
        number = str(bar.number)
        if bar.kind in (WAITING, CALLING) and bar.number and end - begin >= len(number) + 2:
            middle = begin + (end - begin - len(number)) // 2
            cells[middle : middle + len(number)] = number
    return "".join(cells)


def _pairs(line: RankTimelines, letters: Letters) -> str:
    """The messages from rank to rank, added up."""
    found: dict[tuple[int, int], list[int]] = {}
    for arrow in line.arrows:
        found.setdefault((arrow.sender, arrow.receiver), []).append(arrow.bytes)
    words = [
        f"{sender}{letters.arrow}{receiver} {len(sizes)} of {size(sum(sizes))}"
        for (sender, receiver), sizes in sorted(found.items())
    ]
    alone = [f"{number_of(line.alone, 'end')} without the other"] if line.alone else []
    said = [*([", ".join(words)] if words else []), *alone]
    return f"messages: {'; '.join(said)}" if said else ""


def _held(held: Held, head: str, width: int) -> list[str]:
    """A line a rank: of how many ranks each chunk has the gradients."""
    lines = [f"  {head}"] if head else []
    cells = [[in_letters(counts, "/") for counts in chunks] for chunks in held]
    widest = max(len(cell) for row in cells for cell in row)
    for rank, row in enumerate(cells):
        words = f"  rank {rank} has {' '.join(cell.ljust(widest) for cell in row)}".rstrip()
        lines += [words] if len(words) <= width else textwrap.wrap(words, width, subsequent_indent="    ")
    return lines


def _coloured(row: str, letters: Letters) -> str:
    for letter, colour in letters.colours:
        red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
        row = re.sub(f"{re.escape(letter)}+", f"\x1b[38;2;{red};{green};{blue}m\\g<0>\x1b[0m", row)
    return row
