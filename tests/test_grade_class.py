"""`grade` on a class: it resumes, merges rows, grades several at the same time, and lists who handed in nothing."""

import csv
import errno
import json
import os
import signal
import socket
from pathlib import Path

import pytest
from grading import (
    assignment,
    assignment_by,
    has_namespaces,
    rows_of,
    show_grader,
    skip_unless_hidden,
    start_command,
)

from cos598d.errors import UsageError, UserError
from cos598d.tools.grade.folder import SubmittedClass, in_processes
from cos598d.tools.grade.grades import KeptResults
from cos598d.tools.grade.handed_in import Student, digest_of, handed_in, plain_files
from cos598d.tools.grade.rights import OwnNamespaces
from cos598d.tools.grade.submission import grading
from cos598d.tools.learn.lessons import get_lesson
from cos598d.tools.learn.progress import GolfScore

VARIES = ("seconds", "graded", "submitted")  # between two runs that come to the same
_shown = pytest.fixture(autouse=True)(show_grader)


@pytest.fixture
def run(start, scratch):
    """Run one of our commands to its end: run(words) -> (exit code, what it printed)."""

    def _run(*words):
        program = start_command(start, scratch, *words)
        return program.wait(250), program.text

    return _run


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


def test_later_run_grades_only_missing_submissions(submissions, tmp_path):
    names = [path.name for path in submissions]
    assert graded(one_class(submissions, tmp_path), names[:2], str) == names[:2]
    again = one_class(submissions, tmp_path)
    assert list(again.known) == names[:2]
    submissions[0].write_text("who = 'another'\n")
    again = one_class(submissions, tmp_path)
    assert list(again.known) == names[1:2]
    assert graded(again, set(names) - again.known.keys(), str) == ["ann.py", "cat.py", "dan.py"]
    assert list(rows_of(tmp_path / "grades.csv")) == names
    # A file that changes while it is judged: nobody knows which content the result is of.
    again = one_class(submissions, tmp_path)
    graded(again, ["bob.py"], lambda _: submissions[1].write_text("who = 'changed'\n"))
    submissions[1].write_text("who = 'bob'\n")
    assert list(one_class(submissions, tmp_path).known) == ["ann.py", "cat.py", "dan.py"]
    # A result that is broken, or of another assignment, is none.
    for path in (tmp_path / "grades.csv.results").iterdir():
        path.write_text(path.read_text()[:-9])
    assert one_class(submissions, tmp_path).known == {}


def test_odd_names_odd_output_and_large_files_are_graded(submissions, tmp_path, monkeypatch):
    odd = tmp_path / "class" / os.fsdecode(b"\xff.py")
    odd.write_text("x = 1\n")
    for name in (odd.name, "ann.py"):
        assert graded(one_class([odd, *submissions], tmp_path), [name], lambda _: "\ud800 \x1b") == [name]
    assert set(one_class([odd, *submissions], tmp_path).known) == {odd.name, "ann.py"}
    monkeypatch.setattr("cos598d.tools.grade.handed_in.MOST_DIGESTED", 2)
    again = one_class([odd, *submissions], tmp_path)
    assert again.known == {}
    assert graded(again, ["ann.py"], str) == ["ann.py"]


def test_assignment_digest_changes_with_what_verdicts_depend_on(monkeypatch):
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


def test_full_disk_gives_no_verdict(submissions, tmp_path, monkeypatch):
    def is_full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shutil.copyfile", is_full)
    with pytest.raises(UserError, match="no room for a submission"):
        graded(one_class(submissions, tmp_path), ["ann.py"], str)
    assert one_class(submissions, tmp_path).known == {}


def test_second_grader_of_one_table_is_refused(tmp_path):
    folder = tmp_path / "grades.csv.results"
    one, other = (KeptResults(tmp_path / "grades.csv") for _ in range(2))
    with one.locked():
        with pytest.raises(UsageError, match="another grader is using"), other.locked():
            pass
        assert folder.is_dir()
    assert not folder.exists()


