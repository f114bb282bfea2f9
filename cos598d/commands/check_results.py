"""A check's claims as a grade: what an assignment asks for, and the files of teachers' tools."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cos598d.errors import UsageError
from cos598d.tools.check.claims.base import Claim
from cos598d.tools.check.judge import PASSED, ClaimOutcome
from cos598d.tools.check.trial import in_words
from cos598d.tools.grade.assignment import assignment_of
from cos598d.tools.grade.kinds.sync import SyncKind
from cos598d.tools.grade.result_files import ResultFiles
from cos598d.tools.grade.scored import Judged


class CheckResults:
    """The files that a check writes for teachers, which grow with every claim.

    sizes, seconds  as the assignment says
    wanted          the names of the claims to try: those `wanted` by flag, else those of an assignment that is given

    Raises UsageError for an assignment that is not for a sync, and where no claim to try gives points.
    """

    def __init__(self, options: argparse.Namespace, wanted: Sequence[str] | None):
        assignment = assignment_of(options.assignment or "sync")
        if not isinstance(assignment.kind, SyncKind):
            raise UsageError(f"{options.assignment} is not for syncs: check needs an assignment of the kind sync.")
        if wanted is None and options.assignment is not None:
            wanted = list(assignment.points)
        points = {name: each for name, each in assignment.points.items() if wanted is None or name in wanted}
        if not points:
            raise UsageError("none of the claims to try gives points: let --claims name one that does.")
        self.sizes, self.seconds, self.wanted = list(assignment.kind.world_sizes), assignment.kind.seconds, wanted
        self._files = ResultFiles(replace(assignment, points=points), options.gradescope, options.classroom50)

    def refuse(self, words: str) -> None:
        """The file cannot be loaded."""
        self._files.finish(Judged("", False, words))

    def add(self, claim: Claim, outcomes: Sequence[ClaimOutcome], own_file: str) -> None:
        """One more claim has been tried."""
        if claim.name in self._files.assignment.points:
            passed = all(outcome.status == PASSED for outcome in outcomes)
            self._files.add(Judged(claim.name, passed, in_words(claim, outcomes, own_file)))

    def finish(self, result: dict[str, Any]) -> None:
        """All is known. Claims that a sync does not make give nothing; a right one's speed goes on the leaderboard."""
        rows: list[tuple[str, float, str]] = []
        if result["passed"] and result["speed"]:
            rows.append(("ms a step", result["speed"]["seconds"][result["sync"]]["median"] * 1e3, "asc"))
            ratios = result["speed"]["ratio_to"].items()
            rows += [(f"ratio to {other}", ratio["median"], "asc") for other, ratio in ratios]
        words = f"{result['class']} does not make this claim"
        self._files.finish(Judged("", False, words), leaderboard=rows)
