"""The sentences above a table of runs: what not to trust, and a fastest only where the record shows one."""

import json

import pytest
from report_records import write_run

from cos598d.commands import cli
from cos598d.records.schema import Environment, Place
from cos598d.tools.report.busy import share_of_others  # machines that no test can have

LATER = [0.7, 0.69, 0.71, 0.70, 0.69]  # those of the others only up to the second iteration
FLAGS = {"optimizer": "sgd", "gradient_accumulation_steps": 1, "lr_scheduler": "linear", "max_train_examples": None}
BUSY = (1.0, 0.17)
FEW = {"first": 1.0, "counted": 0, "mean": None, "median": None, "p90": None, "interval_95": None}


def run(folder, name, seconds=1.0, **more):
    """A run of two ranks whose mean has an interval of 0.1 s to either side."""
    more["config"] = FLAGS | more.get("config", {})
    return write_run(folder / name, **{"seconds": [9.0, 9.0] + [seconds] * 3} | more)


def alone(folder, name="alone", seconds=1.0, **more):
    return run(folder, name, seconds, ranks=1, sync="none", **more)


@pytest.fixture
def said(capsys):
    """said(*folders) -> the lines that `compare` prints above its table."""

    def _said(*folders):
        assert cli.main(["compare", *map(str, folders)]) == 0
        return f"\n{capsys.readouterr().out}".partition("\nrun ")[0].strip()

    return _said


def test_the_same_work_needs_no_warning(said, tmp_path):
    folders = alone(tmp_path), run(tmp_path, "ddp", sync="ddp"), run(tmp_path, "floor", sync="none", losses=LATER)
    assert said(*folders) == "", "one rank has other threads; replicas that never average may drift"


def trained(examples):
    return {"epochs": [{"epoch": 1, "loss": 0.5, "training": {"examples": examples, "wall_seconds": 1.0}}]}


