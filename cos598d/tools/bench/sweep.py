"""The sweeps on a rank: all-reduce by message size, when gradients arrive, and what both predict for buckets."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from cos598d.comm.communicator import Communicator
from cos598d.comm.hosts import host_groups
from cos598d.comm.ledger import dtype_name, size_in_bytes
from cos598d.comm.timers import Timestamp
from cos598d.records.conventions import FLOOR, WARM_UP
from cos598d.records.fit import CallCost, bandwidths, best_capacity, fit_call_cost, most_exposed, predict_exposed
from cos598d.records.summary import world_seconds
from cos598d.sync.buckets import MIB, plan_buckets
from cos598d.tools.bench.candidates import CAPACITIES_MB
from cos598d.tools.bench.rounds import order_of_round
from cos598d.tools.bench.turns import start_line
from cos598d.tools.bench.workload import Workload

ARRIVALS = 5  # backward passes from which the arrival times are measured


def measure_arrivals(workload: Workload, comm: Communicator) -> dict[str, Any]:
    """The trainable tensors in the model's order, and when backward has each one's gradient, without any sync.

    backward_seconds    from backward's start to its end
    tensors             name, shape, dtype, bytes; seconds from backward's start to its gradient (None: no gradient)

    Medians over some backward passes of the mean over the ranks, which run them at the same time. A gradient arrives
    when the device has computed it, not when its hook is called.
    """
    replica = workload.replica()
    module = workload.computing(replica)
    time = comm.time
    arrived: dict[str, Timestamp] = {}
    for name, parameter in replica.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.__setitem__(name, time.now()))
    passes = []
    for number in range(WARM_UP + ARRIVALS):
        inputs = workload.inputs(number, comm.rank, comm.world_size)
        start_line(comm)
        loss = module(**inputs)[0]
        arrived.clear()
        started = time.now()
        loss.backward()
        ended = time.now()
        time.wait(ended)
        seconds = {name: time.seconds(started, moment) for name, moment in arrived.items()}
        passes.append([seconds, time.seconds(started, ended)])
        replica.zero_grad(set_to_none=True)
    everyone = [rank[WARM_UP:] for rank in comm.exchange(passes)]

    def typical(pick: Callable[[list], float]) -> float:
        return statistics.median(
            statistics.fmean(pick(rank[number]) for rank in everyone) for number in range(ARRIVALS)
        )

    def arrival(name: str) -> float:
        return typical(lambda one: one[0][name])

    of_names = {name: arrival(name) for name in everyone[0][0][0]}
    return {
        "backward_seconds": typical(lambda one: one[1]),
        "tensors": [
            {
                "name": name,
                "shape": list(parameter.shape),
                "dtype": dtype_name(parameter.dtype),
                "bytes": size_in_bytes(parameter),
                "seconds": of_names.get(name),
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
    comm: Communicator, largest_mb: float, rounds: int, seed: int, progress: Callable[[], None]
) -> dict[str, Any]:
    """One float32 all-reduce for each size, all sizes once per round in shuffled order; complete on every rank.

    By size: the raw seconds of a call (of all ranks together, by round), their median, algbw and busbw; and the fitted
    overhead and bandwidth.
    """
    sizes = message_sizes(largest_mb)
    tensors = [torch.zeros(size // 4, device=comm.device) for size in sizes]
    mine: list[list[list[float]]] = [[] for _ in sizes]
    for number in range(-1, rounds):  # the first only touches the memory
        for place in order_of_round(len(sizes), number, seed):
            repeats = max(1, min(MOST_REPEATS, REPEAT_BYTES // sizes[place]))
            start_line(comm)
            began, started = time.perf_counter(), comm.time.now()
            for _ in range(repeats):
                comm.all_reduce(tensors[place], "message")
            ended = comm.time.now()
            comm.time.wait(ended)
            stopped = time.perf_counter()
            mine[place].append([comm.time.seconds(started, ended) / repeats, began / repeats, stopped / repeats])
            progress()
    comm.ledger.forget()
    everyone = comm.exchange([seconds[1:] for seconds in mine])
    one_clock = len(host_groups(comm)) == 1
    rows: list[dict[str, Any]] = []
    for place, size in enumerate(sizes):
        by_round = zip(*(rank[place] for rank in everyone), strict=True)
        seconds = []
        for ranks in by_round:
            by_rank, started_at, stopped_at = zip(*ranks, strict=True)
            seconds.append(world_seconds(by_rank, started_at, stopped_at, one_clock))
        median = statistics.median(seconds)
        algbw, busbw = bandwidths(size, median, comm.world_size)
        rows.append(
            {
                "payload_bytes": size,
                "seconds": seconds,
                "seconds_median": median,
                "algbw_bytes_per_second": algbw,
                "busbw_bytes_per_second": busbw,
            }
        )
    cost = fit_call_cost(sizes, [row["seconds_median"] for row in rows])
    for row in rows:
        row["seconds_fitted"] = cost.seconds(row["payload_bytes"])
    fit = {"overhead_seconds": cost.overhead_seconds, "bytes_per_second": cost.bytes_per_second}
    return {"sizes": rows, "fit": fit}


def predict_capacities(workload: Workload, arrivals: dict[str, Any], fit: dict[str, float]) -> dict[str, Any]:
    """For each capacity its buckets and the bounds of the exposed seconds, from `predict_exposed` and `most_exposed`;
    and the best capacity by the first.

    `arrivals` comes from `measure_arrivals`.
    """
    cost = CallCost(fit["overhead_seconds"], fit["bytes_per_second"])
    trainable, backward_seconds = workload.trainable, arrivals["backward_seconds"]
    seconds = {
        tensor["name"]: backward_seconds if tensor["seconds"] is None else tensor["seconds"]
        for tensor in arrivals["tensors"]
    }
    rows, exposed = [], {}
    for capacity in CAPACITIES_MB:
        groups = plan_buckets(trainable, capacity, min(1.0, capacity))
        buckets = [
            (max(seconds[name] for name, _ in group), sum(size_in_bytes(p) for _, p in group)) for group in groups
        ]
        exposed[capacity] = predict_exposed(buckets, backward_seconds, cost)
        rows.append(
            {
                "bucket_mb": capacity,
                "candidate": f"bucketed:bucket_mb={capacity:g}",
                "buckets": [{"seconds_until_full": ready, "bytes": size} for ready, size in buckets],
                "seconds_exposed_predicted": exposed[capacity],
                "seconds_exposed_at_most": most_exposed(buckets, cost),
            }
        )
    return {
        "backward_seconds": backward_seconds,
        "floor": FLOOR,
        "capacities": rows,
        "best_predicted_mb": best_capacity(exposed),
    }
