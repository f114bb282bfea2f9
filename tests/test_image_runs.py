"""Runs with images: n ranks see exactly what one sees, under every kind of strategy."""

import pytest
from programs import ROOT, Program

from cos598d.records.unfinished import read_summary

pytestmark = pytest.mark.long
STEPS = 6
# The ranks of each run, and its flags in addition to the common ones.
RUNS = {
    "alone": (1, []),
    "four": (4, ["--sync", "bucketed"]),
    "rows": (2, ["--sync", "sparse_rows"]),
    "sharded": (2, ["--sync", "zero3"]),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Six steps of the digits with vit-tiny, in several ways."""
    folder = tmp_path_factory.mktemp("digits")
    environ = {"COS598D_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    for name, (ranks, own) in RUNS.items():
        words = ["-m", "cos598d", "train", "--task_name", "digits", "--max_steps", str(STEPS), "--output_dir", name]
        words += ["--max_train_examples", "150", "--max_eval_examples", "90", "--total_train_batch_size", "30", *own]
        words += ["--augment", *([] if ranks == 1 else ["--world_size", str(ranks)])]
        program = Program(folder, name, words, environ)
        assert program.wait() == 0, program.text
    return folder


@pytest.mark.parametrize("name", ["four", "rows", "sharded"])
def test_n_ranks_see_what_one_sees(finished, name):
    alone, run = (read_summary(finished / one) for one in ("alone", name))
    assert len(alone.losses) == STEPS
    assert run.losses == pytest.approx(alone.losses, abs=1e-5)
    for key in ("acc", "validation_loss"):
        found, wanted = ([epoch[key] for epoch in one.epochs] for one in (run, alone))
        assert found == pytest.approx(wanted, abs=1e-5), key
