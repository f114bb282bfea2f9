"""Lanes in time as a drawing, one below the other on one scale of time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cos598d.terminal.colours import BLUE, ORANGE, PURPLE, VERMILLION
from cos598d.terminal.words import number_of
from cos598d.tools.learn.picture.lanes import CALLING, MEANINGS, Bar, RankLane, RankTimelines
from cos598d.tools.learn.picture.svg import (
    HEAD_LETTERS,
    LINE,
    MARGIN,
    SMALL_LETTERS,
    WIDTH,
    arrowhead,
    document,
    group,
    lines,
    tag,
)
from cos598d.tools.learn.picture.text import ticks
from cos598d.tools.learn.picture.words import left_out, name_of, of_meeting, reading, size, time

LEFT = 44
PLOT = WIDTH - LEFT - MARGIN
ROW, GAP = 11, 8
MOST_ARROWS, MOST_CALLS = 160, 8
STYLE = f"""
.{{n}} .computing{{{{fill:{BLUE}}}}} .{{n}} .calling{{{{fill:{VERMILLION}}}}} .{{n}} .message{{{{fill:{PURPLE}}}}}
.{{n}} .waiting{{{{fill:url(#{{n}}-hatch);stroke:{ORANGE};stroke-width:.6}}}}
.{{n}} .track{{{{fill:var(--track)}}}} .{{n}} .number{{{{fill:#fff;font-size:8px;text-anchor:middle}}}}
.{{n}} .arrow{{{{stroke:currentColor;stroke-width:.7;opacity:.75}}}}
.{{n}} .tick{{{{stroke:var(--faint);stroke-width:.4}}}}
.{{n}} .tick-word{{{{fill:var(--faint);text-anchor:middle;font-size:8px}}}}
@media (prefers-color-scheme:dark){{{{.{{n}} .computing{{{{fill:#3f9bd1}}}}}}}}
"""


@dataclass(frozen=True)
class TimelinePart:
    """One timeline of the drawing, with its title and a line about it."""

    line: RankTimelines
    title: str
    note: str = ""


def lanes_svg(name: str, parts: Sequence[TimelinePart], sentence: str = "") -> str:
    """The timelines below each other on the same scale, and `sentence` about them. `name` begins ids and classes."""
    seconds = max(part.line.seconds for part in parts)
    body = [arrowhead(name), _hatch(name)]
    y = 16.0
    for part in parts:
        drawn, y = _part(name, part, seconds, y)
        body += drawn
    if sentence:
        drawn, y = lines(sentence, MARGIN, y + 4)
        body += drawn
    drawn, y = _legend(parts, y + 4)
    body += drawn
    title = " and ".join(part.title for part in parts)
    described = [
        f"{name_of(part.title, 60)}: {number_of(len(part.line.lanes), 'rank')}. "
        + " ".join(f"{meeting.number}: {of_meeting(meeting)}." for meeting in part.line.meetings[:MOST_CALLS])
        for part in parts
    ]
    description = " ".join([*described, sentence])
    return document(name, y, title, description, STYLE.format(n=name), body)


def _part(name: str, part: TimelinePart, seconds: float, y: float) -> tuple[list[str], float]:
    """A timeline from baseline `y` on, and the next baseline below it."""
    line, scale = part.line, PLOT / seconds
    head = f"{name_of(part.title, 60)}: {number_of(len(line.lanes), 'rank')}"
    body, y = lines(head, MARGIN, y, HEAD_LETTERS, class_="head")
    y -= 4
    if part.note:
        drawn, y = lines(part.note, MARGIN, y + 8, class_="faint")
        body += drawn
        y -= 6
    tops: dict[int, float] = {}
    top = y
    inside: list[str] = []
    for lane in line.lanes:
        tops[lane.rank] = y + (1.5 if lane.rows else 0.5) * ROW
        drawn, y = _lane(lane, scale, y)
        inside += drawn
    body += _axis(seconds, scale, top, y)
    body += inside
    if len(line.arrows) <= MOST_ARROWS:
        for arrow in line.arrows:
            words = f"rank {arrow.sender} to rank {arrow.receiver}: {size(arrow.bytes)}"
            place: dict[str, Any] = {"x1": LEFT + arrow.left * scale, "x2": LEFT + arrow.arrived * scale}
            ends: dict[str, Any] = {"y1": tops[arrow.sender], "y2": tops[arrow.receiver]}
            shaft = tag("line", **place, **ends, class_="arrow", marker_end=f"url(#{name}-arrow)")
            body.append(group([tag("title", words), shaft]))
    y += LINE + 2
    below = [f"{meeting.number}  {of_meeting(meeting)}" for meeting in line.meetings[:MOST_CALLS]]
    if len(line.meetings) > MOST_CALLS:
        below.append(f"and {number_of(len(line.meetings) - MOST_CALLS, 'call')} more")
    if line.arrows:
        drawn_words = "arrows" if len(line.arrows) <= MOST_ARROWS else "not drawn"
        total = size(sum(arrow.bytes for arrow in line.arrows))
        below.append(f"{number_of(len(line.arrows), 'message')} ({drawn_words}), {total} in all")
    below += left_out(line)
    for words in below:
        drawn, y = lines(words, MARGIN, y + LINE, SMALL_LETTERS, class_="small")
        body += drawn
        y -= LINE
    return body, y + 2 * LINE


def _lane(lane: RankLane, scale: float, y: float) -> tuple[list[str], float]:
    """A rank's rows below each other, and where the next rank's begin."""
    body = [tag("text", f"rank {lane.rank}", x=MARGIN, y=y + 9)]
    for row in (lane.computed, *lane.rows):
        body.append(tag("rect", x=LEFT, y=y, width=PLOT, height=ROW - 1, class_="track"))
        for bar in _merged(row, scale):
            x, width = LEFT + bar.start * scale, max(0.7, (bar.end - bar.start) * scale)
            words = f"{name_of(bar.name)}: {MEANINGS[bar.kind]}, {time(bar.end - bar.start)}"
            shape = tag("rect", x=x, y=y, width=width, height=ROW - 1, class_=bar.kind)
            label = []
            if bar.kind == CALLING and bar.number and width >= 5 * len(str(bar.number)) + 3:
                label = [tag("text", str(bar.number), x=x + width / 2, y=y + 8, class_="number")]
            body.append(group([tag("title", words), shape, *label]))
        y += ROW
    return body, y + GAP


def _merged(bars: Sequence[Bar], scale: float) -> list[Bar]:
    """The bars, of which those that follow each other within one unit of the drawing are one."""
    found: list[Bar] = []
    for bar in bars:
        last = found[-1] if found else None
        if last and last.kind == bar.kind and (bar.end - last.start) * scale < 1:
            found[-1] = replace(last, end=max(last.end, bar.end), number=0)
        else:
            found.append(bar)
    return found


def _axis(seconds: float, scale: float, top: float, bottom: float) -> list[str]:
    """Thin lines at round moments, with the moments below."""
    body = []
    for moment in ticks(seconds, 6):
        x = LEFT + moment * scale
        body.append(tag("line", x1=x, x2=x, y1=top, y2=bottom - GAP / 2, class_="tick"))
        if x < WIDTH - 2 * MARGIN:
            body.append(tag("text", time(moment) if moment else "0", x=x, y=bottom + 6, class_="tick-word"))
    return body


def _legend(parts: Sequence[TimelinePart], y: float) -> tuple[list[str], float]:
    """What the colours mean that are in the drawing, a line each, and how lanes are read."""
    used = set().union(*(part.line.kinds for part in parts))
    body = []
    for kind, meaning in MEANINGS.items():
        if kind in used:
            body.append(tag("rect", x=MARGIN, y=y - 7, width=14, height=8, class_=kind))
            body.append(tag("text", meaning, x=MARGIN + 20, y=y, class_="small"))
            y += LINE
    said, y = lines(reading([part.line for part in parts]), MARGIN, y, SMALL_LETTERS, class_="small")
    return [*body, *said], y


def _hatch(name: str) -> str:
    return (
        f'<defs><pattern id="{name}-hatch" width="4" height="4" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><path d="M0 0v4" stroke="{ORANGE}" stroke-width="2"/></pattern></defs>'
    )
