"""Assignments from files, and the formats of teachers' tools held to the fields that are published for them."""

import json
import os
import re
import stat
import subprocess
import sys
import zipfile

import pytest
from grading import assignment, run_autograder
from programs import ROOT

from cos598d.commands.cli import main
from cos598d.errors import UsageError
from cos598d.tools.audit.judge.verdict import AuditFinding, AuditVerdict, Coverage
from cos598d.tools.check.claims import CLAIMS
from cos598d.tools.grade.assignment import VISIBILITIES, Limits, assignment_of
from cos598d.tools.grade.kinds.script import ScriptKind, score
from cos598d.tools.grade.result_files import ResultFiles, gradescope
from cos598d.tools.grade.scored import Judged, Scored, exit_code
from cos598d.tools.learn.lessons import NUMBERS, get_lesson

# https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format: field -> type
NUMBER = (int, float)
TOP = {"extra_data": dict, "tests": list, "leaderboard": list, **dict.fromkeys(("score", "execution_time"), NUMBER)}
TOP |= dict.fromkeys(("output", "output_format", "test_output_format", "test_name_format"), str)
TOP |= dict.fromkeys(("visibility", "stdout_visibility"), str)
TEST = {"extra_data": dict, "tags": list, **dict.fromkeys(("score", "max_score"), NUMBER)}
TEST |= dict.fromkeys(("status", "name", "name_format", "number", "output", "output_format", "visibility"), str)
LEADERBOARD = {"name": str, "value": (int, float, str), "order": str}
FORMATS = ("text", "html", "simple_format", "md", "ansi")
# schemas/result-v1.schema.json of foundation50/classroom50: what it requires, and patterns.
UTC = r"\d{4}-\d{2}-\d{2}T([01]\d|2[0-3]):[0-5]\d:[0-5]\dZ"
CLASSROOM50 = {
    "schema": "classroom50/result/v1",
    "classroom": ".+",
    "assignment": ".+",
    "assignment_type": "individual|group",
    "owner": ".+",
    "submission": "submit/.*",
    "commit": ".+",
    "release": ".+",
    "review": ".+",
    "datetime": UTC,
}
RUNNER = {
    "CLASSROOM": "cos598d",
    "ASSIGNMENT": "lab1",
    "OWNER": "alice",
    "SUBMISSION_TAG": "submit/2026-06-01T14-32-05Z-a1b2c3d",
    "COMMIT_URL": "https://github.com/x/commit/abc",
    "RELEASE_URL": "https://github.com/x/releases/tag/y",
}
ONE = 'kind = "sync"\n[points]\ndefault = 0\naverages_gradients = 4\nlets_go = 1\n'
LESSON_5 = 'kind = "lesson"\nlesson = 5\n'


def is_gradescopes(results):
    """Hold the value of a results.json to the published fields."""
    held(results, TOP)
    assert {"score", "tests"} <= results.keys()
    assert {results[name] for name in ("output_format", "test_output_format", "test_name_format")} <= set(FORMATS)
    assert {results["visibility"], results["stdout_visibility"]} <= set(VISIBILITIES)
    for test in results["tests"]:
        held(test, TEST)
        assert test["status"] in ("passed", "failed")
        assert test["visibility"] in VISIBILITIES
        assert 0 <= test["score"] <= test["max_score"]
    for row in results.get("leaderboard", ()):
        held(row, LEADERBOARD)
        assert row["order"] in ("asc", "desc")
    assert results["score"] == pytest.approx(sum(test["score"] for test in results["tests"]))


def held(value, fields):
    assert value.keys() <= fields.keys()
    assert [(name, each) for name, each in value.items() if not isinstance(each, fields[name])] == []


def is_classroom50s(result):
    optional = {"graded_at", "submitted_by"}
    assert result.keys() - optional == CLASSROOM50.keys() | {"score", "max-score", "tests"}
    assert [name for name, form in CLASSROOM50.items() if not re.fullmatch(form, result[name])] == []
    assert re.fullmatch(UTC, result["graded_at"])
    for each in (result, *result["tests"]):
        assert type(each["score"]) is int
        assert type(each["max-score"]) is int
        assert 0 <= each["score"] <= each["max-score"]
    for test in result["tests"]:
        assert test["test-name"]
        assert type(test["passed"]) is bool


