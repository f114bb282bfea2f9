"""Students' tests of gradient syncs: they must pass on right syncs, and one must fail on each wrong one.

A test is a function of the file, `test_...`, that may ask for `sync`, `rank` and `world_size`. Each sync runs in worlds
of its own, so that a failing rank leaves nothing behind.
"""

import ast
import contextlib
import sys

import pytest
import torch

from cos598d.parallel import data_parallel
from cos598d.tools.exam.ranks import Wrong, run
from cos598d.tools.grade.wrong_syncs import RIGHT, WRONG

GIVEN, SIZES, SEED = ("sync", "rank", "world_size"), (2, 3), 598
EASIEST = ("never_averages", "sums")  # whoever rejects neither tests nothing
FAILED = " raised an exception"
SUBJECTS = RIGHT | WRONG


class SyncUnderTest:
    """What a test gets: the contract of a gradient sync, the same for all of them."""

    def __init__(self, kind):
        self._kind, self._wrapped = kind, None

    def attach(self, model):
        """Give the model rank 0's weights on every rank. Returns what to call instead of the model: when its backward
        returns, every .grad is the average."""
        self._wrapped = data_parallel(model, self._kind)
        return self._wrapped

    def no_sync(self):
        """A context for every forward and backward of a step except the last."""
        return self._wrapped.no_sync() if self._wrapped else contextlib.nullcontext()

    def finish(self):
        """Nothing is left to do: the end of backward has averaged."""

    def detach(self):
        """Release the model."""
        self._wrapped.detach()


def run_tests(comm, module, tests, subject):
    """Run the file's tests one after another, each with a new sync of this kind. The first exception ends the run,
    unless it means that the test is skipped."""
    for name, arguments in tests:
        torch.manual_seed(SEED)
        given = {"sync": SyncUnderTest(SUBJECTS[subject].sync), "rank": comm.rank, "world_size": comm.world_size}
        try:
            getattr(module, name)(**{argument: given[argument] for argument in arguments})
        except BaseException as error:
            if type(error).__name__ not in ("SkipTest", "Skipped"):
                raise
    sys.stdout.flush()


@pytest.fixture(scope="session")
def end_on(request):
    """`end_on(subject)`: why the file's tests do not pass on this sync, on the first number of ranks; "" if they do."""
    file, known = request.config.getoption("--file"), {}
    tests = read_tests(file)

    def end(subject):
        if subject not in known:
            known[subject] = next(filter(None, (words_of(size, subject) for size in SIZES)), "")
        return known[subject]

    def words_of(size, subject):
        try:
            run(size, run_tests, tests, subject, file=file)
        except Wrong as wrong:
            return f"on {size} ranks, {file.name} line {wrong.line}: {wrong.words}"
        return ""

    return end


def read_tests(file):
    """The file's tests with the arguments that each asks for. Raises Wrong for what cannot be run as one."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError) as error:
        raise Wrong(f"this is not valid Python ({error})", getattr(error, "lineno", 0) or 0) from None
    found = {}
    for node in body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        arguments = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
        unknown = next((each for each in arguments if each not in GIVEN), None)
        if unknown:
            raise Wrong(f"{node.name} asks for {unknown}. A test can ask for {', '.join(GIVEN)}.", node.lineno)
        if node.name in found:
            raise Wrong(f"there are two tests {node.name}: only this one would run", node.lineno)
        found[node.name] = arguments
    if not found:
        raise Wrong("there is no test: write functions whose names begin with test_, outside of any class")
    return [*found.items()]


def test_accepts_right_syncs(end_on):
    """All tests pass on right syncs; and some test fails on a wrong one: tests that reject nothing accept nothing."""
    for name, subject in RIGHT.items():
        words = end_on(name)
        assert not words, f"the tests do not pass on a correct sync, which {subject.words}: {words}"
    rejected = [name for name in EASIEST if FAILED in end_on(name)]
    assert rejected, "no test fails on any sync, correct or wrong: tests that reject nothing accept nothing"


@pytest.mark.parametrize("wrong", WRONG)
def test_rejects(end_on, wrong):
    """A test fails on this wrong sync, and all pass on the right ones."""
    for name in RIGHT:
        assert not end_on(name), "the tests do not pass on a correct sync; so it proves nothing if they fail on a wrong"
    words = end_on(wrong)
    assert words, f"no test fails on a sync that {WRONG[wrong].words}"
    assert FAILED in words, f"no test fails on a sync that {WRONG[wrong].words}: {words}; a test fails by an exception"
