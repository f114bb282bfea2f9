"""The files for teachers' tools, which `grade` writes, and `check` and `audit` with the flags for teachers.

They are written again after each claim. So if the grader is ended, only the remaining claims are lost.

Gradescope's results.json: https://gradescope-autograders.readthedocs.io/en/latest/specs/. Classroom 50's result.json is
"classroom50/result/v1": schemas/result-v1.schema.json of foundation50/classroom50. Its runner sets variables that name
the submission. Points are whole numbers there.
"""

import argparse
import io
import os
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, requires
from importlib.resources import files
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError, UserError
from cos598d.terminal.files import write_json
from cos598d.terminal.printable import printable
from cos598d.tools.audit.judge.verdict import AuditVerdict
from cos598d.tools.check.claims.base import Claim
from cos598d.tools.check.judge import ClaimOutcome
from cos598d.tools.check.trial import in_words
from cos598d.tools.check.verdict import PASSED
from cos598d.tools.grade.assignment import KINDS, Assignment, assignment_of, package_files
from cos598d.tools.grade.kinds.lesson import ANSWERS
from cos598d.tools.grade.kinds.script import ScriptKind, score
from cos598d.tools.grade.kinds.sync import SyncKind
from cos598d.tools.grade.scored import Judged, Scored, exit_code, most, number, total

LONGEST, LONGEST_IN_CLASSROOM = 20_000, 2000  # characters of one test's output
SCHEMA = "classroom50/result/v1"
TYPES = ("individual", "group", "team")
# Field -> the variables that may have it, the first one first.
VARIABLES = {
    "classroom": ("CLASSROOM",),
    "assignment": ("ASSIGNMENT",),
    "owner": ("OWNER", "USERNAME"),
    "submission": ("SUBMISSION_TAG",),
    "commit": ("COMMIT_URL",),
    "release": ("RELEASE_URL",),
    "review": ("REVIEW_URL", "COMMIT_URL"),
}
NOT_YET = Judged("", None, "the grader was ended before this was judged")
PROGRAMS = {"setup.sh": "setup.sh.txt", "run_autograder": "run_autograder.sh.txt"}
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same zip for the same content
PLAIN, PROGRAM = 0o100644, 0o100755


def gradescope(
    scored: Sequence[Scored],
    output: str,
    seconds: float,
    visibility: str,
    leaderboard: Sequence[tuple[str, float, str]] = (),
) -> dict[str, Any]:
    """The results of one submission, as the value of results.json. `leaderboard` has names, values and orders."""
    results: dict[str, Any] = {
        "score": round(total(scored), 6),
        "execution_time": round(seconds, 1),
        "output": _clean(output),
        "output_format": "text",
        "test_output_format": "text",
        "test_name_format": "text",
        "visibility": visibility,
        "stdout_visibility": "hidden",
        "extra_data": {},
        "tests": [_test(each, number, visibility) for number, each in enumerate(scored, 1)],
    }
    if leaderboard:
        results["leaderboard"] = [{"name": name, "value": value, "order": order} for name, value, order in leaderboard]
    return results


def _test(scored: Scored, number: int, visibility: str) -> dict[str, Any]:
    said = "" if scored.passed is not None else "could not be judged: "
    return {
        "score": round(scored.points, 6),
        "max_score": round(scored.most, 6),
        "status": "passed" if scored.passed else "failed",
        "name": scored.name,
        "name_format": "text",
        "number": str(number),
        "output": _clean(said + scored.words),
        "output_format": "text",
        "tags": [],
        "visibility": visibility,
        "extra_data": {"verdict": scored.status},
    }


def _clean(text: str) -> str:
    """Text that may come from a submission, without characters that its reader would obey."""
    return printable(text, LONGEST, keep="\n")


@dataclass(frozen=True)
class SubmissionRef:
    """Which submission of which classroom a result is of."""

    fields: dict[str, str]

    @classmethod
    def here(cls, points: Sequence[float]) -> "SubmissionRef":
        """The one in the runner's variables. Raises UsageError if they are missing, and for `points` it cannot take."""
        fields = {
            field: next((value for name in names if (value := os.environ.get(name))), "")
            for field, names in VARIABLES.items()
        }
        missing = [VARIABLES[field][0] for field, value in fields.items() if not value]
        if missing:
            raise UsageError(
                f"--classroom50 needs the variables that Classroom 50's runner sets, and {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set. Let its autograder.py call this."
            )
        if not fields["submission"].startswith("submit/"):
            raise UsageError(
                f"SUBMISSION_TAG is {printable(fields['submission'], 60)}. Give one that begins with submit/."
            )
        kind = os.environ.get("ASSIGNMENT_TYPE") or TYPES[0]
        if kind not in TYPES:
            raise UsageError(f"ASSIGNMENT_TYPE is {printable(kind, 60)}. Give one of {', '.join(TYPES)}.")
        broken = next((each for each in points if each != int(each)), None)
        if broken is not None:
            raise UsageError(
                f"Classroom 50 takes only whole points, but a test gives {number(broken)}. Give a whole number."
            )
        return cls(fields | {"assignment_type": kind})


def classroom50(scored: Sequence[Scored], place: SubmissionRef) -> dict[str, Any]:
    """The result of one submission, as the value of result.json."""
    tests = [
        {
            "test-name": each.name,
            "passed": bool(each.passed),
            "score": int(each.points),
            "max-score": int(each.most),
            "output": printable(each.words, LONGEST_IN_CLASSROOM, keep="\n"),
            "verdict": each.status,
        }
        for each in scored
    ]
    # The runner puts the time of submission here.
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "schema": SCHEMA,
        **place.fields,
        "datetime": now,
        "graded_at": now,
        "score": sum(int(each.points) for each in scored),
        "max-score": sum(int(each.most) for each in scored),
        "tests": tests,
    }


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


def autograder(word: str) -> bytes:
    """The zip that grades the assignment in a file, or the default one of a kind that `word` names.

    Raises UsageError for an assignment that cannot work, UserError if the package's requirements are unknown.
    """
    assignment_of(word)
    text = f'kind = "{word}"\n' if word in KINDS else Path(word).read_text(encoding="utf-8")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, template in PROGRAMS.items():
            _put(archive, name, (files("cos598d.tools.grade") / template).read_bytes(), PROGRAM)
        _put(archive, "assignment.toml", text.encode())
        _put(archive, "requirements.txt", "".join(f"{each}\n" for each in requirements()).encode())
        for name, data in package_files():
            if not Path(name).match(ANSWERS):
                _put(archive, f"cos598d/{name}", data)
    return content.getvalue()


def requirements() -> list[str]:
    """The installed package's requirements, without the extras. Raises UserError if it is not installed."""
    try:
        found = requires("cos598d")
    except PackageNotFoundError:
        found = None
    if not found:
        raise UserError("cos598d is not installed, so its requirements are unknown. Run pip install -e . in its clone.")
    return [each for each in found if "extra ==" not in each]


def _put(archive: zipfile.ZipFile, name: str, data: bytes, mode: int = PLAIN) -> None:
    about = zipfile.ZipInfo(name, EPOCH)
    about.external_attr = mode << 16
    about.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(about, data)
