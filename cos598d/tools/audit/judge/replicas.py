"""Faults of the replicas: weights, buffers, settings and random states that should be alike on all ranks."""

from collections.abc import Mapping, Sequence

import numpy as np

from cos598d.tools.audit.book import BUFFER, ENDED, RECEIVE, SEND, Book, ended_well
from cos598d.tools.audit.judge.gradients import tolerance_of
from cos598d.tools.audit.judge.verdict import AuditFinding, Where, loss_place, where
from cos598d.tools.audit.sketch import from_text

_ALIKE = 1e-5  # relative differences of replicas that are the same except for rounding


def judge_replicas(books: Sequence[Book]) -> tuple[list[AuditFinding], list[str]]:
    """What is wrong with the replicas of one group of ranks, and what could not be judged."""
    unjudged: list[str] = []
    if len(books) < 2:
        return [], []
    findings: list[AuditFinding] = []
    # After a step by shards the whole weights come only with the next forward pass: at the end they are old.
    in_shards = any(step.get("in_shards") for book in books for step in book["steps"])
    if in_shards or any(book["model"].get("sharded") for book in books):
        unjudged = ["weights that drift apart: they are cut over the ranks."]
        return _settings(books) + _dropout(books) + _uneven(books), unjudged
    if not all(book["start"].get("weights") for book in books):
        unjudged.append("the weights: no module was seen to be trained on every rank.")
    alike = max(_ALIKE, tolerance_of(books) / 100)
    place = loss_place(books)
    begun = _apart([book["start"].get("weights", {}) for book in books], alike)
    if begun:
        says = f"Before the first backward pass {_told(begun, books[0]['start']['weights'])}."
        findings.append(AuditFinding("different_start", (says,), place))
    if all(book["state"] == ENDED for book in books):
        weights = _apart([book["end"].get("weights", {}) for book in books], alike)
        if weights:
            says = f"After {books[0]['iterations_seen']} steps {_told(weights, books[0]['end']['weights'])}."
            findings.append(AuditFinding("weights_drift", (says,), place))
        findings += _batch_norm(books, alike, place)
    return findings + _settings(books) + _dropout(books) + _uneven(books), unjudged


def judge_saves(books: Sequence[Book]) -> list[AuditFinding]:
    """Files that several ranks of one host write, with no call between them that would order them."""
    writers: dict[tuple, dict[int, Where]] = {}
    for book in books:
        for each in book["saved"]:
            writers.setdefault((book["host"], each["path"], each["calls"]), {})[book["rank"]] = where(each)
    for (_, path, _), by_rank in writers.items():
        if len(by_rank) > 1:
            says = f"Ranks {', '.join(map(str, by_rank))} write {path}, with no call between that orders them."
            return [AuditFinding("saved_at_once", (says,), next(iter(by_rank.values())))]
    return []


def _apart(by_rank: Sequence[Mapping[str, str]], alike: float) -> dict[str, float]:
    """The tensors that differ from rank 0's on some rank, with the relative difference."""
    found = {}
    for name, text in by_rank[0].items():
        if not all(name in other for other in by_rank):
            continue
        if all(other[name] == text for other in by_rank[1:]):
            continue
        mine = from_text(text)
        others = [from_text(other[name]) for other in by_rank[1:]]
        size = max(float(np.linalg.norm(each)) for each in (mine, *others))
        apart = max(float(np.linalg.norm(mine - each)) for each in others)
        if not np.isfinite(size) or apart > alike * size:
            found[name] = apart / size if np.isfinite(size) and size else float("inf")
    return found


def _told(apart: Mapping[str, float], among: Mapping[str, object]) -> str:
    name = max(apart, key=lambda each: apart[each])
    return f"{len(apart)} of {len(among)} tensors differ between ranks, most of all {name}, by {apart[name]:.1%}"


def _batch_norm(books: Sequence[Book], alike: float, place: Where) -> list[AuditFinding]:
    if not books[0]["model"].get("batch_norms") or any(each["kind"] == BUFFER for each in books[0]["ledger"]):
        return []
    buffers = [book["end"].get("buffers", {}) for book in books]
    apart = {name: each for name, each in _apart(buffers, alike).items() if "running_" in name}
    if not apart:
        return []
    return [
        AuditFinding("batch_norm_apart", (f"At the end {_told(apart, buffers[0])}; no call carried a buffer.",), place)
    ]


