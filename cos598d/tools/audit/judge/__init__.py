"""Judge the books of all ranks: faults with their evidence, waste, notes, and what could not be judged."""

import os
import re
from collections.abc import Sequence

from cos598d.terminal.words import ranks_in_words
from cos598d.tools.audit.book import ENDED, Book, ended_well
from cos598d.tools.audit.judge.averaging import judge_averaging, judge_clip_order
from cos598d.tools.audit.judge.calls import judge_hang, judge_sizes, judge_waits, judge_waste
from cos598d.tools.audit.judge.gradients import fit_steps, groups_of, not_understood
from cos598d.tools.audit.judge.replicas import judge_replicas, judge_saves
from cos598d.tools.audit.judge.samples import judge_metrics, judge_samples
from cos598d.tools.audit.judge.verdict import AuditFinding, AuditVerdict, Coverage, ordered
from cos598d.tools.audit.judge.weighting import judge_weighting, judge_zeros

_OF_ANOTHER = re.compile(
    "connection (closed|reset)|broken pipe|timed? ?out|closed by peer|socket", re.IGNORECASE
)  # errors of a call that another rank has left


def judge(books: Sequence[Book], remarks: Sequence[str] = ()) -> AuditVerdict:
    """The verdict on the books of one run, which are in order of rank. `remarks` are more sentences about the ranks."""
    findings: list[AuditFinding] = []
    unjudged: list[str] = []
    judged: list[int] = []
    groups = groups_of(books)
    for group in groups:
        if any(book["model"].get("cut_otherwise") for book in group):
            judged.append(0)
            unjudged.append("ranks that share batches and have different weights by design (tensor parallelism).")
            continue
        fits = fit_steps(group)
        judged.append(fits.judged if len(group) > 1 else 0)
        of_gradients = judge_clip_order(group, fits)
        open_questions: list[str] = []
        for found, not_judged in (judge_averaging(group, fits), judge_weighting(group, fits)):
            of_gradients += found
            open_questions += not_judged
        if len(group) > 1 and not of_gradients:
            open_questions = open_questions or not_understood(fits)
        findings += of_gradients + judge_zeros(group, fits)
        unjudged += open_questions
        for found, not_judged in (judge_samples(group), judge_replicas(group)):
            findings += found
            unjudged += not_judged
        findings += judge_metrics(group) + judge_waits(group)
        findings += judge_waste(group, fits)
        unjudged += fits.unjudged if len(group) > 1 else []
    findings += judge_saves(books) + judge_sizes(books)
    of_hang, not_judged = judge_hang(books)
    findings += of_hang
    unjudged += not_judged
    died = [book["rank"] for book in books if not ended_well(book)]
    if died and judged and min(judged):
        unjudged.append(f"gradients: the steps that were still to come: {ranks_in_words(died)} did not end well.")
    if earlier := books[0].get("earlier"):
        unjudged.append(f"gradients: those of {earlier} worlds that the command opened before: the last one is judged.")
    if len(books) == 1:
        unjudged.append("anything between ranks: only one rank wrote its results.")
    first = books[0]
    steps = min(book["iterations_seen"] for book in books)
    if not steps:
        unjudged.append("gradients: no step of an optimizer of torch.optim was seen on every rank.")
    return AuditVerdict(
        first["script"],
        Coverage(
            len(books),
            first["world_size"],
            steps,
            min(judged, default=0),
            max(book["seconds"] for book in books),
            max(book["own_seconds"] for book in books),
            min(steps, *(book["examined"] for book in books)),
        ),
        tuple(ordered(findings)),
        tuple(dict.fromkeys(unjudged)),
        (*remarks, *_of_ranks(books)),
    )


def _is_effect(book: Book) -> bool:
    """Whether a rank ended well, or by an error that another rank's end causes."""
    return ended_well(book) or bool(_OF_ANOTHER.search(book["error"]))


def _end_of(book: Book, books: Sequence[Book]) -> str:
    """How a rank ended; "" if it ended well."""
    steps = book["iterations_seen"]
    if ended_well(book):
        return ""
    is_cause = not _is_effect(book) and any(map(_is_effect, (each for each in books if not ended_well(each))))
    what = ", and the others for that" if is_cause else ""
    if book["state"] != ENDED:
        file, line, _ = book["at"]
        at = f" at {os.path.basename(file)} line {line}" if file else ""
        return (
            f"rank {book['rank']} was ended from outside, or still runs{what},{at}: what was seen of it until step "
            f"{steps} is judged."
        )
    why = f" ({book['error']})" if book["error"] else ""
    how = f"ended first{what}, with" if is_cause else "ended with"
    return f"rank {book['rank']} {how} exit code {book['exit_code']}{why} after {steps} steps."


def _of_ranks(books: Sequence[Book]) -> list[str]:
    """Sentences about ranks that never came, were ended, or failed."""
    found = []
    missing = sorted(set(range(books[0]["world_size"])) - {book["rank"] for book in books})
    if missing:
        which = ranks_in_words(missing)
        found.append(
            f"{which} wrote no results: never came, ended before a step, ran without the audit or in another folder."
        )
    found += [said for book in sorted(books, key=_is_effect) if (said := _end_of(book, books))]
    for book in books:
        if book["failed"]:
            found.append(
                f"the audit of rank {book['rank']} ended early ({book['failed']}): what came before is judged."
            )
    return found
