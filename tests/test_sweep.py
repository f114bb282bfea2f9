"""`cos598d sweep`. Imports its plan, to see programs without starting them, and its table, to read made-up records."""

import json
import re
import shutil
import signal

import pytest
from programs import ROOT, TINY, children_of, is_alive, wait_until
from report_records import report, write_run

from cos598d.errors import UsageError
from cos598d.tools.sweeps.plan import SETUP, check_launch, command, plan, presets, read_grid
from cos598d.tools.sweeps.results import results_words

DIGITS = ["--task_name", "digits", "--max_train_examples", "32", "--max_eval_examples", "20", "--do_train", "--do_eval"]
DIGITS += ["--threads", "1"]
# 30 epochs of 3 iterations: a run that is still under way when a test stops it.
LONG = [*TINY, "--do_train", "--max_train_examples", "48", "--num_train_epochs", "30", "--log_every", "1"]


@pytest.fixture
def sweep(start, tmp_path):
    """sweep(words, training): start a sweep in the folder "sweep", once more each time."""
    calls = []

    def _sweep(words, training):
        calls.append(words)
        words = ["-m", "cos598d", "sweep", *words, "--runs_dir", tmp_path / "sweep", "--", *training]
        return start(f"call{len(calls)}", [*map(str, words)])

    return _sweep


def read(path):
    return json.loads(path.read_text())


# ---- the plan


@pytest.mark.parametrize(
    ("preset", "names", "ranks"),
    [
        ("demo", ["task1", "task2a", "task2b", "task3", "floor"], [1, 3, 3, 3, 3]),
        (
            "experiment1",
            [f"batch{size}-setup{setup}" for size in (1, 4, 16) for setup in ("1x1", "1x4", "2x2")],
            [1, 4, 4] * 3,
        ),
        ("traffic", [f"total_train_batch_size{size}-setup3x1" for size in (64, 32, 16)], [3, 3, 3]),
        ("experiment3", [f"delay{delay}-setup2x2" for delay in ("0", "1ms", "10ms", "40ms")], [4] * 4),
    ],
)
def test_a_preset_has_its_runs(preset, names, ranks):
    runs = plan(presets()[preset], {}, {"model_name_or_path": "tiny"}, world_size=3)
    assert [one.name for one in runs] == names
    assert [one.world_size for one in runs] == ranks
    assert not any("N" in one.varies[SETUP] for one in runs), "the table shows the ranks"
    assert {one.flags["label"] for one in runs} == set(names)
    assert all(one.flags["model_name_or_path"] == "tiny" and not one.flags["save_model"] for one in runs)


def test_every_preset_can_be_planned_and_its_flags_are_those_of_train():
    for name, preset in presets().items():
        runs = plan(preset, {}, {})
        assert runs, name
        assert name in ("traffic", "experiment3") or runs[0].world_size == 1, "one process to compare with"
        unknown = [one for one in runs if "no such" in one.refused or "unknown" in one.refused]
        assert not unknown, (name, unknown)


def test_flags_and_axes_take_the_place_of_a_preset_s():
    runs = plan(presets()["demo"], {}, {"num_train_epochs": 1.0, "max_seq_length": 32})
    assert all("max_steps" not in one.flags and one.flags["max_seq_length"] == 32 for one in runs)
    runs = plan(presets()["experiment1"], read_grid(["batch=2", "setup=1x2"]), {})
    assert [(one.name, one.flags["per_gpu_train_batch_size"]) for one in runs] == [("batch2-setup1x2", 2)]


def test_a_grid_is_every_combination_and_links_mean_nothing_on_one_host():
    grid = read_grid(["setup=1x2,2x1", "delay=0,10ms", "sync=ddp,ring"])
    runs = plan({}, grid, {"do_train": True})
    assert len(runs) == 2 + 4
    links = {one.links["delay"] for one in runs if one.hosts == 2}
    assert links == {"0", "10ms"}
    assert all("delay" not in one.varies for one in runs if one.hosts == 1)


def test_seeds_count_upwards_and_repeats_have_the_same_seed_in_another_order():
    grid = read_grid(["sync=ddp,ring,flat,tree"])
    seeds = plan({}, grid, {"do_train": True, "seed": 7}, seeds=2)
    assert [one.flags["seed"] for one in seeds] == [7] * 4 + [8] * 4
    repeats = plan({}, grid, {"do_train": True}, repeats=2)
    first, second = ([one.varies["sync"] for one in part] for part in (repeats[:4], repeats[4:]))
    assert first != second
    assert sorted(first) == sorted(second)
    assert {one.flags["seed"] for one in repeats} == {42}
    assert len({one.name for one in repeats}) == 8


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (["bach=1"], "unknown axis. Did you mean"),
        (["batch"], "has no values"),
        (["batch=1,,2"], "has no values"),
        (["batch=1,1"], "given twice"),
        (["batch=1", "batch=2"], "given twice"),
        (["batch=x"], "is not valid"),
        (["batch=0"], "is not valid"),
        (["setup=4"], "Give hosts and the ranks on each"),
        (["delay=soon"], "delay"),
        (["save_model=yes"], "Give on or off"),
        (["seed=1,2"], "Give --seeds N"),
        (["output_dir=a"], "the sweep sets it itself"),
    ],
)
def test_an_axis_that_cannot_be_is_refused(grid, words):
    with pytest.raises(UsageError, match=words):
        read_grid(grid)


