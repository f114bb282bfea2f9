"""How one or two texts become one sequence: special tokens, truncation, segments and padding.

All code that arranges tokens uses this, whether they are word-piece ids (our own features) or strings
(`utils_glue.convert_examples_to_features`). So the two cannot diverge.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cos598d.errors import UserError

Token = TypeVar("Token")


@dataclass(frozen=True)
class Layout:
    """Where a model type puts its special tokens, and which segment ids it gives them.

    BERT's own, the default:      [CLS] a... [SEP]            or  [CLS] a... [SEP] b... [SEP]
    XLNet (`cls_at_end`):         a... <sep> b... <sep> <cls>
    RoBERTa (`extra_sep`):        <s> a... </s> </s> b... </s>, and two </s> after a single text as well
    """

    cls_at_end: bool = False
    extra_sep: bool = False
    pad_on_left: bool = False
    cls_segment: int = 0
    first_segment: int = 0
    second_segment: int = 1
    pad_segment: int = 0
    uses_segments: bool = True

    def special_tokens(self, pair: bool) -> int:
        """The number of special tokens around a single text or a pair."""
        return 2 + pair + self.extra_sep

    def arrange(
        self, first: Sequence[Token], second: Sequence[Token] | None, cls: Token, sep: Token, max_length: int
    ) -> tuple[list[Token], int]:
        """Truncate and join the tokens of one example; `second` None means a single text.

        Returns the sequence, at most `max_length` tokens, and its split: how many of the tokens other than
        `cls` belong to the first segment. Raises UserError if `max_length` leaves no room for text.
        """
        specials = self.special_tokens(second is not None)
        room = max_length - specials
        if room < 1:
            raise UserError(
                f"A sequence length of {max_length} leaves no room for text next to its {specials} special tokens. "
                f"Give at least {specials + 1} (--max_seq_length)."
            )
        if second is None:
            body = [*first[:room], sep]
        else:
            keep_first, keep_second = truncated_lengths(len(first), len(second), room)
            second = second[:keep_second]
            body = [*first[:keep_first], sep]
        if self.extra_sep:
            body.append(sep)
        split = len(body)
        if second:
            body += [*second, sep]
        return ([*body, cls] if self.cls_at_end else [cls, *body]), split

    def segments(self, split: int, length: int) -> list[int]:
        """The segment id of each of a sequence's `length` tokens; `split` as `arrange` returned it."""
        body = [self.first_segment] * split + [self.second_segment] * (length - 1 - split)
        return [*body, self.cls_segment] if self.cls_at_end else [self.cls_segment, *body]

    def pad(self, rows: Sequence[Sequence[int] | np.ndarray], width: int, filler: int) -> np.ndarray:
        """The rows in one int64 array (rows, width), with `filler` in shorter rows, on this layout's side."""
        padded = np.full((len(rows), width), filler, dtype=np.int64)
        for target, row in zip(padded, rows, strict=True):
            start = width - len(row) if self.pad_on_left else 0
            target[start : start + len(row)] = row
        return padded


def truncated_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each text stay, so that together they fit into `room`.

    Tokens are removed one at a time from the end of the longer text, and from the second when both are equally long. So
    the longer one first shrinks to the shorter one's length, and then both shrink in turn.
    """
    surplus = max(first + second - room, 0)
    shrunk = min(surplus, abs(first - second))
    in_turn = surplus - shrunk
    if first > second:
        first -= shrunk
    else:
        second -= shrunk
    return first - in_turn // 2, second - (in_turn + 1) // 2


LAYOUTS = {
    "bert": Layout(),
    "distilbert": Layout(uses_segments=False),
    "roberta": Layout(extra_sep=True, uses_segments=False),
    "xlm": Layout(uses_segments=False),
    "xlnet": Layout(cls_at_end=True, pad_on_left=True, cls_segment=2, pad_segment=4),
}
