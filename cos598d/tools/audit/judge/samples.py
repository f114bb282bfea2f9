"""Faults of the data: the samples that ranks trained and evaluated on, and the numbers that evaluations add up."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cos598d.tools.audit.book import Book
from cos598d.tools.audit.judge.verdict import AuditFinding, Where, loss_place, where

_SAME = 0.999  # of a step's samples
_EXPECTED = 3  # samples in common that chance would give; with fewer nothing can be judged
_LEAST = 0.02  # of a rank's samples in common: less may be padding
_BY_CHANCE = 6  # times as many in common as a rank has twice: data with equal samples has twice as many
_PLAIN = ("RandomSampler", "SequentialSampler")
_MOST_ROWS = 4096  # of more any number of float32 is nearly a fraction
_ROUNDING = 3e-7  # of a number in float32 that was divided
_PERCENT = 100


def judge_samples(books: Sequence[Book]) -> tuple[list[AuditFinding], list[str]]:
    """What is wrong with the data of one group of ranks, and what could not be judged."""
    findings = _no_set_epoch(books)
    if len(books) < 2:
        return findings, []
    found, unjudged = _overlap(books)
    return found + _leak(books) + findings, unjudged


def _overlap(books: Sequence[Book]) -> tuple[list[AuditFinding], list[str]]:
    by_rank = [[micro["samples"] for step in book["steps"] for micro in step["micro"]] for book in books]
    # By micro-batch the samples of each rank; a second loss of one forward pass has none.
    batches = [ranks for ranks in zip(*by_rank, strict=False) if all(ranks)]
    seen = [book["training_samples"] for book in books]
    if not batches or not all(seen):
        return [], ["the batches: no module with weights was called with one before a backward pass."]
    if len(set(itertools.chain.from_iterable(seen))) <= 2:
        return [], ["the batches: all samples are alike."]
    place = _place(books)
    same = [len(set(ranks[0]).intersection(*ranks[1:])) / len(set(ranks[0])) for ranks in batches]
    if min(same) >= _SAME:
        count, size = len(same), len(batches[0][0])
        says = f"In {count} of {count} examined batches all {len(books)} ranks had the same {size} samples."
        return [AuditFinding("same_batches", (says, *_loader_words(books)), place)], []
    sets = [set(each) for each in seen]
    pairs = list(itertools.combinations(range(len(books)), 2))
    common, (one, other) = max((len(sets[a] & sets[b]), (a, b)) for a, b in pairs)
    smaller = min(len(sets[one]), len(sets[other]))
    repeated = max(len(each) - len(set(each)) for each in seen)
    says = f"Of {len(sets[one])} and {len(sets[other])} samples of ranks {one} and {other} in their first epoch "
    says += f"{common} are the same."
    loaders = [next((each for each in book["loaders"] if each["trains"]), None) for book in books]
    whole = [each for each in loaders if each and each["sampler"] in _PLAIN and not each["is_distributed"]]
    lengths = {each["sampler_length"] for each in whole if each["sampler_length"] == each["dataset_length"]}
    if len(whole) == len(books) and len(lengths) == 1:
        length = lengths.pop()
        by_chance = len(sets[one]) * len(sets[other]) / max(length, 1)
        if common > max(len(books), by_chance / 4, 2 * repeated) and common > _LEAST * smaller:
            return [AuditFinding("all_data_everywhere", (says, *_loader_words(books)), place)], []
        if by_chance < _EXPECTED:
            return [], [
                f"whether the ranks' samples are disjoint: each has a loader over {length}, and of {smaller} that were "
                f"seen {common} are the same."
            ]
        return [], []
    padding = max(len(books), min(_LEAST * smaller, max(len(ranks[0]) for ranks in batches)))
    if common > padding and common > _BY_CHANCE * repeated:
        share = f"A rank has up to {repeated} samples twice; {padding:.0f} in common may be padding."
        return [AuditFinding("overlapping_batches", (says, share), place)], []
    return [], []


def _leak(books: Sequence[Book]) -> list[AuditFinding]:
    """Ranks that evaluate samples that only other ranks train on. Each rank has split the data by itself.

    A rank that evaluates the training data has its own n-th in it, and n - 1 times as many samples of others.
    """
    trained = [set(book["training_samples"]) for book in books]
    for rank, book in enumerate(books):
        evaluated = set(book["evaluation_samples"])
        if not trained[rank] or book["evaluation_batches"] < 2:
            continue
        own = len(evaluated & trained[rank])
        others = len(evaluated.intersection(set().union(*trained[:rank], *trained[rank + 1 :])) - trained[rank])
        if others > max(len(books), _LEAST * len(evaluated)) and others > _BY_CHANCE * (len(books) - 1) * own:
            says = f"Of {len(evaluated)} samples that rank {rank} evaluates other ranks have trained on {others}, and "
            says += f"rank {rank} on {own}."
            places = [where(each) for each in book["loaders"] if not each["trains"]]
            return [AuditFinding("evaluation_leak", (says,), (places or [_place(books)])[-1])]
    return []


def _place(books: Sequence[Book]) -> Where:
    """Where the training loader is iterated over; if there is none, where the loss is."""
    return next((where(loader) for loader in books[0]["loaders"] if loader["trains"]), loss_place(books))


def _loader_words(books: Sequence[Book]) -> list[str]:
    for loader in books[0]["loaders"]:
        if loader["trains"] and loader["sampler_length"]:
            says = f"Each rank's loader draws {loader['sampler_length']} of {loader['dataset_length']} samples by a "
            return [says + f"{loader['sampler']}."]
    return []


def _no_set_epoch(books: Sequence[Book]) -> list[AuditFinding]:
    for sampler in books[0]["samplers"]:
        epochs = sampler["epochs"]
        if sampler["trains"] and sampler["shuffles"] and len(epochs) > 1 and len(set(epochs)) == 1:
            says = f"DistributedSampler drew {len(epochs)} epochs, each as its epoch {epochs[0]}."
            return [AuditFinding("no_set_epoch", (says,), where(sampler))]
    return []


def judge_metrics(books: Sequence[Book]) -> tuple[list[AuditFinding], list[str]]:
    """What is wrong with the numbers that one group's last evaluation adds up, and what could not be judged.

    A share of right answers is a fraction of its rank's examples. So the number itself shows how many examples it is
    of.
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
    """Whether right answers are added up with the count, and nothing shows that the repeated ones are left out.

    It would show if the number of the repeated ones, or of the others, were added up. Numbers of other data do not
    count, and a column of ones may be ranks.
    """
    data = [(row, length) for row in rows]
    of_data = [each for call, each in columns if [(sums["rows"], sums["length"]) for sums in call] == data]
    hits = [each for each in of_data if len({*each}) > 1 and [*each] != [*rows] and _are_whole(each)]
    hits = [each for each in hits if all(0 <= value <= row for value, row in zip(each, rows, strict=True))]
    return bool(hits) and max(rows) > 1 and not any(sum(each) in (sum(rows) - length, length) for each in of_data)


def _are_shares(column: Sequence[float], rows: Sequence[int], length: int) -> bool:
    """Whether the numbers are fractions of their ranks' examples.

    They are not if all are fractions of all examples, as the parts of a weighted mean are. They differ, and are not
    whole numbers, as counts are: 20 of 50 is 40 %, and so may be 40 of 99. On the last rank, whose share is filled up,
    the number is neither 0 nor 1.
    """
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
