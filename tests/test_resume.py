"""A training that resumes is the one that was not interrupted. Calls the loop and checkpoints: a program takes seconds.

From any sync on any number of ranks to any other: the losses of one process. On equal ranks: the same bits.
"""

from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import world
from training_cases import STEPS, damage, train

RANKS, HALF = 4, STEPS // 2
# Syncs that continue to the last bit on equal ranks. DDP's buckets have another order in its first step.
TO_THE_BIT = (
    *("gather_scatter", "reduce_broadcast", "all_reduce", "flat", "overlap", "bucketed", "ring", "halving_doubling"),
    *("tree", "shared_memory", "hierarchical", "sparse_rows", "local_sgd", "diloco"),
    *("zero1", "zero2", "zero3", "sparse_zero1", "shared_weights"),
)
WITH_STATE = {
    "topk": ("bucketed", {"compress": "topk:0.1"}),
    "powersgd": ("bucketed", {"compress": "powersgd:1"}),
    "int8": ("bucketed", {"compress": "int8"}),
    "local": ("local_sgd", {"sync_every": 4}),
    "outer": ("diloco", {"sync_every": 2}),
    "late": ("zero1", {"gather_in_forward": True}),
    "views": ("bucketed", {"gradient_as_bucket_view": True}),
}
MOVES = (
    ("zero3", 4, "all_reduce", 2),
    ("all_reduce", 2, "zero3", 4),
    ("zero1", 2, "zero2", 1),
    ("ddp", 2, "zero1", 3),
    ("zero2", 3, "bucketed", 2),
    ("sparse_zero1", 2, "shared_weights", 3),
    ("shared_weights", 4, "sparse_rows", 1),
    ("none", 1, "sparse_zero1", 3),
    ("bucketed", 3, "ddp", 4),
    ("ring", 2, "zero3", 3),
)


@pytest.fixture(scope="module")
def ranks():
    with world(RANKS) as started:
        yield started


@pytest.fixture(scope="module")
def right(ranks):
    (found,) = ranks.run(train, "none", count=1)
    return found


def run(ranks, count, sync, **words):
    return ranks.run(_train, sync, words, count=count)


def _train(sync, words):
    return train(sync, **words)


@pytest.mark.parametrize(("first", "before", "then", "after"), MOVES)
def test_any_sync_on_any_ranks_resumes_any_other(ranks, right, tmp_path, first, before, then, after):
    run(ranks, before, first, folder=str(tmp_path), save_at=(HALF,), steps=HALF)
    found = run(ranks, after, then, folder=str(tmp_path))
    for each in found:
        assert each["losses"] == pytest.approx(right["losses"][HALF:], abs=1e-6)
        assert (each["weights"] - right["weights"]).abs().max() < 2e-4  # AdamW enlarges the last bits of a gradient
        assert each["digest"] == found[0]["digest"]
        assert ("in place of" in each["said"]) == (before != after)


@pytest.mark.parametrize("sync", TO_THE_BIT)
def test_equal_ranks_resume_to_the_last_bit_with_dropout(ranks, tmp_path, sync):
    _assert_same_bits(ranks, tmp_path, sync, {}, "fp32")


@pytest.mark.parametrize("case", WITH_STATE)
def test_what_a_sync_keeps_is_resumed(ranks, tmp_path, case):
    sync, options = WITH_STATE[case]
    _assert_same_bits(ranks, tmp_path, sync, options, "fp32")


@pytest.mark.parametrize("sync", ["bucketed", "zero2"])
def test_the_loss_scale_of_fp16_is_resumed(ranks, tmp_path, sync):
    _assert_same_bits(ranks, tmp_path, sync, {}, "fp16")


def _assert_same_bits(ranks, tmp_path, sync, options, precision):
    words = {"dropout": 0.3, "options": options, "precision": precision}
    for whole, rest in ranks.run(_interrupted, sync, str(tmp_path), words, count=2):
        assert rest["losses"] == whole["losses"][HALF:]
        assert rest["digest"] == whole["digest"]


def _interrupted(sync, folder, words):
    """A whole training, and the second half of one that ended after the first."""
    whole, part = f"{folder}/whole", f"{folder}/part"
    # Both save at the same step, because some syncs average their weights for that.
    found = [train(sync, folder=whole, save_at=(HALF,), **words)]
    train(sync, folder=part, save_at=(HALF,), steps=HALF, **words)
    if dist.get_rank() == 0:
        damage(Path(part), HALF + 1)  # the newest that can be read counts
    dist.barrier()
    return [*found, train(sync, folder=part, **words)]


def test_other_dropout_is_drawn_on_other_ranks(ranks, tmp_path):
    run(ranks, 1, "none", folder=str(tmp_path), save_at=(HALF,), steps=HALF, dropout=0.5)
    found = run(ranks, 2, "all_reduce", folder=str(tmp_path), dropout=0.5)
    assert "2 ranks in place of 1" in found[0]["said"]
    assert found[0]["digest"] == found[1]["digest"]
