"""What the seconds of a run's iterations come to. Torch-free."""

import statistics
from collections.abc import Sequence
from typing import Any

from cos598d.records.conventions import WARM_UP


def summarize_seconds(seconds: Sequence[float]) -> dict[str, Any]:
    """Mean, median, 90th percentile and the mean's 95 % interval (Student's t) of the iterations after WARM_UP.

    The interval is of this run's iterations: another run of the same settings may lie outside it. The first iteration
    is given beside them. Where there are too few iterations for a figure it is None.
    """
    import numpy as np

    counted = np.asarray(seconds[WARM_UP:], dtype=np.float64)
    summary: dict[str, Any] = {
        "first": seconds[0] if len(seconds) else None,
        "counted": len(counted),
        "mean": None,
        "median": None,
        "p90": None,
        "interval_95": None,
    }
    if len(counted):
        summary |= {
            "mean": statistics.fmean(counted),
            "median": float(np.median(counted)),
            "p90": float(np.quantile(counted, 0.9)),
        }
    if len(counted) > 1:
        from scipy.special import stdtrit  # the quantile of t; scipy.stats takes half a second to import

        spread = float(np.std(counted, ddof=1))
        margin = float(stdtrit(len(counted) - 1, 0.975)) * spread / len(counted) ** 0.5
        summary["interval_95"] = [summary["mean"] - margin, summary["mean"] + margin]
    return summary


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """The mean of those that are not None; None where all are."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
