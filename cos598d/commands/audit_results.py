"""An audit's verdict as a grade: the files of teachers' tools, and the exit code 0, 1 or 2."""

import argparse

from cos598d.errors import UsageError
from cos598d.tools.audit.judge.verdict import AuditVerdict
from cos598d.tools.grade.assignment import assignment_of
from cos598d.tools.grade.kinds.script import ScriptKind, score
from cos598d.tools.grade.result_files import ResultFiles
from cos598d.tools.grade.scored import Judged, exit_code


class AuditResults:
    """The files that an audit writes for teachers. Raises UsageError for an assignment that is not for a script."""

    def __init__(self, options: argparse.Namespace):
        assignment = assignment_of(options.assignment or "script")
        if not isinstance(assignment.kind, ScriptKind):
            raise UsageError(f"{options.assignment} is not for scripts: audit needs an assignment of the kind script.")
        self.kind = assignment.kind
        self._files = ResultFiles(assignment, options.gradescope, options.classroom50)

    def finish(self, verdict: AuditVerdict | None, end: str) -> int:
        """Write what an audit comes to, and return the exit code. `end` is how the script failed ("": it did not)."""
        claims = list(self._files.assignment.points)
        for judged in score(verdict, claims, end, self.kind):
            self._files.add(judged)
        return exit_code(self._files.finish(Judged("", None, "")))
