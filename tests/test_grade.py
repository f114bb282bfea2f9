"""`grade` on right, wrong and hostile submissions: each gets the points that it deserves, and the next one runs."""

import json
import os

import psutil
import pytest
from audit_cases import AVERAGE
from audit_scripts import BY_HAND, with_changes
from grading import grade_one, graded, skip_unless_hidden, start_grade
from programs import ROOT, wait_until

from cos598d.commands.cli import main
from cos598d.tools.check.spawn import patience
from cos598d.tools.grade.assignment import assignment_of
from cos598d.tools.grade.grades import _cell
from cos598d.tools.grade.processes import megabytes_in, scratch_folder
from cos598d.tools.learn.lessons import get_lesson

OPENING = """
import json, os, signal, sys, tempfile, time
from pathlib import Path
from cos598d.sync.all_reduce import AllReduce

class MySync(AllReduce):
    def finish(self):
"""
RIGHT = "        super().finish()\n"
# What each of a class hands in: the body of `finish`. All of them end, even if nobody stops them.
CLASS = {
    "right": RIGHT,
    "sums": "        super().finish()\n        for _, g in self.gradients(): g *= self.comm.world_size\n",
    "hangs": """
        end = time.monotonic() + 60
        while time.monotonic() < end:
            print("all work and no play " * 1000)
""",
    "crashes": "        os.kill(os.getpid(), signal.SIGSEGV)\n",
    # A forged answer, result and score; nothing that it is judged by is left as it was.
    "forges": """
        import cos598d.tools.check.judge, cos598d.tools.check.evidence, torch
        cos598d.tools.check.judge.judge_claims = lambda *_: ["passed"]
        cos598d.tools.check.evidence.Evidence.to_bytes = lambda self: b"passed"
        time.monotonic = lambda: 0.0
        torch.equal = lambda *_: True
        sys.modules.clear()
        folder = Path(tempfile.gettempdir())
        forged = {"score": 1000, "tests": [{"name": "averages_gradients", "score": 1000, "status": "passed"}]}
        for place in ("results.json", "../results.json", "../../results.json", "../grades.csv"):
            Path(place).write_text(json.dumps(forged))
        (folder / f"answer{self.comm.rank}.json").write_text(json.dumps({"rank": self.comm.rank, "how": "returned"}))
        print(json.dumps({"name": "averages_gradients", "passed": True, "words": "", "over": True}))
        Path(__file__).unlink(missing_ok=True)
        os._exit(0)
""",
    "forks": """
        for _ in range(300):
            if os.fork() == 0:
                os.setsid()
                time.sleep(30)
                os._exit(0)
        time.sleep(30)
""",
    "fills": """
        for number in range(40):
            Path(f"large{self.comm.rank}-{number}").write_bytes(bytes(8 << 20))
            time.sleep(0.1)
        time.sleep(30)
""",
    "kills": """
        os.kill(os.getsid(0), signal.SIGKILL)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(30)
""",
}
ASSIGNMENT = """
title = "Lab 1"
kind = "sync"
world_sizes = [2]
seconds = 5

[points]
default = 0
averages_gradients = 5
starts_from_rank_0 = 2.5

[limits]
processes = 40
disk_mb = 60
"""
SCRIPTS = {
    "right": BY_HAND.lstrip(),
    "never_averages": with_changes("by_hand", [(AVERAGE, "")]),
    "leaves_at_once": "import os\nprint('{\"score\": 100}')\nos._exit(0)\n",
}
READS_ANSWER = """import os
from pathlib import Path
import cos598d
from cos598d.tools.learn.lessons import get_lesson

for folder in ("cos598d/tools/learn/lessons/lesson3/answer", "tests/lesson_cases", ".git"):
    place = Path(cos598d.__file__).parents[1] / folder
    assert not place.is_dir() or not os.listdir(place), folder
exec(get_lesson(3).answer())
"""
SCRIPT_ASSIGNMENT = """
kind = "script"
seconds = 100
parameters_least = 1
loss_below = 1e6
[points]
trains = 2
never_averaged = 3
"""
# As a script it takes longer than it may, however quickly Python starts.
SLOW = {"my_sync.py": OPENING + RIGHT + "\nif __name__ == '__main__':\n    time.sleep(100)\n"}


@pytest.fixture
def scratch(scratch):
    """Nothing may be left in it."""
    yield scratch
    assert os.listdir(scratch) == []


