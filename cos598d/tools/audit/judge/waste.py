"""Waste and notes: needless cost, and facts that a reader of the script's output should know."""

from collections.abc import Sequence
from typing import Any

from cos598d.tools.audit.book import Book
from cos598d.tools.audit.contents import ALL_GATHER, ALL_REDUCE, BARRIER, GATHER, GRADIENT, OTHER, REDUCE, SCALAR
from cos598d.tools.audit.judge.gradients import Fits
from cos598d.tools.audit.judge.verdict import AuditFinding, where

_LEAST_EVALUATED = 64  # samples of an evaluation that is worth a word
_HALF = 0.5
_MOST_NUMBERS = 64  # in a call that may carry a loss, next to what else is printed


def judge_waste(books: Sequence[Book], fits: Fits) -> list[AuditFinding]:
    """What costs without need in one group of ranks."""
    if len(books) < 2:
        return []
    return _every_micro_batch(fits) + _evaluation(books) + _barriers(books)


def judge_notes(books: Sequence[Book]) -> list[AuditFinding]:
    """Notes: useful facts that are no faults."""
    if len(books) < 2 or not books[0]["iterations_seen"] or any(map(_brings_numbers_together, books)):
        return []
    calls = sum(entry["calls"] for entry in books[0]["ledger"])
    says = f"None of {calls} calls sums or gathers a few numbers over the ranks, except before the first backward pass."
    return [AuditFinding("local_loss", (says,))]


def _brings_numbers_together(book: Book) -> bool:
    """Whether a rank made a call that may carry a loss, since its first backward pass and outside backward passes."""
    calls = sum(entry["calls"] for entry in book["ledger"] if _may_carry_loss(entry))
    return calls > sum(not row["iteration"] and _may_carry_loss(row) for row in book["calls"])


def _may_carry_loss(call: dict[str, Any]) -> bool:
    sums_or_gathers = call["op"] in (ALL_REDUCE, REDUCE, ALL_GATHER, GATHER)
    is_small = call["kind"] == SCALAR or (call["kind"] == OTHER and call["elements"] <= _MOST_NUMBERS)
    return sums_or_gathers and is_small and not call["in_backward"]


def _every_micro_batch(fits: Fits) -> list[AuditFinding]:
    for step in fits.steps:
        row = step.rows[0]
        if row["places"]:  # what is cut travels after every pass so that nobody has to hold the whole
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


def _barriers(books: Sequence[Book]) -> list[AuditFinding]:
    steps = books[0]["iterations_seen"]
    found = [entry for entry in books[0]["ledger"] if entry["op"] == BARRIER and entry["calls"] >= steps > 2]
    if not found:
        return []
    calls, seconds = sum(entry["calls"] for entry in found), sum(entry["seconds"] for entry in found)
    says = f"{calls} barriers in {steps} steps, {seconds:.3f} s in all."
    return [AuditFinding("barrier_each_step", (says,), where(max(found, key=lambda entry: entry["calls"])))]
