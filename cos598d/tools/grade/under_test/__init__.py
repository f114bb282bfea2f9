"""The gradient syncs that a student's tests are tried on: right ones, which the tests must accept, and wrong ones,
each with one mistake, which they must reject."""

from dataclasses import dataclass

from cos598d.sync import get_sync
from cos598d.sync.base import GradientSync
from cos598d.tools.grade.under_test import right, wrong


@dataclass(frozen=True)
class Subject:
    """A sync under test: what it does, in words that follow "a sync that", and the least ranks on which a wrong one
    is wrong. `own` is its class; None: the registered one of its name."""

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


# What they have in common is the contract alone: no test may hold one of them to another's ways.
RIGHT = _by_name(
    Subject("all_reduce", "sums each gradient by an all-reduce, and divides"),
    Subject("gather_scatter", "averages each gradient on rank 0"),
    Subject("bucketed", "averages buckets while backward runs"),
    Subject("ring", "passes messages round a ring"),
    Subject("ddp", "is torch's DistributedDataParallel: attach returns another module than it was given"),
    Subject("from_the_last", "averages from the last tensor to the first", right.FromTheLast),
    Subject("divides_first", "divides before it sums, which rounds differently", right.DividesFirst),
    Subject("new_gradients", "puts the averages into new tensors", right.NewGradients),
    Subject(
        "reduce_scatter_all_gather",
        "lets each rank sum one part of a gradient, and gathers the parts",
        right.ReduceScatterAllGather,
    ),
)
# In the order in which a student would think of them.
WRONG = _by_name(
    Subject("never_averages", "leaves every rank its own gradients", wrong.NeverAveraged),
    Subject("sums", "sums over the ranks and does not divide", wrong.SumNotMean),
    Subject("divides_by_2", "divides the sum by 2, whatever the number of ranks", wrong.DividedByTwo, least_ranks=3),
    Subject("stays_on_rank_0", "averages on rank 0, and sends nothing back", wrong.GatherWithoutScatter),
    Subject("leaves_out_the_last_rank", "averages over all ranks except the last", wrong.WithoutLastRank),
    Subject("only_1000_elements", "averages only the first 1,000 elements of a tensor", wrong.CopiesBackAPart),
    Subject(
        "leaves_the_remainder", "averages n parts of one size, but not the remainder", wrong.ChunksWithoutRemainder
    ),
    Subject("forgets_the_last_tensor", "averages all tensors except the last", wrong.WithoutLastTensor),
    Subject("forgets_biases", "averages no tensor that is called bias", wrong.OnlyWeights),
    Subject("own_first_weights", "leaves every rank the weights that it began with", wrong.NoInitialBroadcast),
    Subject("averages_weights", "averages the weights and leaves the gradients", wrong.WeightsInsteadOfGradients),
    Subject("changes_weights", "averages the gradients, and divides the weights too", wrong.WeightsScaled),
    Subject("stale", "gives the averages of the step before", wrong.StaleGradients),
    Subject("only_the_last_pass", "averages only what the last backward of a step added", wrong.OnlyLastPass),
    Subject("half_precision", "sends gradients as float16", wrong.HalfInBetween),
    Subject("clips_first", "clips each rank's gradients before it averages them", wrong.ClipBeforeSync),
    Subject("zeros_for_unused", "makes zeros of gradients that no rank has", wrong.ZerosForUnused),
)


def mended(wrong: type[GradientSync]) -> type[GradientSync]:
    """A right class of the same name, module and ancestors, whose methods are again those that `wrong` has changed.

    Tests that go by what a sync is called, and not by what it does, reject it.
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
