"""Ranks that wait for each other forever, and waste, most of which is about calls too."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from cos598d.terminal.words import ranks_in_words
from cos598d.tools.audit.book import (
    BARRIER,
    ENDED,
    GRADIENT,
    RECEIVE,
    SEND,
    Book,
    ended_well,
)
from cos598d.tools.audit.judge.gradients import Fits, have_own_samples
from cos598d.tools.audit.judge.verdict import AuditFinding, Where, where

_SAME_SIZE = ("all_reduce", "broadcast", "reduce")  # on all ranks
_LEAST_SECONDS = 3.0  # more than between two books of a rank: what waits for less may be on its way
_LEAST_EVALUATED = 64  # samples of an evaluation that is worth a word
_HALF = 0.5


def judge_hang(books: Sequence[Book]) -> tuple[list[AuditFinding], list[str]]:
    """A hang that nothing can end, or the evidence of one that may still end by itself."""
    waiting: dict[int, dict[str, Any]] = {}  # the first call of each rank that waits
    for book in books:
        for call in book["recent"]:
            if call["waits"] and call["seconds"] >= _LEAST_SECONDS:
                waiting.setdefault(book["rank"], call)
    if not waiting:
        return [], []
    by_rank = {book["rank"]: book for book in books}
    absent = {rank: _absent(call, rank, waiting, by_rank) for rank, call in waiting.items()}
    lines = [_waits(rank, call, absent[rank], waiting) for rank, call in waiting.items()]
    lines += [_elsewhere(book) for rank, book in by_rank.items() if rank not in waiting and _is_missed(rank, absent)]
    told = _mismatch(waiting, by_rank)
    has_gone = [rank for rank, book in by_rank.items() if _is_missed(rank, absent) and ended_well(book)]
    # What was begun early and is not waited for keeps nobody.
    do_all_wait = len(waiting) == books[0]["world_size"] and all(book["is_in_torch"] for book in books)
    if told or has_gone or (do_all_wait and all(absent.values())):
        first = min(waiting)
        return [AuditFinding("hang", (*([told] if told else []), *lines), where(waiting[first]))], []
    if any(absent.values()):
        return [], [f"gradients: whether the ranks hang: {' '.join(lines)}"]
    return [], []


def _absent(
    call: Mapping[str, Any], rank: int, waiting: Mapping[int, Mapping[str, Any]], books: Mapping[int, Book]
) -> list[int]:
    """The ranks that a rank waits for in a call: those with a book that have not made it."""
    if call["op"] in (SEND, RECEIVE):
        peer = call["ranks"][call["root"]] if call["root"] < len(call["ranks"]) else call["root"]
        answers = waiting.get(peer)
        meets = answers is not None and {call["op"], answers["op"]} == {SEND, RECEIVE} and answers["root"] == rank
        return [] if meets or peer not in books else [peer]
    others = [other for other in call["ranks"] if other != rank and other in books]
    made = {
        other: [each["calls"] for each in books[other]["made"] if each["ranks"] == call["ranks"]] for other in others
    }
    return [other for other in others if sum(made[other][:1]) < call["number"]]


def _mismatch(waiting: Mapping[int, Mapping[str, Any]], books: Mapping[int, Book]) -> str:
    """A sentence about two ranks whose calls with the same number are different; "" if there are none."""
    for rank, call in waiting.items():
        for other in (each for each in call["ranks"] if each in books and each != rank and call["number"]):
            for answer in books[other]["recent"]:
                if (answer["ranks"], answer["number"]) == (call["ranks"], call["number"]) and _differ(call, answer):
                    mine, theirs = (_named(each) for each in (call, answer))
                    return f"Their call {call['number']} is {mine} on rank {rank}, and {theirs} on rank {other}."
    return ""


def _differ(call: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    are_other_sizes = call["op"] in _SAME_SIZE and call["elements"] != other["elements"]
    return call["op"] != other["op"] or are_other_sizes or call["root"] != other["root"]


def _is_missed(rank: int, absent: Mapping[int, Sequence[int]]) -> bool:
    return any(rank in ranks for ranks in absent.values())


def _named(call: Mapping[str, Any]) -> str:
    size = "" if call["op"] == BARRIER else f" of {call['elements']} elements"
    return f"{call['op']}{size} at {_line(call['where'])}"


def _line(place: Sequence[Any]) -> str:
    return f"{os.path.basename(place[0])} line {place[1]}" if place[0] else "an unknown line"


def _waits(rank: int, call: Mapping[str, Any], absent: Sequence[int], waiting: Mapping[int, Any]) -> str:
    whom = f" for {ranks_in_words(absent)}" if absent else ""
    number = f", call {call['number']} of its group" if call["number"] else ""
    return f"Rank {rank} has waited{whom} for {call['seconds']:.0f} s in {_named(call)}{number}."


def _elsewhere(book: Book) -> str:
    if book["state"] == ENDED:
        return f"Rank {book['rank']} has ended with exit code {book['exit_code']}."
    return f"Rank {book['rank']} is in no call, at {_line(book['at'])}."


def judge_sizes(books: Sequence[Book]) -> list[AuditFinding]:
    """All-gathers of one line to which ranks give parts of different sizes, in a script that did not end well."""
    if all(map(ended_well, books)):
        return []
    world = books[0]["world_size"]
    sizes: dict[Where, dict[int, set[int]]] = {}
    for book in books:
        of_parts = {where(each) for each in book["ledger"] if each["ranks"] < world}
        for elements, place in book["gathers"]:
            if place not in of_parts:
                sizes.setdefault(place, {}).setdefault(book["rank"], set()).add(elements)
    for place, by_rank in sizes.items():
        first, *others = by_rank.items()
        for rank, found in others:
            if (mine := first[1] - found) and (theirs := found - first[1]):
                says = f"Rank {first[0]} gives {min(mine)} elements, and rank {rank} {min(theirs)}."
                return [AuditFinding("uneven_sizes", (says,), place)]
    return []


def judge_waits(books: Sequence[Book]) -> list[AuditFinding]:
    """Calls of one group of ranks that carried gradients, and that nobody has waited for until the end."""
    late = books[0]["unwaited"]
    if len(books) < 2 or not late:
        return []
    says = f"Step {late[0]['iteration']}: nobody has waited for {len(late)} calls of {late[0]['op']} that carried "
    says += "gradients, at least."
    return [AuditFinding("never_waited", (says,), where(late[0]))]


def judge_waste(books: Sequence[Book], fits: Fits) -> list[AuditFinding]:
    """Needless cost in one group of ranks."""
    if len(books) < 2:
        return []
    return _every_micro_batch(fits) + _evaluation(books)


def _every_micro_batch(fits: Fits) -> list[AuditFinding]:
    for step in fits.steps:
        row = step.rows[0]
        if not have_own_samples(row):  # two models with a loss each send what each has
            continue
        last = len(row["micro"]) - 1
        calls = [each for each in row["events"] if each["kind"] == "call" and each["carries"] == GRADIENT]
        early = [each for each in calls if each["micro"] < last]
        late = sum(each["elements"] for each in calls if each["micro"] == last)
        if early and late and sum(each["elements"] for each in early) >= _HALF * last * late:
            micros = len({each["micro"] for each in early}) + 1
            says = f"Step {step.iteration}: gradients travel after {micros} of {last + 1} backward passes."
            return [AuditFinding("every_micro_batch_travels", (says,), where(early[0]))]
    return []


def _evaluation(books: Sequence[Book]) -> list[AuditFinding]:
    sets = [set(book["evaluation_samples"]) for book in books]
    smallest = min(map(len, sets))
    if smallest < _LEAST_EVALUATED or min(book["evaluation_batches"] for book in books) < 2:
        return []
    common = len(sets[0].intersection(*sets[1:]))
    if common < 0.9 * smallest:
        return []
    says = f"{common} of {smallest} samples went through the model on all {len(books)} ranks, without gradients."
    return [AuditFinding("evaluation_repeated", (says,))]
