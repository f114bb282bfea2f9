"""A lesson's result as text: first what is wrong, with its line; then check by check, and what to do next."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cos598d.terminal.tables import as_text
from cos598d.terminal.words import listed, number_of
from cos598d.tools.learn.lessons import Lesson
from cos598d.tools.learn.progress import GolfScore

if TYPE_CHECKING:
    from cos598d.tools.learn.checking import Golf

WIDTH = 118
STATUS_WIDTH = 13


def begins(name: str, sizes: Sequence[int]) -> str:
    """The first line, printed at once: the file, and the numbers of ranks that it is checked on, in their order."""
    return f"{name}: checking {'in one process' if tuple(sizes) == (1,) else f'on {_ranks(sizes)}'}"


def world(size: int, held: int, tried: int, left_out: Mapping[str, Sequence[int]]) -> str:
    """How many checks passed on `size` ranks; and how many that are `left_out` there run on other numbers of ranks."""
    others = Counter(_ranks(sorted(sizes)) for sizes in left_out.values())
    elsewhere = "; ".join(
        f"{number_of(number, 'more check')} run{'' if number > 1 else 's'} only on {on}"
        for on, number in others.items()
    )
    here = f"{_ranks([size])}: {held} of {number_of(tried, 'check')} passed"
    return f"{here} ({elsewhere})" if elsewhere else here


def verdict(result: dict[str, Any], lesson: Lesson) -> str:
    """All that a student reads after a check."""
    title = f"lesson {lesson.number}, {lesson.title}"
    causes = result["diagnosis"]
    if result["passed"]:
        claims = "\n".join(_claim(each) for each in result["claims"])
        return f"{title}: {_passed(len(result['claims']), len(result['claims']))}.\n\n{claims}\n\n{after(lesson)}"
    lines = []
    for cause in causes:
        lines.append(textwrap.fill(cause["cause"], WIDTH, subsequent_indent="  ", break_long_words=False))
        if cause["detail"]:
            lines.append(textwrap.fill(cause["detail"], WIDTH, initial_indent="  ", subsequent_indent="  "))
    lines += ["", f"{title}: {_held(result)}", *(_claim(each) for each in result["claims"])]
    if result["printed"]:
        lines += ["", *result["printed"]]
    return "\n".join(lines)


def after(lesson: Lesson) -> str:
    """What to read and to measure when a lesson is done."""
    golf = f"\nGolf:    cos598d learn {lesson.number} --golf" if lesson.golf else ""
    return f"Read:    {lesson.read}\nMeasure: {lesson.measure}{golf}"


def golf_begins(name: str, golf: "Golf", rounds: int) -> str:
    """What is printed before the measuring: all checks have passed."""
    on = "in one process" if golf.ranks == 1 else f"on {_ranks([golf.ranks])}"
    return f"{name}: all checks passed; measuring {rounds} rounds {on}, in turn with the answer"


def golf_board(
    lesson: Lesson, golf: "Golf", own: GolfScore, reference: GolfScore, scores: Sequence[GolfScore], share: float
) -> str:
    """The board: this run next to the answer's and the limit, and the bests that were kept before."""
    on = "in one process" if golf.ranks == 1 else f"on {_ranks([golf.ranks])}"
    before = {
        "this file, before": [score for score in scores if score.sha256 == own.sha256],
        "other files, before": [score for score in scores if score.sha256 != own.sha256],
    }
    rows = [["", "bytes sent", "seconds", "least", "most", "times the answer's"]]
    rows.append(["this file, now", *_golf_cells(own)])
    rows += [[name, *_golf_bests(found)] for name, found in before.items() if found]
    rows.append(["the answer, now", *_golf_cells(reference)])
    rows.append(["the limit", f"{golf.least:,}", "-", "-", "-", "-"])
    notes = [
        "Bytes: of the rank that sends most in a step, as the communicator counted them. Seconds: of the slowest rank,",
        "the median of the rounds. Times the answer's: the median of the rounds' ratios.",
        "What was kept before, in .cos598d/golf.json, is history. It proves nothing.",
    ]
    if share:
        notes.append(
            f"Warning: other programs took {share:.0%} of the processors meanwhile, so these seconds do not count as a "
            "best. Measure again on an idle machine."
        )
    title = f"lesson {lesson.number}, {lesson.title}: {golf.what}, {on}"
    return "\n".join([title, "", as_text(rows, numbers=True), "", *notes])


def _golf_cells(score: GolfScore) -> list[str]:
    seconds = [f"{each:.3g}" for each in (score.seconds, score.least, score.most)]
    return [f"{score.bytes:,}", *seconds, f"{score.ratio:.2f}"]


def _golf_bests(scores: Sequence[GolfScore]) -> list[str]:
    """The fewest bytes, and the least seconds and ratio of those that were measured on an idle machine."""
    idle = [score for score in scores if not score.is_busy]
    sent = f"{min(each.bytes for each in scores):,}"
    if not idle:
        return [sent, "-", "-", "-", "-"]
    return [sent, f"{min(each.seconds for each in idle):.3g}", "-", "-", f"{min(each.ratio for each in idle):.2f}"]


def _ranks(sizes: Sequence[int]) -> str:
    return f"{listed(sizes)} rank{'' if sizes == [1] else 's'}"


def _held(result: dict[str, Any]) -> str:
    statuses = [claim["status"] for claim in result["claims"]]
    if set(statuses) == {"not tried"}:
        return "nothing was tried."
    return f"{_passed(statuses.count('passed'), len(statuses))}."


def _passed(held: int, tried: int) -> str:
    """ "the check passed", "all 3 checks passed", "1 of 3 checks passed"."""
    if tried == 1:
        return "the check passed" if held else "the check FAILED"
    return f"{'all' if held == tried else f'{held} of'} {tried} checks passed"


def _claim(claim: dict[str, Any]) -> str:
    status = claim["status"] if claim["status"] in ("passed", "not tried") else claim["status"].upper()
    return textwrap.fill(
        claim["says"], WIDTH, initial_indent=f"{status:{STATUS_WIDTH}}", subsequent_indent=" " * STATUS_WIDTH
    )