def test_assignment_gives_points_to_each_test():
    plain = assignment_of("sync")
    assert plain.points == {claim.name: 1.0 for claim in CLAIMS}
    assert (plain.kind.file, plain.kind.class_name, plain.kind.world_sizes) == ("my_sync.py", "MySync", (1, 2, 3, 4))
    assert plain.limits == Limits()
    mine = assignment(
        'kind = "sync"\ntitle = "Lab"\nworld_sizes = [4, 2, 2]\nvisibility = "after_due_date"\n'
        "[points]\ndefault = 2\nlets_go = 0\naverages_gradients = 2.5\n[limits]\nprocesses = 7\n"
    )
    assert mine.points == {claim.name: 2.0 for claim in CLAIMS if claim.name != "lets_go"} | {"averages_gradients": 2.5}
    assert (mine.kind.world_sizes, mine.visibility, mine.limits.processes) == ((2, 4), "after_due_date", 7)
    script = assignment('kind = "script"\nwords = ["--rank", "{rank}"]\n[points]\nstale_gradients = 3\n')
    asked = assignment('kind = "script"\nparameters_least = 1000\nloss_below = 1\n').kind
    assert (asked.parameters_least, asked.loss_below) == (1000, 1.0)
    lesson = assignment('kind = "lesson"\nlesson = 3\n')
    assert (lesson.kind.file, set(lesson.points.values())) == ("lesson3.py", {1.0})
    assert script.points == {"ends_well": 1, "trains": 1, "no_fault": 1, "stale_gradients": 3}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "lab.toml has no kind. Give one of sync, script, lesson, tests."),
        ("kind = 3", "lab.toml line 1: kind: it is 3, where one of sync, script, lesson, tests is expected."),
        ("kind = 'x'", 'lab.toml line 1: kind: it is "x", where one of sync, script, lesson, tests is expected.'),
        ('kind = "sync"\n[points\n', "lab.toml is not valid TOML: "),
        ('kind = "sync"\nclass = "My Sync"', "lab.toml line 2: class is 'My Sync'. Give a class's name, as MySync."),
        ('kind = "sync"\nfile = "../x.py"', "lab.toml line 2: file is '../x.py'. Give a Python file's name"),
        ('kind = "sync"\n\nworld_sizes = [2, 17]', "lab.toml line 3: world_sizes: its [1] is 17"),
        ('kind = "sync"\nseconds = 0', "lab.toml line 2: seconds: it is 0, where a number above 0 is expected."),
        ('kind = "sync"\nseconds = nan', "lab.toml line 2: seconds: it is NaN"),
        ('kind = "sync"\nseconds = 2026-01-01', "lab.toml line 2: seconds: it has a date or a time"),
        ('kind = "sync"\nwords = ["x"]', "lab.toml line 2: unknown key words. Use one of title, kind,"),
        ('kind = "sync"\nvisibility = "never"', "lab.toml line 2: visibility: it is"),
        ('kind = "sync"\n[points]\nlets_go = -1', "lab.toml line 3: lets_go: it is -1, where a number of points from"),
        ('kind = "sync"\n[points]\nis_fast = 1', "lab.toml line 3: unknown key is_fast. Use one of default, starts"),
        ('kind = "sync"\n[points]\ndefault = 0', "lab.toml: no test gives points"),
        ('kind = "sync"\npoints = 3', "lab.toml line 2: points is not a table"),
        ('kind = "sync"\n[limits]\ncores = 1', "lab.toml line 3: unknown key cores"),
        ('kind = "lesson"\nlesson = 99', "lab.toml line 2: "),
        ('kind = "script"\nworld_size = 1', "lab.toml line 2: world_size: it is 1, where a whole number from 2 to 64"),
        ('kind = "script"\nparameters_least = -1', "lab.toml line 2: parameters_least: it is -1, where a whole number"),
        ('kind = "script"\n[points]\nlets_go = 1', "lab.toml line 3: unknown key lets_go. Use one of default, ends"),
        (f'{LESSON_5}[groups.a]\ntests = ["x"]', "lab.toml line 4: tests: x is not a test"),
        (f"{LESSON_5}[groups.a]\npoints = 1", "lab.toml: the group groups.a has no tests"),
        (f'{LESSON_5}[groups.a]\ntests = ["sums"]\n[points]\nsums = 1', "lab.toml line 4: tests: sums has points"),
        (f"{LESSON_5}[late]\npoints_per_day = 1", "lab.toml: [late] needs deadline and points_per_day"),
        (f"{LESSON_5}[late]\ndeadline = 2026-10-01T12:00:00\npoints_per_day = 1", "lab.toml line 4: deadline is 2026"),
        ("[parts.a]\nlesson = 1", "lab.toml [parts.a] has no kind"),
        ('[parts."../a"]\nkind = "sync"', "lab.toml: the part ../a has an odd name"),
        ("[parts]\na = 1", "lab.toml line 2: a is not a table. Write [parts.a]"),
        ('kind = "sync"\nhint_cost = 1', "lab.toml line 2: unknown key hint_cost"),
        *(
            (f"{LESSON_5}hint_cost = {bad}", "lab.toml line 3: hint_cost: it is")
            for bad in ("-1", '"x"', "true", "nan")
        ),
    ],
)
def test_wrong_assignment_is_refused_with_its_line(source, says):
    with pytest.raises(UsageError) as refusal:
        assignment(source)
    assert str(refusal.value).startswith(says)
    assert str(refusal.value).endswith(".")
    assert "\n" not in str(refusal.value)


