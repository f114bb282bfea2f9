"""`grade` as its tests start it, and assignments for it."""

import csv
import ctypes
import json
import os
import subprocess
import sys
import zipfile

import pytest
from programs import ROOT

from cos598d.tools.grade.assignment import Assignment, Limits, read_assignment
from cos598d.tools.grade.kinds import AssignmentKind
from cos598d.tools.grade.rights import OwnNamespaces, hide, what_stops
from cos598d.tools.grade.scored import Judged
from cos598d.tools.grade.table import TomlTable

GET_DUMPABLE, SET_DUMPABLE = 3, 4  # prctl(2)


class Judging(AssignmentKind):
    """A kind whose only test passes, and says what `function(folder)` returns."""

    file = "mine.py"

    def __init__(self, function):
        self.function = function

    @classmethod
    def read(cls, table):
        raise NotImplementedError

    def claims(self):
        return {"holds": True}

    def judge(self, folder, claims):
        yield Judged("holds", True, str(self.function(folder)))


def assignment_by(function):
    return Assignment("Lab", "sync", Judging(function), {"holds": 1.0}, "visible", (), Limits(memory_mb=1 << 20))


def assignment(source):
    """The assignment of a file that has this text."""
    return read_assignment(TomlTable.of_text("lab.toml", source))


def show_grader():
    """As a fixture: grading hides the process that grades, which here runs other tests after this one."""
    yield
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 1, 0, 0, 0)


def skip_unless_hidden(folders):
    """Lessons are only graded where their answers can be hidden."""
    if what_stops(lambda empty: hide(folders, empty)):
        pytest.skip("no mount namespaces here")


def has_namespaces():
    """Whether submissions can be kept apart here."""
    return not what_stops(lambda empty: OwnNamespaces(()).enter(empty, None))


def rows_of(path):
    """The rows of a table, by submission; of who handed in nothing, by id."""
    with path.open() as file:
        return {row["submission"] or row["id"]: row for row in csv.DictReader(file)}


def start_grade(start, scratch, *words):
    """The program, which makes its scratch folders in `scratch`."""
    return start_command(start, scratch, "grade", *words, "--as_root")


def start_command(start, scratch, name, *words):
    environ = {"PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
    return start(name, ["-m", "cos598d", name, *words], environ)


def graded(start, folder, scratch, submissions, assignment, file):
    """Grade a class and return the exit code, what was printed, and the rows of the table by submission.

    Each submission is the source of `file`, a path in its folder.
    """
    for name, source in submissions.items():
        place = folder / "class" / name / file
        place.parent.mkdir(parents=True)
        place.write_text(source)
    (folder / "lab.toml").write_text(assignment)
    program = start_grade(start, scratch, "class", "--assignment", "lab.toml", "--csv", "grades.csv")
    code = program.wait(250)
    return code, program.text, rows_of(folder / "grades.csv")


def grade_one(start, folder, scratch, files, assignment, submission="mine"):
    """The program that grades one submission, which has these `files`; results.json has what comes of it."""
    for name, source in files.items():
        (folder / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mine" / name).write_text(source)
    (folder / "mine").mkdir(exist_ok=True)
    words = (submission, "--assignment", assignment, "--gradescope", "results.json")
    return start_grade(start, scratch, *words)


def run_autograder(root, files, python=sys.executable):
    """A stand-in for Gradescope, which calls what lies above the zip's content in source/, on what is in submission/.

    Returns the value of results.json for a submission of these `files`.
    """
    with zipfile.ZipFile("autograder.zip") as archive:
        archive.extractall(root / "source")
    for name, source in files.items():
        (root / "submission" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "submission" / name).write_text(source)
    script = (root / "source" / "run_autograder").read_text()
    program = root / "run_autograder"
    program.write_text(script.replace("cos598d grade ", "cos598d grade --as_root "))  # Python may be below /root here
    environ = {"PATH": os.environ["PATH"], "AUTOGRADER_ROOT": str(root), "AUTOGRADER_PYTHON": python}
    ended = subprocess.run(["bash", str(program)], env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads((root / "results" / "results.json").read_text())
