"""The scripts behind the engines' published numbers, on a small scale."""

import pytest
from programs import TINY, script
from report_records import read
from test_cluster import needs_cluster


@pytest.mark.long
def test_parity_compares_with_task_1_repeats_nothing_and_names_other_work(start, tmp_path):
    words = [script("benchmarks/parity.py"), "--runs_dir", tmp_path / "runs", "--world_size", 2, *TINY]
    words += ["--max_steps", 3, "--no_cuda", "--sync"]
    call = start("parity", [*words, "zero1,torch_fsdp,local_sgd:sync_every=2"])
    assert call.wait(200) == 0, call.text
    facts = read(tmp_path / "runs" / "parity.json")
    assert facts["task1"]["iterations"] == 3
    assert facts["task1"]["weights_moved_by"] > 1e-5
    for engine in ("zero1", "torch_fsdp"):
        assert facts["engines"][engine]["losses"] < 1e-5
        assert facts["engines"][engine]["weights_but_key_biases"] < 1e-5
    assert facts["engines"]["local_sgd:sync_every=2"]["weights_but_key_biases"] > 1e-5  # another training
    again = start("again", [*words, "zero1"])
    assert again.wait() == 0
    assert "==" not in again.text
    (tmp_path / "runs" / "zero1" / "summary.json").unlink()
    other = start("other", [*words, "zero1", "--seed", 7])
    assert other.wait(100) == 1
    assert "zero1: not the same work: seed 42 in task1 and 7 in zero1" in other.text


@pytest.mark.long
@needs_cluster
def test_bytes_are_compared_with_their_formulas(start, tmp_path):
    words = [script("benchmarks/engines_bytes.py"), "--runs_dir", tmp_path / "runs", "--hosts", 2]
    # The last step's bytes may still be in the kernel's queue when it is counted: a small part of many steps.
    words += ["--model_name_or_path", "tiny", "--max_steps", 24, "--max_seq_length", 32, "--sync"]
    call = start("bytes", [*words, "ddp,zero1,zero3,torch_fsdp"])
    assert call.wait(200) == 0, call.text
    facts = read(tmp_path / "runs" / "bytes.json")
    assert 0 < facts["torch_fsdp"]["root"] < facts["torch_fsdp"]["weights"]
    assert facts["zero3"]["once"] == 0, "no embedding of this size is gathered by itself"
    assert facts["zero1"]["tables"] == facts["zero1"]["rows"] == 0, "nor do its rows travel alone"
    for sync, parts, less in (("ddp", 2, None), ("zero1", 2, None), ("zero3", 3, "once"), ("torch_fsdp", 3, "root")):
        sent = parts * facts[sync]["weights"] - (facts[sync][less] if less else 0)
        assert facts[sync]["formula"] == pytest.approx(sent / 2)
        assert abs(facts[sync]["off"]) < 0.05, facts
    again = start("again", [*words, "ddp"])
    assert again.wait() == 0
    assert "==" not in again.text
    unknown = start("unknown", [*words, "nosuch"])
    assert unknown.wait() == 1
    assert "--sync nosuch: no formula is known for it; the known ones are ddp" in unknown.text
