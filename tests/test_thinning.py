"""A rule thins a long run's rows, so that they do not fill the disk. Their sums stay exact."""

import json

import pytest
from recorded import begin, finish, iterate, rows_of, summary_of
from report_records import report

from cos598d.comm.ledger import Row
from cos598d.commands.script import run_script
from cos598d.errors import UsageError
from cos598d.measure import thinning
from cos598d.measure.thinning import AUTO, Detail, LedgerRule, Thinning


def write(folder, iterations, rule):
    """The record of a run of one epoch, and of a call before it."""
    (record,) = begin(folder, kept=rule)
    record.ledger.enter(Row(0, "state", "broadcast", "model", (10,), "float32", 40, 40, 0, 0.1))
    iterate(record, 1, iterations, epoch=iterations)
    finish([record])
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
def test_a_rule_keeps_rows_of_its_iterations_and_totals_count_all(rule, kept, tmp_path):
    whole, thinned = (write(tmp_path / name, 12, name_of) for name, name_of in (("whole", "all"), ("run", rule)))
    assert kept_of(thinned) == kept
    rows = rows_of(thinned / "iterations.rank0.jsonl")
    calls = rows_of(whole / "communication.rank0.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, 13))
    summary, expected = summary_of(thinned), summary_of(whole)
    for name in ("calls", "tensors", "payload_bytes", "bytes_sent", "bytes_received"):
        assert summary[f"{name}_per_iteration"] == expected[f"{name}_per_iteration"]
    synchronizing = [call for call in calls if call["purpose"] == "gradients"]
    assert sum(row["calls"] for row in rows) == len(synchronizing)
    assert sum(row["bytes_sent"] for row in rows) == sum(call["bytes_sent"] for call in synchronizing)
    found = summary["ledger"]
    assert (found["kept"], found["rows"]) == (rule, [len(calls)])
    assert found["rows_kept"] == [len(rows_of(thinned / "communication.rank0.jsonl"))]
    for purpose in ("state", "gradients", "loss"):
        own = [call for call in calls if call["purpose"] == purpose]
        sums = {name: sum(call[name] for call in own) for name in ("payload_bytes", "bytes_sent", "bytes_received")}
        of_rank = {name: [sums[name]] for name in ("bytes_sent", "bytes_received")}
        assert found["by_purpose"][purpose] == {"calls": len(own), **sums, **of_rank}


@pytest.mark.parametrize("rows", [1, 7, 400])
def test_auto_keeps_all_rows_of_a_short_run_and_a_share_of_a_long_one(rows):
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


def test_rank_0_keeps_every_iteration_and_the_others_their_share():
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
def test_an_invalid_rule_is_refused(rule, tmp_path, capfd, monkeypatch):
    with pytest.raises(
        UsageError, match=r"^--ledger .*is not valid. Give all, first:N, every:N, totals or auto, with a whole"
    ):
        LedgerRule.parse(rule)
    monkeypatch.chdir(tmp_path)
    assert run_script("task1", "none", ["--ledger", f"x{rule}", "--output_dir", "out"]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_a_report_shows_a_typical_iteration_whose_rows_were_kept(tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    from cos598d.commands.report import load_records

    whole, some, none = (write(tmp_path / rule.replace(":", "-"), 30, rule) for rule in ("all", "every:4", "totals"))
    runs, _ = load_records([whole, some, none])
    assert [len(run.calls) for run in runs] == [3 + runs[0].typical["iteration"] % 2, 3, 0]
    assert runs[1].typical["iteration"] % 4 == 0
    assert runs[0].typical["iteration"] == runs[2].typical["iteration"]
    assert runs[0].typical["iteration"] == 16, "the lower of the two in the middle, after two that warm up"
    text = report(tmp_path / "page.md", whole, some, none).read_text()
    assert "Its calls were not kept (--ledger totals)." in text
    assert "| all | gradients | 76 |" in text
    assert "| every-4 | gradients | 76 |" in text, "and no less"
