"""A long run's rows are thinned by rule, so that it does not fill the disk; what they add up to stays exact."""

import json

import pytest
from report_records import report

from cos598d.comm.ledger import Row
from cos598d.commands.script import run_script
from cos598d.errors import UsageError
from cos598d.measure import thinning
from cos598d.measure.record import RunRecord
from cos598d.measure.thinning import AUTO, Detail, LedgerRule, Thinning
from cos598d.records.conventions import GRADIENTS, LOSS, PHASES

CALLS = 3  # of an iteration
SETTING = {
    "task": "rte",
    "model": "tiny",
    "data": "a sample",
    "precision": "fp32",
    "sync": "all_reduce",
    "dropout": 0.0,
    "total_train_batch_size": 16,
    "max_seq_length": 32,
    "seed": 42,
    "world_size": 1,
}


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(folder, iterations, **more):
    """The record of a run of so many iterations, of which no two take the same time."""
    folder.mkdir()
    with RunRecord(folder, 0, **more) as record:
        record.ledger.enter(Row(0, "state", "broadcast", "model", (10,), "float32", 40, 40, 0, 0.1))
        for iteration in range(1, iterations + 1):
            record.begin_training()
            record.ledger.begin(iteration, 0.0)
            for place in range(CALLS - 1):
                call = (GRADIENTS, "all_reduce", f"bucket {place}", (10,), "float32", 40, 60 + iteration, 60, 0.1)
                record.ledger.enter(Row(iteration, *call, started=0.2))
            record.ledger.enter(Row(iteration, LOSS, "all_reduce", "loss", (), "float64", 8, 8, 8, 0.001, started=0.3))
            facts = {"iteration": iteration, "loss": 1 / iteration, "epoch": 1, "learning_rate": 0.1, "examples": 16}
            facts["spans_seconds"] = [["backward", 0.0, 0.25]]
            seconds = 1 + (iteration * 37 % 101) / 101
            record.iteration(facts, seconds, dict.fromkeys(PHASES, seconds / 10))
        record.pause_training()
        record.epoch({"epoch": 1, "iterations": iterations, "loss": 0.5})
        record.complete()
        record.stage(SETTING, [record.share()], {})
        record.publish()
        record.publish_summary()
    return folder


def kept_of(folder):
    """The iterations that the ledger's rows are of."""
    return list(dict.fromkeys(row["iteration"] for row in rows_of(folder / "communication.rank0.jsonl")))


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ("all", list(range(13))),
        ("first:3", [0, 1, 2, 3]),
        ("every:5", [0, 5, 10]),
        ("totals", []),
        ("auto", list(range(13))),
    ],
)
def test_a_rule_says_of_which_iterations_the_rows_are_kept_and_totals_know_all(rule, kept, tmp_path):
    summary = json.loads((write(tmp_path / "run", 12, kept=rule) / "summary.json").read_text())
    assert kept_of(tmp_path / "run") == kept
    rows = rows_of(tmp_path / "run" / "iterations.rank0.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, 13))
    assert summary["calls_per_iteration"] == CALLS - 1
    assert summary["bytes_sent_per_iteration"] == [sum(2 * (60 + i) for i in range(1, 13)) / 12]
    assert [row["bytes_sent"] for row in rows] == [2 * (60 + i) for i in range(1, 13)]
    found = summary["ledger"]
    assert (found["kept"], found["rows"]) == (rule, [1 + 12 * CALLS])
    assert found["rows_kept"] == [len(rows_of(tmp_path / "run" / "communication.rank0.jsonl"))]
    assert found["by_purpose"] == {
        "state": {"calls": 1, "payload_bytes": 40, "bytes_sent": [40], "bytes_received": [0]},
        "gradients": {
            "calls": 24,
            "payload_bytes": 24 * 40,
            "bytes_sent": [sum(2 * (60 + i) for i in range(1, 13))],
            "bytes_received": [24 * 60],
        },
        "loss": {"calls": 12, "payload_bytes": 96, "bytes_sent": [96], "bytes_received": [96]},
    }


@pytest.mark.parametrize("rows", [1, 7, 400])
def test_auto_keeps_all_of_a_short_run_ever_fewer_of_a_long_one_and_never_more_than_it_may(rows):
    most = 4000
    thinning = Thinning(LedgerRule(AUTO), most)
    kept = []
    for iteration in range(1, 300_001):
        if thinning.keeps(iteration):
            kept.append(iteration)
            thinning.wrote(rows)
    assert len(kept) * rows < most + rows
    whole = 3 * most // 4 // rows
    assert kept[:whole] == list(range(1, whole + 1))
    later = [iteration for iteration in kept if iteration > whole + 1]
    assert later, "and still some of what follows"
    assert all(iteration % 10 == 0 for iteration in later)


@pytest.mark.parametrize("stop", [1, 700, 5555])
def test_an_interrupted_run_keeps_the_same_iterations(stop):
    def decide(thinning, first, last):
        found = []
        for iteration in range(first, last + 1):
            if thinning.keeps(iteration):
                found.append(iteration)
                thinning.wrote(3)
        return found

    whole = decide(Thinning(LedgerRule(AUTO), 1000), 1, 9000)
    before, after = Thinning(LedgerRule(AUTO), 1000), Thinning(LedgerRule(AUTO), 1000)
    found = decide(before, 1, stop)
    after.state = json.loads(json.dumps(before.state))
    assert found + decide(after, stop + 1, 9000) == whole


def test_ranks_share_what_a_run_may_keep_and_rank_0_keeps_every_iteration():
    kept = [
        sum(detail.of_row({"iteration": iteration}, is_new=True) is not None for iteration in range(1, 200_001))
        for detail in (Detail(AUTO, rank, 4) for rank in range(2))
    ]
    assert kept[0] == 200_000
    assert kept[1] <= thinning.MOST_ROWS // 4
    assert Detail("all", 1, 4).of_row({"iteration": 10**9}) is not None


@pytest.mark.parametrize(
    "rule", ["", "some", "first", "first:", "first:0", "every:-1", "every:1.5", "totals:1", "every:٣"]
)
def test_another_rule_is_refused_in_one_sentence(rule, tmp_path, capfd, monkeypatch):
    with pytest.raises(UsageError, match=r"^--ledger .*: give all, first:N, every:N, totals or auto, with a whole"):
        LedgerRule.parse(rule)
    monkeypatch.chdir(tmp_path)
    assert run_script("task1", "none", ["--ledger", f"x{rule}", "--output_dir", "out"]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_a_report_of_a_thinned_record_shows_a_typical_iteration_that_it_has_and_says_what_it_lacks(tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    from cos598d.commands.report import load_records

    whole, some, none = (
        write(tmp_path / rule.replace(":", "-"), 30, kept=rule) for rule in ("all", "every:4", "totals")
    )
    runs, _ = load_records([whole, some, none])
    assert [len(run.calls) for run in runs] == [CALLS, CALLS, 0]
    assert runs[1].typical["iteration"] % 4 == 0
    assert runs[0].typical["iteration"] == runs[2].typical["iteration"]
    ranked = sorted(range(2, 30), key=lambda place: runs[0].series.seconds[place])
    assert runs[0].typical["iteration"] == ranked[13] + 1, "the lower of the two in the middle"
    text = report(tmp_path / "page.md", whole, some, none).read_text()
    assert "Its calls are not in the record (--ledger totals)." in text
    assert "| all | gradients | 60 |" in text
    assert "| every-4 | gradients | 60 |" in text, "and no less"
