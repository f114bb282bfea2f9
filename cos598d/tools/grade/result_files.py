"""The files for teachers' tools, which `grade` writes, and `check` and `audit` with the flags for teachers.

They are written again after each claim, so that if the grader is ended, only the remaining claims are lost."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError, UserError
from cos598d.terminal.files import write_json
from cos598d.tools.audit.judge.verdict import AuditVerdict
from cos598d.tools.check.claims.base import Claim
from cos598d.tools.check.judge import ClaimOutcome
from cos598d.tools.check.trial import in_words
from cos598d.tools.check.verdict import PASSED
from cos598d.tools.grade.assignment import Assignment, assignment_of
from cos598d.tools.grade.classroom50 import SubmissionRef, classroom50
from cos598d.tools.grade.gradescope import gradescope
from cos598d.tools.grade.kinds.script import ScriptKind, score
from cos598d.tools.grade.kinds.sync import SyncKind
from cos598d.tools.grade.scored import Judged, Scored, exit_code, most, number, total

NOT_YET = Judged("", None, "the grader was ended before this was judged")


class ResultFiles:
    """Gradescope's and Classroom 50's file for one submission; None: not that one. Raises UsageError as `Place`."""

    def __init__(self, assignment: Assignment, gradescope_file: Path | None, classroom50_file: Path | None):
        self.assignment = assignment
        self._gradescope, self._classroom50 = gradescope_file, classroom50_file
        self._place = SubmissionRef.here(list(assignment.points.values())) if classroom50_file else None
        self._judged: list[Judged] = []
        self._began = time.monotonic()
        self.finish(NOT_YET)

    def add(self, judged: Judged) -> None:
        """One more claim is judged."""
        self._judged.append(judged)
        self.finish(NOT_YET)

    def finish(
        self, otherwise: Judged, remark: str = "", leaderboard: Sequence[tuple[str, float, str]] = ()
    ) -> list[Scored]:
        """Write what there is, the claims that were not judged as `otherwise` has it, and return the scores.

        Raises UserError where a file cannot be written.
        """
        scored = self.assignment.scored(self._judged, otherwise)
        try:
            if self._gradescope:
                points = f"{number(total(scored))} of {number(most(scored))} points"
                output = f"{self.assignment.title}: {points}" + (f"\n{remark}" if remark else "")
                seconds = time.monotonic() - self._began
                visibility = self.assignment.visibility
                write_json(self._gradescope, gradescope(scored, output, seconds, visibility, leaderboard))
            if self._classroom50 and self._place:
                write_json(self._classroom50, classroom50(scored, self._place))
        except OSError as error:
            raise UserError(f"{error.filename} cannot be written: {error.strerror}.") from None
        return scored


class CheckResults:
    """The files that a check writes, which grow with every claim.

    sizes, seconds  as the assignment says
    wanted          the names of the claims to try: those `wanted` by flag, else those of an assignment that is given

    Raises UsageError for an assignment that is not for a sync, and where no claim to try gives points.
    """

    def __init__(self, options: argparse.Namespace, wanted: Sequence[str] | None):
        assignment = assignment_of(options.assignment or "sync")
        if not isinstance(assignment.kind, SyncKind):
            raise UsageError(f"{options.assignment} is not for syncs. Give check an assignment of the kind sync.")
        if wanted is None and options.assignment is not None:
            wanted = list(assignment.points)
        points = {name: each for name, each in assignment.points.items() if wanted is None or name in wanted}
        if not points:
            raise UsageError("none of the tests in --claims gives points. Name one that does.")
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
        """Finish the files. Tests that do not apply give nothing; a correct sync's speed goes on the leaderboard."""
        rows: list[tuple[str, float, str]] = []
        if result["passed"] and result["speed"]:
            rows.append(("ms per step", result["speed"]["seconds"][result["sync"]]["median"] * 1e3, "asc"))
            ratios = result["speed"]["ratio_to"].items()
            rows += [(f"ratio to {other}", ratio["median"], "asc") for other, ratio in ratios]
        words = f"this test does not apply to {result['class']}"
        self._files.finish(Judged("", False, words), leaderboard=rows)


class AuditResults:
    """The files that an audit writes. Raises UsageError for an assignment that is not for a script."""

    def __init__(self, options: argparse.Namespace):
        assignment = assignment_of(options.assignment or "script")
        if not isinstance(assignment.kind, ScriptKind):
            raise UsageError(f"{options.assignment} is not for scripts. Give audit an assignment of the kind script.")
        self.kind = assignment.kind
        self._files = ResultFiles(assignment, options.gradescope, options.classroom50)

    def finish(self, verdict: AuditVerdict | None, end: str) -> int:
        """Write what an audit comes to, and return the exit code. `end` is how the script failed ("": it did not)."""
        for judged in score(verdict, list(self._files.assignment.points), end, self.kind):
            self._files.add(judged)
        return exit_code(self._files.finish(Judged("", None, "")))
