"""What grading tests does on each rank: a student's tests run here, on one sync, and never in the judge's process."""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.sync.base import GradientSync
from cos598d.terminal.own_code import load_file
from cos598d.tools.grade.under_test import SUBJECTS

SEED = 598  # of torch's generator before each test, on every rank


class SyncUnderTest:
    """What a test gets: a gradient sync's contract, the same for all of them."""

    def __init__(self, sync: GradientSync):
        self._sync = sync

    def attach(self, model: nn.Module) -> nn.Module:
        """Give the model rank 0's weights on every rank; returns the module to call in its place."""
        return self._sync.attach(model)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context for every forward and backward of a step but the last."""
        return self._sync.no_sync()

    def finish(self) -> None:
        """Make every `.grad` of the model the average over the ranks."""
        self._sync.finish()

    def detach(self) -> None:
        """Let go of the model."""
        self._sync.detach()


def run_tests(comm: Communicator, path: str, tests: Sequence[tuple[str, Sequence[str]]], subject: str) -> None:
    """Run the tests in the file at `path`, each with a new sync of this kind, one after the other.

    A test is its function's name, and the names of what it asks for. The first exception is the end, unless it says
    that the test is skipped, as unittest's and pytest's do.
    """
    os.chdir(Path(path).parent)
    make_sync = SUBJECTS[subject].sync
    module = load_file(Path(path), Path(path).name)
    for name, arguments in tests:
        torch.manual_seed(SEED)
        given = {"sync": SyncUnderTest(make_sync(comm)), "rank": comm.rank, "world_size": comm.world_size}
        try:
            getattr(module, name)(**{argument: given[argument] for argument in arguments})
        except BaseException as error:
            if not _is_skip(error):
                raise


def _is_skip(error: BaseException) -> bool:
    """Whether a test says with this exception that it does not apply here."""
    unittest, pytest = sys.modules.get("unittest"), sys.modules.get("pytest")
    kinds = [getattr(unittest, "SkipTest", None), getattr(getattr(pytest, "skip", None), "Exception", None)]
    return any(isinstance(kind, type) and isinstance(error, kind) for kind in kinds)
