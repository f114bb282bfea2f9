"""`grade` on a class: it resumes, merges rows, grades several at the same time, and knows who handed in nothing."""

import csv
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT
from test_assignment import assignment
from test_grade_rights import SET_DUMPABLE, assignment_by

from cos598d.errors import UsageError, UserError
from cos598d.tools.grade.folder import SubmittedClass, in_processes
from cos598d.tools.grade.grades import KeptResults
from cos598d.tools.grade.handed_in import Student, digest_of, handed_in, plain_files
from cos598d.tools.grade.rights import OwnNamespaces, hide, what_stops
from cos598d.tools.grade.submission import grading
from cos598d.tools.learn.lessons import get_lesson
from cos598d.tools.learn.progress import GolfScore

VARIES = ("seconds", "graded", "submitted")  # between two runs that come to the same


@pytest.fixture(autouse=True)
def seen_again():
    """Grading hides the process that grades, which here goes on with other tests."""
    yield
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 1, 0, 0, 0)


@pytest.fixture
def submissions(tmp_path):
    """Four files of a class."""
    folder = tmp_path / "class"
    folder.mkdir()
    for name in ("ann", "bob", "cat", "dan"):
        (folder / f"{name}.py").write_text(f"who = {name!r}\n")
    return sorted(folder.iterdir())


def one_class(submissions, tmp_path, function=lambda _: "", **more):
    return SubmittedClass(submissions, assignment_by(function), tmp_path / "grades.csv", **more)


def graded(submitted, names, function, parallel=None):
    """Grade these, and return the names in the order in which they were done."""
    done = []
    with grading(assignment_by(function), as_root=True, is_parallel=parallel is not None) as grader:
        submitted.grade(names, grader, parallel or 1, lambda each: done.append(each.result.name))
    return done


def table(path):
    with path.open() as file:
        return {row["submission"] or row["id"]: row for row in csv.DictReader(file)}


def test_a_later_run_grades_only_what_is_missing(submissions, tmp_path):
    names = [path.name for path in submissions]
    assert graded(one_class(submissions, tmp_path), names[:2], str) == names[:2]
    again = one_class(submissions, tmp_path)
    assert list(again.known) == names[:2]
    submissions[0].write_text("who = 'another'\n")
    again = one_class(submissions, tmp_path)
    assert list(again.known) == names[1:2]
    assert graded(again, set(names) - again.known.keys(), str) == ["ann.py", "cat.py", "dan.py"]
    assert list(table(tmp_path / "grades.csv")) == names
    # A file that changes while it is judged: nobody knows which content the result is of.
    again = one_class(submissions, tmp_path)
    graded(again, ["bob.py"], lambda _: submissions[1].write_text("who = 'changed'\n"))
    submissions[1].write_text("who = 'bob'\n")
    assert list(one_class(submissions, tmp_path).known) == ["ann.py", "cat.py", "dan.py"]
    # A result that is broken, or of another assignment, is none.
    for path in (tmp_path / "grades.csv.results").iterdir():
        path.write_text(path.read_text()[:-9])
    assert one_class(submissions, tmp_path).known == {}


def test_odd_names_words_and_files_that_have_no_digest_are_graded_too(submissions, tmp_path, monkeypatch):
    odd = tmp_path / "class" / os.fsdecode(b"\xff.py")
    odd.write_text("x = 1\n")
    for name in (odd.name, "ann.py"):
        assert graded(one_class([odd, *submissions], tmp_path), [name], lambda _: "\ud800 \x1b") == [name]
    assert set(one_class([odd, *submissions], tmp_path).known) == {odd.name, "ann.py"}
    monkeypatch.setattr("cos598d.tools.grade.handed_in.MOST_DIGESTED", 2)
    again = one_class([odd, *submissions], tmp_path)
    assert again.known == {}
    assert graded(again, ["ann.py"], str) == ["ann.py"]


