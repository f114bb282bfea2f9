"""Wall time beside the clock's: recording between two iterations is part of it, evaluation is not."""

import json
import time

import numpy as np
import pytest
from report_records import write_run

from cos598d.data.images.encoder import Images
from cos598d.data.samples import vocabulary
from cos598d.data.text.features import build_features
from cos598d.data.text.tokenization import load_encoder
from cos598d.measure.record import RunRecord
from cos598d.measure.wall import WallTime
from cos598d.records.conventions import PHASES
from cos598d.tools.report.load import load_run
from cos598d.tools.report.speed import speed_rows
from cos598d.tools.report.table import comparison


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


def test_a_copy_after_an_evaluation_is_in_the_walls_time_as_in_the_next_iterations_clock(tmp_path, run_here):
    words = ["--model_name_or_path", "vit-tiny", "--task_name", "digits", "--do_train", "--max_train_examples", 32]
    words += ["--total_train_batch_size", 32, "--num_train_epochs", 3, "--save_steps", 1, "--no_cuda"]
    code, said = run_here("task1/run_glue.py", [*words, "--output_dir", tmp_path / "run"])
    assert code in (0, None), said
    rows = [json.loads(line) for line in (tmp_path / "run" / "iterations.rank0.jsonl").read_text().splitlines()]
    assert [row["seconds_checkpoint"] > 0 for row in rows] == [False, True, True]
    assert all(row["wall_seconds"] >= row["seconds"] for row in rows)


def test_an_epoch_tells_its_tokens_over_a_resume_and_not_where_a_part_of_them_is_unknown(host):
    """Three iterations of 8 examples and 100 tokens, a second each; the second goes on from where the first stood."""

    def lap(wall):
        host[0] += 1.0
        wall.lap(1.0, 8, {"tokens": 100})

    first = WallTime()
    first.begin()
    lap(first)
    position = first.position()
    older = {name: dict(value) if isinstance(value, dict) else value for name, value in position.items()}
    for name in ("epoch", "run"):
        del older[name]["counts"]
    for came, tokens in ((position, 300), (older, None)):
        wall = WallTime()
        wall.resume(came)
        wall.begin()
        lap(wall)
        lap(wall)
        epoch = wall.epoch()
        assert epoch["examples"] == 24
        assert epoch.get("tokens") == tokens
        assert epoch.get("tokens_per_second_wall") == (tokens and pytest.approx(100))
        lap(wall)
        assert wall.epoch()["tokens"] == 100, "the next epoch is known whole"


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


def test_texts_count_their_tokens_and_images_are_images():
    encoder = load_encoder("bert", vocabulary(), True)
    texts = build_features(
        [("a", "", {"labels": 0}), ("a sentence", "another", {"labels": 1})], encoder, 16, {"labels": np.int64}
    )
    tokens = int(texts.collate([0, 1])["attention_mask"].sum())
    assert texts.counts(np.array([0, 1])) == {"tokens": tokens}, "padding is none"
    images = Images(np.zeros((3, 8, 8, 1), np.uint8), np.zeros(3, np.int64), None)
    assert images.counts(np.array([0, 2])) == {"images": 2}