def test_what_cannot_run_is_left_out_with_its_reason_and_nothing_at_all_is_an_error():
    grid = read_grid(["sync=ddp,nosuch"])
    fine, refused = plan({}, grid, {"do_train": True})
    assert (fine.refused, "nosuch" in refused.refused) == ("", True)
    with pytest.raises(UsageError, match="nosuch"):
        plan({}, read_grid(["sync=nosuch"]), {"do_train": True})
    with pytest.raises(UsageError, match="nothing to vary"):
        plan({}, {}, {"do_train": True})
    with pytest.raises(UsageError, match="--sync is given after -- and by --grid"):
        plan({}, grid, {"sync": "ring"})


def test_the_program_of_a_run_is_on_this_host_on_emulated_ones_or_as_the_template_says():
    here, there = plan({}, read_grid(["setup=1x2,2x3"]), {"do_train": True})
    assert command(here, ["--do_train"], None, "x")[-4:] == ["train", "--do_train", "--world_size", "2"]
    words = command(there, ["--do_train"], None, "x")
    assert words[3:5] == ["cluster", "run"]
    assert words[words.index("--hosts") + 1] == "2"
    assert words[words.index("--ranks_per_host") + 1] == "3"
    assert words[words.index("--") + 4 :] == ["train", "--do_train"]
    launched = command(there, ["--do_train"], "mpirun -np {world_size} -N {ranks_per_host} {command} 'a b'", "x")
    assert launched[:5] == ["mpirun", "-np", "6", "-N", "3"]
    assert launched[-3:] == ["train", "--do_train", "a b"]
    for template in ("mpirun -np 2", "mpirun 'a {command}"):
        with pytest.raises(UsageError, match="--launch"):
            check_launch(template)


# ---- the table


def finished(folder, name, ranks, wall_seconds, **changes):
    """A made-up run whose epochs take so many seconds."""
    shutil.rmtree(folder / name, ignore_errors=True)
    place = write_run(folder / name, ranks=ranks, sync="none" if ranks == 1 else "ddp", **changes)
    summary = read(place / "summary.json")
    summary["epochs"] = [
        {"epoch": number, "iterations": 5, "loss": 0.5, "acc": 0.8}
        | {"training": {"examples": 80, "wall_seconds": wall_seconds}}
        for number in (1, 2)
    ]
    cut = {"is_cut": True, "training": {"examples": 16, "wall_seconds": 0.01}}  # it is no epoch's time
    summary["epochs"].append(summary["epochs"][-1] | {"epoch": 3} | cut)
    (place / "summary.json").write_text(json.dumps(summary))


def cells(text, column):
    """The cells of a column of the table by the first cell of each row."""
    head, _, *rows = [re.split(r" {2,}", line) for line in text[text.index("setup ") :].splitlines()]
    return {row[0]: row[head.index(column)] for row in rows}


def test_a_speed_up_that_is_more_than_there_is_to_gain_is_not_printed(tmp_path):
    runs = plan({}, read_grid(["setup=1x1,1x2"]), {"do_train": True})
    finished(tmp_path, "setup1x1", 1, 1.5)
    finished(tmp_path, "setup1x2", 2, 1.0)
    assert cells(results_words(runs, tmp_path), "speed-up") == {"1x1": "-", "1x2": "1.5"}
    finished(tmp_path, "setup1x1", 1, 14.69)
    text = results_words(runs, tmp_path)
    assert "14.69" not in cells(text, "speed-up").values()
    assert "disturbed" in text
    assert text.startswith("warning: a speed-up is more than there is to gain")


def test_bytes_that_no_ledger_has_are_not_known(tmp_path):
    runs = plan({}, read_grid(["setup=1x1,1x2"]), {"do_train": True})
    for name, source in (("setup1x1", "ledger"), ("setup1x2", "counters")):
        finished(tmp_path, name, 2, 1.0, summary={"bytes_from": source})
    assert cells(results_words(runs, tmp_path), "sent MB/it") == {"1x1": "2", "1x2": "-"}


def test_repeats_share_a_row_with_their_range(tmp_path):
    runs = plan({}, read_grid(["setup=1x1,1x2"]), {"do_train": True}, seeds=2)
    for seed, seconds in ((42, 1.0), (43, 2.0)):
        finished(tmp_path, f"setup1x1-seed{seed}", 1, seconds)
        finished(tmp_path, f"setup1x2-seed{seed}", 2, seconds)
    text = results_words(runs, tmp_path)
    assert text.count("1.5 (1 to 2)") == 2
    shutil.rmtree(tmp_path / "setup1x2-seed43")
    assert results_words(runs, tmp_path).count("(1 to 2)") == 1, "one run has no range"


# ---- real runs


