"""Long texts in pieces and many items in batches, so that the memory of a step never grows with its input."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

PIECE = 16_384  # characters; the Rust library takes some 160 bytes for each that it works on
BATCH_CHARACTERS = 1 << 20
SPACES = " \u2028\u2029"  # what separates words; of all white space, BERT leaves these three in a text
_SPACE = re.compile(f"[{SPACES}]")


def pieces(text: str, longest_word: int | None = None) -> Iterator[tuple[int, int, str]]:
    """A text of words separated by SPACES as pieces of about PIECE characters, cut before one: (begin, end, piece).

    A word longer than a piece is a piece of its own. If no word of more than `longest_word` characters is looked into,
    it is cut off behind that many and one more: `end` is where it truly ends.
    """
    begin = 0
    while begin < len(text):
        end = begin + PIECE
        if end >= len(text):
            end = len(text)
        elif (space := max(text.rfind(space, begin + 1, end) for space in SPACES)) > 0:
            end = space
        else:
            found = _SPACE.search(text, end)
            end = found.start() if found else len(text)
        piece = text[begin:end]
        if longest_word is not None and len(piece) > PIECE:
            piece = piece[: longest_word + 2]  # it can begin with the space before it
        yield begin, end, piece
        begin = end


def batches(items: Iterable[Item], most: int, characters: Callable[[Item], int]) -> Iterator[list[Item]]:
    """The items in lists of at most `most`, or fewer where their characters come to BATCH_CHARACTERS."""
    batch: list[Item] = []
    together = 0
    for item in items:
        batch.append(item)
        together += characters(item)
        if len(batch) == most or together >= BATCH_CHARACTERS:
            yield batch
            batch, together = [], 0
    if batch:
        yield batch
