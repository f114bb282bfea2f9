"""n ranks compute what one process computes on the global batch."""

import functools

import pytest
from ranks import world
from sync_cases import EXACT, SETTINGS, SHARDED, TOLERANCE, assert_computed, compute_on_ranks, key_of, one_process
from sync_mutants import MUTANTS

RANKS = 4
right = functools.cache(one_process)


@pytest.fixture(scope="module")
def ranks():
    with world(RANKS) as started:
        yield started


@pytest.fixture(scope="module", params=range(1, RANKS + 1))
def computed(request, ranks):
    return ranks.run(compute_on_ranks, EXACT + SHARDED, SETTINGS, count=request.param)


@pytest.mark.parametrize("sync", EXACT + SHARDED)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_ranks_train_as_one_process(computed, sync, setting):
    assert_computed(computed, key_of(sync, setting), right(*setting), TOLERANCE[setting[0]])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_sync_is_caught(ranks, mutant):
    with pytest.raises(AssertionError):
        compute_and_compare(ranks, mutant)


def compute_and_compare(ranks, sync):
    """The fewest settings that catch every wrong sync."""
    settings = SETTINGS[1:]
    found = ranks.run(compute_on_ranks, [sync], settings, count=3, seconds=20)
    for setting in settings:
        assert_computed(found, key_of(sync, setting), right(*setting), TOLERANCE[setting[0]])
