"""The steps of a collective as an animated drawing, only in SVG and CSS, with its still frames below it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cos598d.terminal.words import number_of
from cos598d.tools.learn.picture.film_time import Clock
from cos598d.tools.learn.picture.frames import Counts, Held, Move, StepFrame, counted, in_letters, is_whole
from cos598d.tools.learn.picture.svg import (
    COLOURS,
    HEAD_LETTERS,
    LINE,
    MARGIN,
    WIDTH,
    arrowhead,
    box,
    clean,
    document,
    group,
    lines,
    tag,
)
from cos598d.tools.learn.picture.words import size

LEFT, GAP = 44, 4
CELL, STEP = 22, 36  # of the film: a cell's height, and from one rank to the next
SMALL_CELL, SMALL_STEP, SMALL_LEFT, SMALL_GAP = 9, 14, 12, 3  # of a still
LEAST_FOR_WORDS = 34  # units that a moving block needs for its bytes
STYLE = """
.{n} .edge{{fill:none;stroke:currentColor;stroke-width:.6;opacity:.5}}
.{n} .whole{{fill:none;stroke:currentColor;stroke-width:1.6}}
.{n} .wrong{{fill:none;stroke:#D55E00;stroke-width:2.2;stroke-dasharray:3 2}}
.{n} .mid{{text-anchor:middle}}
.{n} .block{{fill:var(--paper);stroke:currentColor;stroke-width:.9}}
.{n} .arrow{{stroke:currentColor;stroke-width:.8;fill:none}}
.{n} .halo{{stroke:var(--paper);stroke-width:3}}
.{n} .when{{visibility:hidden}} .{n} .end{{visibility:visible}}
"""


@dataclass(frozen=True)
class Grid:
    """Where the cells of ranks and chunks are."""

    x: float
    y: float
    width: float
    height: float
    step: float
    gap: float
    ranks: int
    chunks: int

    @classmethod
    def within(cls, held: Held, x: float, y: float, width: float, height: float, step: float, gap: float) -> "Grid":
        """A grid of this width for the parts that ranks hold."""
        chunks = len(held[0])
        return cls(x, y, (width - gap * (chunks - 1)) / chunks, height, step, gap, len(held), chunks)

    def left(self, chunk: int) -> float:
        return self.x + chunk * (self.width + self.gap)

    def top(self, rank: int) -> float:
        return self.y + rank * self.step

    def span(self, first: int, last: int) -> float:
        """The width of chunks [first, last)."""
        return (last - first) * (self.width + self.gap) - self.gap

    def edges(self) -> str:
        """The outlines of all cells."""
        return tag("path", d=self._boxes(lambda _: True, None), class_="edge")

    def contents(self, held: Held) -> list[str]:
        """A stripe in each cell for every rank whose gradient is in it, and a frame around cells that are complete or
        wrong."""
        found = [
            tag("path", d=data, fill=COLOURS[other])
            for other in range(self.ranks)
            if (data := "".join(self._stripes(held, other)))
        ]
        for name, is_so in (("whole", is_whole), ("wrong", lambda counts: max(counts) > 1)):
            if data := self._boxes(is_so, held):
                found.append(tag("path", d=data, class_=name))
        return found

    def stripe(self, x: float, y: float, width: float, height: float, other: int) -> str:
        """The place of a rank's stripe in a box."""
        return box(x + other * width / self.ranks, y, width / self.ranks, height)

    def _stripes(self, held: Held, other: int) -> list[str]:
        return [
            self.stripe(self.left(chunk), self.top(rank), self.width, self.height, other)
            for rank, chunks in enumerate(held)
            for chunk, counts in enumerate(chunks)
            if counts[other]
        ]

    def _boxes(self, is_so: Callable[[Counts], bool], held: Held | None) -> str:
        return "".join(
            box(self.left(chunk), self.top(rank), self.width, self.height)
            for rank in range(self.ranks)
            for chunk in range(self.chunks)
            if held is None or is_so(held[rank][chunk])
        )


def film(
    name: str, title: str, first: Held, frames: Sequence[StepFrame], note: str = "", medium: str = "message"
) -> str:
    """The frames one after the other, over and over, with the messages moving; below it each frame by itself.

    name: of letters and hyphens, begins ids and classes; first: what is held before; medium: what a message is called.
    Whoever prefers reduced motion sees the end, and the frames; a pointer over the drawing halts it.
    """
    clock = Clock(name, len(frames))
    drawn, y = lines(title, MARGIN, 16, HEAD_LETTERS, class_="head")
    body = [arrowhead(name), *drawn]
    for words in (
        note,
        "A cell is a part of the gradient as a rank has it, with a stripe for every rank whose gradient is in it.",
    ):
        drawn, y = lines(words, MARGIN, y, class_="faint")
        body += drawn
    body += _legend(len(first), y)
    y += LINE
    grid = Grid.within(first, LEFT, y + LINE, WIDTH - LEFT - MARGIN, CELL, STEP, GAP)
    body += _stage(grid, clock, first, frames, medium)
    y = grid.top(grid.ranks) + 44
    body.append(tag("text", "Step by step", x=MARGIN, y=y, class_="head"))
    drawn, y = _stills(name, first, frames, y + LINE, medium)
    captions = [caption(frame, len(frames), medium) for frame in frames]
    description = " ".join([note, *captions, ending(first, frames, medium)])
    return document(name, y, title, description, STYLE.format(n=name) + clock.style(), [*body, *drawn])


def caption(frame: StepFrame, steps: int, medium: str = "message") -> str:
    """A step in words."""
    sizes = {move.bytes for move in frame.moves}
    each = f"of {size(max(sizes))}" if len({size(each) for each in sizes}) == 1 else f"of up to {size(max(sizes))}"
    adds = sum(move.adds for move in frame.moves)
    done = "added up" if adds == len(frame.moves) else "copied" if not adds else "some of them added up"
    return f"Step {frame.step} of {steps}: {number_of(len(frame.moves), medium)} {each}, {done}."


def ending(first: Held, frames: Sequence[StepFrame], medium: str = "message") -> str:
    """What the ranks have at the end, and what each has sent."""
    held = frames[-1].held if frames else first
    unlike = [
        (rank, chunk) for rank, chunks in enumerate(held) for chunk, one in enumerate(chunks) if not is_whole(one)
    ]
    sent = [
        sum(move.bytes for frame in frames for move in frame.moves if move.sender == rank) for rank in range(len(held))
    ]
    least, most = size(min(sent)), size(max(sent))
    amount = most if least == most else f"{least} to {most}"
    words = f"a rank sent {amount}" if medium == "message" else f"others read {amount} of what a rank wrote"
    if not unlike:
        return f"Every rank has the complete sum of every part; {words}."
    rank, chunk = unlike[0]
    return (
        f"{number_of(len(unlike), 'cell')} {'is' if len(unlike) == 1 else 'are'} no complete sum. Rank {rank} has in "
        f"part {chunk} the gradients of rank {counted(held[rank][chunk], ' + ')}; {words}."
    )


def _stage(grid: Grid, clock: Clock, first: Held, frames: Sequence[StepFrame], medium: str) -> list[str]:
    """The moving part: cells that fill, blocks that move, and a caption under them."""
    body = [tag("text", f"rank {rank}", x=MARGIN, y=grid.top(rank) + 14) for rank in range(grid.ranks)]
    body += [
        tag("text", f"part {chunk}" if grid.chunks <= 8 else str(chunk), x=middle, y=grid.y - 4, class_="small mid")
        for chunk in range(grid.chunks)
        for middle in [grid.left(chunk) + grid.width / 2]
    ]
    for place, held in enumerate([first, *(frame.held for frame in frames)]):
        shown = [*grid.contents(held), *_labels(grid, held)]
        end = " end" if place == len(frames) else ""
        body.append(group(shown, class_=f"when{end} {clock.state(place)}"))
    body.append(grid.edges())
    y = grid.top(grid.ranks) + 8
    words = ["At first every rank has its own gradient.", *(caption(each, len(frames), medium) for each in frames)]
    for place, text in enumerate([*words, ending(first, frames, medium)]):
        drawn, _ = lines(text, MARGIN, y)
        end = " end" if place == len(words) else ""
        body.append(group(drawn, class_=f"when{end} {clock.caption(place)}"))
    before = first
    for frame in frames:
        word = f"when {clock.move(frame.step)}"
        body += [_block(grid, move, place, before, word) for move, place in _side_by_side(frame.moves, _meet)]
        before = frame.held
    return body


def _block(grid: Grid, move: Move, place: tuple[int, int], held: Held, word: str) -> str:
    """A message at its sender, with the stripes of what it carries; as an element of class `word` it moves by --way."""
    index, count = place
    width = grid.span(move.first, move.last) / count
    x, y = grid.left(move.first) + index * width + 1, grid.top(move.sender) + 4
    inside = [tag("rect", x=x, y=y, width=width - 2, height=CELL - 8, rx=2, class_="block")]
    for other, amount in enumerate(held[move.sender][move.first]):
        if amount:
            data = grid.stripe(x + 1, y + CELL - 12, width - 4, 3, other)
            inside.append(tag("path", d=data, fill=COLOURS[other]))
    if width >= LEAST_FOR_WORDS:
        inside.append(tag("text", size(move.bytes), x=x + width / 2 - 1, y=y + 8, class_="small mid"))
    words = f"rank {move.sender} to rank {move.receiver}: {size(move.bytes)}"
    way = grid.top(move.receiver) - grid.top(move.sender)
    return f'<g class="{word}" style="--way:{way:.0f}px"><title>{clean(words)}</title>{"".join(inside)}</g>'


def _side_by_side(moves: Sequence[Move], collide: Callable[[Move, Move], bool]) -> list[tuple[Move, tuple[int, int]]]:
    """Each move with its place among those of the same chunks with which it would collide, and how many these are."""
    found = []
    for move in moves:
        same = [other for other in moves if other.first < move.last and move.first < other.last]
        others = [other for other in same if other is move or collide(other, move)]
        found.append((move, (others.index(move), len(others))))
    return found


def _meet(one: Move, other: Move) -> bool:
    """Whether two blocks that move at once are ever in one place: they come from or go to one rank, or cross."""
    return (one.sender - other.sender) * (one.receiver - other.receiver) <= 0


def _share_rows(one: Move, other: Move) -> bool:
    """Whether the arrows of two moves would overlap."""
    first, last = (sorted((each.sender, each.receiver)) for each in (one, other))
    return first[0] < last[1] and last[0] < first[1]


def _labels(grid: Grid, held: Held) -> list[str]:
    """Below each cell whose gradients are in it."""
    found = []
    for rank, chunks in enumerate(held):
        for chunk, counts in enumerate(chunks):
            x, y = grid.left(chunk) + grid.width / 2, grid.top(rank) + CELL + 8
            found.append(tag("text", in_letters(counts, " of "), x=x, y=y, class_="small mid"))
    return found


def _stills(name: str, first: Held, frames: Sequence[StepFrame], y: float, medium: str) -> tuple[list[str], float]:
    """Each frame by itself, two in a row: its messages as arrows over what is held after them."""
    body, ranks = [], len(first)
    width, height = (WIDTH - 3 * MARGIN) / 2, ranks * SMALL_STEP + LINE + 6
    for place, frame in enumerate(frames):
        x, top = MARGIN + place % 2 * (width + MARGIN), y + place // 2 * height
        total = size(sum(move.bytes for move in frame.moves))
        words = f"{frame.step}: {number_of(len(frame.moves), medium)}, {total}"
        body.append(tag("text", words, x=x, y=top, class_="small"))
        grid = Grid.within(first, x + SMALL_LEFT, top + 5, width - SMALL_LEFT, SMALL_CELL, SMALL_STEP, SMALL_GAP)
        body += [tag("text", str(rank), x=x, y=grid.top(rank) + 8, class_="small") for rank in range(ranks)]
        body += [*grid.contents(frame.held), grid.edges()]
        for move, (index, count) in _side_by_side(frame.moves, _share_rows):
            at = grid.left(move.first) + (index + 0.5) * grid.span(move.first, move.last) / count
            down = 1 if move.receiver > move.sender else -1
            y1, y2 = (grid.top(rank) + SMALL_CELL / 2 for rank in (move.sender, move.receiver))
            way: dict[str, Any] = {"x1": at, "x2": at, "y1": y1, "y2": y2 - down}
            body.append(tag("line", **way, class_="halo"))
            body.append(tag("line", **way, class_="arrow", marker_end=f"url(#{name}-arrow)"))
    return body, y + -(-len(frames) // 2) * height + LINE / 2


def _legend(ranks: int, y: float) -> list[str]:
    """The colour of each rank's gradient."""
    body = []
    for rank in range(ranks):
        x = MARGIN + rank * (WIDTH - 2 * MARGIN) / max(ranks, 6)
        body.append(tag("rect", x=x, y=y - 7, width=8, height=8, fill=COLOURS[rank]))
        body.append(tag("text", f"rank {rank}", x=x + 11, y=y, class_="small"))
    return body
