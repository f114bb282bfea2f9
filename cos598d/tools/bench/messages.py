"""An all-reduce by the size of its message, and the line through its seconds: what a call costs, and what a byte."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import least_squares

from cos598d.comm.group import Ranks
from cos598d.formulas import MIB
from cos598d.measure.clock import timer_of
from cos598d.records.summary import world_seconds
from cos598d.tools.bench.rounds import order_of_round
from cos598d.tools.bench.turns import start_line

SMALLEST_BYTES, FACTOR = 1 << 10, 4
# A small message's call is repeated within a sample, until this many bytes are sent or this many calls are made.
REPEAT_BYTES, MOST_REPEATS = 1 << 20, 16
# Larger relative residuals count less than their square, so that one odd size does not bend the line.
TOLERATED_RESIDUAL = 0.1


def message_sizes(largest_mb: float) -> list[int]:
    """1 KiB, 4 KiB, 16 KiB ... up to `largest_mb` MiB, in bytes."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * FACTOR <= largest_mb * MIB:
        sizes.append(sizes[-1] * FACTOR)
    return sizes


def fit_line(payload_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """The seconds of a call, and of a byte besides, that best explain the seconds of one call of each size.

    Robust least squares (soft L1) over relative residuals, predicted / measured - 1, so that small sizes, which show
    the call's own seconds, count as much as large ones. Both are fitted as logarithms, so they are positive.
    """
    sizes, measured = np.asarray(payload_bytes, dtype=float), np.asarray(seconds, dtype=float)

    def residuals(logs: np.ndarray) -> np.ndarray:
        call, byte = np.exp(logs)
        return (call + sizes * byte) / measured - 1

    start = np.log([measured.min(), (measured / sizes).min()])
    call, byte = np.exp(least_squares(residuals, start, loss="soft_l1", f_scale=TOLERATED_RESIDUAL).x).tolist()
    return call, byte


def sweep_message_size(
    ranks: Ranks, largest_mb: float, rounds: int, seed: int, progress: Callable[[], None]
) -> dict[str, Any]:
    """One float32 all-reduce for each size, all sizes once per round in shuffled order; complete on every rank.

    By size: the raw seconds of a call (of all ranks together, by round) and their median. algbw is payload / seconds,
    and busbw algbw x 2(n-1)/n, as NCCL's tests define them.
    """
    sizes, timer = message_sizes(largest_mb), timer_of(ranks.device)
    tensors = [torch.zeros(size // 4, device=ranks.device) for size in sizes]
    mine: list[list[list[float]]] = [[] for _ in sizes]
    for number in range(-1, rounds):  # the first only touches the memory
        for place in order_of_round(len(sizes), number, seed):
            repeats = max(1, min(MOST_REPEATS, REPEAT_BYTES // sizes[place]))
            start_line(ranks)
            began, started = time.perf_counter(), timer.now()
            for _ in range(repeats):
                dist.all_reduce(tensors[place])
            ended = timer.now()
            timer.wait(ended)
            stopped = time.perf_counter()
            mine[place].append([timer.seconds(started, ended) / repeats, began / repeats, stopped / repeats])
            progress()
    everyone = ranks.exchange([seconds[1:] for seconds in mine])
    one_clock = len({str(host) for host in ranks.hosts}) == 1
    found = []
    for by_rank in zip(*everyone, strict=True):
        by_round = (zip(*one_round, strict=True) for one_round in zip(*by_rank, strict=True))
        found.append([world_seconds(own, began, stopped, one_clock) for own, began, stopped in by_round])
    medians = [statistics.median(seconds) for seconds in found]
    call, byte = fit_line(sizes, medians)
    rows = [
        {
            "payload_bytes": size,
            "seconds": seconds,
            "seconds_median": median,
            "seconds_fitted": call + size * byte,
            "algbw_bytes_per_second": size / median,
            "busbw_bytes_per_second": size / median * 2 * (ranks.world_size - 1) / ranks.world_size,
        }
        for size, seconds, median in zip(sizes, found, medians, strict=True)
    ]
    return {"sizes": rows, "fit": {"overhead_seconds": call, "bytes_per_second": 1 / byte}}
