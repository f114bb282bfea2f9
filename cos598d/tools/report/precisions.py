"""Benches that differ in their precision alone: what computing in fewer bits does to each candidate's seconds."""

from collections.abc import Sequence

from cos598d.records.conventions import DDP, PRECISIONS
from cos598d.terminal.words import listed
from cos598d.tools.report.benches import Bench
from cos598d.tools.report.blocks import Table
from cos598d.tools.report.numbers import plain, plain_or_none
from cos598d.tools.report.settings import alike_but_for

WORD = "precision"


def precision_blocks(benches: Sequence[Bench]) -> list[Table]:
    """A table for each two benches that are alike but for their precision and their rounds."""
    found = []
    for group in alike_but_for(benches, frozenset((WORD, "rounds"))):
        ordered = [bench for one in PRECISIONS for bench in group if bench.facts[WORD] == one]
        first = ordered[0] if ordered else None
        found += [_table(first, bench) for bench in ordered[1:] if first and bench.facts[WORD] != first.facts[WORD]]
    return found


def _table(before: Bench, after: Bench) -> Table:
    """Seconds and ratios to DDP of what both measured, the fastest in `after` first."""
    words = [bench.facts[WORD] for bench in (before, after)]
    head = ["sync", *(f"{word} s" for word in words), "times"]
    rows = [head + [f"ratio to {DDP} in {word}" for word in words]]
    for one in sorted(after.candidates, key=lambda each: each.seconds):
        other = before.candidate(one.label)
        if other is not None:
            cells = [plain(other.seconds), plain(one.seconds), plain(one.seconds / other.seconds)]
            rows.append([one.label, *cells, plain_or_none(other.ratio), plain_or_none(one.ratio)])
    note = f"{listed([before.name, after.name])}, which differ in their precision alone: median seconds in "
    note += f"{words[0]} and in {words[1]}, and how many times the first the second are. Each ratio to {DDP} is to "
    return Table(f"{note}{DDP} in the same precision.", rows)
