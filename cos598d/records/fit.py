"""Overhead and bandwidth of a call fitted to its seconds, and what they predict of a bucket size. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

# Residuals beyond this fraction count less than their square: one odd size must not bend the line.
TOLERATED_RESIDUAL = 0.1


@dataclass(frozen=True)
class CallCost:
    """seconds of a call = overhead_seconds + payload bytes / bytes_per_second (an algbw)."""

    overhead_seconds: float
    bytes_per_second: float

    def seconds(self, payload_bytes: float, calls: int = 1) -> float:
        """Seconds of `calls` calls that carry `payload_bytes` together."""
        return calls * self.overhead_seconds + payload_bytes / self.bytes_per_second


def bandwidths(payload_bytes: int, seconds: float, ranks: int) -> tuple[float, float]:
    """algbw = payload / seconds and busbw = algbw x 2(n-1)/n, in bytes a second, as NCCL's tests define them."""
    algbw = payload_bytes / seconds
    return algbw, algbw * 2 * (ranks - 1) / ranks


def fit_call_cost(payload_bytes: Sequence[int], seconds: Sequence[float]) -> CallCost:
    """The overhead and bandwidth that explain the seconds of one call of each size best.

    Robust least squares (soft L1) over relative residuals, predicted / measured - 1, so that small sizes, which tell
    the overhead, count as much as large ones. The parameters are fitted as logarithms: both are above 0.
    """
    sizes, measured = np.asarray(payload_bytes, dtype=float), np.asarray(seconds, dtype=float)

    def residuals(logs: np.ndarray) -> np.ndarray:
        overhead, per_byte = np.exp(logs)
        return (overhead + sizes * per_byte) / measured - 1

    start = np.log([measured.min(), (measured / sizes).min()])
    overhead, per_byte = np.exp(least_squares(residuals, start, loss="soft_l1", f_scale=TOLERATED_RESIDUAL).x)
    return CallCost(float(overhead), float(1 / per_byte))


def predict_exposed(buckets: Sequence[tuple[float, int]], backward_seconds: float, cost: CallCost) -> float:
    """Seconds of communication that backward does not hide, for `buckets` of (seconds until full, bytes), in order.

    The gradient of S bytes is cut into B buckets. Bucket j is full r_j seconds after backward began, when the last of
    its gradients has arrived. Calls go one after another: bucket j's ends at

        e_j = max(e_(j-1), r_j) + overhead + bytes_j / bandwidth,        e_0 = 0

    Of it all, exposed = max(0, e_B - T) is left when backward ends at T. A large bucket is full late; small ones cost
    their overhead B times. This lets calls and backward run side by side without slowing each other: on a host whose
    cores are busy with backward it is a lower bound, and `most_exposed` the upper one.
    """
    ended = 0.0
    for ready, size in buckets:
        ended = max(ended, ready) + cost.seconds(size)
    return max(0.0, ended - backward_seconds)


def most_exposed(buckets: Sequence[tuple[float, int]], cost: CallCost) -> float:
    """Seconds of communication where every second of a call is one that backward's cores are kept from backward.

    Nothing is hidden then, whatever runs side by side: the sum of the calls.
    """
    return sum(cost.seconds(size) for _, size in buckets)


def best_capacity(exposed: Mapping[float, float]) -> float:
    """The capacity of the least exposed seconds; of equals the largest, which makes the fewest calls."""
    return min(exposed, key=lambda capacity: (exposed[capacity], -capacity))
