"""From the messages of a collective to frames: which are under way at once, and who holds what after them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cos598d.tools.learn.picture.messages import Message

MOST_MESSAGES, MOST_CHUNKS, MOST_RANKS = 600, 32, 8

# held[rank][chunk][other]: how often the gradient of rank `other` is in what `rank` has of that chunk.
Counts = tuple[int, ...]
Held = tuple[tuple[Counts, ...], ...]


@dataclass(frozen=True)
class Move:
    """A message as a frame shows it: chunks [first, last) go from one rank to another, there to be added or not."""

    sender: int
    receiver: int
    first: int
    last: int
    bytes: int
    adds: bool


@dataclass(frozen=True)
class StepFrame:
    """One step, counted from 1: its messages, and what every rank holds after them."""

    step: int
    moves: tuple[Move, ...]
    held: Held


def chunks_of(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """The tensor in the pieces that the messages cut it into: elements [begin, end) of each, in order."""
    edges = sorted({0, *(message.begin for message in messages), *(message.end for message in messages)})
    return list(pairwise(edges))


def ranks_of(messages: Sequence[Message]) -> int:
    """How many ranks these messages join."""
    return 1 + max(max(message.sender, message.receiver) for message in messages)


def at_first(ranks: int, chunks: int) -> Held:
    """What is held before any message: every rank has its own gradient of every chunk."""
    return tuple((tuple(int(other == rank) for other in range(ranks)),) * chunks for rank in range(ranks))


def is_whole(counts: Counts) -> bool:
    """Whether every rank's gradient is in it, once."""
    return all(count == 1 for count in counts)


def in_letters(counts: Counts, of: str) -> str:
    """ "all", "0+3" for few ranks, "5/8" for many; one that is in it twice is told twice."""
    if is_whole(counts):
        return "all"
    if len(counts) <= 4 or max(counts) > 1:
        return counted(counts, "+")
    return f"{sum(counts)}{of}{len(counts)}"


def counted(counts: Counts, plus: str) -> str:
    """Whose gradients are in it, as "0 + 3"; one that is in it twice is told twice."""
    return plus.join(str(rank) for rank, count in enumerate(counts) for _ in range(count))


def frames(messages: Sequence[Message]) -> list[StepFrame]:
    """The messages of one tensor's all-reduce, however it is made, as steps; each message is in one of them.

    A message is in the step after those that its sender had waited for before it began, and after those that its
    receiver had taken into the same elements before it was ready: so a step does not show which rank was the faster.
    Raises ValueError for more messages, pieces or ranks than can be drawn.
    """
    if not messages:
        return []
    chunks, ranks = chunks_of(messages), ranks_of(messages)
    for count, most, what in (
        (len(messages), MOST_MESSAGES, "messages"),
        (len(chunks), MOST_CHUNKS, "pieces"),
        (ranks, MOST_RANKS, "ranks"),
    ):
        if count > most:
            raise ValueError(f"{count} {what} are more than a picture of {most} can show")
    first_of = {begin: place for place, (begin, _) in enumerate(chunks)}
    last_of = {end: place + 1 for place, (_, end) in enumerate(chunks)}
    held, found = at_first(ranks, len(chunks)), []
    by_step: dict[int, list[Message]] = {}
    for message, step in zip(messages, _steps(messages), strict=True):
        by_step.setdefault(step, []).append(message)
    for step in sorted(by_step):
        moves = tuple(
            Move(m.sender, m.receiver, first_of[m.begin], last_of[m.end], m.bytes, m.adds)
            for m in sorted(by_step[step], key=lambda m: (m.begin, m.sender, m.receiver))
        )
        held = _after(held, moves)
        found.append(StepFrame(step, moves, held))
    return found


def _steps(messages: Sequence[Message]) -> list[int]:
    """The step of each message, from 1."""
    before = [
        [place for place, earlier in enumerate(messages) if earlier is not message and _precedes(earlier, message)]
        for message in messages
    ]
    steps = [1] * len(messages)
    for _ in messages:
        after = [1 + max((steps[place] for place in places), default=0) for places in before]
        if after == steps:
            return steps
        steps = after
    raise ValueError("the messages wait for each other in a circle, so their times are not of one clock")


def _precedes(earlier: Message, message: Message) -> bool:
    """Whether `message` had to wait for `earlier`."""
    here = message.sender
    if (earlier.sender == here and earlier.left <= message.sent) or (
        earlier.receiver == here and earlier.arrived <= message.sent
    ):
        return True
    return earlier.receiver == message.receiver and earlier.arrived <= message.expected and earlier.overlaps(message)


def _after(held: Held, moves: Sequence[Move]) -> Held:
    """What is held when all of these have arrived, each with what its sender held before."""
    found = [list(chunks) for chunks in held]
    for move in moves:
        for chunk in range(move.first, move.last):
            sent, own = held[move.sender][chunk], found[move.receiver][chunk]
            found[move.receiver][chunk] = tuple(map(sum, zip(own, sent, strict=True))) if move.adds else sent
    return tuple(map(tuple, found))