def test_table_merges_rows_and_refuses_another_class(submissions, tmp_path):
    path = tmp_path / "grades.csv"
    graded(one_class(submissions[:2], tmp_path), ["ann.py", "bob.py"], str)
    graded(one_class(submissions[1:], tmp_path), ["bob.py", "cat.py", "dan.py"], str)
    assert list(rows_of(path)) == ["ann.py", "bob.py", "cat.py", "dan.py"]
    before = path.read_bytes()
    (tmp_path / "eve.py").write_text("x = 1\n")
    with pytest.raises(UsageError, match="table of another class"):
        one_class([tmp_path / "eve.py"], tmp_path)
    for text in ("a,b\n1,2\n", "\xff", ""):
        path.write_text(text)
        with pytest.raises(UsageError, match="other columns"):
            one_class(submissions, tmp_path)
        assert path.read_text() == text
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
def test_parallel_submissions_share_no_processes_ports_or_files(submissions, tmp_path, monkeypatch):
    monkeypatch.setattr("cos598d.tools.grade.submission.needed_by", lambda _: [])  # this clone may be in /tmp
    if not has_namespaces():
        pytest.skip("no namespaces here")
    names = [path.name for path in submissions]
    done = graded(one_class(submissions, tmp_path, meets), names, meets, parallel=2)
    assert sorted(done) == names
    rows = rows_of(tmp_path / "grades.csv")
    assert list(rows) == names
    assert {row["status"] for row in rows.values()} == {"passed"}
    for result in (tmp_path / "grades.csv.results").iterdir():
        (judged,) = json.loads(result.read_text())["judged"]
        found = json.loads(judged["words"])
        assert found["left"] == []
        assert found["processes"] == ["1", "2"]  # the first of the namespace, and the judge
    assert not list(Path("/tmp").glob("left-by-*"))
    in_turn = SubmittedClass(submissions, assignment_by(meets), tmp_path / "other.csv")
    graded(in_turn, names, meets, parallel=1)
    both = [[*rows.values()], [*rows_of(tmp_path / "other.csv").values()]]
    one, other = ([{k: v for k, v in row.items() if k not in VARIES} for row in each] for each in both)
    assert one == other


def test_submission_whose_judge_is_killed_is_not_judged(submissions, tmp_path):
    if not has_namespaces():
        pytest.skip("no namespaces here")

    def kills(_):
        os.kill(os.getpid(), signal.SIGKILL)

    graded(one_class(submissions, tmp_path, kills), ["ann.py"], kills, parallel=1)
    row = rows_of(tmp_path / "grades.csv")["ann.py"]
    assert row["status"] == "not judged"
    assert "SIGKILL" in row["words"]
    assert one_class(submissions, tmp_path, kills).known == {}  # it is judged again


def test_worker_that_ends_early_is_an_error_after_the_others_finish():
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


def test_student_without_submission_has_a_row_until_one_arrives(submissions, tmp_path):
    students = [Student("1", "=Ann", "ann@x"), Student("2", "Zed", "zed@x")]
    graded(one_class(submissions, tmp_path, students=students), ["ann.py", "bob.py"], str)
    rows = rows_of(tmp_path / "grades.csv")
    assert (rows["ann.py"]["id"], rows["ann.py"]["name"], rows["bob.py"]["id"]) == ("1", "'=Ann", "")
    assert (rows["2"]["status"], rows["2"]["score"], rows["2"]["max_score"]) == ("missing", "0", "1")
    (tmp_path / "class" / "zed.py").write_text("who = 'zed'\n")
    late = one_class([tmp_path / "class" / "zed.py"], tmp_path, students=students)
    graded(late, ["zed.py"], str)
    rows = rows_of(tmp_path / "grades.csv")
    assert sorted(rows) == ["ann.py", "bob.py", "zed.py"]
    assert rows["zed.py"]["status"] == "passed"
    # Who was not in the roster when first graded keeps one row.
    students.append(Student("3", "Bob", "bob@x"))
    graded(one_class(submissions, tmp_path, students=students), [], str)
    assert sorted(rows) == sorted(rows_of(tmp_path / "grades.csv"))
    # Nor has anybody two rows after a run without the roster.
    graded(one_class(submissions[:1], tmp_path), [], str)
    assert (tmp_path / "grades.csv").read_text().count("ann.py") == 1


