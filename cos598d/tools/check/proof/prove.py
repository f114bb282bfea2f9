"""Worlds of ranks for the cases of a proof: one case after another in one world, and a new world if a case ended it."""

from collections.abc import Callable, Sequence
from typing import Any

from cos598d.terminal.printable import printable
from cos598d.tools.check import card
from cos598d.tools.check.evidence import BadEvidence, Evidence
from cos598d.tools.check.judge import judge
from cos598d.tools.check.proof.cases import Case
from cos598d.tools.check.proof.judge import CaseVerdict, finished, judge_case
from cos598d.tools.check.spawn import RankEnd, run_world
from cos598d.tools.check.verdict import FAILED, PASSED, WRONG


def prove(
    world_size: int,
    cases: Sequence[Case],
    nonce: int,
    seconds: float,
    function: Callable,
    *arguments: Any,
) -> dict[str, CaseVerdict]:
    """The outcome of each case on `world_size` ranks, by its name; a case may take `seconds`.

    `function(comm, *arguments, names, nonce, seconds)` is called on every rank, with the cases' names.
    """
    verdicts: dict[str, CaseVerdict] = {}
    left = list(cases)
    while left:
        names = [case.name for case in left]
        most = seconds * (1 + len(left))
        ends = run_world(world_size, function, *arguments, names, nonce, seconds, seconds=most, timeout=seconds)
        status, reports = judge(ends, "", seconds)
        evidence = _evidence(ends, nonce)
        done = min((finished(each) for each in evidence), key=len, default=[])
        for case in left[: len(done)]:
            try:
                verdicts[case.name] = judge_case(case, evidence)
            except BadEvidence as error:
                verdicts[case.name] = CaseVerdict(WRONG, printable(error))
        left = left[len(done) :]
        if left:  # the first of these ended the world
            words = card.report(reports[0], "") if reports else "the ranks ended without an error message"
            verdicts[left[0].name] = CaseVerdict(status if status != PASSED else FAILED, words)
            left = left[1:]
        elif status != PASSED:
            verdicts[names[-1]] = CaseVerdict(status, f"afterwards {card.report(reports[0], '')}")
    return verdicts


def _evidence(ends: Sequence[RankEnd], nonce: int) -> list[Evidence]:
    """What all ranks have handed in; [] if one of them has not, or not correctly."""
    try:
        found = [Evidence.from_bytes(end.handed_in, end.rank, nonce) for end in ends]
        for each in found:
            finished(each)
    except BadEvidence:
        return []
    return found