def test_teaching_page_lists_every_test_by_name():
    page = (ROOT / "docs" / "teaching.md").read_text().partition("### Tests by name")[2].partition("\n## ")[0]
    rows = [re.fullmatch(r"\| `?([\w ]+?)`? \| (.*) \|", line) for line in page.splitlines()]
    said = {row[1]: re.findall(r"`(\w+)`", row[2]) for row in rows if row and row[1] != "of"}
    found = {name: assignment_of(name).kind.claims() for name in ("sync", "script", "tests")}
    found |= {f"lesson {n}": assignment(f'kind = "lesson"\nlesson = {n}\n').kind.claims() for n in NUMBERS}
    assert said == {of: [name for name, is_scored in claims.items() if is_scored] for of, claims in found.items()}


def test_unreadable_assignment_is_refused(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b'title = "\xff"')
    for path, says in ((tmp_path / "nosuch.toml", "No such file"), (tmp_path / "latin.toml", "is not UTF-8")):
        with pytest.raises(UsageError, match=says):
            assignment_of(str(path))


def test_gradescope_results_have_its_fields_and_no_points_for_unjudged_tests():
    scored = [
        Scored("right", True, "it holds", 2.5, 2.5),
        Scored("wrong", False, "it does\nnot \x1b[31m", 0, 1),
        Scored("unknown", None, "a rank was lost", 0, 3),
    ]
    results = gradescope(scored, "Lab 1", 3.21, "after_published", [("ms per step", 1.5, "asc")])
    is_gradescopes(json.loads(json.dumps(results)))
    assert results["score"] == 2.5
    assert [test["status"] for test in results["tests"]] == ["passed", "failed", "failed"]
    assert results["tests"][1]["output"] == "it does\nnot \\x1b[31m"
    assert results["tests"][2]["output"] == "could not be judged: a rank was lost"
    assert [exit_code(scored[:number]) for number in (1, 2, 3)] == [0, 1, 2]


def test_result_files_grow_test_by_test(tmp_path, monkeypatch):
    for name, value in RUNNER.items():
        monkeypatch.setenv(name, value)
    paths = tmp_path / "results.json", tmp_path / "result.json"
    files = ResultFiles(assignment(ONE), *paths)

    def scores():
        results, result = (json.loads(path.read_text()) for path in paths)
        is_gradescopes(results)
        is_classroom50s(result)
        assert result["max-score"] == 5
        assert result["score"] == results["score"]
        return results["score"], [test["extra_data"]["verdict"] for test in results["tests"]]

    assert scores() == (0, ["not judged", "not judged"])
    files.add(Judged("averages_gradients", True, "yes"))
    assert scores() == (4, ["passed", "not judged"])
    files.finish(Judged("", False, "time was over"))
    assert scores() == (4, ["passed", "wrong"])


def test_classroom_50_needs_its_variables_and_whole_points(monkeypatch, tmp_path):
    for name in RUNNER:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="CLASSROOM, ASSIGNMENT, OWNER, .* are not set"):
        ResultFiles(assignment(ONE), None, tmp_path / "result.json")
    for name, value in RUNNER.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="takes only whole points, but a test gives 2.5"):
        ResultFiles(assignment(ONE.replace("lets_go = 1", "lets_go = 2.5")), None, tmp_path / "result.json")
    monkeypatch.setenv("SUBMISSION_TAG", "main")
    with pytest.raises(UsageError, match="begins with submit/"):
        ResultFiles(assignment(ONE), None, tmp_path / "result.json")


