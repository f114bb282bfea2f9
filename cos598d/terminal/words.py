"""Numbers and lists as text, for sentences: "2 runs", "a, b and c", "ranks 1, 3"."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

MOST_RANKS = 20


def number_of(count: int, word: str) -> str:
    """ "1 run", "2 runs"."""
    return f"{count:,} {word}{'' if count == 1 else 'es' if word.endswith('ch') else 's'}"


def listed(values: Sequence[Any]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}" if first else last


def ranks_in_words(ranks: Sequence[int]) -> str:
    """The ranks as "rank 3" or "ranks 1, 3"; for more than MOST_RANKS, the first ones and how many more."""
    shown, more = ", ".join(map(str, ranks[:MOST_RANKS])), len(ranks) - MOST_RANKS
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{f' and {more} more' if more > 0 else ''}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ " Did you mean 'ring'?", to put after a sentence; "" if no known word looks like `word`. Flags' dashes are not
    compared, since all flags have them."""
    names = {name.lstrip("-"): name for name in known}
    near = difflib.get_close_matches(word.lstrip("-"), list(names), n=1, cutoff=0.6)
    return f" Did you mean '{names[near[0]]}'?" if near else ""
