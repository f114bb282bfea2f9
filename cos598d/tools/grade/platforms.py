"""Files for teachers' platforms: the zip that Gradescope runs, and Classroom 50's result.json.

Gradescope's results.json is what exam/plugin.py writes: https://gradescope-autograders.readthedocs.io/en/latest/specs/.
Classroom 50's is "classroom50/result/v1": schemas/result-v1.schema.json of foundation50/classroom50. Its runner sets
variables that name the submission. Points are whole numbers there.
"""

import io
import os
import zipfile
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, requires
from importlib.resources import files
from pathlib import Path
from typing import Any

import cos598d
from cos598d.errors import UsageError, UserError
from cos598d.terminal.printable import printable
from cos598d.tools.grade.assignment import assignment_of

LONGEST = 2000  # characters of one test's output on Classroom 50
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
PROGRAMS = {"setup.sh": "setup.sh.txt", "run_autograder": "run_autograder.sh.txt"}
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same zip for the same content
PLAIN, PROGRAM = 0o100644, 0o100755


def autograder(word: str) -> bytes:
    """The zip that grades an assignment, named as for `assignment_of`, on Gradescope. It has no lesson's answer."""
    assignment = assignment_of(word)
    path = Path(word)
    text = path.read_text(encoding="utf-8") if path.is_file() else f'tests = "{assignment.tests}"\n'
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, template in PROGRAMS.items():
            _put(archive, name, (files(__package__) / template).read_bytes(), PROGRAM)
        _put(archive, "assignment.toml", text.encode())
        _put(archive, "requirements.txt", "".join(f"{each}\n" for each in requirements()).encode())
        package = Path(cos598d.__file__).parent
        for source in sorted(package.rglob("*")):
            place = source.relative_to(package)
            if source.is_file() and "__pycache__" not in place.parts and "answer" not in place.parts:
                _put(archive, f"cos598d/{place.as_posix()}", source.read_bytes())
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


def submission_here() -> dict[str, str]:
    """Which submission of which classroom this is, by the variables of Classroom 50's runner. Raises UsageError."""
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
        raise UsageError(f"SUBMISSION_TAG is {printable(fields['submission'], 60)}. Give one that begins with submit/.")
    kind = os.environ.get("ASSIGNMENT_TYPE") or TYPES[0]
    if kind not in TYPES:
        raise UsageError(f"ASSIGNMENT_TYPE is {printable(kind, 60)}. Give one of {', '.join(TYPES)}.")
    return fields | {"assignment_type": kind}


def classroom50(results: dict[str, Any], fields: dict[str, str]) -> dict[str, Any]:
    """Gradescope's results in Classroom 50's form. Raises UsageError for points that are no whole numbers."""
    broken = next((each["max_score"] for each in results["tests"] if each["max_score"] != int(each["max_score"])), None)
    if broken is not None:
        raise UsageError(f"Classroom 50 takes only whole points, but a test gives {broken:g}. Give a whole number.")
    tests = [
        {
            "test-name": each["name"],
            "passed": each["status"] == "passed",
            "score": int(each["score"]),
            "max-score": int(each["max_score"]),
            "output": printable(each["output"], LONGEST, keep="\n"),
            "verdict": each["status"],
        }
        for each in results["tests"]
    ]
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")  # the runner puts the time of submission here
    return {
        "schema": SCHEMA,
        **fields,
        "datetime": now,
        "graded_at": now,
        "score": sum(test["score"] for test in tests),
        "max-score": sum(test["max-score"] for test in tests),
        "tests": tests,
    }