def test_audit_verdict_becomes_points():
    claims = ["ends_well", "trains", "no_fault", "summed", "weights_drift", "stale_gradients"]

    def passed(verdict, end="", **asked):
        return [judged.passed for judged in score(verdict, claims, end, ScriptKind(**asked))]

    def verdict(findings=(), ranks=2, steps=5, judged=3, loss=0.5):
        seen = Coverage(ranks, 2, steps, judged, 1.0, 0.1, 0.0, parameters=60, loss=loss)
        return AuditVerdict("train.py", seen, tuple(findings), ("closures",))

    summed = AuditFinding("summed", ("2 times the mean",), ("train.py", 7, "step"), ("weights_drift",))
    assert passed(verdict()) == [True] * 6
    assert passed(verdict([summed])) == [True, True, False, False, False, True]
    assert passed(verdict(judged=0)) == [True, True, None, None, None, None]
    assert passed(verdict(steps=2)) == [True, False, False, False, False, False]
    assert passed(verdict(ranks=1)) == [True, False, False, False, False, False]
    assert passed(None, "it ended with exit code 1") == [False] * 6
    assert passed(verdict(), "it ended with exit code 1") == [False, True, True, True, True, True]
    assert passed(verdict(), parameters_least=60, loss_below=0.6) == [True] * 6
    for asked, loss, says in (
        ({"parameters_least": 61}, 0.5, "its model has 60 parameters, and should have 61"),
        ({"loss_below": 0.5}, 0.5, "its loss is 0.5 at the end, and should be below 0.5"),
        ({"loss_below": 9}, None, "its loss is not known at the end"),
    ):
        assert passed(verdict(loss=loss), **asked) == [True, False, False, False, False, False]
        assert next(score(verdict(loss=loss), ["trains"], "", ScriptKind(**asked))).words.startswith(says)


