"""`grade` on a class: it resumes, merges, grades several at once, knows students and deadlines, and writes pages."""

import base64
import csv
import ctypes
import html
import json
import os
import signal
import socket
import subprocess
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from test_grade_rights import SET_DUMPABLE, assignment_by

from cos598d.commands.cli import main
from cos598d.errors import UsageError, UserError
from cos598d.tools.grade.assignment import read_assignment
from cos598d.tools.grade.feedback import lines_named, page, page_name
from cos598d.tools.grade.folder import SubmittedClass
from cos598d.tools.grade.grades import Graded
from cos598d.tools.grade.handed_in import HandedIn, LatePolicy, handed_in
from cos598d.tools.grade.results import Result
from cos598d.tools.grade.rights import OwnNamespaces, what_stops
from cos598d.tools.grade.roster import Student, owners, read_roster
from cos598d.tools.grade.scored import Judged
from cos598d.tools.grade.similar import similar_pairs
from cos598d.tools.grade.submission import SubmissionEnd, grading
from cos598d.tools.grade.table import TomlTable
from cos598d.tools.grade.workers import in_processes
from cos598d.tools.learn.lessons import get_lesson

NOON = datetime(2026, 10, 1, 12, tzinfo=timezone.utc)
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


def assignment(source):
    return read_assignment(TomlTable.of_text("lab.toml", source))


def graded_as(judged, asked=None, time=None, end=None, name="ann"):
    """A result with these claims, as `asked` scores it."""
    result = Result(name, "", "", tuple(judged), end or SubmissionEnd(Judged("", False, "left")), 1.0, "")
    return Graded.of(result, asked or assignment_by(str), HandedIn(time), None)


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


def test_the_digest_of_an_assignment_is_of_what_verdicts_depend_on():
    plain = assignment('kind = "sync"\nseconds = 5\n')
    points = assignment('title = "Lab"\nkind = "sync"\nseconds = 5\n[points]\nlets_go = 3\n')
    assert plain.digest == points.digest
    assert plain.version != points.version
    for other in ("seconds = 6", "seconds = 5\n[points]\nlets_go = 0", "seconds = 5\n[limits]\nprocesses = 7"):
        assert assignment(f'kind = "sync"\n{other}\n').digest != plain.digest


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


