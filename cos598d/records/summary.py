"""Statistics of a candidate's seconds: median, quartiles, ratios within rounds and their intervals. No torch."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def median_interval(values: Sequence[float], confidence: float = 0.95) -> list[float] | None:
    """The interval between two order statistics that contains the true median with at least `confidence`.

    Of n independent values, the k-th smallest is above the median with the probability that fewer than k are below it.
    That is P(Binomial(n, 1/2) < k), for any distribution; the other end is symmetric. The largest k is taken for which
    both together are at most 1 - confidence. None if even the extremes do not suffice: for 95 %, below 6 values.
    """
    count, outside, k = len(values), 0.0, 0
    while k < count // 2 and 2 * (outside + math.comb(count, k) / 2**count) <= 1 - confidence:
        outside += math.comb(count, k) / 2**count
        k += 1
    ordered = sorted(values)
    return [ordered[k - 1], ordered[count - k]] if k else None


def mean_interval(values: Sequence[float]) -> list[float]:
    """The 95 % confidence interval of the mean of two values or more (Student's t)."""
    from scipy.special import stdtrit  # its quantiles; importing scipy.stats would take a second

    mean, count = statistics.fmean(values), len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    margin = float(stdtrit(count - 1, 0.975)) * math.sqrt(variance / count)
    return [mean - margin, mean + margin]


# How the seconds of an iteration on several ranks are defined.
LAST_TO_LAST, SLOWEST = "from the last rank's start to the last one's stop", "of the slowest rank, by its own clock"


def world_seconds(
    by_rank: Sequence[float], started: Sequence[float], stopped: Sequence[float], one_clock: bool
) -> float:
    """Seconds of the ranks' common work, from each rank's seconds, start and stop.

    With `one_clock` for all (ranks of one host), LAST_TO_LAST. A rank that starts late makes the others wait. That is
    not their work, and would count as exposed time of a sync. Otherwise SLOWEST: the longest, since clocks of different
    hosts have different origins.
    """
    return max(stopped) - max(started) if one_clock else max(by_rank)


def paired_ratio(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Median and its interval of the ratios value / base, taken round by round: common slowdowns cancel out."""
    ratios = [value / other for value, other in zip(values, base, strict=True)]
    return {"median": statistics.median(ratios), "interval_95": median_interval(ratios)}


def paired_difference(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Median and its interval of the differences value - base, taken round by round."""
    differences = [value - other for value, other in zip(values, base, strict=True)]
    return {"median": statistics.median(differences), "interval_95": median_interval(differences)}


def summarize(seconds: Mapping[str, Sequence[float]], floor: str, ddp: str) -> dict[str, dict[str, Any]]:
    """The figures of the table for each candidate, from its seconds by round (the same rounds for all).

    A figure is None if its baseline, DDP or the floor, was not measured. These are the ratios, and the exposed
    communication: the median minus the floor's, and the differences within rounds.
    """
    summary = {}
    for label, values in seconds.items():
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        median = statistics.median(values)
        summary[label] = {
            "seconds_median": median,
            "seconds_mean": statistics.fmean(values),
            "seconds_quartiles": [quartiles[0], quartiles[2]],
            "seconds_interval_95": median_interval(values),
            "seconds_exposed": median - statistics.median(seconds[floor]) if floor in seconds else None,
            "exposed_within_rounds": paired_difference(values, seconds[floor]) if floor in seconds else None,
            "ratio_to_ddp": paired_ratio(values, seconds[ddp]) if ddp in seconds else None,
            "ratio_to_floor": paired_ratio(values, seconds[floor]) if floor in seconds else None,
        }
    return summary
