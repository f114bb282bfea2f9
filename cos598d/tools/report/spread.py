"""Whether two runs' seconds are told apart by their spread, and the words for it."""

from cos598d.tools.report.disturbed import is_disturbed
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import plain, seconds
from cos598d.tools.report.references import ratio_of_means
from cos598d.tools.report.repeats import over_pairs

Interval = tuple[float, float]


def overlap(one: Interval, other: Interval) -> bool:
    """Whether two intervals have a value in common."""
    return one[0] <= other[1] and other[0] <= one[1]


def are_apart(one: Run, other: Run) -> bool:
    """Whether the 95 % intervals of the two means leave a gap; unknown, and `is_disturbed`, count as no.

    Of runs that were repeated as often as each other: whether the interval of their ratio, repeat by repeat, leaves 1.
    """
    if is_disturbed(one.summary) or is_disturbed(other.summary):
        return False
    several = over_pairs(one.summary, other.summary, ratio_of_means)
    if several:
        return not overlap((several[1][0], several[1][1]), (1, 1))
    first, second = one.seconds["interval_95"], other.seconds["interval_95"]
    return bool(first and second) and not overlap(first, second)


def why_not_apart(one: Run, other: Run) -> str:
    """Why `are_apart` says no."""
    if is_disturbed(one.summary) or is_disturbed(other.summary):
        return "the machine was busy with other programs, so this is no comparison"
    if one.seconds["interval_95"] and other.seconds["interval_95"]:
        return "the 95 % intervals overlap, so no difference is shown"
    return "too few iterations for an interval, so this may be chance"


def with_interval(run: Run) -> str:
    """A run's mean seconds with their 95 % interval."""
    interval, mean = run.seconds["interval_95"], seconds(run.seconds["mean"])
    return (
        f"{mean}, 95 % {plain(interval[0])} to {plain(interval[1])}" if interval else f"{mean}, one iteration counted"
    )
