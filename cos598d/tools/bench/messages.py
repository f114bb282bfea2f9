"""Measured on a rank without a sync: when gradients arrive, and an all-reduce by message size."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cos598d.comm.group import Ranks
from cos598d.formulas import MIB
from cos598d.measure.clock import Timestamp, timer_of
from cos598d.records.conventions import WARM_UP
from cos598d.records.fit import bandwidths, fit_call_cost
from cos598d.records.summary import world_seconds
from cos598d.tools.bench.rounds import order_of_round
from cos598d.tools.bench.turns import start_line
from cos598d.tools.bench.workload import Workload

ARRIVALS = 5  # backward passes from which the arrival times are measured
BACKWARD = ""  # the place of backward's end among the tensors' names


def measure_arrivals(workload: Workload, ranks: Ranks) -> dict[str, Any]:
    """The trainable tensors in the model's order, and when backward has each one's gradient, without any sync.

    backward_seconds    from backward's start to its end
    tensors             name, shape, dtype, bytes; seconds from backward's start to its gradient (None: no gradient)

    Medians over some backward passes of the mean over the ranks, which run them at the same time. A gradient arrives
    when the device has computed it, not when its hook is called.
    """
    replica = workload.replica()
    module = workload.computing(replica)
    timer = timer_of(ranks.device)
    arrived: dict[str, Timestamp] = {}
    for name, parameter in replica.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.__setitem__(name, timer.now()))
    passes = []
    for number in range(WARM_UP + ARRIVALS):
        inputs = workload.inputs(number, ranks.rank, ranks.world_size)
        start_line(ranks)
        loss = module(**inputs)[0]
        arrived.clear()
        started = timer.now()
        loss.backward()
        arrived[BACKWARD] = timer.now()
        timer.wait(arrived[BACKWARD])
        passes.append({name: timer.seconds(started, moment) for name, moment in arrived.items()})
        replica.zero_grad(set_to_none=True)
    everyone = ranks.exchange(passes[WARM_UP:])
    seconds = {
        name: statistics.median(statistics.fmean(one[name] for one in of_ranks) for of_ranks in zip(*everyone))
        for name in everyone[0][0]
    }
    return {
        "backward_seconds": seconds[BACKWARD],
        "tensors": [
            {
                "name": name,
                "shape": list(parameter.shape),
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "bytes": parameter.nbytes,
                "seconds": seconds.get(name),
            }
            for name, parameter in workload.trainable
        ],
    }


SMALLEST_BYTES, FACTOR = 1 << 10, 4
# A small message's call is repeated within a sample, until this many bytes are sent or this many calls are made.
REPEAT_BYTES, MOST_REPEATS = 1 << 20, 16


def message_sizes(largest_mb: float) -> list[int]:
    """1 KiB, 4 KiB, 16 KiB ... up to `largest_mb` MiB, in bytes."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * FACTOR <= largest_mb * MIB:
        sizes.append(sizes[-1] * FACTOR)
    return sizes


def sweep_message_size(
    ranks: Ranks, largest_mb: float, rounds: int, seed: int, progress: Callable[[], None]
) -> dict[str, Any]:
    """One float32 all-reduce for each size, all sizes once per round in shuffled order; complete on every rank.

    By size: the raw seconds of a call (of all ranks together, by round), their median, algbw and busbw; and the fitted
    overhead and bandwidth.
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
    rows: list[dict[str, Any]] = []
    for place, size in enumerate(sizes):
        by_round = zip(*(rank[place] for rank in everyone), strict=True)
        seconds = []
        for one in by_round:
            by_rank, started_at, stopped_at = zip(*one, strict=True)
            seconds.append(world_seconds(by_rank, started_at, stopped_at, one_clock))
        median = statistics.median(seconds)
        algbw, busbw = bandwidths(size, median, ranks.world_size)
        row: dict[str, Any] = {"payload_bytes": size, "seconds": seconds, "seconds_median": median}
        rows.append(row | {"algbw_bytes_per_second": algbw, "busbw_bytes_per_second": busbw})
    cost = fit_call_cost(sizes, [row["seconds_median"] for row in rows])
    for row in rows:
        row["seconds_fitted"] = cost.seconds(row["payload_bytes"])
    fit = {"overhead_seconds": cost.overhead_seconds, "bytes_per_second": cost.bytes_per_second}
    return {"sizes": rows, "fit": fit}
