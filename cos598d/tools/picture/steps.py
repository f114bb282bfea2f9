"""A collective that is made of messages, step by step: which part of the gradient goes where, and who holds what after.

Each rank's gradient has a number of its own in every element. So what a rank holds tells whose gradients are in it.

1. Whenever a rank begins to receive, and at the end, it shows what it holds (`Look`).
2. What has changed between two of its looks is what the message brought.
3. A message belongs to the step after the last one that its sender and its receiver had waited for before it began.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

BASE = 101  # the number of rank r is BASE**r; no sum of them, divided by the number of ranks, is another one
MOST_RANKS = 8
ROUNDING = 1e-9
Counts = tuple[int, ...]  # how often each rank's gradient is in a part
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
WIDTH, CELL, ROW, LEFT = 760, 16, 22, 60


@dataclass(frozen=True)
class Look:
    """What a rank holds when it begins to receive from `peer` (-1: at the end), as runs: (counts, first, last).

    sent: how many messages it had begun to send, by the rank that gets them.
    """

    peer: int
    runs: tuple[tuple[Counts, int, int], ...]
    sent: dict[int, int]


@dataclass(frozen=True)
class Move:
    """Elements [first, last) that go from one rank to another, there to be added or not."""

    step: int
    sender: int
    receiver: int
    first: int
    last: int
    adds: bool


def counts_in(value: float, ranks: int) -> Counts:
    """Whose gradients are in an element, and how often; of an average too."""
    for times in (1, ranks):
        whole = round(value * times)
        rest, found = whole, []
        for _ in range(ranks):
            rest, count = divmod(rest, BASE)
            found.append(count)
        if abs(value * times - whole) <= ROUNDING * max(1, whole) and not rest and max(found) <= ranks:
            return tuple(found)
    return (0,) * ranks


def look_at(values: Sequence[float], peer: int, sent: dict[int, int], ranks: int) -> dict[str, Any]:
    """What a rank holds, in runs of equal elements, as JSON."""
    edges = [0, *(place for place in range(1, len(values)) if values[place] != values[place - 1]), len(values)]
    runs = [[list(counts_in(values[first], ranks)), first, last] for first, last in pairwise(edges)]
    return {"peer": peer, "runs": runs, "sent": sorted(sent.items())}


def read_looks(found: Sequence[dict[str, Any]]) -> list[Look]:
    """The looks of a rank from JSON."""
    return [
        Look(each["peer"], tuple((tuple(c), first, last) for c, first, last in each["runs"]), dict(each["sent"]))
        for each in found
    ]


def moves_of(looks: Sequence[Sequence[Look]]) -> list[Move]:
    """The messages of all ranks, by step. Raises ValueError where they cannot be put in steps."""
    steps: dict[tuple[int, int], int] = {}  # (rank, number of its message) -> step

    def sent_from(rank: int, number: int) -> int:
        """The place of the sender's look before it began the message that this rank received."""
        peer = looks[rank][number].peer
        nth = sum(each.peer == peer for each in looks[rank][: number + 1])
        return max(0, sum(each.sent.get(rank, 0) < nth for each in looks[peer][:-1]) - 1)

    def step_of(rank: int, number: int, seen: frozenset[tuple[int, int]]) -> int:
        if (rank, number) in seen:
            raise ValueError("the messages wait for each other in a circle")
        if (rank, number) not in steps:
            below = seen | {(rank, number)}
            before = [step_of(rank, number - 1, below)] if number else []
            had = sent_from(rank, number)  # messages that the sender had received
            before += [step_of(looks[rank][number].peer, had - 1, below)] if had else []
            steps[rank, number] = 1 + max(before, default=0)
        return steps[rank, number]

    found = []
    for rank, mine in enumerate(looks):
        for number, (look, after) in enumerate(pairwise(mine)):
            source = looks[look.peer][sent_from(rank, number)]
            for first, last in _changed(look, after):
                adds = _at(source, first) != _at(after, first)
                found.append(Move(step_of(rank, number, frozenset()), look.peer, rank, first, last, adds))
    return sorted(found, key=lambda move: (move.step, move.receiver, move.first))


def _at(look: Look, element: int) -> Counts:
    """Whose gradients are in an element."""
    return next(counts for counts, first, last in look.runs if first <= element < last)


