"""Records of three real runs: they stay readable, and the code still trains like them."""

from pathlib import Path

import pytest
from report_records import read

from cos598d.records.unfinished import read_summary

GOLDEN = Path(__file__).resolve().parent / "golden_runs"
RUNS = {"one": ("none", 1), "ring": ("ring", 2), "hosts": ("bucketed", 2)}
LOSSES = [2.2478645, 2.8111638, 1.9998952, 2.2923875]
WEIGHTS = 4 * 534_410  # bytes


@pytest.mark.parametrize("name", RUNS)
def test_a_real_record_has_its_facts(name):
    run = read_summary(GOLDEN / name)
    assert (run.sync, run.world_size) == RUNS[name]
    assert run.losses == pytest.approx(LOSSES, abs=1e-6)
    assert [epoch["validation_loss"] for epoch in run.epochs] == pytest.approx([2.4924372, 2.6414916], abs=1e-6)
    assert [epoch["acc"] for epoch in run.epochs] == [2 / 24] * 2
    seconds = [row["seconds"] for row in read(GOLDEN / name / "iterations.rank0.jsonl")]
    assert run.seconds_per_iteration.mean == pytest.approx((seconds[2] + seconds[3]) / 2)


def test_the_code_still_trains_like_the_golden_run(start, tmp_path):
    words = "--task_name digits --max_train_examples 16 --max_eval_examples 24 --total_train_batch_size 8 --seed 1 "
    words += "--num_train_epochs 2 --dropout 0 --save_epochs 0 --no_save_model --no_cuda --sync none --output_dir again"
    program = start("train", ["-m", "cos598d", "train", *words.split()])
    assert program.wait() == 0, program.text
    assert read_summary(tmp_path / "again").losses == pytest.approx(LOSSES, abs=1e-4)
