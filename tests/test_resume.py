"""A run that is killed at any point of a step or of a save, and goes on, ends as the one that nothing interrupted.

Bit for bit, in weights, checkpoints and record. Dropout is on, a step comes in two parts, and checkpoints are made
within an epoch: after 4, 7 where it is the best, 8 and 12.
"""

import pytest
from lives import OF_A_SAVE, PHASES, all_whole, checkpoints_in, kept, live
from worlds import run_ranks

from cos598d.tools.check.spawn import DIED, run_world

# Ranks and flags, by name; with "1" one checkpoint is kept, not two.
RUNS = {
    "none": (1, {"sync": "none"}),
    "all_reduce": (2, {"sync": "all_reduce"}),
    "bucketed": (3, {"sync": "bucketed"}),
    "bucketed topk": (2, {"sync": "bucketed", "compress": "topk"}),
    "bucketed powersgd": (2, {"sync": "bucketed", "compress": "powersgd"}),
    "sparse_rows": (2, {"sync": "sparse_rows"}),
    "local_sgd": (2, {"sync": "local_sgd", "sync_every": 3}),
    "diloco": (2, {"sync": "diloco", "fragments": 2, "sync_every": 2}),
    "ddp": (3, {"sync": "ddp"}),
    "shared_memory": (2, {"sync": "shared_memory"}),
    "zero1": (3, {"sync": "zero1"}),
    "sparse_zero1": (3, {"sync": "sparse_zero1"}),
    "zero2": (3, {"sync": "zero2"}),
    "zero3": (3, {"sync": "zero3"}),
    "shared_weights": (2, {"sync": "shared_weights"}),
}
KILLED_IN_6 = [(name, "forward", 6, 0) for name in RUNS]
RUNS |= {f"{name} 1": (2, {**RUNS[name][1], "keep": 1}) for name in ("bucketed", "zero1", "diloco", "sparse_zero1")}
RUNS["shared_weights 1"] = (2, {"sync": "shared_weights", "keep": 1})
IN_A_STEP = [("bucketed 1", point, 6, 0) for point in PHASES]
IN_A_STEP += [("bucketed 1", "backward", 6, 1), ("zero1 1", "step", 6, 1)]
# These two share memory, or send weights, from one phase to the next.
IN_A_STEP += [
    (name, point, 6, 1) for name in ("shared_weights 1", "sparse_zero1 1") for point in ("backward", "sync", "step")
]
# A fragment set out after step 4, and is in its checkpoint; it should arrive after step 6.
IN_A_STEP += [("diloco 1", point, 6, 1) for point in ("forward", "step")]
IN_A_SAVE = [("bucketed 1", point, 8, 0) for point in OF_A_SAVE]
IN_A_SAVE += [("zero1 1", point, 8, rank) for point in ("copy", "write") for rank in (0, 1)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """uninterrupted(name): what each rank of the run comes to, and its folder; computed once."""
    found = {}

    def _uninterrupted(name):
        if name not in found:
            folder, (ranks, values) = tmp_path_factory.mktemp("whole"), RUNS[name]
            found[name] = run_ranks(ranks, live, str(folder), values), folder
        return found[name]

    return _uninterrupted


@pytest.mark.long(one_in=10)
@pytest.mark.parametrize(("name", "point", "iteration", "rank"), KILLED_IN_6 + IN_A_STEP + IN_A_SAVE)
def test_a_killed_run_loses_at_most_an_interval_and_ends_as_it_would_have(
    name, point, iteration, rank, uninterrupted, tmp_path
):
    ranks, values = RUNS[name]
    ends = run_world(ranks, live, str(tmp_path), values, (point, iteration, rank), seconds=90)
    assert ends[rank].how == DIED, [(end.how, end.traceback, end.output) for end in ends]
    assert all_whole(tmp_path)
    found = run_ranks(ranks, live, str(tmp_path), values | {"resume": "auto"})
    expected, whole = uninterrupted(name)
    begun = {one["from"] for one in found}
    assert begun <= ({4} if iteration == 6 else {7, 8} if point in ("renamed", "prune") else {4, 7}), begun
    assert len(set(expected[0]["losses"])) == 12
    assert found[0]["epochs"] == expected[0]["epochs"]  # rank 0 reads them back
    for one, other in zip(found, expected):
        for part in ("losses", "weights", "totals"):
            assert one[part] == other[part], part
        assert one["calls"] | {"0": None} == other["calls"] | {"0": None}
    assert all_whole(tmp_path)
    assert checkpoints_in(tmp_path) == checkpoints_in(whole)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        path.name for path in (whole / "checkpoints").iterdir()
    }, "and nothing else"
    assert kept(tmp_path, 12) == kept(whole, 12)
