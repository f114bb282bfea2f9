"""The files for teachers' tools, written whole each time one more claim is known, so that an end from outside costs
only what was left."""

import time
from collections.abc import Sequence
from pathlib import Path

from cos598d.errors import UserError
from cos598d.terminal.files import write_json
from cos598d.tools.grade.assignment import Assignment
from cos598d.tools.grade.classroom50 import SubmissionRef, classroom50
from cos598d.tools.grade.gradescope import gradescope
from cos598d.tools.grade.scored import Judged, Scored, most, number, total

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
