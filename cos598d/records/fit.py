"""A call's overhead and bandwidth, fitted to measured seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

# Larger relative residuals count less than their square, so that one odd size does not bend the line.
TOLERATED_RESIDUAL = 0.1


@dataclass(frozen=True)
class CallCost:
    """seconds of a call = overhead_seconds + payload bytes / bytes_per_second (an algbw)."""

    overhead_seconds: float
    bytes_per_second: float

    def seconds(self, payload_bytes: float) -> float:
        """Seconds of a call with this payload."""
        return self.overhead_seconds + payload_bytes / self.bytes_per_second


def bandwidths(payload_bytes: int, seconds: float, ranks: int) -> tuple[float, float]:
    """algbw = payload / seconds and busbw = algbw x 2(n-1)/n, in bytes per second, as NCCL's tests define them."""
    algbw = payload_bytes / seconds
    return algbw, algbw * 2 * (ranks - 1) / ranks


def fit_call_cost(payload_bytes: Sequence[int], seconds: Sequence[float]) -> CallCost:
    """The overhead and bandwidth that best explain the seconds of one call of each size.

    Robust least squares (soft L1) over relative residuals, predicted / measured - 1, so that small sizes, which show
    the overhead, count as much as large ones. The parameters are fitted as logarithms: both are positive.
    """
    sizes, measured = np.asarray(payload_bytes, dtype=float), np.asarray(seconds, dtype=float)

    def residuals(logs: np.ndarray) -> np.ndarray:
        overhead, per_byte = np.exp(logs)
        return (overhead + sizes * per_byte) / measured - 1

    start = np.log([measured.min(), (measured / sizes).min()])
    overhead, per_byte = np.exp(least_squares(residuals, start, loss="soft_l1", f_scale=TOLERATED_RESIDUAL).x)
    return CallCost(float(overhead), float(1 / per_byte))
