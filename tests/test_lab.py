"""The lab: its report has the four tasks' figures, questions with blanks, and replaces nothing; a student's script."""

import re

import pytest
from programs import ROOT, script
from report_records import write_run

from cos598d.commands.cli import main
from cos598d.tools.report.lab import BLANK, SECTIONS

SECONDS = {"task1": [9.0, 4.0, 4.0], "task2a": [8.0, 3.0, 3.5], "task2b": [6.0, 2.0, 2.2], "task3": [4.0, 1.0, 1.0]}
SYNCS = {"task1": "none", "task2a": "gather_scatter", "task2b": "all_reduce", "task3": "ddp"}


def write_task(folder, task, **changes):
    """A record of one of the four tasks."""
    summary = {"label": task, **changes.pop("summary", {})}
    ranks = 1 if task == "task1" else 4
    write_run(folder, sync=SYNCS[task], seconds=SECONDS[task], ranks=ranks, summary=summary, **changes)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for task in SYNCS:
        write_task(tmp_path / "lab" / task, task)
    write_run(tmp_path / "lab" / "floor", sync="none", ranks=4)
    return tmp_path / "lab"


def cells(text, head):
    """The rows of the table that begins with these cells, each as its cells."""
    lines = text.partition(f"| {head} |")[2].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]


def test_tables_match_the_records_and_every_question_has_a_blank(lab, capsys):
    assert main(["report", "--lab", "lab", "-o", "mine.md"]) == 0, capsys.readouterr().err
    text = (lab.parent / "mine.md").read_text()
    seconds = cells(text, "run | first s | mean s of the others | times task3's")
    assert [row[:4] for row in seconds] == [
        ["task1", "9", "4", "4"],
        ["task2a", "8", "3.25", "3.25"],
        ["task2b", "6", "2.1", "2.1"],
        ["task3", "4", "1", "1"],
    ]
    losses = cells(text, "run | iterations | loss 1 | loss 2 | loss 3 | losses differ from 1 rank by")
    assert losses[1] == ["task2a", "3", "0.700000", "0.690000", "0.680000", "0"]
    sent = {row[0]: row[4] for row in cells(text, "run | calls")}
    assert sent == {"task1": "0", **dict.fromkeys(("task2a", "task2b", "task3"), "2 x 4")}
    accuracy = cells(text, "run | epoch | loss")
    assert [row[:2] for row in accuracy] == [[task, epoch] for task in SYNCS for epoch in ("1", "2")]
    assert accuracy[1][2:] == ["0.69", "0.52"]
    for _, *questions in SECTIONS.values():
        for question in questions:
            assert text.split(question)[1].strip().startswith(BLANK)
    assert "floor" not in text
    assert "not the same work" not in text


def test_a_written_report_is_kept_and_a_second_run_of_a_task_is_listed(lab, capsys):
    write_task(lab / "second" / "task3", "task3", summary={"data": "other sentences"}, load=(1.0, 0.2))
    (lab.parent / "report.md").write_text("my answers")
    assert main(["report", "--lab", "lab"]) == 2
    assert "report.md exists already and is not overwritten" in capsys.readouterr().err
    assert (lab.parent / "report.md").read_text() == "my answers"
    assert main(["report", "--lab", "lab", "-o", "again.md"]) == 0
    text = (lab.parent / "again.md").read_text()
    assert [row[0] for row in cells(text, "run | sync")] == ["task1", "task2a", "task2b", "second/task3", "task3"]
    assert "not the same work: data (a sample in task1" in text
    assert "other programs took 80 % of its processors during second/task3" in text
    assert text.count("| disturbed (warning) |") == 5, "task 3's seconds are the base of all"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (
            ["--lab", "lab", "-o", "page.html"],
            2,
            "-o page.html is a file of another kind. Give a name that ends in .md.",
        ),
        (["--lab", "lab", "-o", "no/page.md"], 2, "there is no folder no"),
        (["--lab", "lab", "lab/task1"], 2, "Give one of the two"),
        ([], 2, "Give one of the two"),
        (["--lab", "nosuch"], 1, "nosuch is not a folder"),
        (["--lab", "lab/task1"], 1, "has no finished run of task1, task2a, task2b and task3"),
    ],
)
def test_bad_arguments_print_one_line_and_write_nothing(lab, capsys, words, code, says):
    before = sorted(lab.parent.rglob("*"))
    assert main(["report", *words]) == code
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert sorted(lab.parent.rglob("*")) == before


def test_a_missing_task_is_named_with_its_fix(lab, capsys):
    (lab / "task2b" / "summary.json").unlink()
    assert main(["report", "--lab", "lab"]) == 1
    said = capsys.readouterr().err
    assert re.findall(r"task\w+", said) == ["task2b"] * 2
    assert "--output_dir lab/task2b" in said


@pytest.mark.long
def test_a_students_script_and_ours_have_the_same_losses(start, tmp_path):
    words = ["--runs_dir", "runs", "--repeats", 1, "--max_steps", 4, "--world_size", 2, "--total_batch_size", 8]
    words += ["--max_seq_length", 32, "--model", "tiny", "--sync", "gather_scatter"]
    program = start("both", [script("benchmarks/beside_student.py"), *words], {"PYTHONPATH": str(ROOT)})
    assert program.wait() == 0, program.text
    rows = [line.split() for line in program.text.splitlines() if re.match("gather_scatter ", line)]
    assert len(rows) == 1
    assert 0 <= float(rows[0][-1]) < 1e-5, program.text
    assert len(list((tmp_path / "runs" / "repeat1").iterdir())) == 2