def test_the_digest_of_an_assignment_is_of_what_verdicts_depend_on(monkeypatch):
    plain = assignment('kind = "sync"\nseconds = 5\n')
    points = assignment('title = "Lab"\nkind = "sync"\nseconds = 5\n[points]\nlets_go = 3\n')
    assert plain.digest == points.digest
    assert plain.version != points.version
    for other in ("seconds = 6", "seconds = 5\n[points]\nlets_go = 0", "seconds = 5\n[limits]\nprocesses = 7"):
        assert assignment(f'kind = "sync"\n{other}\n').digest != plain.digest
    named = 'kind = "sync"\nenvironment = ["GLUE_DIR"]\n'
    digests = set()
    for folder in ("one", "other"):
        monkeypatch.setenv("GLUE_DIR", folder)
        digests.add(assignment(named).digest)
    assert len(digests) == 2


def test_a_full_disk_is_no_fault_of_the_submission(submissions, tmp_path, monkeypatch):
    def is_full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shutil.copyfile", is_full)
    with pytest.raises(UserError, match="no room for a submission"):
        graded(one_class(submissions, tmp_path), ["ann.py"], str)
    assert one_class(submissions, tmp_path).known == {}


def test_one_grader_at_a_time_works_on_a_table(tmp_path):
    folder = tmp_path / "grades.csv.results"
    with KeptResults(tmp_path / "grades.csv").locked():
        with (
            pytest.raises(UsageError, match="another grader is using"),
            KeptResults(tmp_path / "grades.csv").locked(),
        ):
            pass
        assert folder.is_dir()
    assert not folder.exists()


def test_rows_are_merged_and_no_table_of_another_class_is_touched(submissions, tmp_path):
    path = tmp_path / "grades.csv"
    graded(one_class(submissions[:2], tmp_path), ["ann.py", "bob.py"], str)
    graded(one_class(submissions[1:], tmp_path), ["bob.py", "cat.py", "dan.py"], str)
    assert list(table(path)) == ["ann.py", "bob.py", "cat.py", "dan.py"]
    before = path.read_bytes()
    (tmp_path / "eve.py").write_text("x = 1\n")
    with pytest.raises(UsageError, match="table of another class"):
        one_class([tmp_path / "eve.py"], tmp_path)
    for text, says in (("a,b\n1,2\n", "other columns"), ("\xff", "other columns"), ("", "other columns")):
        path.write_text(text)
        with pytest.raises(UsageError, match=says):
            one_class(submissions, tmp_path)
        assert path.read_text() == text
    path.write_bytes(before)
    path.write_bytes(b"\xef\xbb\xbf" + before)  # as a spreadsheet saves it
    assert len(one_class(submissions, tmp_path).known) == 4


def meets(folder):
    """What a submission can reach of others, as JSON."""
    left = [name for name in os.listdir("/tmp") if name.startswith("left-by-")]
    Path(f"/tmp/left-by-{Path(folder, 'mine.py').read_text().split()[-1][1:-1]}").write_text("x")
    with socket.socket() as port:
        port.bind(("127.0.0.1", 29500))
        port.listen()
        processes = [name for name in os.listdir("/proc") if name.isdigit()]
        return json.dumps({"left": left, "processes": sorted(processes), "uid": os.getuid()})


@pytest.mark.long
def test_submissions_at_the_same_time_meet_neither_processes_nor_ports_nor_files(submissions, tmp_path, monkeypatch):
    monkeypatch.setattr("cos598d.tools.grade.submission.needed_by", lambda _: [])  # this clone may be in /tmp
    if what_stops(lambda empty: OwnNamespaces(()).enter(empty, None)):
        pytest.skip("no namespaces here")
    names = [path.name for path in submissions]
    done = graded(one_class(submissions, tmp_path, meets), names, meets, parallel=2)
    assert sorted(done) == names
    rows = table(tmp_path / "grades.csv")
    assert list(rows) == names
    assert {row["status"] for row in rows.values()} == {"passed"}
    for result in (tmp_path / "grades.csv.results").iterdir():
        (judged,) = json.loads(result.read_text())["judged"]
        found = json.loads(judged["words"])
        assert found["left"] == []
        assert found["processes"] == ["1", "2"]  # the first of the namespace, and the judge
    assert not list(Path("/tmp").glob("left-by-*"))
    one_after_the_other = SubmittedClass(submissions, assignment_by(meets), tmp_path / "other.csv")
    graded(one_after_the_other, names, meets, parallel=1)
    other = table(tmp_path / "other.csv")
    assert [{k: v for k, v in row.items() if k not in VARIES} for row in other.values()] == [
        {k: v for k, v in row.items() if k not in VARIES} for row in rows.values()
    ]


