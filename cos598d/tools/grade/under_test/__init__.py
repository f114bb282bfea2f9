"""The gradient syncs on which a student's tests are tried, and the work of the ranks that run the tests.

The tests must accept the right syncs and reject the wrong ones. Each wrong one has one mistake.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.sync import get_sync
from cos598d.sync.base import GradientSync
from cos598d.terminal.own_code import load_file
from cos598d.tools.grade.under_test import syncs

SEED = 598  # of torch's generator before each test, on every rank


@dataclass(frozen=True)
class Subject:
    """A sync under test. `words` describe what it does, after "a sync that". A wrong one is wrong on `least_ranks` and
    more. `own` is its class; None: the built-in sync of its name."""

    name: str
    words: str
    own: type[GradientSync] | None = None
    least_ranks: int = 2

    @property
    def sync(self) -> type[GradientSync]:
        """Its class."""
        return self.own or get_sync(self.name)


def _by_name(*subjects: Subject) -> dict[str, Subject]:
    return {subject.name: subject for subject in subjects}


# They share only the contract: a test must not require of one what only another does.
RIGHT = _by_name(
    Subject("all_reduce", "sums each gradient by an all-reduce, and divides"),
    Subject("gather_scatter", "averages each gradient on rank 0"),
    Subject("bucketed", "averages buckets while backward runs"),
    Subject("ring", "passes messages round a ring"),
    Subject("ddp", "is torch's DistributedDataParallel: attach returns another module than it was given"),
    Subject("from_the_last", "averages from the last tensor to the first", syncs.FromTheLast),
    Subject("divides_first", "divides before it sums, which rounds differently", syncs.DividesFirst),
    Subject("new_gradients", "puts the averages into new tensors", syncs.NewGradients),
    Subject(
        "reduce_scatter_all_gather",
        "lets each rank sum one part of a gradient, and gathers the parts",
        syncs.ReduceScatterAllGather,
    ),
)
# In the order in which a student would think of them.
WRONG = _by_name(
    Subject("never_averages", "leaves every rank its own gradients", syncs.NeverAveraged),
    Subject("sums", "sums over the ranks and does not divide", syncs.SumNotMean),
    Subject("divides_by_2", "divides the sum by 2, whatever the number of ranks", syncs.DividedByTwo, least_ranks=3),
    Subject("stays_on_rank_0", "averages on rank 0, and sends nothing back", syncs.GatherWithoutScatter),
    Subject("leaves_out_the_last_rank", "averages over all ranks except the last", syncs.WithoutLastRank),
    Subject("only_1000_elements", "averages only the first 1,000 elements of a tensor", syncs.CopiesBackAPart),
    Subject(
        "leaves_the_remainder", "averages n parts of one size, but not the remainder", syncs.ChunksWithoutRemainder
    ),
    Subject("forgets_the_last_tensor", "averages all tensors except the last", syncs.WithoutLastTensor),
    Subject("forgets_biases", "averages no tensor that is called bias", syncs.OnlyWeights),
    Subject("own_first_weights", "leaves every rank the weights that it began with", syncs.NoInitialBroadcast),
    Subject("averages_weights", "averages the weights and leaves the gradients", syncs.WeightsInsteadOfGradients),
    Subject("changes_weights", "averages the gradients, and divides the weights too", syncs.WeightsScaled),
    Subject("stale", "gives the averages of the step before", syncs.StaleGradients),
    Subject("only_the_last_pass", "averages only what the last backward of a step added", syncs.OnlyLastPass),
    Subject("half_precision", "sends gradients as float16", syncs.HalfInBetween),
    Subject("clips_first", "clips each rank's gradients before it averages them", syncs.ClipBeforeSync),
    Subject("zeros_for_unused", "makes zeros of gradients that no rank has", syncs.ZerosForUnused),
)


def mended(wrong: type[GradientSync]) -> type[GradientSync]:
    """A right class with the name, module and ancestors of `wrong`, in which the changed methods are the right ones
    again.

    Tests that go by a sync's name, and not by what it does, reject it.
    """
    right = wrong.__mro__[1]
    restored = {name: getattr(right, name) for name, value in vars(wrong).items() if callable(value)}
    called = {name: getattr(wrong, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(wrong.__name__, (wrong,), restored | called)


# Of these a few are drawn for each submission.
MENDED = _by_name(
    *(
        Subject(f"mended_{name}", f'is called as one that "{each.words}", but does not', mended(each.sync))
        for name, each in WRONG.items()
    )
)
SUBJECTS = RIGHT | WRONG | MENDED


class SyncUnderTest:
    """What a test gets: the contract of a gradient sync, the same for all of them."""

    def __init__(self, sync: GradientSync):
        self._sync = sync

    def attach(self, model: nn.Module) -> nn.Module:
        """Give the model rank 0's weights on every rank. Returns the module to call instead of the model."""
        return self._sync.attach(model)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context for every forward and backward of a step except the last."""
        return self._sync.no_sync()

    def finish(self) -> None:
        """Make every `.grad` of the model the average over the ranks."""
        self._sync.finish()

    def detach(self) -> None:
        """Release the model."""
        self._sync.detach()


def run_tests(comm: Communicator, path: str, tests: Sequence[tuple[str, Sequence[str]]], subject: str) -> None:
    """Run the tests in the file at `path`, one after another, each with a new sync of this kind.

    A test is its function's name and the names of its arguments. The first exception ends the run, unless it means that
    the test is skipped, as unittest's and pytest's exceptions do.
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
    """Whether this exception means that a test does not apply here."""
    unittest, pytest = sys.modules.get("unittest"), sys.modules.get("pytest")
    kinds = [getattr(unittest, "SkipTest", None), getattr(getattr(pytest, "skip", None), "Exception", None)]
    return any(isinstance(kind, type) and isinstance(error, kind) for kind in kinds)
