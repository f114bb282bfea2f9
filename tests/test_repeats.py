"""Runs of the same settings are one row, whose intervals are from run to run; the demo interleaves them."""

import json
import subprocess

import pytest
from report_records import write_run

from cos598d.commands import cli, demo
from cos598d.tools.report.load import load_run
from cos598d.tools.report.references import alike, exposed_seconds, floor_of
from cos598d.tools.report.repeats import in_groups, mean_interval
from cos598d.tools.report.table import comparison, losses_rows, time_rows

T_OF_2 = 4.3027  # Student's t for 2 degrees of freedom, 97.5 %
# By repeat: the seconds of the floor's iterations, and by how much the all-reduce's are longer.
REPEATS = ((1.0, 0.50), (1.4, 0.54), (1.2, 0.46))


@pytest.fixture
def folders(tmp_path):
    """Three repeats of an all-reduce, DDP and the floor: repeats differ much, what is exposed within them little."""
    found = []
    for number, (floor, more) in enumerate(REPEATS):
        for name, sync, seconds in (
            ("task2b", "all_reduce", floor + more),
            ("task3", "ddp", (floor + more) / 1.25),
            ("floor", "none", floor),
        ):
            found.append(write_run(tmp_path / f"repeat{number}" / name, sync=sync, seconds=[9.0, 5.0] + [seconds] * 4))
    return found


def test_repeats_are_one_row_and_exposed_seconds_have_the_interval_of_the_pairs(folders):
    text = comparison([load_run(folder) for folder in folders])
    assert text.count("\ntask2b, 3 runs") == 3  # a row in each table
    mean, spread = 0.5, 0.04
    low, high = (mean + sign * T_OF_2 * spread / 3**0.5 for sign in (-1, 1))
    assert f"0.500 (29%), 95 % {low:.3f} to {high:.3f}" in text
    assert "1.25 (1.25-1.25)" in text, "a slow repeat is slow for both"
    assert "from run to run (Student's t)" in text
    assert "one run's iterations" not in text, "all rows are of several runs"


def test_a_run_alone_has_no_interval_of_what_is_exposed_and_is_told_whose_its_own_is(folders):
    text = comparison([load_run(folder) for folder in folders[:3]])
    assert "0.500 (33%)" in text
    assert "(33%), 95 %" not in text
    assert "95 %: of that mean, from the spread of one run's iterations. A repeat may be outside it." in text
    assert "without the first 2;" in text


def test_each_run_can_have_a_row_whose_floor_is_its_own_repeat_s(folders, capsys):
    assert cli.main(["compare", "--each", *map(str, folders)]) == 0
    assert " runs" not in capsys.readouterr().out.split("s/it: ")[0]
    runs = [load_run(folder) for folder in folders]
    exposed = [exposed_seconds(run, floor_of(runs, run)) for run in runs if run["sync"] == "all_reduce"]
    assert exposed == pytest.approx([0.50, 0.54, 0.46])
    assert [alike(runs, run, "ddp") for run in runs[::3]] == runs[1::3]


def test_a_second_run_of_one_rank_does_not_drift(tmp_path):
    once, again = (load_run(write_run(tmp_path / name, ranks=1, sync="none")) for name in ("once", "again"))
    assert [row[-1] for row in losses_rows([once, again])[1:]] == ["-", "0.0e+00"]


def test_runs_of_other_flags_code_or_machines_are_no_repeats(folders):
    for folder, name, change in (
        (folders[0], "config", {"learning_rate": 1e-5}),
        (folders[3], "environment", {"commit": "0123456789ab"}),
    ):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (folders[6] / "config.json").unlink()
    rows = time_rows(in_groups([load_run(folder) for folder in folders]))
    assert [row[0] for row in rows[1:]] == ["task2b", "task3, 3 runs", "floor, 3 runs", "task2b", "task2b"]
    config = folders[1] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"output_dir": "elsewhere"}))
    environment = folders[4] / "environment.json"
    job = {"launcher": {"name": "srun"}, "places": [{"node": "n7"}]}
    environment.write_text(json.dumps(json.loads(environment.read_text()) | job))
    assert len(in_groups([load_run(folder) for folder in folders])) == 5, "where it ran and lies is no setting"


def test_the_interval_of_a_mean_is_student_s():
    low, high = mean_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - T_OF_2 / 3**0.5, 2 + T_OF_2 / 3**0.5), abs=1e-4)


def test_the_demo_runs_its_lessons_again_in_another_order(tmp_path, monkeypatch, capsys):
    order = []

    def train(words, **_):
        own = {name: words[words.index(f"--{name}") + 1] for name in ("label", "sync", "world_size", "output_dir")}
        order.append(own["label"])
        write_run(demo.Path(own["output_dir"]), sync=own["sync"], ranks=int(own["world_size"]), seconds=[2.0, 1, 1, 1])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(demo.subprocess, "run", train)
    words = ["--runs_dir", str(tmp_path / "runs"), "--max_steps", "4", "--model_name_or_path", "tiny"]
    assert cli.main(["demo", "--repeats", "3", *words]) == 0
    labels = [label for label, *_ in demo.LESSONS]
    rounds = [order[i : i + len(labels)] for i in range(0, len(order), len(labels))]
    assert rounds[0] == labels
    assert [sorted(one) for one in rounds] == [sorted(labels)] * 3
    assert len(set(map(tuple, rounds))) == 3
    text = capsys.readouterr().out
    assert "[15/15]" in text
    assert "repeat 3 of 3" in text
    rows = [line.split("  ")[0] for line in text.splitlines() if ", 3 runs  " in line]
    assert rows == [f"{label}, 3 runs" for label in labels]


def test_the_demo_refuses_no_repeats_in_a_sentence(tmp_path, capsys):
    assert cli.main(["demo", "--repeats", "0", "--runs_dir", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == "error: --repeats 0 is not valid. Give a number of at least 1.\n"
    assert not (tmp_path / "runs").exists()


def test_a_report_has_each_run_and_the_repeats_together(folders):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    from cos598d.commands.report import load_records
    from cos598d.tools.report.page import build_page

    page = build_page(*load_records(folders))
    tables = next(section for section in page.sections if section.title == "Seconds per iteration").blocks
    each, together = (tables[place].rows for place in (0, 1))
    assert [row[0] for row in together[1:]] == ["task2b, 3 runs", "task3, 3 runs", "floor, 3 runs"]
    assert len(each) == 1 + len(folders)
    assert "95 % 0.401 to 0.599" in together[1][5]
    # Each run's floor is its own repeat's: 0.54 of 1.94.
    assert next(row for row in each if row[0] == "repeat1/task2b")[-1] == "0.540 (28%)"