def test_a_judge_that_is_killed_in_its_namespaces_is_not_judged(submissions, tmp_path):
    if what_stops(lambda empty: OwnNamespaces(()).enter(empty, None)):
        pytest.skip("no namespaces here")

    def kills(_):
        os.kill(os.getpid(), signal.SIGKILL)

    graded(one_class(submissions, tmp_path, kills), ["ann.py"], kills, parallel=1)
    row = table(tmp_path / "grades.csv")["ann.py"]
    assert row["status"] == "not judged"
    assert "SIGKILL" in row["words"]
    assert one_class(submissions, tmp_path, kills).known == {}  # it is judged again


def test_without_namespaces_nothing_is_graded_at_the_same_time(monkeypatch):
    monkeypatch.setattr("cos598d.tools.grade.submission.what_stops", lambda _: "unshare is refused")
    with (
        pytest.raises(UsageError, match="cannot keep submissions apart here: unshare is refused"),
        grading(assignment_by(str), as_root=True, is_parallel=True),
    ):
        pass


def test_a_worker_that_ends_early_is_an_error_after_the_rest_is_done():
    def work(slot, numbers):
        for number in numbers:
            if number == 2:
                os._exit(3)
            yield number

    done = []
    with pytest.raises(UserError, match="ended early"):
        done.extend(in_processes(2, 20, work))
    assert sorted(done) == [number for number in range(20) if number != 2]
    assert sorted(in_processes(3, 50, lambda _, numbers: numbers)) == list(range(50))


def test_who_handed_in_nothing_has_a_row_until_something_comes(submissions, tmp_path):
    students = [Student("1", "=Ann", "ann@x"), Student("2", "Zed", "zed@x")]
    graded(one_class(submissions, tmp_path, students=students), ["ann.py", "bob.py"], str)
    rows = table(tmp_path / "grades.csv")
    assert (rows["ann.py"]["id"], rows["ann.py"]["name"], rows["bob.py"]["id"]) == ("1", "'=Ann", "")
    assert (rows["2"]["status"], rows["2"]["score"], rows["2"]["max_score"]) == ("missing", "0", "1")
    (tmp_path / "class" / "zed.py").write_text("who = 'zed'\n")
    late = one_class([tmp_path / "class" / "zed.py"], tmp_path, students=students)
    graded(late, ["zed.py"], str)
    rows = table(tmp_path / "grades.csv")
    assert sorted(rows) == ["ann.py", "bob.py", "zed.py"]
    assert rows["zed.py"]["status"] == "passed"
    # Who was not in the roster when first graded keeps one row.
    students.append(Student("3", "Bob", "bob@x"))
    graded(one_class(submissions, tmp_path, students=students), [], str)
    assert sorted(rows) == sorted(table(tmp_path / "grades.csv"))
    # Nor has anybody two rows after a run without the roster.
    graded(one_class(submissions[:1], tmp_path), [], str)
    assert (tmp_path / "grades.csv").read_text().count("ann.py") == 1


def test_what_tools_leave_in_a_folder_is_no_part_of_the_submission(tmp_path):
    mine = tmp_path / "ann"
    mine.mkdir()
    (mine / "lesson9.py").write_text("x = 1\n")
    os.utime(mine / "lesson9.py", (1_790_000_000, 1_790_000_000))
    before = digest_of(mine), handed_in(mine)
    left = (".cos598d/golf.json", "__pycache__/a.pyc", "b/__pycache__/a.pyc", ".idea/a.py", ".DS_Store", ".a.py.swp")
    for name in (*left, "a.py~", "#a.py#", ".venv/a.py", ".git/HEAD"):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text("y = 2\n")
    assert (digest_of(mine), handed_in(mine)) == before
    assert plain_files(mine) == [mine / "lesson9.py"]
    (mine / "b" / "more.py").write_text("z = 3\n")
    assert digest_of(mine) != before[0]
    assert handed_in(mine).changed > before[1].changed


