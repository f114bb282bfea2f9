"""Killed at any point of a step or of a save, a run loses no more than an interval, and never a whole checkpoint."""

import pytest
from lives import OF_A_SAVE, PHASES, all_whole, live
from worlds import run_ranks

from cos598d.tools.check.spawn import DIED, run_world

SYNCS = {"bucketed": {"sync": "bucketed", "keep": 1}, "zero1": {"sync": "zero1", "keep": 1}}
SYNCS["diloco"] = {"sync": "diloco", "fragments": 2, "sync_every": 2, "keep": 1}
SYNCS |= {name: {"sync": name, "keep": 1} for name in ("shared_weights", "sparse_zero1")}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What the run comes to by each sync, computed once."""
    found = {}

    def _uninterrupted(name):
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            found[name] = run_ranks(2, live, str(folder), SYNCS[name])
        return found[name]

    return _uninterrupted


# At a phase, in iteration 6; at a save, that after iteration 8: saves are made after 4, 7 where it is the best, 8, 12.
IN_A_STEP = [("bucketed", point, 6, 0) for point in PHASES] + [("bucketed", "backward", 6, 1), ("zero1", "step", 6, 1)]
IN_A_STEP += [(name, point, 6, 1) for name in ("shared_weights", "sparse_zero1") for point in PHASES]
# A fragment set out after step 4, and is in its checkpoint; it should arrive after step 6.
IN_A_STEP += [("diloco", point, 6, 1) for point in ("forward", "step")]
IN_A_SAVE = [("bucketed", point, 8, 0) for point in OF_A_SAVE]
OF_SHARDS = [("zero1", point, 8, rank) for point in ("copy", "write") for rank in (0, 1)]


@pytest.mark.parametrize(("sync", "point", "iteration", "rank"), IN_A_STEP + IN_A_SAVE + OF_SHARDS)
def test_a_rank_that_is_killed_costs_at_most_an_interval(sync, point, iteration, rank, uninterrupted, tmp_path):
    ends = run_world(2, live, str(tmp_path), SYNCS[sync], (point, iteration, rank), seconds=90)
    assert ends[rank].how == DIED, [(end.how, end.traceback, end.output) for end in ends]
    assert all_whole(tmp_path)
    found = run_ranks(2, live, str(tmp_path), SYNCS[sync] | {"resume": "auto"})
    expected = uninterrupted(sync)
    begun = {one["from"] for one in found}
    is_saved = point in ("renamed", "prune")
    assert begun <= ({7, 8} if is_saved else {4, 7}), begun
    assert found[0]["epochs"] == expected[0]["epochs"]  # rank 0 reads them back
    for one, other in zip(found, expected):
        for name in ("losses", "weights", "totals"):
            assert one[name] == other[name], name
    assert all_whole(tmp_path)
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert all(name.startswith("step-") for name in left), left