@pytest.mark.long
def test_check_writes_results_and_a_leaderboard(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.toml").write_text(ONE)
    words = ["check", "all_reduce", "--world_sizes", "2", "--seconds", "60"]
    assert main([*words, "--assignment", "lab.toml", "--gradescope", "results.json"]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    is_gradescopes(results)
    assert {test["name"]: test["score"] for test in results["tests"]} == {"averages_gradients": 4, "lets_go": 1}
    assert [row["name"] for row in results["leaderboard"]] == ["ms per step", "ratio to ddp"]
    assert main(["check", "nosuch.py:Mine", "--gradescope", "results.json"]) == 2
    refused = json.loads((tmp_path / "results.json").read_text())
    assert refused["score"] == 0
    assert "nosuch.py: no such file" in refused["tests"][0]["output"]
    capsys.readouterr()
    for more, says in (
        (["--assignment", "lab.toml"], "--assignment only sets points for --gradescope and --classroom50"),
        (["--gradescope", "no/results.json"], "there is no folder no"),
        (["--gradescope", "r.json", "--assignment", "script"], "script is not for syncs"),
    ):
        assert main([*words, *more]) == 2
        assert says in capsys.readouterr().err


def test_flags_that_cannot_work_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "class" / "ann").mkdir(parents=True)
    (tmp_path / "parts.toml").write_text(SEVERAL)
    (tmp_path / "lab9.toml").write_text('kind = "lesson"\nlesson = 9\n')
    of_class = ["grade", "class", "--as_root", "--csv", "g.csv", "--assignment"]
    of_one = ["grade", "class", "--assignment", "sync", "--gradescope", "r.json"]
    for words, says in (
        (["grade", "."], "--assignment"),
        (["grade", ".", "--assignment", "sync"], "Give --csv FILE for a class"),
        (["grade", ".", "--assignment", "sync", "--csv", "a", "--gradescope", "b"], "Give --csv FILE"),
        (["grade", "nosuch", "--assignment", "sync", "--csv", "a"], "nosuch does not exist"),
        ([*of_class, "sync", "--regrade", "nobody"], "--regrade nobody is not a submission"),
        ([*of_class, "lesson", "--board", "b"], "lesson 0 has no board. Lessons 5, 6, 7, 9 and 11 have one"),
        ([*of_class, "parts.toml", "--board", "b"], "--board needs an assignment of one lesson"),
        ([*of_class, "lab9.toml", "--board", "g.csv"], "is the table's file"),
        ([*of_one, "--board", "b"], "--board is for a class"),
        ([*of_one, "--parallel", "2"], "--parallel is for a class"),
        (["audit", "--gradescope", "r.json", "train.py"], "--gradescope and --classroom50 need --world_size"),
        (["autograder", "--assignment", "nosuch.toml"], "nosuch.toml cannot be read"),
    ):
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code
        assert code == 2
        assert says in capsys.readouterr().err


SEVERAL = """
title = "Weeks 3 and 5"
[parts.mean]
kind = "lesson"
lesson = 3
[parts.ring]
kind = "lesson"
lesson = 5
[parts.ring.points]
sums = 3
"""


@pytest.mark.long
def test_autograder_grades_several_lessons_and_for_classroom_50(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.toml").write_text(SEVERAL)
    assert main(["autograder", "--assignment", "lab.toml"]) == 0
    root = tmp_path / "autograder"
    results = run_autograder(root, {"lesson3.py": get_lesson(3).page(), "theirs/lesson5.py": "def f(:\n"})
    is_gradescopes(results)
    said = {test["name"]: test["output"] for test in results["tests"]}
    assert list(said) == ["mean.averages", "mean.one_ring_each", "ring.sums", "ring.neighbours_only"]
    assert sum(test["max_score"] for test in results["tests"]) == 6
    assert "nothing is filled in yet" in said["mean.averages"]
    assert "this is not valid Python" in said["ring.sums"]
    words = [root / "submission", "--assignment", "lab.toml", "--classroom50", "result.json", "--as_root"]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(root / "source"), **RUNNER}
    ended = subprocess.run([sys.executable, "-m", "cos598d", "grade", *words], env=environ, cwd=tmp_path, check=False)
    assert ended.returncode == 1
    result = json.loads((tmp_path / "result.json").read_text())
    is_classroom50s(result)
    assert {test["test-name"]: test["output"] for test in result["tests"]} == said


@pytest.mark.long
def test_autograder_runs_in_gradescopes_layout(tmp_path, monkeypatch, capsys):
    """A stand-in for Gradescope: the zip's content in source/, run_autograder above it, one submission."""
    monkeypatch.chdir(tmp_path)
    text = ONE.replace('"sync"', '"sync"\nworld_sizes = [2]\nseconds = 60')
    (tmp_path / "lab.toml").write_text(text)
    assert main(["autograder", "--assignment", "lab.toml", "-o", "first.zip"]) == 0
    assert main(["autograder", "--assignment", "lab.toml", "-o", "autograder.zip"]) == 0
    assert (tmp_path / "first.zip").read_bytes() == (tmp_path / "autograder.zip").read_bytes()
    root = tmp_path / "autograder"
    with zipfile.ZipFile("autograder.zip") as archive:
        assert {"setup.sh", "run_autograder", "assignment.toml", "requirements.txt"} <= set(archive.namelist())
        assert all(archive.getinfo(name).external_attr >> 16 & stat.S_IXUSR for name in ("setup.sh", "run_autograder"))
        assert not [name for name in archive.namelist() if "/answer/" in name]
    source = (
        "from cos598d.sync.all_reduce import AllReduce\nclass MySync(AllReduce):\n"
        "    def average(self, name, gradient):\n        self.comm.all_reduce(gradient, name)\n"
    )
    results = run_autograder(root, {"my_sync.py": source})
    needed = (root / "source" / "requirements.txt").read_text()
    assert "torch>=" in needed
    assert "pytest" not in needed
    assert subprocess.run(["bash", "-n", str(root / "source" / "setup.sh")], check=False).returncode == 0
    is_gradescopes(results)
    statuses = {test["name"]: test["status"] for test in results["tests"]}
    assert statuses == {"averages_gradients": "failed", "lets_go": "passed"}
    assert "summed and not averaged" in results["tests"][0]["output"]
    assert "1 of 5 points" in results["output"]
    # Where the grader cannot even start, there is a result that says so.
    assert "could not be started" in run_autograder(root, {}, python="/no/such/python")["output"]