@pytest.mark.long
def test_a_class_with_hostile_submissions(start, tmp_path, scratch):
    before = {process.pid for process in psutil.process_iter()}
    submissions = {name: OPENING + body for name, body in CLASS.items()}
    seconds = f"{5 * patience():g}"  # what is right must not be late on a machine that does much else
    assignment = ASSIGNMENT.replace("seconds = 5", f"seconds = {seconds}")
    code, text, rows = graded(start, tmp_path, scratch, submissions, assignment, "in a folder of theirs/my_sync.py")
    assert code == 2, text  # one could not be judged
    scores = {name: (row["score"], row["status"]) for name, row in rows.items()}
    assert scores == {
        "right": ("7.5", "passed"),
        **dict.fromkeys(("sums", "hangs", "crashes"), ("2.5", "wrong")),  # the other claim holds
        **dict.fromkeys(("forges", "forks", "fills"), ("0", "wrong")),
        "kills": ("0", "not judged"),
    }
    assert {row["max_score"] for row in rows.values()} == {"7.5"}
    says = {
        "sums": "averages_gradients: summed and not averaged",
        "hangs": f"still running after {seconds} s - my_sync.py line ",
        "crashes": "SIGSEGV",
        "forges": "my_sync.py: no such file",
        "forks": "It started more than 40 processes",
        "fills": "It wrote more than 60 MB",
        "kills": "was ended (SIGKILL), by the submission or for lack of memory",
    }
    for name, words in says.items():
        assert words in rows[name]["words"], (name, rows[name])
    assert all(float(row["seconds"]) > 0 for row in rows.values())
    lines = text.splitlines()
    assert [line.split()[0] for line in lines if line.partition(" ")[0] in CLASS] == sorted(CLASS)
    assert lines[-1].startswith("8 submissions in ")
    # Nothing is left: no process, no file but the table and the results, and what was handed in is as it was.
    ours = [p for p in psutil.process_iter(["cwd"]) if p.pid not in before and str(tmp_path) in str(p.info["cwd"])]
    assert ours == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("class", "grade.txt", "grades.csv", "grades.csv.results", "lab.toml")
    ]
    left = sorted(path.name for path in (tmp_path / "class").rglob("*") if path.is_file())
    assert left == ["my_sync.py"] * len(CLASS)


def test_a_class_of_scripts(start, tmp_path, scratch):
    code, text, rows = graded(start, tmp_path, scratch, SCRIPTS, SCRIPT_ASSIGNMENT, "in a folder of theirs/train.py")
    assert code == 0, text
    claims = ["ends_well", "trains", "no_fault", "never_averaged"]
    points = {name: [row[claim] for claim in claims] for name, row in rows.items()}
    assert points == {
        "right": ["1", "2", "1", "3"],
        "never_averages": ["1", "2", "0", "0"],
        "leaves_at_once": ["1", "0", "0", "0"],
    }
    assert "the gradients are never averaged [never_averaged]" in rows["never_averages"]["words"]
    assert "opened no process group" in rows["leaves_at_once"]["words"]


