"""n ranks compute what one process computes on the global batch."""

import functools

import pytest
from ranks import world
from sync_cases import EXACT, SETTINGS, SHARDED, TOLERANCE, assert_computed, compute_on_ranks, key_of, one_process
from sync_mutants import MUTANTS

RANKS = 4
# On these numbers of ranks each value of the settings is there twice or more; the others are long.
EACH_RUN = {1: SETTINGS[3:], 2: SETTINGS[::3], 3: SETTINGS[1:2], 4: SETTINGS[2:3]}
REST = {ranks: tuple(one for one in SETTINGS if one not in few) for ranks, few in EACH_RUN.items()}
WORLDS = [*EACH_RUN.items(), *(pytest.param(each, marks=pytest.mark.long) for each in REST.items())]
right = functools.cache(one_process)


@pytest.fixture(scope="module")
def ranks():
    with world(RANKS) as started:
        yield started


@pytest.fixture(scope="module", params=WORLDS, ids=lambda each: f"{each[0]} ranks")
def computed(request, ranks):
    count, settings = request.param
    return settings, ranks.run(compute_on_ranks, EXACT + SHARDED, settings, count=count)


@pytest.mark.parametrize("sync", EXACT + SHARDED)
def test_ranks_train_as_one_process(computed, sync):
    settings, found = computed
    for setting in settings:
        assert_computed(found, key_of(sync, setting), right(*setting), TOLERANCE[setting[0]])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_sync_is_caught(ranks, mutant):
    with pytest.raises(AssertionError):
        compute_and_compare(ranks, mutant)


def compute_and_compare(ranks, sync):
    """The fewest settings that catch every wrong sync, until one does."""
    for setting in SETTINGS[:0:-1]:
        found = ranks.run(compute_on_ranks, [sync], [setting], count=3, seconds=20)
        assert_computed(found, key_of(sync, setting), right(*setting), TOLERANCE[setting[0]])
