"""Faults of the data: the samples that ranks trained and evaluated on, and the numbers that evaluations add up."""

import itertools
from collections.abc import Sequence
from typing import Any

from cos598d.tools.audit.book import Book
from cos598d.tools.audit.judge.verdict import AuditFinding, Where, loss_place, where

_SAME = 0.999  # of a step's samples
_EXPECTED = 3  # samples in common that chance would give; with fewer nothing can be judged
_LEAST = 0.02  # of a rank's samples in common: less may be padding
_BY_CHANCE = 6  # times as many in common as a rank has twice: data with equal samples has twice as many
_PLAIN = ("RandomSampler", "SequentialSampler")
_HALF = 0.5  # of the examples that one more reader would repeat


def judge_samples(books: Sequence[Book]) -> tuple[list[AuditFinding], list[str]]:
    """What is wrong with the data of one group of ranks, and what could not be judged."""
    findings = _no_set_epoch(books) + _repeated_by_workers(books)
    if len(books) < 2:
        return findings, []
    found, unjudged = _overlap(books)
    return _sharded_twice(books) + found + _leak(books) + findings, unjudged


def _repeated_by_workers(books: Sequence[Book]) -> list[AuditFinding]:
    """Samples that a rank draws several times in its first epoch, because each worker of its loader reads all."""
    for book in books:
        loader = next((each for each in book["loaders"] if each["trains"]), None)
        seen = book["training_samples"]
        if loader is None or not loader["is_iterable"] or loader["workers"] < 2 or not seen:
            continue
        repeated = len(seen) - len(set(seen))
        if repeated >= _HALF * (len(seen) - len(seen) / loader["workers"]):
            says = f"Of {len(seen)} samples that rank {book['rank']} drew first, {repeated} are repeated ones. "
            says += f"Its loader reads an IterableDataset by {loader['workers']} workers."
            return [AuditFinding("repeated_by_workers", (says,), where(loader))]
    return []


def _sharded_twice(books: Sequence[Book]) -> list[AuditFinding]:
    """A distributed sampler over a data set that is a rank's own share already."""
    samplers = [next((each for each in book["samplers"] if each["trains"]), None) for book in books]
    known = [each for each in samplers if each is not None and each["subset"]]
    if len(known) < len(books) or len({each["subset"] for each in known}) < len(books):
        return []
    drawn = sum(each["share"] for each in known)
    whole = max(each["whole_length"] for each in known)
    # Shares of shares: together they are an n-th of what the ranks' own shares have.
    held = sum(each["dataset_length"] for each in known)
    if held > whole + len(books) or drawn * len(books) > held + len(books) ** 2:
        return []
    says = f"The sampler of rank 0 draws {known[0]['share']} of {known[0]['dataset_length']} samples of a Subset that "
    says += f"only this rank has. All ranks together draw {drawn} of {whole} in an epoch."
    return [AuditFinding("sharded_twice", (says,), where(known[0]))]


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
        if len({each["subset"] for each in whole}) == len(books):  # each rank has a data set of its own
            if common > max(len(books), 2 * repeated) and common > _LEAST * smaller:
                own = f"Each rank's loader has a Subset of {length} samples of its own."
                return [AuditFinding("shares_drawn_apart", (says, own), place)], []
            return [], []
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


def judge_metrics(books: Sequence[Book]) -> list[AuditFinding]:
    """Examples that pad the ranks' shares, and that one group's last evaluation counts twice."""
    of_rank = [book["sums"] for book in books]
    calls = [each for each in zip(*of_rank, strict=False) if len({(*sums["where"],) for sums in each}) == 1]
    if len(books) < 2 or len({*map(len, of_rank)}) > 1 or len(calls) < len(of_rank[0]):
        return []
    columns = [(call, column) for call in calls for column in zip(*(sums["values"] for sums in call), strict=False)]
    for call, column in columns:
        rows, length = [sums["rows"] for sums in call], call[0]["length"]
        is_cut = all(sums["is_cut"] and sums["share"] == sums["rows"] for sums in call)
        is_padded = is_cut and 0 < sum(rows) - length < len(books)
        if is_padded and [*column] == rows and _has_hits(columns, rows, length):
            said = ", ".join(f"rank {book['rank']} {value:.6g}" for book, value in zip(books, column, strict=True))
            says = f"{sum(rows)} examples are counted, of which the data has {length}: {said}."
            return [AuditFinding("counted_twice", (says,), where(call[0]))]
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


def _are_whole(column: Sequence[float]) -> bool:
    return all(value.is_integer() for value in column)
