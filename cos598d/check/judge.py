"""From how the ranks of a world ended to what is to be said of it: the status, and who is to blame at which line."""

import linecache
import signal
from collections.abc import Sequence
from typing import Any

from cos598d import conformance
from cos598d.lifeline import SILENCE
from cos598d.rank import BROKEN_COLLECTIVE
from cos598d.worlds import DIED, LATE, RAISED, RETURNED, Place, RankEnd

PASSED, FAILED, DID_NOT_END, CRASHED = "passed", "failed", "did not end", "crashed"
# What a rank says that ends only because another did.
CONSEQUENCES = (SILENCE.split("{")[0], "stopped because rank", "no word from rank", "is gone.")
LAST_LINES = 3


def judge(ends: Sequence[RankEnd], own_file: str, seconds: float) -> tuple[str, list[dict[str, Any]]]:
    """The status of a world, and a report of each rank that is a cause of it.

    A report has rank, kind (claim, exception, time or crash), type and message, and the file, line, function and code
    of the innermost place in `own_file`, else of the innermost of all.
    """
    ended_badly = [end for end in ends if end.how != RETURNED]
    causes = [end for end in ended_badly if not _is_consequence(end)] or ended_badly
    hows = {end.how for end in causes}
    status = CRASHED if DIED in hows else DID_NOT_END if LATE in hows else FAILED if hows else PASSED
    return status, [_report(end, own_file, seconds) for end in causes]


def _is_consequence(end: RankEnd) -> bool:
    """Whether this rank ended only because another one did."""
    if end.how == RAISED:
        if end.type == "UserError":
            return any(words in end.message for words in CONSEQUENCES)
        is_broken = any(words in end.message for words in BROKEN_COLLECTIVE)
        return is_broken and "Timed out" not in end.message
    return end.how == DIED and any(words in (_last_lines(end.output, 1) or [""])[0] for words in CONSEQUENCES)


def _report(end: RankEnd, own_file: str, seconds: float) -> dict[str, Any]:
    place = _place(end, own_file)
    where = {} if place is None else {"file": place.file, "line": place.line, "function": place.function}
    if place is not None:
        where["code"] = linecache.getline(place.file, place.line).strip()
    about = {"rank": end.rank}
    if end.how == RAISED:
        is_claim = end.type == "AssertionError" and end.places[-1].file == conformance.__file__
        if is_claim:
            return about | {"kind": "claim", "type": end.type, "message": end.message}
        return about | {"kind": "exception", "type": end.type, "message": end.message} | where
    if end.how == LATE:
        return about | {"kind": "time", "type": "", "message": f"still running after {seconds:g} s"} | where
    message = "; ".join((_exit_words(end.exit_code), *_last_lines(end.output, LAST_LINES)))
    return about | {"kind": "crash", "type": "", "message": message} | where


def _place(end: RankEnd, own_file: str) -> Place | None:
    """The innermost place in the student's file, on any thread; else the innermost of all."""
    # faulthandler writes other characters than ASCII as Python does in its escapes.
    names = (own_file, own_file.encode("ascii", "backslashreplace").decode())
    for thread in reversed(end.threads):
        for place in reversed(thread):
            if place.file in names:
                return Place(own_file, place.line, place.function)
    return end.places[-1] if end.places else None


def _exit_words(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"the process left with exit code {exit_code}"
    return f"the process was ended by {signal.Signals(-exit_code).name}"


def _last_lines(text: str, count: int) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()][-count:]
