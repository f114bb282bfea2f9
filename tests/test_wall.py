"""Wall time beside the clock's: recording between two iterations is part of it, evaluation is not."""

import time

import numpy as np
import pytest
from recorded import finish, rows_of, summary_of
from report_records import write_run

from cos598d.data.images.encoder import Images
from cos598d.data.samples import vocabulary
from cos598d.data.text.features import build_features
from cos598d.data.text.tokenization import load_encoder
from cos598d.measure.record import RunRecord
from cos598d.records.conventions import PHASES
from cos598d.tools.report.load import load_run
from cos598d.tools.report.table import comparison, speed_rows


@pytest.fixture
def host(monkeypatch):
    """The host's clock, moved by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_recording_is_off_the_clock_and_on_the_wall(tmp_path, host):
    """Two epochs of 4 iterations of 8 examples, each 0.05 s, and 0.002 s to record each; 5 s of evaluation."""
    record = RunRecord(tmp_path, 0).__enter__()
    for epoch in (1, 2):
        for number in range(1, 5):
            record.begin_training()
            host[0] += 0.05
            facts = {"iteration": 4 * (epoch - 1) + number, "epoch": epoch, "loss": 0.5, "examples": 8}
            record.iteration(facts, 0.05, dict.fromkeys(PHASES, 0.0))
            host[0] += 0.002
        record.pause_training()
        host[0] += 5.0
        record.epoch({"epoch": epoch, "iterations": 4, "loss": 0.5})
    finish([record])
    rows = rows_of(tmp_path / "iterations.rank0.jsonl")
    assert [round(row["wall_seconds"], 6) for row in rows] == [0.05, 0.052, 0.052, 0.052] * 2
    for row in rows_of(tmp_path / "epochs.jsonl"):
        training = row["training"]
        assert training["clock_seconds"] == pytest.approx(4 * 0.05)
        assert training["wall_seconds"] == pytest.approx(4 * 0.052)
        assert training["examples_per_second_wall"] == pytest.approx(8 / 0.052)
    wall = summary_of(tmp_path)["wall"]
    # Iterations 3 to 8: all but the first of an epoch have recorded the one before.
    assert wall["examples_per_second_clock"] == pytest.approx(160)
    assert wall["examples_per_second_wall"] == pytest.approx(6 * 8 / (6 * 0.05 + 5 * 0.002))
    assert wall["share_off_the_clock"] == pytest.approx(5 * 0.002 / (6 * 0.05 + 5 * 0.002))


def test_a_copy_after_an_evaluation_is_in_the_walls_time_as_in_the_next_iterations_clock(tmp_path, run_here):
    words = ["--model_name_or_path", "vit-tiny", "--task_name", "digits", "--do_train", "--max_train_examples", 32]
    words += ["--total_train_batch_size", 32, "--num_train_epochs", 3, "--save_steps", 1, "--no_cuda"]
    code, said = run_here("task1/run_glue.py", [*words, "--output_dir", tmp_path / "run"])
    assert code in (0, None), said
    rows = rows_of(tmp_path / "run" / "iterations.rank0.jsonl")
    assert [row["seconds_checkpoint"] > 0 for row in rows] == [False, True, True]
    assert all(row["wall_seconds"] >= row["seconds"] for row in rows)


def test_an_epoch_tells_its_tokens_over_a_resume(tmp_path, host):
    """Three iterations of 8 examples and 100 tokens, a second each; the second goes on from where the first was."""

    def iterate(record, iteration):
        record.begin_training()
        host[0] += 1.0
        facts = {"iteration": iteration, "epoch": 1, "loss": 0.5, "examples": 8}
        record.iteration(facts, 1.0, dict.fromkeys(PHASES, 0.0), {"tokens": 100})

    with RunRecord(tmp_path, 0) as record:
        iterate(record, 1)
        position = record.position()
    with RunRecord(tmp_path, 0, resume=[position]) as record:
        for iteration in (2, 3):
            iterate(record, iteration)
        record.pause_training()
        record.epoch({"epoch": 1, "iterations": 3, "loss": 0.5})
        training = record.epochs[0]["training"]
    assert (training["examples"], training["tokens"]) == (24, 300)
    assert training["tokens_per_second_wall"] == pytest.approx(100)


def test_both_speeds_stand_side_by_side_and_an_older_record_has_none(tmp_path):
    new, old = (load_run(write_run(tmp_path / name)) for name in ("new", "old"))
    new["wall"] = {"examples_per_second_clock": 160.0, "examples_per_second_wall": 154.9, "share_off_the_clock": 0.032}
    assert speed_rows([old]) == []
    head, row = speed_rows([new, old])
    assert dict(zip(head, row, strict=True)) == {
        "run": "new", "examples/s": "160", "examples/s (wall clock)": "154.9", "share not timed": "3.2%",
    }  # fmt: skip
    new["operations"] = {"per_example": 2e9, "peak_per_second": 1e12, "share_of_peak": 0.32}
    assert speed_rows([new, old])[0][-1] == "of the peak"
    assert speed_rows([new, old])[1][-1] == "32%"
    new["repeat_of"] = None
    assert "examples/s (wall clock)" in comparison([new, old], each=True)
    assert "examples/s (wall clock)" not in comparison([old])


def test_texts_count_their_tokens_and_images_are_images():
    encoder = load_encoder("bert", vocabulary(), True)
    texts = build_features(
        [("a", "", {"labels": 0}), ("a sentence", "another", {"labels": 1})], encoder, 16, {"labels": np.int64}
    )
    tokens = int(texts.collate([0, 1])["attention_mask"].sum())
    assert texts.counts(np.array([0, 1])) == {"tokens": tokens}, "padding is none"
    images = Images(np.zeros((3, 8, 8, 1), np.uint8), np.zeros(3, np.int64), None)
    assert images.counts(np.array([0, 2])) == {"images": 2}