def test_a_sweep_is_made_once_two_at_a_time_and_refused_with_other_flags(sweep, tmp_path):
    grid = ["--grid", "setup=1x1,1x2", "--grid", "batch=4"]
    training = [*DIGITS, "--num_train_epochs", "2"]
    first = sweep([*grid, "--parallel", 2], training)
    assert first.wait() == 0, first.text
    for name, ranks, batch in (("setup1x1-batch4", 1, 4), ("setup1x2-batch4", 2, 8)):
        summary = read(tmp_path / "sweep" / name / "summary.json")
        assert (summary["world_size"], summary["total_train_batch_size"], summary["label"]) == (ranks, batch, name)
        assert "epoch 2:" in (tmp_path / "sweep" / "logs" / f"{name}.txt").read_text()
        assert not (tmp_path / "sweep" / name / "checkpoints").exists()
    when = (tmp_path / "sweep" / "setup1x1-batch4" / "summary.json").stat().st_mtime_ns
    table = first.text[first.text.index("\nsetup ") :]
    second = sweep(grid, training)
    assert second.wait() == 0, second.text
    assert second.text.count("finished before") == 2
    assert second.text.endswith(table)
    assert (tmp_path / "sweep" / "setup1x1-batch4" / "summary.json").stat().st_mtime_ns == when
    other = sweep(grid, [*DIGITS, "--num_train_epochs", "3"])
    assert other.wait() == 1
    assert "setup1x1-batch4 is another run: its num_train_epochs is 2.0, and should be 3.0." in other.text
    defaults = sweep(grid, [*training, "--learning_rate", "0.1"])
    assert defaults.wait() == 1
    assert "its learning_rate is" in defaults.text


def test_only_one_run_is_made_by_a_template_and_one_that_fails_has_its_words(sweep, tmp_path):
    grid = ["--grid", "total_train_batch_size=16,8", "--launch", "env MARK=7 {command}"]
    training = [*TINY[:4], "--threads", "1", "--do_train", "--max_steps", "1"]
    assert sweep([*grid, "--only", 3], training).wait() == 2
    one = sweep([*grid, "--only", 2], training)
    assert one.wait() == 0, one.text
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["logs", "total_train_batch_size8"]
    assert (tmp_path / "sweep" / "logs" / "total_train_batch_size8.txt").read_text().startswith("$ env MARK=7 ")
    bad = sweep([*grid[:2], "--only", 1], [*training, "--data_dir", str(tmp_path / "nothing")])
    assert bad.wait() == 1
    assert "[1/1] total_train_batch_size16: it failed with exit code" in bad.text
    assert str(tmp_path / "nothing") in bad.text


@pytest.mark.long(one_in=2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_or_killed_sweep_ends_its_runs_and_goes_on(sweep, tmp_path, number):
    if number == signal.SIGKILL and not shutil.which("setpriv"):
        pytest.skip("not installed: setpriv, which ends children with their parent")
    grid = ["--grid", "setup=1x2"]
    log = tmp_path / "sweep" / "logs" / "setup1x2.txt"
    first = sweep(grid, LONG)
    wait_until(lambda: log.exists() and "iteration 5:" in log.read_text())
    started = children_of(first.process.pid)
    first.process.send_signal(number)
    code = first.wait()
    assert code in ((130,) if number == signal.SIGINT else (-9, 137)), first.text
    wait_until(lambda: not any(is_alive(process) for process in started))
    assert not (tmp_path / "sweep" / "setup1x2" / "summary.json").exists()
    second = sweep(grid, LONG)
    assert second.wait() == 0, second.text
    assert "resumes after iteration" in log.read_text()
    summary = read(tmp_path / "sweep" / "setup1x2" / "summary.json")
    assert summary["iterations"] == 90
    assert len(summary["attempts"]) == 2


@pytest.mark.long
def test_the_demo_is_the_preset_and_prints_the_table_of_compare(start, tmp_path):
    words = ["demo", *TINY, "--world_size", "2", "--max_steps", "2", "--parallel", "2", "--runs_dir", tmp_path / "demo"]
    program = start("demo", ["-m", "cos598d", *map(str, words)])
    assert program.wait() == 0, program.text
    table = program.text[program.text.index("\nrun ") :].splitlines()
    assert table[1].split("  ")[0] == "run"
    assert [row.split()[0] for row in table[3:8]] == ["task1", "task2a", "task2b", "task3", "floor"]
    losses = {name: read(tmp_path / "demo" / name / "summary.json")["losses"] for name in ("task1", "task3")}
    assert losses["task3"] == pytest.approx(losses["task1"], abs=1e-5)
    assert table[7].split()[-1] == "drifts"


def test_report_takes_the_folder_of_a_sweep_and_the_file_of_a_bench(tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    for name in ("first-run", "second-run"):
        write_run(tmp_path / "sweep" / name)
    bench = ROOT / "tests" / "real_benches" / "2hosts-1gbit.json"
    page = report(tmp_path / "page.html", tmp_path / "sweep", bench)
    assert all(name in page for name in ("first-run", "second-run"))
    assert "2hosts-1gbit" in page
