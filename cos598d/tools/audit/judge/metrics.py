"""Faults of evaluation: numbers that are added up over the ranks, and that the examples behind them prove wrong."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cos598d.tools.audit.book import Book
from cos598d.tools.audit.judge.verdict import AuditFinding, where

_MOST_ROWS = 4096  # of more any number of float32 is nearly a fraction
_ROUNDING = 3e-7  # of a number in float32 that was divided
_PERCENT = 100


def judge_metrics(books: Sequence[Book]) -> tuple[list[AuditFinding], list[str]]:
    """What is wrong with the numbers that one group's last evaluation adds up, and what could not be judged of them.

    A share of right answers is a fraction of the examples of its rank: of which examples the number itself tells.
    """
    of_rank = [book.get("sums", []) for book in books]
    calls = [each for each in zip(*of_rank, strict=False) if len({(*sums["where"],) for sums in each}) == 1]
    if len(books) < 2 or len({*map(len, of_rank)}) > 1 or len(calls) < len(of_rank[0]):
        return _padded(books), []
    columns = [(call, column) for call in calls for column in zip(*(sums["values"] for sums in call), strict=False)]
    unjudged: list[str] = []
    for call, column in columns:
        rows = [sums["rows"] for sums in call]
        is_cut = all(sums["is_cut"] and sums["share"] == sums["rows"] for sums in call)
        length, place = call[0]["length"], where(call[0])
        said = ", ".join(f"rank {book['rank']} {value:.6g}" for book, value in zip(books, column, strict=True))
        if is_cut and 0 < sum(rows) - length < len(books):
            if [*column] == rows and _has_hits(columns, rows, length):
                says = f"{sum(rows)} examples are counted, of which the data has {length}: {said}."
                return [AuditFinding("counted_twice", (says,), place)], []
            if _are_shares(column, rows, length):
                says = f"The ranks evaluate {sum(rows)} examples, of which the data has {length}, and average shares "
                return [AuditFinding("counted_twice", (f"{says}of {rows[0]} each: {said}.",), place)], []
        elif len({*rows}) > 1 and _are_shares(column, rows, length):
            what = f"numbers that are means over {', '.join(map(str, rows))} examples count the same: {said}"
            if is_cut:
                return [AuditFinding("unweighted_metric", (f"N{what[1:]}.",), place)], []
            at = f"{Path(place[0]).name} line {place[1]}"
            unjudged.append(f"an evaluation at {at}: {what}. That is right for tasks of their own.")
    return _padded(books), unjudged[:1]


def _padded(books: Sequence[Book]) -> list[AuditFinding]:
    for sampler in books[0]["samplers"]:
        if not sampler["trains"] and sampler["total_length"] > sampler["dataset_length"]:
            says = f"{sampler['total_length']} samples are drawn of {sampler['dataset_length']}."
            return [AuditFinding("padded_duplicates", (says,), where(sampler))]
    return []


def _has_hits(columns: Sequence[Any], rows: Sequence[int], length: int) -> bool:
    """Whether right answers are added up with the count, and nothing tells that the repeated ones are left out: neither
    the number of these nor that of the others is added up. Other data's numbers do not count, and ones may be ranks."""
    data = [(row, length) for row in rows]
    of_data = [each for call, each in columns if [(sums["rows"], sums["length"]) for sums in call] == data]
    hits = [each for each in of_data if len({*each}) > 1 and [*each] != [*rows] and _are_whole(each)]
    hits = [each for each in hits if all(0 <= value <= row for value, row in zip(each, rows, strict=True))]
    return bool(hits) and max(rows) > 1 and not any(sum(each) in (sum(rows) - length, length) for each in of_data)


def _are_shares(column: Sequence[float], rows: Sequence[int], length: int) -> bool:
    """Whether the numbers are fractions of their ranks' examples, and not all of them of all examples, as parts of a
    weighted mean are. They differ, and are not whole, as counts are: 20 of 50 is 40 %, and so may be 40 of 99.
    On the last rank, whose share is filled up, it is neither 0 nor 1."""
    if _are_whole(column):
        return False
    wholes = {length or sum(rows)} | ({sum(rows)} if len({*rows}) > 1 else set())
    for way in (1, _PERCENT, 1 / len(rows), _PERCENT / len(rows)):
        shares = [value / way for value in column]
        are_fractions = all(
            0 <= share <= 1 and _is_fraction(share, row) for share, row in zip(shares, rows, strict=True)
        )
        are_parts = any(all(_is_fraction(share, whole) for share in shares) for whole in wholes)
        are_apart = len({*shares}) > 1 and not are_parts
        if are_fractions and are_apart and (sum(rows) <= length or 0 < shares[-1] < 1):
            return max(rows) <= _MOST_ROWS
    return False


def _are_whole(column: Sequence[float]) -> bool:
    return all(value.is_integer() for value in column)


def _is_fraction(share: float, of: int) -> bool:
    return abs(share * of - round(share * of)) <= _ROUNDING * of
