"""`grade` and `autograder`: a class of right, wrong, looping, dying files; one submission for Gradescope."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import tomllib

from cos598d.tools.course import get_lesson

SUM = "def average(comm, gradient, name):\n    comm.all_reduce(gradient, name)\n"
LOOP = "def average(comm, gradient, name):\n    while True:\n        pass\n"
EXIT = "import os\ndef average(comm, gradient, name):\n    os._exit(0)\n"
# Leaves its session.
DAEMON = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n" + SUM


def cos598d(folder, *words):
    """The exit code and the output of a command in a folder."""
    command = [sys.executable, "-m", "cos598d", *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def klass(tmp_path_factory):
    """A folder with a class's submissions, and the class graded once."""
    folder = tmp_path_factory.mktemp("class")
    for name, code in {"ann": get_lesson(3).answer(), "bob": SUM, "cho": LOOP, "dee": EXIT}.items():
        (folder / "class" / name).mkdir(parents=True)
        (folder / "class" / name / "lesson3.py").write_text(code)
    (folder / "class" / "eve.py").write_text(DAEMON)
    (folder / "class" / "fay").mkdir()
    (folder / "lab.toml").write_text('tests = "lesson3"\n[points]\naverages = 3\n')
    words = ("grade", "class", "--assignment", "lab.toml", "--csv", "grades.csv", "--parallel", 2)
    code, text = cos598d(folder, *words)
    assert code == 0, text
    return folder, text


def rows_of(folder):
    return {row["submission"]: row for row in csv.DictReader((folder / "grades.csv").open())}


@pytest.mark.long
def test_a_class_gets_a_table_with_the_first_sentence_of_each(klass):
    folder, text = klass
    rows = rows_of(folder)
    assert {name: float(row["score"]) for name, row in rows.items()} == {
        "ann": 4,
        "bob": 1,
        "cho": 0,
        "dee": 0,
        "eve": 1,
    }
    assert "lesson3.py line 2: rank 1's gradient is the sum over 2 ranks" in rows["bob"]["words"]
    assert "did not end" in rows["cho"]["words"]
    assert "ended early" in rows["dee"]["words"]
    assert "fay" in text
    assert "has no lesson3.py" in text
    assert "without --container a submission has your rights" in text


@pytest.mark.long
def test_a_second_run_grades_only_what_has_changed(klass):
    folder, _ = klass
    (folder / "class" / "bob" / "lesson3.py").write_text(get_lesson(3).answer())
    stamps = {path.name: path.stat().st_mtime_ns for path in (folder / "grades.csv.results").iterdir()}
    code, text = cos598d(folder, "grade", "class", "--assignment", "lab.toml", "--csv", "grades.csv")
    assert code == 0, text
    after = {path.name: path.stat().st_mtime_ns for path in (folder / "grades.csv.results").iterdir()}
    assert [name for name, stamp in after.items() if stamp != stamps[name]] == ["bob.json"]
    assert float(rows_of(folder)["bob"]["score"]) == 4


@pytest.mark.long
def test_nothing_of_a_submission_is_left(klass):
    time.sleep(0.5)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text()
            where = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            continue
        assert str(klass[0]) not in words, words
        assert str(klass[0]) not in where, words


@pytest.mark.long
def test_a_class_that_is_stopped_leaves_nothing_and_goes_on(tmp_path):
    (tmp_path / "class").mkdir()
    (tmp_path / "tmp").mkdir()
    for name, code in {"ann": SUM, "bob": DAEMON + "while True:\n    pass\n"}.items():
        (tmp_path / "class" / f"{name}.py").write_text(code)
    (tmp_path / "lab.toml").write_text('tests = "lesson3"\n')
    words = ("grade", "class", "--assignment", "lab.toml", "--csv", "grades.csv")
    command = [sys.executable, "-m", "cos598d", *words]
    kept = tmp_path / "grades.csv.results"
    grader = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")})
    while grader.poll() is None and not ((kept / "ann.json").exists() and [*(tmp_path / "tmp").glob("*/*/store")]):
        time.sleep(0.1)
    began = time.monotonic()
    grader.send_signal(signal.SIGINT)
    grader.wait()
    while [*(tmp_path / "tmp").iterdir()] and time.monotonic() < began + 15:
        time.sleep(0.1)
    assert [*(tmp_path / "tmp").iterdir()] == []
    test_nothing_of_a_submission_is_left((tmp_path, ""))
    (tmp_path / "class" / "bob.py").write_text(SUM)
    stamp = (kept / "ann.json").stat().st_mtime_ns
    code, text = cos598d(tmp_path, *words)
    assert code == 0, text
    assert (kept / "ann.json").stat().st_mtime_ns == stamp
    assert set(rows_of(tmp_path)) == {"ann", "bob"}


def test_one_submission_has_a_result_per_test(start, tmp_path):
    (tmp_path / "lesson3.py").write_text(SUM)
    words = ("grade", "lesson3.py", "--assignment", "lesson3", "--gradescope", "results.json")
    program = start("grade", ["-m", "cos598d", *words], {"TMPDIR": "/tmp"})  # for a socket's short path
    assert program.wait() == 1, program.text
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(test["name"], test["score"], test["max_score"], test["status"]) for test in results["tests"]] == [
        ("averages", 0, 1, "failed"),
        ("one_ring_each", 1, 1, "passed"),
    ], results
    assert results["score"] == 1
    assert results["visibility"] == "visible"
    assert "is the sum over 2 ranks" in results["output"]


def test_the_zip_has_the_assignment_and_no_answers(command, tmp_path):
    (tmp_path / "lab.toml").write_text('tests = "lesson5"\n')
    code, text = command("autograder", "--assignment", "lab.toml")
    assert code == 0, text
    with zipfile.ZipFile(io.BytesIO((tmp_path / "autograder.zip").read_bytes())) as archive:
        names = archive.namelist()
        assert tomllib.loads(archive.read("assignment.toml").decode()) == {"tests": "lesson5"}
        assert b"torch" in archive.read("requirements.txt")
    assert {"setup.sh", "run_autograder", "cos598d/tools/course/lessons/lesson5/test_lesson.py"} <= set(names)
    assert not [name for name in names if "/answer/" in name]


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ('tests = "lesson77"', "there are no tests lesson77"),
        ('tests = "lesson3"\npoint = 3', "point"),
        ('tests = "lesson3"\nseconds = -1', "seconds"),
        ("tests = 3", "tests"),
        ("tests =", "is no assignment"),
    ],
)
def test_an_assignment_that_cannot_work_is_refused(command, tmp_path, toml, says):
    (tmp_path / "lab.toml").write_text(toml)
    (tmp_path / "class").mkdir()
    code, text = command("grade", "class", "--assignment", "lab.toml", "--csv", "grades.csv")
    assert code == 2
    assert says in text
