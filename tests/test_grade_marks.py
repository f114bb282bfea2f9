"""`grade` after the verdicts: points, costs of lateness and hints, owners, pages, boards, and similar submissions."""

import base64
import csv
import html
import json
import os
import subprocess
from dataclasses import asdict, replace
from datetime import datetime, timedelta, timezone

import pytest
from grading import assignment, assignment_by

from cos598d.errors import UsageError, UserError
from cos598d.tools.grade.feedback import lines_named, page, page_name, write_feedback
from cos598d.tools.grade.grades import Graded, KeptResults, Result, write_board
from cos598d.tools.grade.handed_in import HandedIn, LatePolicy, Student, handed_in, owners, read_roster, similar_pairs
from cos598d.tools.grade.scored import Judged
from cos598d.tools.grade.submission import SubmissionEnd
from cos598d.tools.learn import progress, session
from cos598d.tools.learn.lessons import NUMBERS, get_lesson
from cos598d.tools.learn.lessons.golf import Stroke
from cos598d.tools.learn.progress import GolfScore

NOON = datetime(2026, 10, 1, 12, tzinfo=timezone.utc)


def graded_as(judged, asked=None, time=None, end=None, name="ann"):
    """A result with these claims, as `asked` scores it."""
    result = Result(name, "", "", tuple(judged), end or SubmissionEnd(Judged("", False, "left")), 1.0, "")
    return Graded.of(result, asked or assignment_by(str), HandedIn(time), None)


def test_each_day_late_costs_points_down_to_zero():
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


def test_git_time_comes_from_the_commit_and_no_program_of_the_student_runs(tmp_path):
    place, ran = tmp_path / "ann", tmp_path / "ran"
    place.mkdir()
    (place / "my_sync.py").write_text("x = 1\n")
    environ = {"PATH": os.environ["PATH"], "GIT_COMMITTER_DATE": "1790000000 +0200", "HOME": str(tmp_path)}

    def git(*words):
        program = ["git", "-C", place, *words]
        return subprocess.run(program, env=environ, check=True, capture_output=True, text=True).stdout

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
    expected = (commit, datetime.fromtimestamp(1790000000, timezone.utc))

    def found():
        mine = handed_in(place)
        return mine.commit, mine.committed

    assert found() == expected
    git("pack-refs", "--all")
    git("gc", "-q")
    ran.unlink(missing_ok=True)
    assert found() == expected
    assert not ran.exists()
    for head in ("ref: refs/heads/../../../x", "ref: /etc/passwd", "", "\xff" * 40):
        (place / ".git" / "HEAD").write_text(head)
        assert found() == ("", None)
    assert not ran.exists()