def _settings(books: Sequence[Book]) -> list[AuditFinding]:
    for step, rows in enumerate(zip(*(book["iterations"] for book in books), strict=False), 1):
        first = rows[0]["rates"]
        for rank, row in enumerate(rows):
            rates = row["rates"]
            if len(rates) == len(first) and rates != first and not _step_apart(books[0], books[rank]):
                mine, theirs = next(pair for pair in zip(first, rates, strict=True) if pair[0] != pair[1])
                says = f"Step {step}: lr is {mine:g} on rank 0 and {theirs:g} on rank {rank}."
                return [AuditFinding("optimizers_differ", (says,), _step_place(books))]
    for rank, book in enumerate(books):
        for first, other in zip(books[0]["settings"], book["settings"], strict=False):
            is_own = first["class"] == other["class"] and _step_apart(books[0], book)
            if other != first and not is_own:
                says = f"At the first step {_difference(first, other, rank)}."
                return [AuditFinding("optimizers_differ", (says,), _step_place(books))]
    return []


def _step_apart(mine: Book, theirs: Book) -> bool:
    """Whether no tensor is stepped on both ranks, so that each may have its own settings."""
    here, there = ({name for step in book["steps"] for name in step["applied"]} for book in (mine, theirs))
    return bool(here and there) and here.isdisjoint(there)


def _step_place(books: Sequence[Book]) -> Where:
    events = [each for step in books[0]["steps"] for each in step["events"] if each["kind"] == "step"]
    return where(events[0]) if events else ("", 0, "")


def _difference(first: Mapping, other: Mapping, rank: int) -> str:
    if first["class"] != other["class"]:
        return f"rank 0 steps by {first['class']}, rank {rank} by {other['class']}"
    for place, (here, there) in enumerate(zip(first["groups"], other["groups"], strict=False)):
        for name in here:
            if here[name] != there.get(name):
                return f"{name} of group {place} is {here[name]:g} on rank 0 and {there.get(name)} on rank {rank}"
    return f"rank 0 has {len(first['groups'])} groups of parameters, rank {rank} {len(other['groups'])}"


def _dropout(books: Sequence[Book]) -> list[AuditFinding]:
    share = books[0]["model"].get("dropout", 0.0)
    micros = [[micro for step in book["steps"] for micro in step["micro"]] for book in books]
    count = min(map(len, micros))
    states = [[micro["rng"] for micro in each[:count]] for each in micros]
    is_on = count and all(micro["is_training"] for micro in micros[0][:count])
    if not share or not is_on or not all(map(all, states)) or any(each != states[0] for each in states[1:]):
        return []
    says = f"In {count} of {count} examined forward passes all ranks have the same random state; dropout is {share:g}."
    return [AuditFinding("same_dropout", (says,), where(micros[0][0]))]


def _uneven(books: Sequence[Book]) -> list[AuditFinding]:
    counts = [book["backwards"] for book in books]
    least = min(counts)
    if any(book["failed"] for book in books):
        return []
    if max(counts) == least:
        return _calls_apart(books)
    # One that crashed, or was killed, made fewer for that.
    if not any(book["backwards"] == least for book in books if _has_seen_all(book)):
        return []
    # One that has no data left may take part with zeros: nobody has waited for it then.
    if all(map(_has_seen_all, books)) and not _calls_apart(books):
        return []
    says = f"Backward passes by rank: {', '.join(map(str, counts))}."
    batches = [book["batches"] for book in books]
    if batches[counts.index(least)] >= max(batches) > 0:
        drew = f"Batches drawn by rank: {', '.join(map(str, batches))}."
        return [AuditFinding("skipped_by_one", (says, drew), loss_place(books))]
    return [AuditFinding("uneven_steps", (says,), loss_place(books))]


def _calls_apart(books: Sequence[Book]) -> list[AuditFinding]:
    """Collectives of all ranks that some rank made more often than another one, although that one ended well."""
    world = books[0]["world_size"]
    well = [rank for rank, book in enumerate(books) if _has_seen_all(book)]
    if len(books) < world or not well:
        return []
    by_op: dict[str, list[int]] = {}
    by_line: dict[tuple, list[int]] = {}
    for rank, book in enumerate(books):
        for entry in book["ledger"]:
            if entry["ranks"] == world and entry["op"] not in (SEND, RECEIVE):
                for counts in (
                    by_op.setdefault(entry["op"], [0] * world),
                    by_line.setdefault((entry["op"], *entry["where"]), [0] * world),
                ):
                    counts[rank] += entry["calls"]
    for op, counts in by_op.items():
        if max(counts) > min(counts[rank] for rank in well):
            says = f"Calls of {op} by rank: {', '.join(map(str, counts))}."
            lines = [key for key in by_line if key[0] == op]
            _, file, line, function = max(lines, key=lambda key: max(by_line[key]) - min(by_line[key]))
            return [AuditFinding("uneven_calls", (says,), (file, line, function))]
    return []


def _has_seen_all(book: Book) -> bool:
    return ended_well(book) and not book["failed"]