def test_files_of_tools_do_not_change_a_submission(tmp_path):
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
def test_learn_check_between_two_gradings_keeps_the_row(run, tmp_path):
    skip_unless_hidden(assignment(PARTS).kind.hides)
    (tmp_path / "lab.toml").write_text(LATE)
    mine = tmp_path / "class" / "ann" / "lesson9.py"
    mine.parent.mkdir(parents=True)
    mine.write_text(get_lesson(9).answer())
    os.utime(mine, (1_790_000_000, 1_790_000_000))  # in September
    of_class = ("grade", "class", "--assignment", "lab.toml", "--csv", "g.csv", "--as_root")
    assert run(*of_class)[0] == 0
    row = rows_of(tmp_path / "g.csv")["ann"]
    assert (row["score"], row["days_late"], row["submitted"][:7]) == ("3", "0", "2026-09")
    assert run("learn", "9", "--check", "class/ann/lesson9.py")[0] == 0
    assert (mine.parent / ".cos598d").is_dir()
    assert "already graded: 1 of 1 submission" in run(*of_class)[1]
    assert rows_of(tmp_path / "g.csv")["ann"] == row


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
def test_missing_part_costs_its_points_and_flags_choose_what_is_graded(run, tmp_path):
    skip_unless_hidden(assignment(PARTS).kind.hides)
    (tmp_path / "lab.toml").write_text(PARTS)
    for name in ("ann", "bob"):
        (tmp_path / "class" / name).mkdir(parents=True)
    (tmp_path / "class" / "ann" / "lesson3.py").write_text(get_lesson(3).page())
    of_class = ("grade", "class", "--assignment", "lab.toml", "--csv", "class/g.csv", "--as_root")
    assert run(*of_class, "--only", "ann")[0] == 0
    row = rows_of(tmp_path / "class" / "g.csv")["ann"]
    assert [row[name] for name in ("ring.averages", "ring.one_ring_each", "own.lets_go")] == ["0"] * 3
    assert row["max_score"] == "6"
    assert "ring.averages: nothing is filled in yet" in row["failures"]
    assert "own.lets_go: the submission has no my_sync.py" in row["failures"]
    # What is kept in the class's folder is no submission.
    code, text = run(*of_class, "--feedback", "class/pages")
    assert code == 0
    assert "already graded: 1 of 2 submissions" in text
    assert "1 submission in " in text
    assert sorted(os.listdir(tmp_path / "class" / "pages")) == ["ann.html", "bob.html"]
    assert "1 submission in " in run(*of_class, "--feedback", "class/pages", "--regrade", "bob", "--only", "ann")[1]


def test_temporary_folders_with_needed_files_stay_shared(tmp_path, monkeypatch):
    assert OwnNamespaces(("/usr/bin/python3",)).shared == []
    assert OwnNamespaces(("/tmp/venv/bin/python",)).shared == [Path(os.path.realpath("/tmp"))]
    monkeypatch.setattr("cos598d.tools.grade.submission.what_stops", lambda _: "")
    monkeypatch.setattr("cos598d.tools.grade.submission.needed_by", lambda _: ["/tmp/venv/bin/python"])
    with grading(assignment_by(str), as_root=True, is_parallel=True) as grader:
        assert "Submissions share /tmp" in grader.remark


@pytest.mark.long
def test_board_has_only_submissions_that_pass(run, tmp_path):
    skip_unless_hidden(assignment(PARTS).kind.hides)
    lesson = get_lesson(9)
    (tmp_path / "lab.toml").write_text('kind = "lesson"\nlesson = 9\n')
    (tmp_path / "roster.csv").write_text("id,name\nann,=Ann\nbob,Bob\n")
    (tmp_path / "class").mkdir()
    forged = "\nimport json, sys\nprint(json.dumps({'golf': [0, 1e-9, 1e-9, 1e-9]}))\n"
    (tmp_path / "class" / "ann.py").write_text(lesson.answer() + forged)
    (tmp_path / "class" / "bob.py").write_text(lesson.page() + forged)

    def grade(*words):
        of_class = ("class", "--assignment", "lab.toml", "--csv", "g.csv", "--roster", "roster.csv", "--as_root")
        code, text = run("grade", *of_class, *words)
        assert code == 0, text
        return text

    grade("--only", "ann")
    said = grade("--board", "b.csv")
    assert "wrote b.csv: 0 submissions; passed, but not measured: ann.py (add --regrade NAME)" in said
    parallel = ("--parallel", "2") if has_namespaces() else ()
    assert "wrote b.csv: 1 submission\n" in grade("--board", "b.csv", "--regrade", "ann", *parallel)
    with (tmp_path / "b.csv").open() as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert sorted(rows) == ["'=Ann", "(the answer)"]
    ann = rows["'=Ann"]
    assert float(ann["seconds"]) > 1e-8
    assert float(ann["answer_seconds"]) > 1e-8  # the answer's folder is hidden, and it was measured
    assert ann["measured"] == rows_of(tmp_path / "g.csv")["ann.py"]["graded"]
    # A later board has the same row, since it is a result like the others.
    grade("--board", "b2.csv")
    assert (tmp_path / "b2.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