def test_roster_finds_the_owner_of_a_submission(tmp_path):
    path = tmp_path / "roster.csv"
    path.write_text("\ufeffname,id,email,section,more\nAnn A,17,ann@x.edu,A,\nBob,18,bob@x.edu,B,\n", encoding="utf-8")
    ann, bob = students = read_roster(path)
    assert ann == Student("17", "Ann A", "ann@x.edu", "A")
    assert owners(["ANN", "18.py", "eve"], students) == {"ANN": ann, "18.py": bob}
    # With what platforms add to a name.
    for name, whose in {"ann@x.edu_12345": ann, "18_2_345.py": bob, "Ann@x.edu_1.py": ann}.items():
        assert owners([name], students) == {name: whose}
    assert owners(["ann_1", "ann@x.edu_lee", "17x_1", "_1", "ann@x.edu_"], students) == {}
    more = [*students, Student("18_2")]
    assert owners(["18_2", "18_3"], more) == {"18_2": more[2], "18_3": bob}
    assert owners(["18_2_345"], more) == {"18_2_345": more[2]}
    with pytest.raises(UsageError, match="ann@x.edu_1 and ann@x.edu_2 both belong"):
        owners(["ann@x.edu_1", "ann@x.edu_2"], students)
    with pytest.raises(UsageError, match="ann and 17 both belong to the student 17"):
        owners(["ann", "17"], students)
    for text, says in (
        ("id;name\n1;ann\n", "no column id"),
        ("id,name\n,ann\n", "without an id"),
        ("id\n", "no student"),
        ("id\n1\n1\n", "the id 1 twice"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=says):
            read_roster(path)


def test_feedback_page_shows_line_expectation_and_picture_escaped(tmp_path):
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
    late = replace(graded_as(judged, asked), days_late=2)
    assert "2 days late; no points to lose" in page(late, source, asked)
    assert "2 days late: 1.5 points less" in page(replace(late, late_points=1.5), source, asked)
    (tmp_path / "bob.py").write_text("x = 1\n")
    (tmp_path / "eve.py").write_text("x = 1\n")
    for name in ("bob.py", "eve.py", "eve"):  # eve is a folder, and eve.py another submission
        write_feedback(tmp_path / "pages", graded_as(judged, asked, name=name), tmp_path / name, asked)
    assert sorted(os.listdir(tmp_path / "pages")) == ["bob.html", "eve.html", "eve.py.html"]
    names = ["ann", "ann.py", "../ann", "a b", "a_b", ".hidden", "ann.html"]
    pages = [page_name(name) for name in names]
    assert pages[:2] == ["ann.html", "ann.py.html"]
    assert len(set(pages)) == len(names)
    assert all("/" not in each and each[0] != "." for each in pages)


@pytest.mark.parametrize(
    "source",
    ['kind = "sync"', 'kind = "script"', 'kind = "tests"', *(f'kind = "lesson"\nlesson = {n}' for n in NUMBERS)],
)
def test_every_claim_says_what_it_expects(source):
    kind = assignment(source).kind
    assert all(len(kind.expected(claim)) > 10 for claim in kind.claims())


def test_renamed_copies_are_similar_and_given_code_does_not_count(tmp_path):
    page_of = get_lesson(5).page()
    ring = get_lesson(5).answer()
    renamed = ring.replace("tensor", "buffer_of_mine").replace("    ", "      # another comment\n    ", 1)
    lines = (f"    if comm.rank == {n}:\n        tensor.mul_({n}).add_(comm.world_size - {n})\n" for n in range(20))
    other = "def all_reduce(comm, tensor):\n" + "".join(lines)
    sources = {"ring": ring, "renamed": renamed, "other": other, "page": page_of, "page2": page_of, "none": "f(("}
    paths = {name: tmp_path / f"{name}.py" for name in sources}
    for name, source in sources.items():
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


def test_group_shares_its_points_and_can_give_them_only_together():
    asked = assignment(GROUPS)
    assert asked.points == {"zero1_steps": 1, "zero1_sends": 1, "zero3_steps": 2.5, "zero3_holds": 2.5}

    def points(*passed):
        scored = asked.scored([Judged(name, name in passed, "") for name in asked.points], Judged("", None, ""))
        return {each.name: each.points for each in scored if each.points}

    assert points("zero1_steps", "zero3_steps") == {"zero1_steps": 1}
    assert points("zero3_holds", "zero3_steps") == {"zero3_holds": 2.5, "zero3_steps": 2.5}


HINTED = 'kind = "lesson"\nlesson = 9\nhint_cost = 0.5\n'


@pytest.mark.parametrize(
    ("shown", "held"), [(0, [1, 2, 3]), (2, [3]), (3, []), (None, []), ("edited", []), ("wrong", [])]
)
def test_shown_hint_costs_its_points_and_an_edited_line_costs_all(shown, held, tmp_path, monkeypatch):
    monkeypatch.setattr("cos598d.tools.grade.kinds.lesson.warm_up", lambda _: None)
    asked, lesson = assignment(HINTED), get_lesson(9)
    assert asked.points == {
        **dict.fromkeys(("predicts_bytes", "predicts_seconds", "predicts_a_step"), 1.0),
        **{f"without_hint_{number}": 0.5 for number in (1, 2, 3)},
    }
    line = progress.hint_line(lesson, shown if isinstance(shown, int) else 0)
    line = {None: "", "edited": line.replace("shown: 0", "shown: 1")}.get(shown, line)
    code = lesson.page() if shown == "wrong" else lesson.answer()
    (tmp_path / "lesson9.py").write_text(f"{code}\n{line}\n")
    judged = {each.name: each for each in asked.kind.judge(tmp_path, list(asked.points))}
    assert list(judged) == list(asked.points)
    assert [number for number in (1, 2, 3) if judged[f"without_hint_{number}"].passed] == held
    assert judged["predicts_bytes"].passed == (shown != "wrong")
    if shown in (None, "edited"):
        assert "keep the line that `learn 9` writes" in judged["without_hint_1"].words
    assert all(asked.kind.expected(name) for name in asked.points)
    # The cost of hints does not change whether a file passes. One line says what they cost.
    mine = graded_as(judged.values(), asked)
    assert mine.status == ("wrong" if shown == "wrong" else "passed")
    assert mine.points == (0 if shown == "wrong" else 3 + 0.5 * len(held))
    text, row = page(mine, tmp_path, asked), mine.row(asked)
    assert text.count("Hint points:") == 1
    assert "without_hint" not in text + row["words"] + row["failures"]
    assert f"Hint points: {0.5 * len(held):g} of 1.5, because " in html.unescape(text)
    assert row["failures"].count("Hint points") == (len(held) < 3)
    if shown == "wrong":
        assert "Hint points: 0 of 1.5, because not all checks pass." in text
        assert row["words"].startswith("predicts_bytes: ")


def test_missing_file_is_wrong_even_if_only_hints_give_points():
    asked = assignment(HINTED + "[points]\ndefault = 0\n")
    assert list(asked.points) == ["without_hint_1", "without_hint_2", "without_hint_3"]
    assert graded_as([], asked).status == "wrong"


def test_hints_cost_nothing_by_default():
    plain = assignment('kind = "lesson"\nlesson = 9\n')
    assert not any(name.startswith("without_hint") for name in plain.points)
    assert plain.digest != assignment(HINTED).digest
    own = assignment(HINTED + "[points]\nwithout_hint_1 = 2\n")
    assert [own.points[f"without_hint_{number}"] for number in (1, 2, 3)] == [2.0, 0.5, 0.5]


def golfed(sent, seconds, ratio):
    return GolfScore("", "", sent, seconds, seconds / 2, 2 * seconds, ratio)


def with_golf(name, golf, student=None, graded="2026-10-02T10:00:00Z"):
    end = SubmissionEnd(Judged("", None, ""), golf=golf)
    result = Result(name, "", "", (), end, 1.0, graded)
    return Graded(result, (), HandedIn(None), student)


def test_board_is_sorted_has_the_answer_and_no_formula_of_a_student(tmp_path):
    path = tmp_path / "board.csv"
    graded = [
        # On a fast day, with fewer seconds than the fast file on a slow day.
        with_golf("=slow\x1b.py", (golfed(10, 0.3, 1.5), golfed(10, 0.2, 1.0))),
        with_golf("fast.py", (golfed(10, 1.0, 0.5), golfed(10, 2.0, 1.0)), Student("1", "=Ann", "", "-B"), "today"),
        with_golf("wrong.py", None),
        with_golf("few.py", (golfed(8, 9.0, 4.5), golfed(10, 2.0, 1.0))),
    ]
    assert write_board(path, graded, 8) == 3
    with path.open() as file:
        rows = list(csv.DictReader(file))
    named = [row["submission"] or row["name"] for row in rows]
    assert named == ["few.py", "fast.py", "(the answer)", "'=slow\\x1b.py"]
    assert [row["times_the_limit"] for row in rows] == ["1.000", "1.250", "1.250", "1.250"]
    assert [row["times_the_answer"] for row in rows] == ["4.500", "0.500", "1.000", "1.500"]
    assert [row["measured"][:5] for row in rows] == ["2026-", "today", "", "2026-"]
    assert (rows[1]["name"], rows[1]["section"], rows[1]["answer_seconds"]) == ("'=Ann", "'-B", "2")
    assert write_board(path, [with_golf("few.py", (golfed(0, 1.0, 1.0),) * 2)], 0) == 1  # no bytes: lesson 9
    assert write_board(path, [], 8) == 0
    with pytest.raises(UserError, match="cannot be written"):
        write_board(path / "in a file", [], 0)


def test_golf_score_is_kept_with_its_result(tmp_path):
    kept = KeptResults(tmp_path / "grades.csv")
    result = with_golf("ann.py", (golfed(10, 3.0, 1.5), golfed(10, 2.0, 1.0))).result
    kept.keep(result)
    assert kept.get("ann.py", "") == result
    (place,) = (tmp_path / "grades.csv.results").iterdir()
    said = json.loads(place.read_text())
    del said["end"]["golf"]
    place.write_text(json.dumps(said))
    assert kept.get("ann.py", "").end.golf is None
    for bad in ([1], ["x", 1, 1, 1], [asdict(golfed(1, 0, 1))] * 2):
        said["end"]["golf"] = bad
        place.write_text(json.dumps(said))
        assert kept.get("ann.py", "") is None


def test_golf_measures_only_files_that_pass(tmp_path, monkeypatch):
    kind = assignment(HINTED).kind
    (tmp_path / "lesson9.py").write_text("# mine\n")
    host = [{"seconds": 1.0, "host_cpu_percent": 0.0, "process_cpu_seconds": 0.0}]
    monkeypatch.setattr(session, "ROUNDS", 3)
    seen = []

    def takes(_, path, answer):
        seen.append((path and path.name, answer))
        return Stroke(7 if path else 9, 2.0 if path else 4.0, host)

    monkeypatch.setattr(session, "stroke", takes)
    mine, answers = kind.golf(tmp_path, [], "the text")
    assert (mine.bytes, mine.seconds, mine.ratio, answers.bytes, answers.seconds) == (7, 2.0, 0.5, 9, 4.0)
    assert [name for name, _ in seen] == [None, "lesson9.py", "lesson9.py", None, None, "lesson9.py"]
    assert {answer for _, answer in seen} == {"the text"}
    assert kind.golf(tmp_path, ["without_hint_2"], "the text") == (mine, answers)
    assert kind.golf(tmp_path, ["predicts_bytes"], "") is None
    assert assignment('kind = "lesson"\nlesson = 3\n').kind.golf(tmp_path, [], "") is None
    assert assignment('kind = "sync"\n').kind.golf(tmp_path, [], "") is None

    def fails(*_):
        raise UserError("not a round of golf")

    monkeypatch.setattr(session, "stroke", fails)
    assert kind.golf(tmp_path, [], "") is None
