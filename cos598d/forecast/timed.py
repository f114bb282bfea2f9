"""A short timing of what ranks compute, without their communication: as many processes as ranks, side by side.

    python -m cos598d.forecast.timed < QUESTION > ANSWER

This is a program of its own, since it forks: torch's threads, and what a caller has computed before, survive no fork.
1. It loads the model and the data of the run once, and forks a process for each rank.
2. Each computes its share of the run's first global batches: forward, backward, clipping and the optimizer's step.
   After backward they wait for one another, as a sync has them wait: so the seconds know that they compete for cores.
3. Nothing travels between them, nobody listens, and the model that they train is dropped.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from cos598d.config import RunConfig
from cos598d.forecast.known import Known, Work
from cos598d.forecast.steps import PlannedSteps
from cos598d.models.build import build_model
from cos598d.strategies.optimizers import make_optimizer
from cos598d.strategies.precision import autocast
from cos598d.world.devices import choose_threads
from cos598d.world.limits import keep_freed_memory

WARM_UP, LEAST, MOST = 2, 3, 60  # iterations that are left out, and at least and at most counted
WAIT_SECONDS = 120  # after which one that waits for the others knows that one of them has died


@dataclass(frozen=True)
class TimingRequest:
    """What to time: a run's flags, on so many ranks, of which so many processes stand for all. seconds: how long to go
    on, about. sharded: whether each rank steps and clips an n-th of the weights alone; equal_passes: the strategy's."""

    config: dict[str, Any]
    ranks: int
    processes: int
    seconds: float
    sharded: bool
    equal_passes: bool


@dataclass(frozen=True)
class Timed:
    """Seconds of an iteration of rank 0 without communication, medians: until its last backward begins, in that, and
    after it; waiting for the other ranks is in `backward`. arrivals: from that backward's begin to each tensor's
    gradient. counted: of how many iterations. cost: that of their mean batch in tokens, whose seconds these are. share:
    how much of its time each of its threads had a core, at most 1."""

    before: float
    backward: float
    after: float
    arrivals: Mapping[str, float]
    counted: int
    cost: float
    threads: int
    share: float

    @property
    def seconds(self) -> float:
        """Of the whole iteration."""
        return self.before + self.backward + self.after


def answer(question: TimingRequest) -> Timed:
    """Fork the ranks, and return what rank 0 has seen. Raises RuntimeError where one of them did not end well."""
    torch.set_num_threads(1)  # no pool of threads before the fork
    keep_freed_memory()  # as ranks do
    config = RunConfig(**question.config)
    work = Known().work(config)
    model = build_model(work.source, work.task.head, work.task.num_labels, config.dropout, config.seed)
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
        found = json.loads(inlet.recv_bytes())
        for process in ranks:
            process.join(30)
    except EOFError:
        raise RuntimeError("the ranks that were to be timed ended without an answer") from None
    finally:
        for process in ranks:
            process.kill()
    return Timed(**found)


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
    """One rank's iterations. Rank 0 decides how many there are, and sends what it has seen through `outlet`."""
    threads = choose_threads(config.threads, question.ranks)
    torch.manual_seed(config.seed + rank)
    steps = PlannedSteps(config, work.examples, question.ranks, question.equal_passes, model)
    backward = wall = processor = 0.0
    batches = steps.first(min(WARM_UP + MOST, steps.plan.steps))
    named = list(model.named_parameters())
    mine = [(name, _part(p.detach(), question.ranks)) for name, p in named] if question.sharded else named
    optimizer = make_optimizer(mine, config)
    arrived: dict[str, float] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(functools.partial(_note, arrived, name))
    context = functools.partial(autocast, config.precision, torch.device("cpu"))
    rows: list[tuple[float, float, float]] = []
    moments: list[dict[str, float]] = []
    number = 0
    while number < WARM_UP + (counted.value or MOST):
        if number == WARM_UP and rank == 0:
            last = sum(rows[-1])
            counted.value = max(LEAST, min(MOST, int(question.seconds / max(last, 1e-4))))
        barrier.wait()
        if number == WARM_UP:
            wall, processor = time.perf_counter(), time.process_time()
        began = time.perf_counter()
        for micro_batch in steps.share(batches[number % len(batches)], rank):
            inputs = work.examples.collate(micro_batch.indices, (config.seed, 1))
            with context():
                loss = model(**inputs)[0]
            backward = time.perf_counter()
            (loss * micro_batch.weight).backward()
        barrier.wait()
        waited = time.perf_counter()
        for (_, part), (_, whole) in zip(mine, named, strict=True):
            if part is not whole and whole.grad is not None:
                part.grad = _part(whole.grad, question.ranks).data
        if config.max_grad_norm:
            torch.nn.utils.clip_grad_norm_([p for _, p in mine], config.max_grad_norm)
        optimizer.step()
        for _, parameter in named:
            parameter.grad = None
        ended = time.perf_counter()
        rows.append((backward - began, waited - backward, ended - waited))
        moments.append({name: moment - backward for name, moment in arrived.items()})
        number += 1
    if rank == 0:
        share = (time.process_time() - processor) / (time.perf_counter() - wall) / threads
        rows, moments = rows[WARM_UP:], moments[WARM_UP:]
        costs = list(steps.costs([batches[(WARM_UP + place) % len(batches)] for place in range(len(rows))]))
        cost = statistics.fmean(costs)
        # What a batch of the mean cost would have taken: batches of texts differ by a tenth and more.
        before, in_backward = (
            statistics.median(row[phase] * cost / own for row, own in zip(rows, costs, strict=True)) for phase in (0, 1)
        )
        after = statistics.median(row[2] for row in rows)
        arrivals = {
            name: statistics.median(one[name] * cost / own for one, own in zip(moments, costs, strict=True))
            for name in moments[0]
        }
        found = Timed(before, in_backward, after, arrivals, len(rows), cost, threads, min(1.0, share))
        outlet.send_bytes(json.dumps(asdict(found)).encode())
    with contextlib.suppress(BrokenPipeError):
        outlet.close()
    os._exit(0)  # nothing of the parent's is tidied up twice


def _part(whole: torch.Tensor, ranks: int) -> nn.Parameter:
    """An n-th of the elements of a tensor, as a parameter of its own."""
    return nn.Parameter(whole.reshape(-1)[: -(-whole.numel() // ranks)])


def _note(arrived: dict[str, float], name: str, _: torch.Tensor) -> None:
    arrived[name] = time.perf_counter()


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
