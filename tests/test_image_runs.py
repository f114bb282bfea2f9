"""Runs with images: n ranks see exactly what one sees, under every kind of strategy."""

import pytest
from programs import ROOT, Program
from report_records import read

from cos598d.records.unfinished import read_summary

pytestmark = pytest.mark.long
STEPS = 6
# The ranks of each run, and its flags in addition to the common ones.
RUNS = {
    "alone": (1, []),
    "four": (4, ["--sync", "bucketed"]),
    "rows": (2, ["--sync", "sparse_rows"]),
    "sharded": (2, ["--sync", "zero3"]),
    "unaugmented": (1, []),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Six steps of the digits with vit-tiny, in several ways."""
    folder = tmp_path_factory.mktemp("digits")
    environ = {"COS598D_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    for name, (ranks, own) in RUNS.items():
        words = ["-m", "cos598d", "train", "--task_name", "digits", "--max_steps", str(STEPS), "--output_dir", name]
        words += ["--max_train_examples", "150", "--max_eval_examples", "90", "--total_train_batch_size", "30", *own]
        words += [] if name == "unaugmented" else ["--augment"]
        words += [] if ranks == 1 else ["--world_size", str(ranks)]
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


def test_augmenting_changes_what_is_trained_on(finished):
    augmented, plain = (read_summary(finished / name).losses for name in ("alone", "unaugmented"))
    assert all(abs(one - other) > 1e-4 for one, other in zip(augmented, plain))


def test_without_a_word_embedding_sparse_rows_sends_what_bucketed_does(finished):
    rows, buckets = (read_summary(finished / name) for name in ("rows", "four"))
    calls = [read(finished / name / "communication.rank0.jsonl") for name in ("rows", "four")]
    gradients = [{call["tensor"] for call in of if call["purpose"] == "gradients"} for of in calls]
    assert gradients[0] == gradients[1]
    assert rows.parameters == buckets.parameters