def test_forged_scores_do_not_end_the_grader(submissions):
    asked = assignment_by(str)
    for seconds, is_taken in ((1.0, True), (0.0, False), (float("nan"), False)):
        score = GolfScore("a.py", "", 10, seconds, seconds, seconds, seconds)
        asked.kind.golf = lambda *_, score=score: (score, score)
        judged = []
        with grading(asked, as_root=True, answer="an answer") as grader:
            end = grader.grade(submissions[0], judged.append)
        assert end.golf == ((score, score) if is_taken else None)
        assert [each.passed for each in judged] == [True]
        assert end.remark == ""


LATE = """
kind = "lesson"
lesson = 9
[late]
deadline = 2026-10-01T23:59:00Z
points_per_day = 2
"""


@pytest.mark.long
def test_a_check_of_a_submission_between_two_gradings_leaves_its_row(tmp_path):
    if what_stops(lambda empty: hide(assignment(PARTS).kind.hides, empty)):
        pytest.skip("no mount namespaces here, so lessons are not graded beside their answers")
    (tmp_path / "lab.toml").write_text(LATE)
    mine = tmp_path / "class" / "ann" / "lesson9.py"
    mine.parent.mkdir(parents=True)
    mine.write_text(get_lesson(9).answer())
    os.utime(mine, (1_790_000_000, 1_790_000_000))  # in September
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}

    def run(*words):
        program = [sys.executable, "-m", "cos598d", *words]
        ended = subprocess.run(program, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    of_class = ("grade", "class", "--assignment", "lab.toml", "--csv", "g.csv", "--as_root")
    run(*of_class)
    row = table(tmp_path / "g.csv")["ann"]
    assert (row["score"], row["days_late"], row["submitted"][:7]) == ("3", "0", "2026-09")
    run("learn", "9", "--check", "class/ann/lesson9.py")
    assert (mine.parent / ".cos598d").is_dir()
    assert "already graded: 1 of 1 submission" in run(*of_class)
    assert table(tmp_path / "g.csv")["ann"] == row


PARTS = """
title = "Weeks 1 to 3"
[parts.ring]
kind = "lesson"
lesson = 3
[parts.ring.points]
averages = 3
[parts.own]
kind = "sync"
[parts.own.points]
default = 0
lets_go = 2
"""


@pytest.mark.long
def test_a_part_without_its_file_costs_only_its_points_and_flags_choose_what_is_graded(tmp_path):
    if what_stops(lambda empty: hide(assignment(PARTS).kind.hides, empty)):
        pytest.skip("no mount namespaces here, so lessons are not graded beside their answers")
    (tmp_path / "lab.toml").write_text(PARTS)
    for name in ("ann", "bob"):
        (tmp_path / "class" / name).mkdir(parents=True)
    (tmp_path / "class" / "ann" / "lesson3.py").write_text(get_lesson(3).page())
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}

    def grade(*words):
        program = [sys.executable, "-m", "cos598d", "grade", "--assignment", "lab.toml", "--as_root", *words]
        ended = subprocess.run(program, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout + ended.stderr

    of_class = ("class", "--csv", "class/g.csv")
    assert grade(*of_class, "--only", "ann")[0] == 0
    row = table(tmp_path / "class" / "g.csv")["ann"]
    assert {name: row[name] for name in ("ring.averages", "ring.one_ring_each", "own.lets_go", "max_score")} == {
        **dict.fromkeys(("ring.averages", "ring.one_ring_each", "own.lets_go"), "0"),
        "max_score": "6",
    }
    assert "ring.averages: nothing is filled in yet" in row["failures"]
    assert "own.lets_go: the submission has no my_sync.py" in row["failures"]
    # What is kept in the class's folder is no submission.
    code, text = grade(*of_class, "--feedback", "class/pages")
    assert code == 0
    assert "already graded: 1 of 2 submissions" in text
    assert "1 submission in " in text
    assert sorted(os.listdir(tmp_path / "class" / "pages")) == ["ann.html", "bob.html"]
    assert "1 submission in " in grade(*of_class, "--feedback", "class/pages", "--regrade", "bob", "--only", "ann")[1]
    code, text = grade(*of_class, "--regrade", "nobody")
    assert code == 2
    assert "--regrade nobody is not a submission" in text
    code, text = grade("class/ann", "--gradescope", "r.json", "--parallel", "2")
    assert code == 2
    assert "--parallel is for a class" in text


def test_temporary_folders_that_have_what_is_needed_stay_shared(tmp_path, monkeypatch):
    assert OwnNamespaces(("/usr/bin/python3",)).shared == []
    assert OwnNamespaces(("/tmp/venv/bin/python",)).shared == [Path(os.path.realpath("/tmp"))]
    monkeypatch.setattr("cos598d.tools.grade.submission.what_stops", lambda _: "")
    monkeypatch.setattr("cos598d.tools.grade.submission.needed_by", lambda _: ["/tmp/venv/bin/python"])
    with grading(assignment_by(str), as_root=True, is_parallel=True) as grader:
        assert "Submissions share /tmp" in grader.remark


@pytest.mark.long
def test_a_board_has_who_passes_and_is_refused_where_nothing_is_measured(tmp_path):
    if what_stops(lambda empty: hide(assignment(PARTS).kind.hides, empty)):
        pytest.skip("no mount namespaces here, so lessons are not graded beside their answers")
    lesson = get_lesson(9)
    (tmp_path / "lab.toml").write_text('kind = "lesson"\nlesson = 9\n')
    (tmp_path / "parts.toml").write_text(PARTS)
    (tmp_path / "roster.csv").write_text("id,name\nann,=Ann\nbob,Bob\n")
    (tmp_path / "class").mkdir()
    forged = "\nimport json, sys\nprint(json.dumps({'golf': [0, 1e-9, 1e-9, 1e-9]}))\n"
    (tmp_path / "class" / "ann.py").write_text(lesson.answer() + forged)
    (tmp_path / "class" / "bob.py").write_text(lesson.page() + forged)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}

    def grade(*words):
        program = [sys.executable, "-m", "cos598d", "grade", "class", "--as_root", *words]
        ended = subprocess.run(program, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout + ended.stderr

    of_class = ("--assignment", "lab.toml", "--csv", "g.csv", "--roster", "roster.csv")
    code, text = grade(*of_class, "--only", "ann")
    assert code == 0, text
    code, text = grade(*of_class, "--board", "b.csv")
    assert code == 0, text
    assert "wrote b.csv: 0 submissions; passed, but not measured: ann.py (add --regrade NAME)" in text
    is_refused = what_stops(lambda empty: OwnNamespaces(()).enter(empty, None))
    parallel = () if is_refused else ("--parallel", "2")
    code, text = grade(*of_class, "--board", "b.csv", "--regrade", "ann", *parallel)
    assert code == 0, text
    assert "wrote b.csv: 1 submission\n" in text
    with (tmp_path / "b.csv").open() as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert sorted(rows) == ["'=Ann", "(the answer)"]
    assert float(rows["'=Ann"]["seconds"]) > 1e-8
    assert float(rows["'=Ann"]["answer_seconds"]) > 1e-8  # the answer's folder is hidden, and it was measured
    measured = rows["'=Ann"]["measured"]
    assert measured == table(tmp_path / "g.csv")["ann.py"]["graded"]
    # A later board has the same row, since it is a result like the others.
    code, text = grade(*of_class, "--board", "b2.csv")
    assert code == 0, text
    assert (tmp_path / "b2.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    for words, says in {
        ("--assignment", "lesson", "--csv", "g2.csv"): "lesson 0 has no board. Lessons 5, 6, 7, 9 and 11 have one",
        ("--assignment", "parts.toml", "--csv", "g2.csv"): "--board needs an assignment of one lesson",
        ("--assignment", "lab.toml", "--csv", "b.csv"): "is the table's file",
        ("--assignment", "lab.toml", "--gradescope", "r.json"): "--board is for a class",
    }.items():
        code, text = grade(*words, "--board", "b.csv")
        assert code == 2
        assert says in text
