"""Records of three real runs: they stay readable, the code still trains like them, and the builders have their form."""

from pathlib import Path

import pytest
from report_records import read, write_run

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


@pytest.mark.parametrize("name", ["ring", "hosts"])
def test_the_kernel_counted_the_formula_s_bytes(name):
    """On one host in each rank's own sockets; on two on the link, with the headers of packets."""
    run = read_summary(GOLDEN / name)
    assert run.bytes_sent_per_iteration == [WEIGHTS] * 2  # 2(n-1)/n of the weights
    for counted in run.wire.bytes_sent_per_iteration:
        assert 0 < counted - WEIGHTS < 0.02 * WEIGHTS


def test_the_code_still_trains_like_the_golden_run(run_here, tmp_path):
    words = "--task_name digits --max_train_examples 16 --max_eval_examples 24 --total_train_batch_size 8 --seed 1 "
    words += "--num_train_epochs 2 --dropout 0 --save_epochs 0 --no_save_model --no_cuda --sync none --output_dir again"
    code, text = run_here("cos598d/__main__.py", ["train", *words.split()])
    assert code == 0, text
    assert read_summary(tmp_path / "again").losses == pytest.approx(LOSSES, abs=1e-4)


def differences(built, real, place=""):
    """Where a value that tests build has another form than a real one: a key that is not there, another type."""
    if isinstance(built, dict) and isinstance(real, dict):
        absent = [f"{place}.{key} is not in a real record" for key in built.keys() - real.keys()]
        both = built.keys() & real.keys()
        return absent + [found for key in both for found in differences(built[key], real[key], f"{place}.{key}")]
    if isinstance(built, list) and isinstance(real, list):
        return differences(built[0], real[0], f"{place}[0]") if built and real else []
    is_same = None in (built, real) or isinstance(built, type(real)) or {type(built), type(real)} == {int, float}
    return [] if is_same else [f"{place} is {built!r}, and {real!r} in a real record"]


def test_the_records_that_tests_build_have_the_form_of_real_ones(tmp_path):
    network = {"hosts": 2, "rate": "1gbit", "delay": "1ms", "offload": "on"}
    built = write_run(tmp_path / "built", wire_share=1.02, environment={"network": network})
    real = GOLDEN / "hosts"
    files = sorted(path.name for path in built.iterdir())
    assert set(files) <= {path.name for path in real.iterdir()}
    assert {name: found for name in files if (found := differences(read(built / name), read(real / name)))} == {}
