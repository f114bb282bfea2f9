"""A short timing of what ranks compute, without their communication: as many processes as ranks, at once.

    python -m cos598d.cost.timed < QUESTION > ANSWER

It is a separate program, since it forks: torch's threads, and a caller's earlier computations, do not survive a fork.
1. It loads the run's model and data once, and forks a process for each rank.
2. Each computes its share of the run's first global batches: forward, backward, clipping and the optimizer's step.
   After backward they wait for one another, as in a sync. So the seconds include their competition for cores.
3. Nothing is sent between them, nothing listens, and the trained model is dropped.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from cos598d.config import RunConfig
from cos598d.cost.compute import PassTimer
from cos598d.cost.model import Compute
from cos598d.cost.planned import Known, PlannedSteps, Work
from cos598d.models.build import build_model
from cos598d.models.recompute import recompute_activations
from cos598d.strategies.optimizers import load_compiler, make_optimizer
from cos598d.world.devices import choose_threads
from cos598d.world.limits import keep_freed_memory

WARM_UP, LEAST, MOST = 2, 3, 60  # iterations that are excluded, and at least and at most counted
WAIT_SECONDS = 120  # a process that waits longer for the others knows that one of them has died


@dataclass(frozen=True)
class TimingRequest:
    """What to time: a run's flags, on `ranks` ranks, of which `processes` processes represent all. seconds: roughly how
    long. sharded: whether each rank steps and clips only an n-th of the weights."""

    config: dict[str, Any]
    ranks: int
    processes: int
    seconds: float
    sharded: bool


@dataclass(frozen=True)
class Timed:
    """The timing of rank 0.

    compute     seconds of an iteration without communication, medians; `backward` includes the wait for other ranks
    counted     iterations that were counted
    cost        tokens of their mean batch, to which `compute` refers
    threads     of each rank
    share       the share of its time for which each thread had a core, at most 1
    """

    compute: Compute
    counted: int
    cost: float
    threads: int
    share: float

    @classmethod
    def read(cls, text: str) -> "Timed":
        """From the JSON that `main` prints."""
        found = json.loads(text)
        return cls(**found | {"compute": Compute(**found["compute"])})


def answer(question: TimingRequest) -> Timed:
    """Fork the ranks, and return rank 0's timing. Raises RuntimeError if one of them did not end well."""
    torch.set_num_threads(1)  # no thread pool before the fork
    keep_freed_memory()  # as ranks do
    load_compiler()  # once for all ranks
    config = RunConfig(**question.config)
    work = Known().work(config)
    model = build_model(work.source, work.task.head, work.task.num_labels, config.dropout, config.seed)
    if config.activation_checkpointing:
        recompute_activations(model)
    context = multiprocessing.get_context("fork")
    barrier, counted = context.Barrier(question.processes, timeout=WAIT_SECONDS), context.Value("i", 0)
    inlet, outlet = context.Pipe(duplex=False)
    ranks = []
    for rank in range(question.processes):
        arguments = (question, config, work, model, rank, barrier, counted, outlet)
        ranks.append(context.Process(target=_be_rank, args=arguments, daemon=True))
        ranks[-1].start()
    outlet.close()
    try:
        found = Timed.read(inlet.recv_bytes().decode())
        for process in ranks:
            process.join(30)
    except EOFError:
        raise RuntimeError("the ranks that were being timed ended without a result") from None
    finally:
        for process in ranks:
            process.kill()
    return found


def _be_rank(
    question: TimingRequest,
    config: RunConfig,
    work: Work,
    model: nn.Module,
    rank: int,
    barrier: Any,
    counted: Any,
    outlet: Any,
) -> None:
    """One rank's iterations. Rank 0 decides on their number, and sends its timing through `outlet`."""
    threads = choose_threads(config.threads, question.ranks)
    torch.manual_seed(config.seed + rank)
    steps = PlannedSteps(config, work.examples, question.ranks)
    wall = processor = 0.0
    batches = steps.first(min(WARM_UP + MOST, steps.plan.steps))
    named = list(model.named_parameters())
    mine = [(name, _part(p.detach(), question.ranks)) for name, p in named] if question.sharded else named
    optimizer = make_optimizer(mine, config)
    timer = PassTimer(model, config.precision, torch.device("cpu"), barrier.wait)
    rows: list[Compute] = []
    number = 0
    while number < WARM_UP + (counted.value or MOST):
        if number == WARM_UP and rank == 0:
            counted.value = max(LEAST, min(MOST, int(question.seconds / max(rows[-1].seconds, 1e-4))))
        barrier.wait()  # all know `counted` now
        if number == WARM_UP:
            wall, processor = time.perf_counter(), time.process_time()
        share = steps.share(batches[number % len(batches)], rank)
        row = timer.time((work.examples.collate(one.indices, (config.seed, 1)), one.weight) for one in share)
        waited = time.perf_counter()
        for (_, part), (_, whole) in zip(mine, named, strict=True):
            if part is not whole and whole.grad is not None:
                part.grad = _part(whole.grad, question.ranks).data
        if config.max_grad_norm:
            torch.nn.utils.clip_grad_norm_([p for _, p in mine], config.max_grad_norm)
        optimizer.step()
        for _, parameter in named:
            parameter.grad = None
        rows.append(replace(row, after=time.perf_counter() - waited))
        number += 1
    if rank == 0:
        of_a_core = (time.process_time() - processor) / (time.perf_counter() - wall) / threads
        rows = rows[WARM_UP:]
        costs = list(steps.costs([batches[(WARM_UP + place) % len(batches)] for place in range(len(rows))]))
        cost = statistics.fmean(costs)
        # The seconds for a batch of the mean cost: batches of texts differ by a tenth and more.
        alike = [row.scaled(cost / own) for row, own in zip(rows, costs, strict=True)]
        compute = Compute(
            statistics.median(row.before for row in alike),
            statistics.median(row.backward for row in alike),
            statistics.median(row.after for row in rows),
            {name: statistics.median(row.arrivals[name] for row in alike) for name in rows[0].arrivals},
        )
        found = Timed(compute, len(rows), cost, threads, min(1.0, of_a_core))
        outlet.send_bytes(json.dumps(asdict(found)).encode())
    with contextlib.suppress(BrokenPipeError):
        outlet.close()
    os._exit(0)  # the parent's clean-up must not run here too


def _part(whole: torch.Tensor, ranks: int) -> nn.Parameter:
    """An n-th of the elements of a tensor, as a parameter of its own."""
    return nn.Parameter(whole.reshape(-1)[: -(-whole.numel() // ranks)])


def _end(number: int, _: object) -> None:
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(128 + number)


def main(words: Sequence[str] = ()) -> int:
    """Answer the question on standard input; SIGTERM ends the ranks as well."""
    signal.signal(signal.SIGTERM, _end)
    question = TimingRequest(**json.load(sys.stdin))
    print(json.dumps(asdict(answer(question))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
