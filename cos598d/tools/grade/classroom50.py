"""Classroom 50's result.json, "classroom50/result/v1": schemas/result-v1.schema.json of foundation50/classroom50.

Its runner sets variables that name the submission. Points are whole numbers there.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from cos598d.errors import UsageError
from cos598d.terminal.printable import printable
from cos598d.tools.grade.scored import Scored, number

SCHEMA = "classroom50/result/v1"
TYPES = ("individual", "group", "team")
LONGEST = 2000  # characters of a test's output
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
            "output": printable(each.words, LONGEST, keep="\n"),
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
