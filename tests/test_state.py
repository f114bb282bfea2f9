"""A training that is left and taken up again goes on as if nothing had been, to the last bit, under every strategy."""

from pathlib import Path

import pytest
from states import BUCKETS, Case, Training
from worlds import run_ranks

from cos598d.sync import SYNCS

RANKS = 3
CASES = [
    Case("none"),
    Case("all_reduce", optimizer="momentum"),
    Case("all_reduce", optimizer="sgd"),
    Case("flat"),
    Case("gather_scatter"),
    Case("bucketed", BUCKETS),
    Case("bucketed", BUCKETS, precision="bf16"),
    Case("bucketed", BUCKETS, precision="fp16"),
    Case("bucketed", {"compress": "topk:0.1", **BUCKETS}),
    Case("bucketed", {"compress": "topk:0.1", **BUCKETS}, precision="fp16"),
    Case("bucketed", {"compress": "powersgd:1", **BUCKETS}),
    Case("bucketed", {"compress": "int8", **BUCKETS}),
    Case("ring", {"compress": "topk:0.1"}),
    Case("flat", {"compress": "powersgd:1"}),
    Case("tree", {"compress": "topk:0.1"}),
    Case("sparse_rows", {"compress": "topk:0.1", **BUCKETS}),
    Case("sparse_rows", BUCKETS),
    Case("local_sgd", {"sync_every": 2}),
    Case("local_sgd", {"sync_every": 3}),
    Case("diloco", {"fragments": 2}),
    Case("diloco", {"fragments": 3, "compress": "topk:0.1"}, precision="fp16"),
    Case("shared_memory", BUCKETS),
    Case("hierarchical", BUCKETS),
    Case("dp"),
    Case("ddp"),
    Case("ddp", {}, "plain"),
    Case("ddp", {"bucket_view": True}, "plain"),
    Case("ddp", {}, "plain", left=1),
    *(Case("ddp", {"ddp_hook": "powersgd"}, "plain", left=left, end=14) for left in (4, 12)),
    *(Case("ddp", {"ddp_hook": "post_localsgd", "sync_every": 3}, "plain", left=left, end=14) for left in (4, 12)),
    Case("zero1", BUCKETS),
    Case("zero1", BUCKETS, optimizer="momentum"),
    Case("zero1", BUCKETS, precision="fp16"),
    Case("sparse_zero1", BUCKETS),
    Case("sparse_zero1", {"pack_gradients": True, **BUCKETS}),
    Case("zero2", BUCKETS),
    Case("zero3", BUCKETS),
    Case("zero3", BUCKETS, precision="bf16"),
    Case("shared_weights", BUCKETS),
    Case("shared_weights", BUCKETS, optimizer="momentum"),
    Case("shared_weights", BUCKETS, precision="fp16"),
    *(Case(sync, {"bucket_mb": 0.3}, "plain") for sync in ("bucketed", "zero1", "zero2", "zero3", "shared_weights")),
    *(
        Case(sync, {"bucket_mb": 0.3}, "bert")
        for sync in ("bucketed", "ddp", "zero1", "zero2", "zero3", "shared_weights")
    ),
]
CASES += [Case(name) for name in SYNCS if not any(case.sync == name for case in CASES)]

GROUPS = [("ddp",), ("bucketed", "ring"), ("zero1", "sparse_zero1", "zero2", "zero3", "shared_weights")]
GROUPS.append(tuple(dict.fromkeys(case.sync for case in CASES if not any(case.sync in group for group in GROUPS))))


def train_and_leave(comm, folder, cases):
    """For each training: what it is without being asked for its state, and what it is where it was asked and saved."""
    found = []
    for place, case in enumerate(cases):
        left = Training(comm, case).steps(0, case.left)
        into = Path(folder) / str(place)
        into.mkdir(exist_ok=True)
        left.save(into)
        asked = left.steps(case.left, case.end).found()
        found.append([Training(comm, case).steps(0, case.end).found(), asked])
    return found


def take_up(comm, folder, cases):
    """What each training is that goes on from what was saved."""
    return [
        Training(comm, case, seed=1).load(Path(folder) / str(place)).steps(case.left, case.end).found()
        for place, case in enumerate(cases)
    ]


def differences(right, found):
    """The words under which two answers differ."""
    return [word for word in right if right[word] != found[word]]


def compare(tmp_path, cases, ranks=RANKS, seconds=120):
    """What differs, by training, between one that nobody asked, one that was asked, and one that was taken up."""
    begun = run_ranks(ranks, train_and_leave, str(tmp_path), cases, seconds=seconds)
    gone_on = run_ranks(ranks, take_up, str(tmp_path), cases, seconds=seconds)
    wrong = {}
    for rank in range(ranks):
        for case, (alone, asked), found in zip(cases, begun[rank], gone_on[rank], strict=True):
            wrong[case.label, rank, "asked"] = differences(alone | {"rows": asked["rows"]}, asked)
            later = asked | {"losses": asked["losses"][-len(found["losses"]) :]}
            wrong[case.label, rank, "taken up"] = differences(later, found)
    return {who: words for who, words in wrong.items() if words}


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("syncs", GROUPS, ids=" ".join)
def test_every_strategy_goes_on_to_the_last_bit(tmp_path, syncs):
    assert compare(tmp_path, [case for case in CASES if case.sync in syncs]) == {}