def test_audit_gives_points_at_once_and_later_from_its_folder(start, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPTS["never_averages"])
    (tmp_path / "lab.toml").write_text(SCRIPT_ASSIGNMENT)
    flags = ["--assignment", "lab.toml", "--gradescope", "results.json"]
    words = ["-m", "cos598d", "audit", "--world_size", "2", "--output_dir", "audit", *flags, "--", "train.py"]
    program = start("audit", words, {"PYTHONPATH": str(ROOT)})
    assert program.wait() == 1, program.text
    assert "FAULT: the gradients are never averaged" in program.text

    def points():
        return {test["name"]: test["score"] for test in json.loads((tmp_path / "results.json").read_text())["tests"]}

    expected = {"ends_well": 1, "trains": 2, "no_fault": 0, "never_averaged": 0}
    assert points() == expected
    (tmp_path / "results.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert main(["audit", *flags, "audit"]) == 1
    assert points() == expected


def test_a_class_of_lessons(start, tmp_path, scratch):
    lesson = get_lesson(3)
    assignment = 'kind = "lesson"\nlesson = 3\nseconds = 60\ntitle = "a\\u001b[31mred lab"\n'
    hidden = assignment_of("lesson").kind.hides
    assert hidden[0].parts[-2:] == ("lesson0", "answer")
    skip_unless_hidden(hidden)
    submissions = {"page": lesson.page(), "answer": lesson.answer(), "reads": READS_ANSWER}
    code, text, rows = graded(start, tmp_path, scratch, submissions, assignment, "in a folder of theirs/lesson3.py")
    assert code == 0, text
    assert "a\\x1b[31mred lab: 2 points" in text
    assert "\x1b" not in text
    assert "closed while a file is checked" in rows["reads"]["words"]
    assert list(hidden[0].glob("*.txt"))  # which are still there for others
    assert rows["answer"]["status"] == "passed", text
    assert rows["page"]["score"] == "0"
    assert "nothing is filled in yet" in rows["page"]["words"]


def test_results_file_grows_after_each_claim(start, tmp_path, scratch):
    """The second claim never ends, and the grader is stopped: the file has the first claim's points."""
    # starts_from_rank_0 never calls finish. Tried with the other claim it fails at once, so only that one waits.
    once = "        here = Path(__file__).with_name('seen')\n        if not here.exists(): here.touch(); os._exit(3)\n"
    (tmp_path / "lab.toml").write_text(ASSIGNMENT.replace("seconds = 5", "seconds = 250"))
    files = {"my_sync.py": OPENING + once + "        time.sleep(200)\n"}
    program = grade_one(start, tmp_path, scratch, files, "lab.toml")

    def results():
        path = tmp_path / "results.json"
        return json.loads(path.read_text()) if path.exists() else {"score": 0}

    wait_until(lambda: results()["score"] == 2.5 or program.process.poll() is not None)
    program.process.terminate()
    assert program.wait() == 128 + 15, program.text
    assert [test["score"] for test in results()["tests"]] == [2.5, 0]
    assert [test["extra_data"]["verdict"] for test in results()["tests"]] == ["passed", "not judged"]
    assert "the grader was ended before this was judged" in results()["tests"][1]["output"]


@pytest.mark.parametrize(
    ("assignment", "files", "says"),
    [
        ('kind = "sync"\n[limits]\nseconds_in_all = 0.5\n', SLOW, "It took more than 0.5 s"),
        ('kind = "script"\nfile = "my_sync.py"\nseconds = 0.2\n', SLOW, "it was still running after 0.2 s"),
        ('kind = "sync"\n', {"other.py": "x = 1"}, "the submission has no my_sync.py, but other.py"),
        ('kind = "sync"\n', {}, "has no my_sync.py and no other .py file. Hand in my_sync.py"),
        ('kind = "sync"\n', {"a/my_sync.py": "x", "b/my_sync.py": "x"}, "has my_sync.py in several folders (a, b)"),
        ('kind = "sync"\n', {"my_sync.py": "def f(:\n"}, "my_sync.py is not Python (invalid syntax, line 1"),
    ],
)
def test_submission_that_is_late_or_cannot_be_loaded_gets_nothing(start, tmp_path, scratch, assignment, files, says):
    (tmp_path / "lab.toml").write_text(assignment)
    submission = "mine/my_sync.py" if files == SLOW else "mine"
    program = grade_one(start, tmp_path, scratch, files, "lab.toml", submission)
    assert program.wait() == 1, program.text
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["score"] == 0
    assert {test["status"] for test in results["tests"]} == {"failed"}
    same = results["tests"][:1] if "script" in assignment else results["tests"]  # a script's other tests never began
    assert all(says in test["output"] for test in same), same


def test_class_that_is_stopped_leaves_no_process_and_no_folder(start, tmp_path, scratch):
    source = OPENING + "        (Path(__file__).parent / 'here').touch()\n        time.sleep(60)\n"
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "alice.py").write_text(source)
    (tmp_path / "lab.toml").write_text(ASSIGNMENT.replace("seconds = 5", "seconds = 50"))
    program = start_grade(start, scratch, "class", "--assignment", "lab.toml", "--csv", "grades.csv")
    wait_until(lambda: list(scratch.glob("cos598d-grade-*/submission/here")))
    below = psutil.Process(program.process.pid).children(recursive=True)
    assert below
    program.process.terminate()
    assert program.wait() == 128 + 15
    assert not [each for each in below if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["class", "grade.txt", "lab.toml"]


def test_scratch_folder_is_removed_even_if_locked_or_deep():
    with scratch_folder() as folder:
        (folder / "locked").mkdir()
        (folder / "locked" / "file").write_bytes(bytes(3 << 20))
        assert 3 <= megabytes_in(folder) < 4
        (folder / "locked").chmod(0)
        here = os.open(folder, os.O_RDONLY)
        try:
            for _ in range(1200):
                os.mkdir("d", dir_fd=here)
                deeper = os.open("d", os.O_RDONLY, dir_fd=here)
                os.close(here)
                here = deeper
        finally:
            os.close(here)
        assert megabytes_in(folder) < 10
    assert not folder.exists()


def test_no_cell_of_the_table_is_a_formula():
    cells = {"=1+1": "'=1+1", "-2": "'-2", "@x": "'@x", "alice": "alice", "a\nb": "a\\x0ab"}
    assert {text: _cell(text) for text in cells} == cells
