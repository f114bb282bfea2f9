"""When backward's gradients arrive, which determines how much communication can overlap with backward."""

import statistics
from collections.abc import Callable
from typing import Any

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import dtype_name, size_in_bytes
from cos598d.comm.timers import Timestamp
from cos598d.records.conventions import WARM_UP
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
