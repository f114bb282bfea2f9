"""`grade` keeps its process, its results and its next submission out of a submission's reach."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from grading import GET_DUMPABLE, assignment_by, rows_of, show_grader
from programs import ROOT
from test_assignment import RUNNER

from cos598d.commands.cli import main
from cos598d.errors import UsageError, UserError
from cos598d.tools.check import supervisor
from cos598d.tools.check.claims import CLAIMS
from cos598d.tools.grade import processes, submission
from cos598d.tools.grade.folder import SubmittedClass, submissions_in
from cos598d.tools.grade.rights import User, user_for
from cos598d.tools.grade.submission import grading
from cos598d.tools.learn import lessons, session
from cos598d.tools.learn.lessons import get_lesson
from cos598d.tools.learn.picture.probe import Recorded

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user's rights")
FORGED = {"score": 100, "output": "full points", "tests": []}
_shown = pytest.fixture(autouse=True)(show_grader)


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\n")
    return tmp_path / "mine.py"


def write_traps(folder):
    """Modules that `grade` imports; whoever runs one forges result.json and leaves with exit code 0."""
    trap = f"import os\nopen('result.json', 'w').write({json.dumps(FORGED)!r})\nos._exit(0)\n"
    (folder / "cos598d").mkdir(parents=True)
    for name in ("psutil.py", "random.py", "argparse.py", "json.py", "cos598d/__init__.py"):
        (folder / name).write_text(trap)


def test_grade_refuses_to_start_where_it_would_import_from_a_submission(tmp_path, monkeypatch, capsys):
    (tmp_path / "ann" / "lib").mkdir(parents=True)
    (tmp_path / "bob.py").write_text("x = 1\n")
    places = {
        # A submission below the folder it is started in is well.
        tmp_path: [["ann", "--csv", "g.csv"], ["ann/lib", "--gradescope", "r.json"]],
        tmp_path / "ann": [[".", "--csv", "g.csv"], ["../ann", "--gradescope", "r.json"], ["..", "--csv", "g.csv"]],
        tmp_path / "ann" / "lib": [["..", "--gradescope", "r.json"]],
    }
    monkeypatch.setattr("cos598d.commands.grade._one", lambda *_: 0)
    monkeypatch.setattr("cos598d.commands.grade._class", lambda *_: 0)
    for place, commands in places.items():
        for words in commands:
            with monkeypatch.context() as patch:
                patch.chdir(place)
                patch.setattr(sys, "path", [str(place), *sys.path])
                code = main(["grade", *words, "--assignment", "sync"])
            said = capsys.readouterr().err
            assert code == (0 if place == tmp_path else 2)
            assert (f"import modules from {place}, which" in said) == (place != tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    assert main(["grade", "bob.py", "--gradescope", "r.json", "--assignment", "sync"]) == 2
    assert "in another folder" in capsys.readouterr().err


def test_classroom_50_recipe_imports_nothing_of_the_checkout(tmp_path):
    """The page's recipe starts in a checkout that has modules of the names that it imports."""
    page = (ROOT / "docs" / "teaching.md").read_text()
    recipe = re.search(r"```python\n(.*?)```", page.partition("## Classroom 50")[2], flags=re.DOTALL)[1]
    (tmp_path / "teacher").mkdir()
    # Python may be below /root here.
    (tmp_path / "teacher" / "autograder.py").write_text(recipe.replace('["grade", ', '["grade", "--as_root", '))
    (tmp_path / "teacher" / "lab1.toml").write_text('kind = "sync"\n')
    checkout = tmp_path / "checkout"
    write_traps(checkout)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **RUNNER}
    words = [sys.executable, str(tmp_path / "teacher" / "autograder.py")]
    ended = subprocess.run(words, cwd=checkout, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    result = json.loads((checkout / "result.json").read_text())
    assert (result["score"], result["max-score"]) == (0, len(CLAIMS)), ended.stdout
    assert "the submission has no my_sync.py" in result["tests"][0]["output"]


@pytest.mark.parametrize(
    ("end", "is_taken"),
    [(f"exit {code}", code <= 2) for code in (0, 1, 2, 3, 143)] + [("kill -9 $$", False)],
)
def test_results_of_a_killed_grader_do_not_count(tmp_path, end, is_taken):
    """In place of the grader runs a script, whose results somebody else has written when it ends."""
    results = tmp_path / "results" / "results.json"
    grader = tmp_path / "python"
    grader.write_text(f"#!/bin/bash\necho '{json.dumps(FORGED)}' > {results}\n{end}\n")
    grader.chmod(0o755)
    environ = {"PATH": os.environ["PATH"], "AUTOGRADER_ROOT": str(tmp_path), "AUTOGRADER_PYTHON": str(grader)}
    program = ROOT / "cos598d" / "tools" / "grade" / "run_autograder.sh.txt"
    assert subprocess.run(["bash", str(program)], env=environ, check=False).returncode == 0
    found = json.loads(results.read_text())
    assert found["score"] == (100 if is_taken else 0)
    assert is_taken or "nothing could be judged" in found["output"]


def test_the_grader_is_hidden_from_what_it_grades(mine):
    with grading(assignment_by(lambda _: ""), as_root=True):
        assert ctypes.CDLL(None).prctl(GET_DUMPABLE, 0, 0, 0, 0) == 0


def what_it_may(folder):
    """What a submission's processes can do, as JSON."""

    def tried(function, *arguments):
        try:
            function(*arguments)
            return True
        except OSError:
            return False

    (folder / "own").write_text("x")
    (folder / "mine.py").write_text("x = 2\n")
    return json.dumps(
        {
            "ids": [*os.getresuid(), *os.getresgid(), *os.getgroups()],
            "home": os.stat(os.environ["HOME"]).st_uid,
            "signals the grader": tried(os.kill, os.getppid(), 0),
            "reads its memory": tried(open, f"/proc/{os.getppid()}/mem", "rb"),
            "becomes root again": tried(os.setuid, 0),
        }
    )


@as_root
def test_root_grader_runs_submissions_as_nobody(mine, monkeypatch):
    monkeypatch.setattr(submission, "needed_by", lambda _: [tempfile.gettempdir()])
    judged = []
    with grading(assignment_by(what_it_may)) as grader:
        assert grader.remark == ""
        end = grader.grade(mine, judged.append)
    assert end.remark == "", end
    may = json.loads(judged[0].words)
    assert may["home"] != 0
    assert may["ids"] == [may["home"]] * 3 + [may["ids"][3]] * 3  # and no other groups
    refused = ("signals the grader", "reads its memory", "becomes root again")
    assert {name: may[name] for name in refused} == dict.fromkeys(refused, False)
    assert mine.read_text() == "x = 1\n"


@as_root
def test_grader_names_a_needed_file_that_nobody_cannot_read():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        hidden, open_to_all = Path(folder, "hidden"), Path(folder, "open")
        Path(folder).chmod(0o755)
        for place in (hidden, open_to_all):
            place.mkdir()
            (place / "file").write_text("x")
        hidden.chmod(0o700)
        assert isinstance(user_for([str(open_to_all), str(open_to_all / "file")])[0], User)
        # As a venv's python, which links to one in a home folder.
        (open_to_all / "link").symlink_to(hidden / "file")
        inside = f"{hidden}, which has {hidden / 'file'}"
        for path, what in {hidden: hidden, hidden / "file": inside, open_to_all / "link": inside}.items():
            user, said = user_for([str(open_to_all), str(path)])
            assert user is None
            assert said == (
                f"The user nobody cannot read {what}, so submissions can only run as root: they can end the "
                "grader, change its results and read all files."
            )


@as_root
def test_grading_as_root_needs_the_teachers_flag(mine, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        monkeypatch.setattr(submission, "needed_by", lambda _: [folder])
        words = "The user nobody cannot read .* or give --as_root"
        with pytest.raises(UsageError, match=words), grading(assignment_by(lambda _: "")):
            pass
        with grading(assignment_by(lambda _: ""), as_root=True) as grader:
            assert grader.remark.startswith("The user nobody cannot read")


@pytest.mark.parametrize(
    ("hides", "is_parallel", "words"),
    [
        ((Path("answers"),), False, "could read the answers in .*, since unshare is refused. Delete these folders"),
        ((), True, "cannot keep submissions apart here: unshare is refused"),
    ],
)
def test_grading_is_refused_without_the_namespaces_it_needs(monkeypatch, hides, is_parallel, words):
    monkeypatch.setattr(submission, "what_stops", lambda _: "unshare is refused")
    assignment = assignment_by(str)
    assignment.kind.hides = hides
    with pytest.raises(UsageError, match=words), grading(assignment, as_root=True, is_parallel=is_parallel):
        pass


def test_user_takes_a_folder_and_follows_no_link(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(os, "chown", lambda path, *ids, follow_symlinks: taken.append((path, ids, follow_symlinks)))
    (tmp_path / "own" / "deep").mkdir(parents=True)
    (tmp_path / "own" / "deep" / "link").symlink_to("/etc")
    User(7, 8).take(tmp_path / "own")
    assert {os.path.normpath(path) for path, _, _ in taken} == {
        str(tmp_path / name) for name in ("own", "own/deep", "own/deep/link")
    }
    assert {each[1:] for each in taken} == {((7, 8), False)}


def leave_one_behind(_):
    return subprocess.Popen(["sleep", "100"], start_new_session=True).pid


def test_process_that_survives_its_submission_is_ended_with_the_next(mine, monkeypatch):
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.3)
    judged = []
    with grading(assignment_by(leave_one_behind), as_root=True) as grader:
        with monkeypatch.context() as patch:
            patch.setattr(psutil.Process, "kill", lambda _: None)
            end = grader.grade(mine, judged.append)
        assert end.remark == "Some processes could not be ended."
        left = psutil.Process(int(judged[0].words))
        assert left.is_running()
        assert grader.grade(mine, judged.append).remark == ""
        assert not left.is_running()
        assert not psutil.pid_exists(int(judged[1].words))


def test_process_of_an_earlier_submission_is_not_counted_for_the_next(monkeypatch):
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.1)
    tree = supervisor.ProcessTree()
    sleeper = subprocess.Popen(["sleep", "100"])
    try:
        assert [each.pid for each in tree.own(tree.processes())] == [sleeper.pid]
        with monkeypatch.context() as patch:
            patch.setattr(psutil.Process, "kill", lambda _: None)
            tree.begin()
        assert [each.pid for each in tree.processes()] == [sleeper.pid]
        assert tree.own(tree.processes()) == []
    finally:
        sleeper.kill()
        sleeper.wait()


def test_next_grader_removes_folders_of_a_killed_one(tmp_path, scratch, monkeypatch):
    monkeypatch.setattr(processes, "scratch_base", lambda: str(scratch))
    (scratch / "cos598d-grade-old" / "tmp").mkdir(parents=True)
    (scratch / "cos598d-grade-file").write_text("")
    (scratch / "cos598d-grade-link").symlink_to(tmp_path)
    (scratch / "grade-of-somebody").mkdir()
    with processes.scratch_folder() as own, grading(assignment_by(str), as_root=True):
        left = {path.name for path in scratch.iterdir()}
    assert left == {own.name, "cos598d-grade-file", "cos598d-grade-link", "grade-of-somebody"}
    assert not own.exists()


def test_submissions_keep_their_full_names_and_skipped_files_are_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("ann", "_dan", "carl"):
        (tmp_path / "class" / name).mkdir(parents=True)
    for name in ("ann.py", "bob.zip", "_eve.py", ".DS_Store"):
        (tmp_path / "class" / name).write_text("x = 1\n")
    (tmp_path / "class" / "link.py").symlink_to("ann.py")
    found, passed_over = submissions_in(tmp_path / "class")
    assert [path.name for path in found] == ["ann", "ann.py", "carl"]
    assert passed_over == [".DS_Store", "_dan", "_eve.py", "bob.zip", "link.py"]
    assignment = assignment_by(lambda _: "")
    with grading(assignment, as_root=True) as grader:
        names = {path.name for path in found}
        SubmittedClass(found, assignment, tmp_path / "g.csv").grade(names, grader, 1, lambda _: None)
    statuses = {name: row["status"] for name, row in rows_of(tmp_path / "g.csv").items()}
    assert statuses == {"ann": "wrong", "ann.py": "passed", "carl": "wrong"}
    (tmp_path / "lab.toml").write_text('kind = "sync"\n')
    (tmp_path / "class" / "ann.py").unlink()
    assert main(["grade", "class", "--assignment", "lab.toml", "--csv", "h.csv", "--as_root"]) == 0
    assert ": .DS_Store, _dan, _eve.py, bob.zip, link.py (" in capsys.readouterr().out
    (tmp_path / "zips").mkdir()
    (tmp_path / "zips" / "bob.zip").write_text("")
    assert main(["grade", "zips", "--assignment", "lab.toml", "--csv", "h.csv"]) == 2
    assert "a Python file for each; it only has bob.zip." in capsys.readouterr().err


def test_missing_answers_are_named_in_the_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "lessons"
    shutil.copytree(Path(lessons.__file__).parent, copy, ignore=shutil.ignore_patterns("answer"))
    monkeypatch.setattr(lessons, "files", lambda _: copy)
    monkeypatch.setattr(session, "warm_up", lambda _: None)
    monkeypatch.setattr(session, "record_file", lambda *_: Recorded(["an event"], []))
    with pytest.raises(UserError, match="has no answer to lesson 3: its repository has"):
        get_lesson(3).answer()
    assert main(["learn", "3", "--picture"]) == 1
    assert "has no answer to lesson 3" in capsys.readouterr().err
