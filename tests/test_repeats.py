"""Runs of the same settings are one row, whose intervals are from run to run; the demo interleaves them."""

from pathlib import Path

import pytest
from report_records import edit, update, write_run

from cos598d.commands import cli, demo
from cos598d.tools.report.load import load_run
from cos598d.tools.report.references import alike, exposed_seconds, floor_of, in_groups, mean_interval
from cos598d.tools.report.table import comparison, losses_rows, time_rows
from cos598d.tools.runs import runner
from cos598d.tools.runs.jobs import Ended

T_OF_2 = 4.3027  # Student's t for 2 degrees of freedom, 97.5 %
# By repeat: the seconds of the floor's iterations, and by how much the all-reduce's are longer.
REPEATS = ((1.0, 0.50), (1.4, 0.54), (1.2, 0.46))


@pytest.fixture
def folders(tmp_path):
    """Three repeats of an all-reduce, DDP and the floor: repeats differ much, exposed seconds within them little."""
    found = []
    for number, (floor, more) in enumerate(REPEATS):
        for name, sync, seconds in (
            ("task2b", "all_reduce", floor + more),
            ("task3", "ddp", (floor + more) / 1.25),
            ("floor", "none", floor),
        ):
            found.append(write_run(tmp_path / f"repeat{number}" / name, sync=sync, seconds=[9.0, 5.0] + [seconds] * 4))
    return found


def test_repeats_are_one_row_and_exposed_seconds_have_an_interval_of_pairs(folders):
    text = comparison([load_run(folder) for folder in folders])
    assert text.count("\ntask2b, 3 runs") == 3  # a row in each table
    mean, spread = 0.5, 0.04
    low, high = (mean + sign * T_OF_2 * spread / 3**0.5 for sign in (-1, 1))
    assert f"0.500 (29%), 95 % {low:.3f} to {high:.3f}" in text
    assert "1.25 (1.25-1.25)" in text, "a slow repeat is slow for both"
    assert "from run to run (Student's t)" in text
    assert "one run's iterations" not in text, "all rows are of several runs"


def test_one_run_has_no_interval_of_exposed_seconds(folders):
    text = comparison([load_run(folder) for folder in folders[:3]])
    assert "0.500 (33%)" in text
    assert "(33%), 95 %" not in text
    assert "from the spread of one run's iterations" in text
    assert "without the first 2;" in text


def test_each_run_can_have_a_row_with_the_floor_of_its_own_repeat(folders, capsys):
    assert cli.main(["compare", "--verbose", "--each", *map(str, folders)]) == 0
    assert " runs" not in capsys.readouterr().out.split("s/it: ")[0]
    runs = [load_run(folder) for folder in folders]
    exposed = [exposed_seconds(run, floor_of(runs, run)) for run in runs if run["sync"] == "all_reduce"]
    assert exposed == pytest.approx([0.50, 0.54, 0.46])
    assert [alike(runs, run, "ddp") for run in runs[::3]] == runs[1::3]


def test_a_second_run_of_one_rank_does_not_drift(tmp_path):
    once, again = (load_run(write_run(tmp_path / name, ranks=1, sync="none")) for name in ("once", "again"))
    assert [row[-1] for row in losses_rows([once, again])[1:]] == ["-", "0.0e+00"]


def test_runs_of_other_flags_code_or_machines_are_no_repeats(folders):
    update(folders[0] / "config.json", learning_rate=1e-5)
    update(folders[3] / "environment.json", commit="0123456789ab")
    (folders[6] / "config.json").unlink()
    rows = time_rows(in_groups([load_run(folder) for folder in folders]))
    assert [row[0] for row in rows[1:]] == ["task2b", "task3, 3 runs", "floor, 3 runs", "task2b", "task2b"]
    update(folders[1] / "config.json", output_dir="elsewhere")
    update(folders[4] / "environment.json", launcher={"name": "srun"}, places=[{"node": "n7"}])
    assert len(in_groups([load_run(folder) for folder in folders])) == 5, "its folder and its nodes are no settings"


def test_the_interval_of_a_mean_is_student_s_t():
    low, high = mean_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - T_OF_2 / 3**0.5, 2 + T_OF_2 / 3**0.5), abs=1e-4)