def test_without_namespaces_nothing_is_graded_at_the_same_time(monkeypatch):
    monkeypatch.setattr("cos598d.tools.grade.submission.what_stops", lambda _: "unshare is refused")
    with (
        pytest.raises(UsageError, match="share processes and ports, since unshare is refused"),
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


def test_a_day_that_has_begun_costs_points_and_no_more_than_there_are():
    late = LatePolicy(NOON, 0.4)
    asked = assignment('kind = "sync"\n[points]\ndefault = 0\nlets_go = 1\n')
    times = {NOON: 0, NOON + timedelta(seconds=1): 1, NOON + timedelta(days=1): 1, NOON + timedelta(days=9): 9}
    for time, days in times.items():
        assert late.days(HandedIn(time)) == days
        mine = graded_as([Judged("lets_go", True, "")], replace(asked, late=late), time)
        assert mine.points == pytest.approx(max(0, 1 - 0.4 * days))
        assert mine.row(asked)["days_late"] == str(days)
    assert late.days(HandedIn(None)) == 0
    by_commit = LatePolicy(NOON, 1, "git")
    assert by_commit.days(HandedIn(NOON + timedelta(days=3), "a" * 40, NOON)) == 0
    assert by_commit.days(HandedIn(NOON + timedelta(days=3))) == 3


def test_git_times_come_from_the_commit_and_no_setting_of_a_student_runs(tmp_path):
    place, ran = tmp_path / "ann", tmp_path / "ran"
    place.mkdir()
    (place / "my_sync.py").write_text("x = 1\n")
    environ = {"PATH": os.environ["PATH"], "GIT_COMMITTER_DATE": "1790000000 +0200", "HOME": str(tmp_path)}

    def git(*words):
        return subprocess.run(
            ["git", "-C", place, *words], env=environ, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "committer x> 1 +0000")
    commit = git("rev-parse", "HEAD").strip()
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {ran}\n")
    trap.chmod(0o755)
    for name in ("gpg.program", "core.pager", "core.fsmonitor", "core.sshCommand", "core.hooksPath"):
        git("config", name, str(trap))
    git("config", "log.showSignature", "true")
    expected = datetime.fromtimestamp(1790000000, timezone.utc)
    assert (handed_in(place).commit, handed_in(place).committed) == (commit, expected)
    git("pack-refs", "--all")
    git("gc", "-q")
    ran.unlink(missing_ok=True)
    assert (handed_in(place).commit, handed_in(place).committed) == (commit, expected)
    assert not ran.exists()
    for head in ("ref: refs/heads/../../../x", "ref: /etc/passwd", "", "\xff" * 40):
        (place / ".git" / "HEAD").write_text(head)
        assert (handed_in(place).commit, handed_in(place).committed) == ("", None)
    assert not ran.exists()


def test_a_roster_says_whose_a_submission_is(tmp_path):
    path = tmp_path / "roster.csv"
    path.write_text("\ufeffname,id,email,section,more\nAnn A,17,ann@x.edu,A,\nBob,18,bob@x.edu,B,\n", encoding="utf-8")
    ann, bob = students = read_roster(path)
    assert ann == Student("17", "Ann A", "ann@x.edu", "A")
    assert owners(["ANN", "18.py", "eve"], students) == {"ANN": ann, "18.py": bob}
    with pytest.raises(UsageError, match="ann and 17 are both of the student 17"):
        owners(["ann", "17"], students)
    for text, says in (("name\nann\n", "no id"), ("id\n", "no student"), ("id\n1\n1\n", "the id 1 twice")):
        path.write_text(text)
        with pytest.raises(UsageError, match=says):
            read_roster(path)


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


def test_a_page_has_the_line_what_was_expected_and_the_picture_and_nothing_raw(tmp_path):
    source = tmp_path / "eve"
    source.mkdir()
    (source / "my_sync.py").write_text("x = 1\n<script>alert(1)</script>  # \x1b[31m\n")
    words = "my_sync.py line 2: <img src=x onerror=y>\x1b[31m and my_sync.py line 99: nothing"
    picture = "<svg onload='alert(1)'/>"
    end = SubmissionEnd(Judged("", False, ""), "", "<b>printed</b>", (("One <step>", picture),))
    asked = assignment('title = "<Lab>"\nkind = "sync"\n[points]\ndefault = 0\nlets_go = 1\naccumulates = 2\n')
    judged = [Judged("lets_go", False, words), Judged("accumulates", True, "")]
    text = page(graded_as(judged, asked, end=end, name="<eve>"), source, asked)
    for raw in ("<script>", "<img src=x", "\x1b", "<b>printed", "<Lab>", "<eve>", "<svg", "<step>"):
        assert raw not in text
    assert "my_sync.py line 2: &lt;script&gt;alert(1)&lt;/script&gt;  # \\x1b[31m" in text
    assert base64.b64encode(picture.encode()).decode() in text
    assert "default-src 'none'" in text
    assert "2 of 3 points" in text
    assert html.escape(asked.kind.expected("lets_go")) in text
    assert lines_named("other.py line 1: x", source) == []
    names = ["ann", "ann.py", "../ann", "a b", "a_b", ".hidden", "ann.html"]
    pages = [page_name(name) for name in names]
    assert len(set(pages)) == len(names)
    assert all("/" not in each and each[0] != "." for each in pages)


@pytest.mark.parametrize("kind", ["sync", "script", "tests", *(f"lesson{number}" for number in range(14))])
def test_every_test_says_what_is_expected(kind):
    number = f"lesson = {kind.removeprefix('lesson')}\n" if kind.startswith("lesson") else ""
    found = assignment(f'kind = "{kind.rstrip("0123456789")}"\n{number}').kind
    assert all(len(found.expected(claim)) > 10 for claim in found.claims())


def test_copies_with_other_names_are_alike_and_what_was_given_does_not_count(tmp_path):
    page_of = get_lesson(5).page()
    ring = get_lesson(5).answer()
    renamed = ring.replace("tensor", "buffer_of_mine").replace("    ", "      # another comment\n    ", 1)
    other = "def all_reduce(comm, tensor):\n" + "".join(
        f"    if comm.rank == {n}:\n        tensor.mul_({n}).add_(comm.world_size - {n})\n" for n in range(20)
    )
    sources = {"ring": ring, "renamed": renamed, "other": other, "page": page_of, "page2": page_of, "none": "f(("}
    paths = {}
    for name, source in sources.items():
        paths[name] = tmp_path / f"{name}.py"
        paths[name].write_text(source)
    pairs = similar_pairs(paths, page_of)
    assert [set(pair[1:]) for pair in pairs] == [{"ring", "renamed"}]
    assert pairs[0][0] > 0.9


GROUPS = """
kind = "lesson"
lesson = 11
[points]
default = 0
zero1_steps = 1
[groups.third]
tests = ["zero3_steps", "zero3_holds"]
points = 5
together = true
[groups.rest]
tests = ["zero1_sends"]
"""


def test_groups_share_points_and_can_give_them_only_together():
    asked = assignment(GROUPS)
    assert asked.points == {"zero1_steps": 1, "zero1_sends": 1, "zero3_steps": 2.5, "zero3_holds": 2.5}

    def points(*passed):
        scored = asked.scored([Judged(name, name in passed, "") for name in asked.points], Judged("", None, ""))
        return {each.name: each.points for each in scored if each.points}

    assert points("zero1_steps", "zero3_steps") == {"zero1_steps": 1}
    assert points("zero3_holds", "zero3_steps") == {"zero3_holds": 2.5, "zero3_steps": 2.5}
    for text, says in (
        ('[groups.a]\ntests = ["x"]', "line 4: tests: x is no test"),
        ("[groups.a]\npoints = 1", "the group groups.a has no tests"),
        ('[groups.a]\ntests = ["sums"]\n[points]\nsums = 1', "sums has points already"),
        ("[late]\npoints_per_day = 1", "needs deadline and points_per_day"),
        ("[late]\ndeadline = 2026-10-01T12:00:00\npoints_per_day = 1", "line 4: deadline"),
        ("[parts.a]\nlesson = 1", "[parts.a] has no kind"),
    ):
        with pytest.raises(UsageError) as refusal:
            assignment(f'kind = "lesson"\nlesson = 5\n{text}\n' if "parts" not in text else text)
        assert says in str(refusal.value)


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


def test_a_part_without_its_file_costs_only_its_points(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.toml").write_text(PARTS)
    for name in ("ann", "bob"):
        (tmp_path / "class" / name).mkdir(parents=True)
    (tmp_path / "class" / "ann" / "lesson3.py").write_text(get_lesson(3).page())
    words = ["grade", "class", "--assignment", "lab.toml", "--csv", "g.csv", "--as_root"]
    assert main([*words, "--only", "ann"]) == 0
    row = table(tmp_path / "g.csv")["ann"]
    assert {name: row[name] for name in ("ring.averages", "ring.one_ring_each", "own.lets_go", "max_score")} == {
        **dict.fromkeys(("ring.averages", "ring.one_ring_each", "own.lets_go"), "0"),
        "max_score": "6",
    }
    assert "ring.averages: nothing is filled in yet" in row["failures"]
    assert "own.lets_go: the submission has no my_sync.py" in row["failures"]
    capsys.readouterr()
    assert main([*words, "--feedback", "pages"]) == 0
    out = capsys.readouterr().out
    assert "1 of 2 submissions are graded already" in out
    assert "1 submission in " in out
    assert sorted(os.listdir("pages")) == ["ann.html", "bob.html"]
    beside = ["grade", "class", "--assignment", "lab.toml", "--csv", "class/g.csv", "--as_root"]
    for said in ("2 submissions in ", "0 submissions in "):
        assert main(beside) == 0
        assert said in capsys.readouterr().out  # what is kept in the class's folder is no submission
    assert main([*words, "--regrade", "nobody"]) == 2
    assert "--regrade nobody is no submission" in capsys.readouterr().err
    assert main([*words, "--regrade", "bob"]) == 0
    assert "1 submission in " in capsys.readouterr().out
    assert main(["grade", "class/ann", "--assignment", "lab.toml", "--gradescope", "r.json", "--parallel", "2"]) == 2
    assert "--parallel is for a class" in capsys.readouterr().err


def test_temporary_folders_that_have_what_is_needed_stay_shared(tmp_path, monkeypatch):
    assert OwnNamespaces(("/usr/bin/python3",)).shared == []
    assert OwnNamespaces(("/tmp/venv/bin/python",)).shared == [Path(os.path.realpath("/tmp"))]
    monkeypatch.setattr("cos598d.tools.grade.submission.what_stops", lambda _: "")
    monkeypatch.setattr("cos598d.tools.grade.submission.needed_by", lambda _: ["/tmp/venv/bin/python"])
    with grading(assignment_by(str), as_root=True, is_parallel=True) as grader:
        assert "Submissions share /tmp" in grader.remark
