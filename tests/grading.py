"""`grade` in a program of its own, as its tests start it."""

import csv
import os
import subprocess
import sys
import zipfile

from programs import ROOT


def start_grade(start, scratch, *words):
    """The program, which makes its scratch folders in `scratch`."""
    environ = {"PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
    return start("grade", ["-m", "cos598d", "grade", *words, "--as_root"], environ)


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
    with (folder / "grades.csv").open() as table:
        return code, program.text, {row["submission"]: row for row in csv.DictReader(table)}


def grade_one(start, folder, scratch, files, assignment, submission="mine"):
    """The program that grades one submission, which has these `files`; results.json has what comes of it."""
    for name, source in files.items():
        (folder / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mine" / name).write_text(source)
    (folder / "mine").mkdir(exist_ok=True)
    words = (submission, "--assignment", assignment, "--gradescope", "results.json")
    return start_grade(start, scratch, *words)


def run_autograder(root, python=sys.executable):
    """A stand-in for Gradescope, which calls what lies above the zip's content in source/, on what is in submission/.

    Returns its program, which has ended.
    """
    with zipfile.ZipFile("autograder.zip") as archive:
        archive.extractall(root / "source")
    script = (root / "source" / "run_autograder").read_text()
    program = root / "run_autograder"
    program.write_text(script.replace("cos598d grade ", "cos598d grade --as_root "))  # Python may be below /root here
    environ = {"PATH": os.environ["PATH"], "AUTOGRADER_ROOT": str(root), "AUTOGRADER_PYTHON": python}
    return subprocess.run(["bash", str(program)], env=environ, capture_output=True, text=True, check=False)
