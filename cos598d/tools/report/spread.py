"""Whether two runs' seconds differ by more than their spread, and the words for it."""

from typing import NamedTuple

from cos598d.tools.report.disturbed import is_disturbed
from cos598d.tools.report.load import Run
from cos598d.tools.report.numbers import plain, seconds
from cos598d.tools.report.references import ratio_of_means
from cos598d.tools.report.repeats import members, over_pairs

Interval = tuple[float, float]


class _Mean(NamedTuple):
    """A mean, its standard error (same unit), and the values less one that it was made from."""

    mean: float
    error: float
    freedom: int


def difference(one: Run, other: Run) -> Interval | None:
    """The 95 % interval of the first run's mean seconds less the other's (Welch's t); None where one has no interval.

    Source: B. L. Welch, Biometrika 34 (1947), 28-35.
    """
    first, second = _mean_of(one), _mean_of(other)
    if first is None or second is None:
        return None
    return _interval(first.mean - second.mean, first, second)


def ratio(run: Run, base: Run) -> tuple[float, Interval | None] | None:
    """The run's mean seconds over the base's and its 95 % interval; None where one has no mean.

    Of runs that were repeated as often as each other, repeat by repeat (Student's t). Else of the two means, with
    their standard errors as shares of them (the delta method).
    """
    several = over_pairs(run.summary, base.summary, ratio_of_means)
    if several:
        return several[0], (several[1][0], several[1][1])
    value = ratio_of_means(run.summary, base.summary)
    if not value:
        return None
    mine, its = _mean_of(run), _mean_of(base)
    if mine is None or its is None:
        return value, None
    shares = [_Mean(1.0, each.error / each.mean, each.freedom) for each in (mine, its)]
    low, high = _interval(0.0, *shares)
    return value, (value * (1 + low), value * (1 + high))


def are_apart(one: Run, other: Run) -> bool:
    """Whether the 95 % interval of the difference leaves 0; unknown, and `is_disturbed`, count as no.

    Of runs that were repeated as often as each other: whether the interval of their ratio, repeat by repeat, leaves 1.
    """
    if is_disturbed(one.summary) or is_disturbed(other.summary):
        return False
    several = over_pairs(one.summary, other.summary, ratio_of_means)
    if several:
        return not several[1][0] <= 1 <= several[1][1]
    found = difference(one, other)
    return found is not None and not found[0] <= 0 <= found[1]


def why_not_apart(one: Run, other: Run) -> str:
    """Why `are_apart` is false."""
    if is_disturbed(one.summary) or is_disturbed(other.summary):
        return "the machine was busy with other programs, so this is no comparison"
    if difference(one, other) is not None:
        return "the 95 % interval of the difference contains 0, so no difference is shown"
    return "too few iterations for an interval, so this may be chance"


def with_interval(run: Run) -> str:
    """A run's mean seconds with their 95 % interval."""
    interval, mean = run.seconds["interval_95"], seconds(run.seconds["mean"])
    return (
        f"{mean}, 95 % {plain(interval[0])} to {plain(interval[1])}" if interval else f"{mean}, one iteration counted"
    )


def _mean_of(run: Run) -> _Mean | None:
    interval, repeats = run.seconds["interval_95"], len(members(run.summary))
    count = repeats if repeats > 1 else run.seconds.get("counted")
    if not interval or not count or count < 2:
        return None
    return _Mean(run.seconds["mean"], (interval[1] - interval[0]) / 2 / _student(count - 1), count - 1)


def _interval(middle: float, one: _Mean, other: _Mean) -> Interval:
    """The 95 % interval round `middle`, whose error is that of both."""
    first, second = one.error**2, other.error**2
    if not first + second:
        return middle, middle
    freedom = (first + second) ** 2 / (first**2 / one.freedom + second**2 / other.freedom)
    margin = _student(freedom) * (first + second) ** 0.5
    return middle - margin, middle + margin


def _student(freedom: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))
