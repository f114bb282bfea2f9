"""`--sync auto`: try the syncs on the run's own model and first batch, and take the fastest. Nothing is modelled.

1. Every rank wraps the model by each candidate in turn, makes a few steps at a learning rate of 0, and unwraps it.
2. A step takes as long as the slowest rank. A candidate that is several times slower than the fastest is given up.
3. Weights, buffers and random numbers are put back as they were, so the run is the one that names the sync.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from cos598d.comm.group import Ranks
from cos598d.errors import UserError
from cos598d.parallel import Parallel, parallelize
from cos598d.records.conventions import FLOOR
from cos598d.sync import get_sync

# Those that are the fastest somewhere; the last two only where all ranks share a host.
CANDIDATES = ("ddp", "bucketed", "flat", "sparse_rows", "shared_memory", "hierarchical")
ON_ONE_HOST = ("shared_weights", "zero1")
WARM_UP, MOST = 2, 5  # steps of a candidate that are not counted, and the most that are
ENOUGH, GIVE_UP = 1.0, 3.0  # seconds of a candidate's steps; how many times slower than the fastest it may be
RUNNERS_UP = 2

Loss = Callable[[nn.Module], torch.Tensor]


@dataclass(frozen=True)
class Choice:
    """The choice, the same on every rank. `seconds` per step by candidate, the fastest first; `left_out`: reasons."""

    sync: str
    why: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The line for the screen."""
        if not self.seconds:
            return f"--sync auto: {self.sync}, {self.why}"
        others = [f"{name} {took:.3g} s" for name, took in list(self.seconds.items())[1 : 1 + RUNNERS_UP]]
        then = f"; then {', '.join(others)}" if others else ""
        return f"--sync auto: {self.sync}, {self.seconds[self.sync]:.3g} s per step{then} ({self.why})"

    def as_record(self) -> dict[str, Any]:
        """For the run's record, as JSON."""
        return asdict(self)


def choose(
    ranks: Ranks,
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    losses: Sequence[Loss],
    options: Mapping[str, Any],
    before: str | None = None,
) -> Choice:
    """Try all, and choose. Every rank calls it with the same model.

    losses: for each micro-batch of this rank's share of the first batch, what computes its loss, times its weight.
    options: of all syncs; each gets its own. before: the sync of a run that is resumed on the same number of ranks.
    Raises UserError if no candidate can work.
    """
    if ranks.world_size == 1:
        return Choice(FLOOR, "a single rank has nothing to average")
    if before is not None:
        return Choice(before, "as in the run that is resumed")
    one_host = len({str(host) for host in ranks.hosts}) == 1
    tensors = [*model.parameters(), *model.buffers()]
    kept = [tensor.detach().clone() for tensor in tensors]
    seconds: dict[str, float] = {}
    left_out: dict[str, str] = {}
    devices = [ranks.device] if ranks.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for name in (*CANDIDATES, *(ON_ONE_HOST if one_host else ())):
            try:
                own = {key: options[key] for key in get_sync(name).takes if key in options}
                wrapped, _ = parallelize(model, make_optimizer, name, ledger=ranks.ledger, **own)
            except UserError as error:  # the same on every rank
                left_out[name] = str(error)
                continue
            try:
                seconds[name] = _seconds(wrapped, losses, ranks, min(seconds.values(), default=math.inf))
            finally:
                wrapped.detach()
                model.zero_grad(set_to_none=True)
                with torch.no_grad():
                    for tensor, value in zip(tensors, kept, strict=True):
                        tensor.copy_(value)
    if not seconds:
        raise UserError(f"--sync auto found no sync that works here ({left_out[CANDIDATES[0]]}). Name one.")
    seconds = dict(sorted(seconds.items(), key=lambda one: one[1]))
    return Choice(next(iter(seconds)), f"the fastest of {len(seconds)} that were tried", seconds, left_out)


def _seconds(model: Parallel, losses: Sequence[Loss], ranks: Ranks, best: float) -> float:
    """Seconds of a step on the slowest rank: the median of a few, after a warm-up."""
    optimizer = model.optimizer
    assert optimizer is not None
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    found: list[float] = []
    while len(found) < WARM_UP + MOST:
        ranks.exchange("start line")
        began = time.perf_counter()
        for loss in losses:
            with nullcontext() if loss is losses[-1] else model.no_sync():
                value = loss(model)
            (value * ranks.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        found.append(max(ranks.exchange(time.perf_counter() - began)))
        counted = found[WARM_UP:] or found[-1:]
        if len(found) > 1 and (found[-1] > GIVE_UP * best or sum(found[WARM_UP:]) > ENOUGH):
            break
    return statistics.median(counted)
