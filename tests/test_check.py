"""`check` refuses every known mistake by its test and names it, and passes every right sync. Calls check's own tests,
so that one world serves many syncs."""

from pathlib import Path

import mutants
import mutants_field
import pytest
import right_syncs
from check_worlds import TESTS, Together, alone, mistake

from cos598d.tools.check import training

ALL = mutants.MUTANTS | mutants_field.FIELD
EXACT = (
    *("gather_scatter", "reduce_broadcast", "all_reduce", "flat", "overlap", "bucketed", "ring", "halving_doubling"),
    *("tree", "shared_memory", "hierarchical", "sparse_rows", "ddp"),
)
AT_ONCE = 4  # in one world, whose values are all kept
GROUPS = {}
for _name, _mutant in ALL.items():
    if not _mutant.alone:
        GROUPS.setdefault((_mutant.test, _mutant.n), []).append(_name)
CHUNKS = [
    (*key, names[first : first + AT_ONCE]) for key, names in GROUPS.items() for first in range(0, len(names), AT_ONCE)
]


def own(name):
    """FILE.py:CLASS of a mutant."""
    module = mutants if name in mutants.MUTANTS else mutants_field
    return f"{Path(module.__file__)}:{name}"


def wrong_of(name, said):
    """What is missing in what was said of a mutant; "" if nothing."""
    return "" if said and ALL[name].says in said else f"{name}: wanted {ALL[name].says!r}, got {said[:300]!r}"


@pytest.mark.long(one_in=16)
@pytest.mark.parametrize(("test", "n", "names"), CHUNKS)
def test_mutants_are_refused_and_named(test, n, names):
    together = Together([own(name) for name in names])
    said = {name: mistake(test, together.sync_of(own(name)), n) for name in names}
    assert [words for name in names if (words := wrong_of(name, said[name]))] == []


@pytest.mark.parametrize("name", [name for name, each in ALL.items() if each.alone])
def test_mutant_that_ends_its_world_is_named_with_its_line(name):
    file = Path(own(name).rpartition(":")[0])
    said = mistake(ALL[name].test, alone(own(name), file), ALL[name].n)
    assert wrong_of(name, said) == ""


THEIRS = [f"{Path(right_syncs.__file__)}:{name}" for name in right_syncs.RIGHT]


@pytest.mark.long(one_in=16)
@pytest.mark.timeout(900)  # seven syncs, one after the other
@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("names", [EXACT[:7], EXACT[7:], THEIRS], ids=["built-in", "more built-in", "from a file"])
def test_right_syncs_pass(test, names):
    together = Together(names)
    assert {name: said for name in names if (said := mistake(test, together.sync_of(name), 3))} == {}


@pytest.mark.parametrize("seed", range(2))
def test_the_training_of_check_stays_finite(seed):
    """With too large a rate it ended in NaN for most seeds, and right syncs were refused."""
    steps, state = training.alone(seed, 2)
    found = [*state.values(), *(g for own in steps for of_rank in own for g in of_rank.values() if g is not None)]
    assert all(each.isfinite().all() for each in found)
    assert max(each.abs().max() for name, each in state.items() if name not in ("large", "seen") and each.numel()) < 100


def test_a_way_to_train_is_compared_with_one_process(start):
    words = ["check", "zero3", "--world_sizes", "2", "--tests", "clipped", "--no_cost"]
    program = start("check", ["-m", "cos598d", *words], {"TMPDIR": "/tmp"})  # for a socket's short path
    assert program.wait() == 0, program.text
    assert "micro-batches that are clipped" in program.text
