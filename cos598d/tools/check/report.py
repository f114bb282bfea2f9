"""Which tests a sync gets, and what a step of it costs next to the formulas."""

import math
from importlib.resources import files
from pathlib import Path

from cos598d.errors import UsageError
from cos598d.formulas import FACTS, Job
from cos598d.sync import SYNCS, get_sync
from cos598d.terminal.own_code import check_file, is_own
from cos598d.tools.check.driving import file_of, second_step
from cos598d.tools.exam.models import plain_model
from cos598d.tools.exam.ranks import run

# They average weights, or hold parts of them: only the whole training can be compared.
STRATEGIES = ("zero1", "zero2", "zero3", "sparse_zero1", "shared_weights")
INEXACT = ("none", "local_sgd", "diloco")


def tests_of(name: str) -> Path:
    """The file of tests for a sync. Raises UsageError for a sync that does not exist, or claims nothing to test."""
    here = files(__package__)
    if is_own(name):
        check_file(name)
        return Path(str(here.joinpath("test_sync.py")))
    get_sync(name)
    if name in INEXACT:
        raise UsageError(f"{name} does not average every step's gradients, so no test applies to it. Choose another.")
    return Path(str(here.joinpath("test_strategy.py" if name in STRATEGIES else "test_sync.py")))


def cost_in_words(name: str, n: int) -> str:
    """What each rank sends in a step, and the nearest formula of a built-in sync. "" for a strategy."""
    if name in STRATEGIES:
        return ""
    made = run(n, second_step, name, file=file_of(name), loads=False).values
    job = Job(tuple(p.nbytes for p in plain_model().parameters()), n)
    stated = {
        other: [{"calls": FACTS[other].calls(job), "sent": FACTS[other].sent(job, rank)} for rank in range(n)]
        for other in SYNCS
        if other in FACTS and other not in (*STRATEGIES, *INEXACT)
    }
    nearest = min(stated, key=lambda other: (_distance(made, stated[other]), other != name))
    lines = [f"One step on {n} ranks, {job.P} tensors of {job.S:,} bytes in all:"]
    for rank, (mine, its) in enumerate(zip(made, stated[nearest], strict=True)):
        lines.append(
            f"  rank {rank}: {mine['calls']} calls, {mine['sent']:,} bytes sent ({nearest}: {its['sent']:,.0f})"
        )
    is_equal = _distance(made, stated[nearest]) < 1e-3
    lines.append(f"The cost is {'that' if is_equal else 'nearest to that'} of the formula of {nearest}.")
    return "\n".join(["", *lines, ""])


def _distance(made: list[dict[str, int]], stated: list[dict[str, float]]) -> float:
    """How far calls and bytes are apart, as ratios: they range from a few calls to millions of bytes."""
    pairs = [(mine[key], its[key]) for mine, its in zip(made, stated, strict=True) for key in its]
    return sum(abs(math.log((mine + 1) / (its + 1))) for mine, its in pairs)
