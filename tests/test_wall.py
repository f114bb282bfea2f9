"""Wall time beside the clock's: recording between two iterations is part of it, evaluation is not."""

import json
import time

import pytest
from report_records import write_run

from cos598d.measure.record import RunRecord
from cos598d.records.conventions import PHASES
from cos598d.report.load import load_run
from cos598d.report.speed import speed_rows
from cos598d.report.table import comparison


@pytest.fixture
def host(monkeypatch):
    """The host's clock, moved by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_recording_is_off_the_clock_and_on_the_wall(tmp_path, host):
    """Two epochs of 4 iterations of 8 examples, each 0.05 s, and 0.002 s to record each; 5 s of evaluation."""
    with RunRecord(tmp_path, 0) as record:
        for epoch in (1, 2):
            record.begin_training()
            for number in range(1, 5):
                iteration = 4 * (epoch - 1) + number
                record.ledger.begin(iteration, host[0])
                host[0] += 0.05
                facts = {"iteration": iteration, "epoch": epoch, "loss": 0.5, "examples": 8}
                record.iteration(facts, 0.05, dict.fromkeys(PHASES, 0.0))
                host[0] += 0.002
            record.pause_training()
            host[0] += 5.0
            record.epoch({"epoch": epoch, "iterations": 4, "loss": 0.5})
        record.stage({}, [record.share()], {})
        record.publish()
        record.publish_summary()
    rows = [json.loads(line) for line in (tmp_path / "iterations.rank0.jsonl").read_text().splitlines()]
    assert [round(row["wall_seconds"], 6) for row in rows] == [0.05, 0.052, 0.052, 0.052] * 2
    for line in (tmp_path / "epochs.jsonl").read_text().splitlines():
        training = json.loads(line)["training"]
        assert training["clock_seconds"] == pytest.approx(4 * 0.05)
        assert training["wall_seconds"] == pytest.approx(4 * 0.052)
        assert training["examples_per_second_wall"] == pytest.approx(8 / 0.052)
    wall = json.loads((tmp_path / "summary.json").read_text())["wall"]
    # Iterations 3 to 8: all but the first of an epoch have recorded the one before.
    assert wall["examples_per_second_clock"] == pytest.approx(160)
    assert wall["examples_per_second_wall"] == pytest.approx(6 * 8 / (6 * 0.05 + 5 * 0.002))
    assert wall["share_off_the_clock"] == pytest.approx(5 * 0.002 / (6 * 0.05 + 5 * 0.002))


def test_both_speeds_stand_side_by_side_and_an_older_record_has_none(tmp_path):
    new, old = (load_run(write_run(tmp_path / name)) for name in ("new", "old"))
    new["wall"] = {"examples_per_second_clock": 160.0, "examples_per_second_wall": 154.9, "share_off_the_clock": 0.032}
    assert speed_rows([old]) == []
    head, row = speed_rows([new, old])
    assert dict(zip(head, row, strict=True)) == {
        "run": "new", "examples/s": "160", "by the wall": "154.9", "off the clock": "3.2%",
    }  # fmt: skip
    new["repeat_of"] = None
    assert "by the wall" in comparison([new, old], each=True)
    assert "by the wall" not in comparison([old])
