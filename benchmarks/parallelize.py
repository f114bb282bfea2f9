"""Does a script that trains by `cos598d.parallelize` take as long as `cos598d train` for the same steps?

    torchrun --nproc_per_node 2 benchmarks/parallelize.py [--sync bucketed,zero1,zero3,shared_weights] [--rounds 30]

Each round is a step of the training loop and a step of a script, in turn, on MiniLM and one batch, with clipping and
AdamW. Seconds are the slowest rank's. A ratio is a round's: the script's seconds divided by the trainer's. It ends with
an error if the losses show that the two did not do the same work.
"""

import argparse
import copy
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import cos598d
from cos598d.commands.run_flags import RankFlags, identity_from
from cos598d.config import RunConfig
from cos598d.data.sampler import MicroBatch
from cos598d.errors import UserError
from cos598d.loop import step
from cos598d.models.build import find_model
from cos598d.rank import RankProcess, init_rank
from cos598d.records.conventions import WARM_UP
from cos598d.strategies import get_strategy
from cos598d.strategies.optimizers import make_optimizer
from cos598d.sync.options import SyncOptions
from cos598d.tools.bench.workload import Workload

BATCH, TOKENS = 8, 64  # of a rank
CONFIG = RunConfig(learning_rate=1e-4)
SAME = 1e-3  # losses of one training after some steps of sums in another order


def trainers(comm: Any, workload: Workload, name: str) -> Callable[[dict[str, torch.Tensor]], float]:
    """A step as the training loop makes it; its loss on this rank."""
    strategy = get_strategy(name)(comm, workload.may_leave_unused, SyncOptions(), "fp32")
    module = strategy.attach(copy.deepcopy(workload.model), functools.partial(make_optimizer, config=CONFIG))
    losses: list[torch.Tensor] = []

    def run(inputs: dict[str, torch.Tensor]) -> float:
        batch = MicroBatch(np.arange(0), 1 / comm.world_size)
        step(strategy, lambda **each: keep(module(**each), losses), [batch], lambda _: inputs, CONFIG.max_grad_norm)
        return losses.pop().item()

    return run


def keep(outputs: Any, losses: list[torch.Tensor]) -> Any:
    """A model's outputs, whose first is kept."""
    losses.append(outputs[0])
    return outputs


def scripts(comm: Any, workload: Workload, name: str) -> Callable[[dict[str, torch.Tensor]], float]:
    """A step as a script makes it; its loss on this rank."""
    model, unused = copy.deepcopy(workload.model), workload.may_leave_unused
    make = lambda _: make_optimizer(model.named_parameters(), CONFIG)  # noqa: E731 - as scripts write it
    module, optimizer = cos598d.parallelize(model, make, name, find_unused_parameters=unused)

    def run(inputs: dict[str, torch.Tensor]) -> float:
        loss = module(**inputs)[0]
        loss.backward()
        module.clip_grad_norm_(CONFIG.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return run


def measure(comm: Any, workload: Workload, name: str, rounds: int) -> tuple[list[list[float]], list[float]]:
    """The trainer's and the script's seconds of each round, and both losses of the last on this rank."""
    ways = [make(comm, workload, name) for make in (trainers, scripts)]
    rows, losses = [], [0.0, 0.0]
    for number in range(rounds + WARM_UP):
        inputs, seconds = workload.inputs(number, comm.rank, comm.world_size), [0.0, 0.0]
        for way in (0, 1) if number % 2 else (1, 0):
            comm.exchange("at the start line")
            began = time.perf_counter()
            losses[way] = ways[way](inputs)
            seconds[way] = time.perf_counter() - began
        rows.append([max(each) for each in zip(*comm.exchange(seconds), strict=True)])
    return rows[WARM_UP:], losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sync", default="bucketed,zero1,zero2,zero3,sparse_zero1,shared_weights")
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    identity = identity_from(RankFlags())
    assert identity is not None  # torchrun started this rank
    with RankProcess(identity) as process:
        comm = init_rank(process.meet(300, {}), "gloo", True, None).comm
        workload = Workload(find_model("minilm"), comm.device, BATCH, TOKENS, seed=1)
        if comm.rank == 0:
            print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors; medians (quartiles)")
        for name in asked.sync.split(","):
            rows, losses = measure(comm, workload, name, asked.rounds)
            ratios = statistics.quantiles([script / trainer for trainer, script in rows])
            trainer, script = (statistics.median(column) for column in zip(*rows, strict=True))
            words = f"ratio {ratios[1]:.3f} ({ratios[0]:.3f}-{ratios[2]:.3f}), losses {losses[0]:.5f} {losses[1]:.5f}"
            if comm.rank == 0:
                print(f"{name:15s} trainer {trainer:.3f} s, script {script:.3f} s, {words}", flush=True)
            if abs(losses[0] - losses[1]) > SAME:
                raise UserError(f"the losses of {name} differ: {losses}. They did not do the same work.")
    return process.exit_code


if __name__ == "__main__":
    sys.exit(main())
