"""Every registered gradient sync keeps every claim, at every world size; and each known mistake is caught."""

import tempfile
from pathlib import Path

import pytest
from mutants import MUTANTS
from worlds import RankFailure, run_ranks

from cos598d import conformance
from cos598d.sync import SYNCS, get_sync


def hold(comm, name, claims):
    """On a rank: run the claims on the registered sync `name`."""
    with tempfile.TemporaryDirectory() as folder:
        for claim in claims:
            getattr(conformance, claim)(get_sync(name), comm, Path(folder))


def hold_mutant(comm, name, claim):
    with tempfile.TemporaryDirectory() as folder:
        make_sync = MUTANTS[name].make()
        getattr(conformance, claim)(make_sync, comm, Path(folder))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SYNCS)
def test_sync_keeps_every_claim(name, world_size):
    # Without a sync only a single rank has the global average; more ranks share no more than their first state.
    claims = [claim.__name__ for claim in conformance.claims_of(get_sync(name))]
    if name == "none" and world_size > 1:
        claims = ["starts_from_rank_0", "refuses_different_models"]
    run_ranks(world_size, hold, name, claims, seconds=120)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught_by_its_claim(name):
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, hold_mutant, name, MUTANTS[name].claim)
    texts = " ".join(failure.value.texts.values())
    assert "AssertionError" in texts, texts
    assert MUTANTS[name].says in texts, texts


def test_on_one_rank_the_order_of_clipping_does_not_matter():
    """So the mutant above is caught for its order, and for nothing else."""
    run_ranks(1, hold_mutant, "clip before sync, in the loop", "trains_like_one_process")


def test_no_sync_on_two_ranks_is_caught():
    with pytest.raises(RankFailure, match="off the mean over ranks"):
        run_ranks(2, hold, "none", ["averages_gradients"])