def _changed(before: Look, after: Look) -> list[tuple[int, int]]:
    """The elements that are other ones in a later look, in runs."""
    found: list[tuple[int, int]] = []
    for counts, first, last in after.runs:
        for old, begin, end in before.runs:
            low, high = max(first, begin), min(last, end)
            if low < high and old != counts:
                if found and found[-1][1] == low:
                    found[-1] = (found[-1][0], high)
                else:
                    found.append((low, high))
    return found


def held_after(looks: Sequence[Sequence[Look]], moves: Sequence[Move], step: int) -> list[Look]:
    """What each rank holds after a step: its look after the last message that it has received by then."""
    found = []
    for rank, mine in enumerate(looks):
        seen = {move.step for move in moves if move.receiver == rank and move.step <= step}
        found.append(mine[min(len(seen), len(mine) - 1)])
    return found


def captions(moves: Sequence[Move], element_bytes: int) -> list[str]:
    """A sentence for each step."""
    found = []
    last = max((move.step for move in moves), default=0)
    for step in range(1, last + 1):
        some = [move for move in moves if move.step == step]
        most = max(move.last - move.first for move in some) * element_bytes
        adds = sum(move.adds for move in some)
        done = "added up" if adds == len(some) else "copied" if not adds else "some of them added up"
        word = "message" if len(some) == 1 else "messages"
        found.append(f"Step {step} of {last}: {len(some)} {word} of up to {most:,} bytes, {done}.")
    return found


def in_letters(looks: Sequence[Sequence[Look]], moves: Sequence[Move], element_bytes: int) -> str:
    """Each step in words, then what every rank has."""
    lines = captions(moves, element_bytes)
    whole = all(set(counts) == {1} for mine in looks for counts, *_ in mine[-1].runs)
    return "\n".join([*lines, "Every rank has the complete sum." if whole else "Not every rank has the complete sum."])


def svg(looks: Sequence[Sequence[Look]], moves: Sequence[Move], element_bytes: int, title: str) -> str:
    """Still frames, one below the other."""
    words = ["At first every rank has its own gradient.", *captions(moves, element_bytes)]
    states = [[mine[0] for mine in looks], *(held_after(looks, moves, step) for step in range(1, len(words)))]
    tall = len(looks) * ROW + 34
    body = [f'<text x="10" y="20" font-weight="bold">{html.escape(title)}</text>']
    for step, state in enumerate(states):
        frame = _frame(state, [move for move in moves if move.step == step], words[step])
        body.append(f'<g transform="translate(0,{30 + step * tall})">{frame}</g>')
    height = 40 + len(states) * tall
    view = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view}>{"".join(body)}</svg>\n'


def _frame(state: Sequence[Look], moves: Sequence[Move], words: str) -> str:
    """What ranks hold, a stripe for each rank whose gradient is in a part, and arrows of what has just come."""
    size = state[0].runs[-1][2]

    def x(element: int) -> float:
        return LEFT + element / size * (WIDTH - LEFT - 10)

    parts = [f'<text x="10" y="12">{html.escape(words)}</text>']
    for rank, look in enumerate(state):
        top = 20 + rank * ROW
        parts.append(f'<text x="10" y="{top + 12}">rank {rank}</text>')
        for counts, first, last in look.runs:
            stripe = CELL / len(counts)
            for other, count in enumerate(counts):
                if count:
                    place = f'x="{x(first):.1f}" y="{top + other * stripe:.1f}" width="{x(last) - x(first):.1f}"'
                    parts.append(f'<rect {place} height="{stripe:.1f}" fill="{COLOURS[other]}"/>')
            edge = f'x="{x(first):.1f}" y="{top}" width="{x(last) - x(first):.1f}" height="{CELL}"'
            parts.append(f'<rect {edge} fill="none" stroke="currentColor" stroke-width=".5"/>')
    for move in moves:
        middle = (x(move.first) + x(move.last)) / 2
        y1, y2 = (20 + rank * ROW + CELL / 2 for rank in (move.sender, move.receiver))
        tip = f"rank {move.sender} to rank {move.receiver}"
        line = f'x1="{middle:.1f}" x2="{middle:.1f}" y1="{y1}" y2="{y2}" stroke="currentColor" stroke-width="1.5"'
        parts.append(f'<line {line}><title>{tip}</title></line><circle cx="{middle:.1f}" cy="{y2}" r="3"/>')
    return "".join(parts)