@pytest.fixture
def demo_of(tmp_path, monkeypatch, capsys):
    """demo_of(*words, fails=None): the demo in one folder, whose runs only write a record; its code, what it prints,
    and the labels of the runs that it made, in their order. The run of the label `fails` writes none."""

    def _demo(*words, fails=None):
        order = []

        def run_jobs(jobs, parallel, begin, end):
            for job in jobs:
                begin(job)
                names, given = ("label", "sync", "world_size", "output_dir"), job.command
                label, sync, ranks, place = (given[given.index(f"--{name}") + 1] for name in names)
                order.append(label)
                if label == fails:
                    end(job, Ended(3, "no room.", 1.0, False))
                asked = {"max_steps": 4, "model_name_or_path": "tiny", "do_train": True, "save_epochs": 0}
                config = asked | {"task_name": "rte", "label": label, "sync": sync, "world_size": int(ranks)}
                write_record(Path(place), config)
                end(job, Ended(0, "", 1.0, False))

        monkeypatch.setattr(runner, "run_jobs", run_jobs)
        flags = ["--runs_dir", str(tmp_path / "runs"), "--max_steps", "4", "--model_name_or_path", "tiny"]
        code = cli.main(["demo", *flags, *words])
        found = capsys.readouterr()
        return code, found.out + found.err, order

    return _demo


def write_record(place, config):
    """Write the record of the run with this configuration into the folder `place`."""

    def set_summary(summary):
        summary["label"] = config["label"]
        summary["memory"] = {"process_peak_bytes": [3e8] * ranks, "gpu_peak_bytes": [None] * ranks}
        for epoch in summary["epochs"]:
            epoch["training"] = {"examples": 80, "wall_seconds": 6.0}

    ranks = config["world_size"]
    write_run(place, sync=config["sync"], ranks=ranks, seconds=[2.0, 1, 1, 1])
    edit(place / "summary.json", set_summary)
    update(place / "config.json", **config)
    update(place / "environment.json", device="cpu", cores=2)


def test_the_demo_repeats_its_tasks_in_another_order(demo_of):
    code, text, order = demo_of("--repeats", "3")
    assert code == 0, text
    labels = [label for label, *_ in demo.LESSONS]
    rounds = [order[i : i + len(labels)] for i in range(0, len(order), len(labels))]
    assert rounds[0] == labels
    assert [sorted(one) for one in rounds] == [sorted(labels)] * 3
    assert len(set(map(tuple, rounds))) == 3
    assert "[15/15]" in text
    assert "repeat 3 of 3" in text
    rows = [line.split("  ")[0] for line in text.splitlines() if ", 3 runs  " in line]
    assert rows == [f"{label}, 3 runs" for label in labels]


def test_a_failed_demo_resumes_only_with_the_same_arguments(demo_of, tmp_path):
    code, text, order = demo_of(fails="task2b")
    assert (code, order) == (1, ["task1", "task2a", "task2b"])
    assert "error: task2b failed with exit code 3; see its error above." in text
    code, text, order = demo_of()
    assert (code, order) == (0, ["task2b", "task3", "floor"]), text
    assert text.count("finished before, not run again") == 2
    assert "task2b: sync all_reduce on 4 ranks: run again, since it failed with exit code 3: no room." in text
    code, text, order = demo_of("--seed", "7")
    assert (code, order) == (2, [])
    assert "was made by demo with other arguments (--seed: not given there, 7 here)" in text
    assert demo_of()[2] == []


def test_a_dry_run_of_the_demo_lists_its_runs_and_makes_nothing(demo_of, tmp_path, monkeypatch):
    code, text, order = demo_of("--repeats", "2", "--world_size", "2", "--no_cuda", "--dry_run")
    assert (code, order) == (0, [])
    rows = {line.split()[0]: line.split()[1:4] for line in text.splitlines() if line.startswith(("task", "floor"))}
    assert rows == {"task1": ["2", "1", "4"]} | dict.fromkeys(("task2a", "task2b", "task3", "floor"), ["2", "2", "4"])
    assert not (tmp_path / "runs").exists()


def test_the_demo_refuses_0_repeats(demo_of, tmp_path):
    code, text, order = demo_of("--repeats", "0")
    assert (code, text, order) == (2, "error: --repeats 0 is not valid. Give a number of at least 1.\n", [])
    assert not (tmp_path / "runs").exists()


def test_the_report_has_a_row_per_run_and_a_row_per_group(folders):
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