MISTAKES = {
    "a total batch that grows with the ranks": ({"batch": 64}, "total_train_batch_size (16 in alone, 64 in ddp)"),
    "TF32 on one side only": ({"environment": {"tf32": True}}, "tf32 (no in alone, yes in ddp)"),
    "no sampler": ({"summary": trained(384)}, "examples per epoch (96 in alone, 384 in ddp)"),
    "another precision": ({"summary": {"precision": "bf16"}}, "precision (fp32 in alone, bf16 in ddp)"),
    "accumulation": (
        {"config": {"gradient_accumulation_steps": 4}},
        "gradient_accumulation_steps (1 in alone, 4 in ddp)",
    ),
    "another schedule": ({"config": {"lr_scheduler": "constant"}}, "lr_scheduler (linear in alone, constant in ddp)"),
    "fewer examples": ({"config": {"max_train_examples": 48}}, "max_train_examples (- in alone, 48 in ddp)"),
    "other data": ({"summary": {"data": "RTE"}}, "data (a sample in alone, RTE in ddp)"),
    "another rate in its last digit": (
        {"config": {"learning_rate": 5.0001e-5}},
        "learning_rate (5e-05 in alone, 5.0001e-05 in ddp)",
    ),
    "another seed": ({"summary": {"seed": 1}}, "seed (42 in alone, 1 in ddp)"),
    "dropout": ({"summary": {"dropout": None}}, "dropout (0.0 in alone, - in ddp)"),
    "another processor": ({"environment": {"processor": "new"}}, "processor (a processor in alone, new in ddp)"),
    "other code": ({"environment": {"commit": "b"}}, "commit (a in alone, b in ddp)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_of_published_comparisons_that_a_record_can_show_is_named(mistake, said, tmp_path):
    changes, words = MISTAKES[mistake]
    more = {"environment": {"tf32": False, "commit": "a"}, "summary": trained(96)}
    changes = {
        **more,
        **{name: {**more.get(name, {}), **own} if isinstance(own, dict) else own for name, own in changes.items()},
    }
    found = said(alone(tmp_path, **more), run(tmp_path, "ddp", sync="ddp", **changes))
    assert found.startswith(f"warning: not the same work: {words}. Seconds and losses are compared only between runs")
    assert found.count("\n") == 0, "nothing else"


@pytest.mark.parametrize(
    ("changes", "has_warning"),
    [
        ({}, True),
        ({"summary": {"dropout": 0.1}}, False),
        ({"config": {"sync_every": 8}}, False),
        ({"config": {"learning_rate": 1.0}}, False),  # another warning says so
    ],
)
def test_losses_that_part_although_nothing_else_differs_show_another_gradient(changes, has_warning, said, tmp_path):
    more = {"summary": changes.get("summary")}
    found = said(alone(tmp_path, **more), run(tmp_path, "flat", sync="flat", losses=LATER, **changes))
    words = "the losses of flat and alone differ by 0.03 in iteration 3, although their settings do not"
    assert (words in found) == has_warning
    assert "Fastest" not in said(*tmp_path.iterdir())


def test_the_fastest_is_named_only_where_its_interval_its_losses_and_its_settings_allow_it(said, tmp_path):
    slow, near, fast = (
        run(tmp_path, "slow", 4.0),
        run(tmp_path, "near", 2.05, sync="flat"),
        run(tmp_path, "ddp", 2.0, sync="ddp"),
    )
    words = said(slow, fast, run(tmp_path, "floor", 0.9, sync="none"), alone(tmp_path))
    assert words.startswith("Fastest: ddp (2 s per step), before slow (4 s per step).")
    assert said(slow, near, fast) == "Fastest: ddp (2 s per step) and near (2.05 s per step) are too close to call."
    for name, changes in {
        "other": {"config": {"learning_rate": 1.0}},
        "apart": {"losses": LATER},
        "few": {"summary": {"seconds_per_iteration": FEW}},
    }.items():
        assert "Fastest" not in said(slow, fast, run(tmp_path, name, 1.0, sync="ring", **changes)), name
    assert said(slow, alone(tmp_path, "single")) == "", "one run that averages is no comparison"


def test_repeats_share_a_row_and_are_compared_pair_by_pair(capsys, said, tmp_path):
    """The means' intervals overlap widely; those of the ratio within each repeat leave out 1."""
    bases = (1.0, 1.4, 1.2)
    folders = [
        run(tmp_path / str(number), sync, base + more, sync=sync)
        for number, base in enumerate(bases)
        for sync, more in (("flat", 0.5), ("ddp", 0.1))
    ]
    assert said(*folders).startswith("Fastest: ddp, 3 runs (1.3 s per step), before flat, 3 runs (1.7 s per step)")
    assert cli.main(["compare", "--verbose", *map(str, folders)]) == 0
    table = capsys.readouterr().out.partition("\nrun ")[2].splitlines()
    ratios = [(base + 0.5) / (base + 0.1) for base in bases]
    assert f"{sum(ratios) / 3:.4g} (" in table[2]
    assert table[2].startswith("flat, 3 runs")


def test_a_run_on_a_busy_machine_is_named_and_not_compared(capsys, said, tmp_path):
    quiet = run(tmp_path, "ddp", 2.0, sync="ddp"), run(tmp_path, "flat", 3.0, sync="flat")
    busy = run(tmp_path, "busy", 1.0, sync="ring", load=BUSY), alone(tmp_path, load=BUSY)
    words = "the machine was busy: other programs took 83 % of its processors during busy and alone"
    assert said(*quiet, *busy).startswith(
        f"warning: {words}, so these times are disturbed, and not compared. Run again"
    )
    assert "Fastest" not in said(*quiet, *busy)
    cli.main(["compare", "--verbose", *map(str, (*quiet, *busy))])
    rows = {line.split()[0]: line.count("disturbed (warning)") for line in capsys.readouterr().out.splitlines()[4:8]}
    assert rows == {"ddp": 1, "flat": 1, "busy": 3, "alone": 1}, "speed-ups, ratios, seconds"


def test_an_impossible_speed_up_is_named(said, tmp_path):
    words = "ddp is faster than alone by more than there is to gain: something disturbed alone. Run it again"
    assert words in said(alone(tmp_path, seconds=6.0), run(tmp_path, "ddp", 2.0, sync="ddp"))


@pytest.mark.parametrize(
    ("loads", "facts", "share"),
    [
        ([(1.0, 0.34)], {}, 0.83),
        ([(1.0, 0.9), (1.0, 0.9)], {}, 0.0),
        ([(0.6, 0.2)], {"cores": 16, "threads_per_rank": 2}, 0.0),  # others have cores enough of their own
        ([(0.6, 0.2)], {"cores": 16, "threads_per_rank": 16}, 0.5875),
        ([(0.6, 0.2)], {"cores": 16, "threads_per_rank": 16, "device": "a GPU"}, 0.0),
        ([(1.0, 2.0), (1.0, 0.5)], {"ranks_on_host": 1, "places": [Place("a"), Place("b")]}, 0.75),
        ([(1.0, 2.0), (1.0, 0.5)], {"ranks_on_host": 1}, None),
        ([(1.0, 1.0), None], {}, None),
        ([(1.0, 1.0)], {"cores": None}, None),
    ],
)
def test_the_share_of_others_is_the_busy_share_less_the_ranks_own(loads, facts, share):
    found = share_of_others(loads, Environment(**{"cores": 2, "ranks_on_host": 2, "threads_per_rank": 2} | facts))
    assert found == (share if share is None else pytest.approx(share))


def classes(*found):
    """An evaluation's classes from (examples, precision, recall)."""
    rows = [dict(zip(("examples", "precision", "recall"), one, strict=True)) for one in found]
    return [row | {"class": f"c{number}", "f1": 0.0} for number, row in enumerate(rows)]


def test_a_model_that_predicts_one_class_is_a_warning(said, tmp_path):
    one, two = classes((30, 0.0, 0.0), (70, 0.7, 1.0)), classes((30, 1.0, 0.1), (70, 0.72, 1.0))
    found = {}
    for name, last in (("a", one), ("b", two), ("c", one), ("d", one[1:])):
        epochs = [{"epoch": 1, "iterations": 5, "loss": 0.7, "acc": 0.7, "by_class": last}]
        found[name] = run(tmp_path, name, sync=name, summary={"epochs": epochs})
    words = "only one class is predicted by a and c: every example is classified as c1, so the"
    assert f"{words} accuracy, 0.7, is that class's share" in said(*found.values())
    assert "only one class" not in said(found["b"], found["d"])


def test_words_of_a_record_are_printed_as_text(capsys, tmp_path):
    evil = "\x1b[2Jx"
    folder = run(tmp_path, "a", sync=evil, summary={"data": evil})
    assert cli.main(["compare", "--verbose", str(folder), str(run(tmp_path, evil, sync="ddp"))]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count("\\x1b[2Jx") >= 3
    (folder / "summary.json").write_text(json.dumps({"task": evil, "world_size": evil}))
    assert cli.main(["compare", str(folder)]) == 1
    assert "\x1b" not in capsys.readouterr().err
