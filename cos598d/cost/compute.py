"""What an iteration computes. `PassTimer` times a model's passes, for `--sync auto` and for `--dry_run`.

With `--sync auto`, the ranks time the model's own passes over the first global batch, before training begins:

1. All ranks start together. Each runs forward and backward over its share, and records when gradients arrive.
2. The rows of large embeddings that any rank looks up are combined over the ranks.
3. A step of the optimizer, and clipping, are timed on a part of the weights.
Afterwards gradients are dropped, buffers and random states are restored, and no weight has changed.
"""

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig
from cos598d.cost.model import Compute
from cos598d.data.examples import Examples
from cos598d.data.sampler import micro_batches
from cos598d.plan import Plan
from cos598d.records.conventions import AGREEMENT
from cos598d.strategies.base import MakeOptimizer
from cos598d.strategies.optimizers import make_optimizer
from cos598d.strategies.precision import autocast
from cos598d.sync.parts.embeddings import large_embeddings

SECONDS, MOST = 1.0, 5  # roughly how long passes are repeated, and how often at most
STAND_IN = 1 << 22  # elements of the weights that represent all


class PassTimer:
    """Times forward and backward passes of `model`. All ranks call `meet` at the start and the end of the passes."""

    def __init__(self, model: nn.Module, precision: str, device: torch.device, meet: Callable[[], object]):
        self._model, self._meet = model, meet
        self._autocast = functools.partial(autocast, precision, device)
        self._arrived: dict[str, float] = {}
        self._hooks = [
            p.register_post_accumulate_grad_hook(functools.partial(self._note, name))
            for name, p in model.named_parameters()
            if p.requires_grad
        ]

    def time(self, passes: Iterable[tuple[Mapping[str, torch.Tensor], float]]) -> Compute:
        """Seconds of the passes of one step, each an input and the weight of its loss, without the optimizer's step.

        `arrivals` counts from the start of the last backward. The time in the last `meet` belongs to backward.
        """
        self._meet()
        began = backward = time.perf_counter()
        for inputs, weight in passes:
            with self._autocast():
                loss = self._model(**inputs)[0]
            backward = time.perf_counter()
            (loss * weight).backward()
        self._meet()
        in_backward = time.perf_counter() - backward
        return Compute(backward - began, in_backward, 0.0, {n: at - backward for n, at in self._arrived.items()})

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str, _: torch.Tensor) -> None:
        self._arrived[name] = time.perf_counter()


@dataclass(frozen=True)
class Computed:
    """An iteration without a sync, the same on every rank. step_seconds: its seconds for clipping and stepping.

    arrival: the tensors' names in the order in which their gradients arrive. touched: the share of large embeddings'
    rows that some rank looks up; 1 without such an embedding.
    """

    compute: Compute
    step_seconds: float
    arrival: Sequence[str]
    touched: float


def time_compute(config: RunConfig, comm: Communicator, model: nn.Module, examples: Examples) -> Computed:
    """Time an iteration. Every rank calls it with the same model."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    _, batch = next(Plan(config, len(examples), comm.world_size).batches(after=0))
    share = micro_batches(batch, comm.rank, comm.world_size, config.gradient_accumulation_steps)
    passes = [(examples.collate(one.indices, (config.seed, 1)), one.weight) for one in share]
    buffers = [buffer.clone() for buffer in model.buffers()]
    embeddings = large_embeddings(model)
    looked_up = {p: torch.zeros(len(p), dtype=torch.uint8) for p in embeddings}
    timer = PassTimer(model, config.precision, comm.device, functools.partial(_meet, comm))
    hooks = [
        module.register_forward_pre_hook(functools.partial(_look_up, looked_up[p]), with_kwargs=True)
        for p, module in embeddings.items()
    ]
    was_training = model.training
    model.train()
    rows: list[Compute] = []
    with torch.random.fork_rng(devices=[]):
        count = 1
        while len(rows) <= count:  # the first one is a warm-up
            rows.append(timer.time(passes))
            for _, p in trainable:
                p.grad = None
            if len(rows) == 1:
                slowest = max(comm.exchange(rows[0].seconds))
                count = max(1, min(MOST, int(SECONDS / slowest)))
    timer.detach()
    for hook in hooks:
        hook.remove()
    model.train(was_training)
    with torch.no_grad():
        for buffer, kept in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(kept)
    fastest = min(rows[1:], key=lambda row: row.seconds)
    before, in_backward = fastest.before, fastest.backward
    moments = {name: max(0.0, moment) for name, moment in rows[-1].arrivals.items()}
    # unused parameters are sent at the end of backward
    moments |= {name: in_backward for name, _ in trainable if name not in moments}
    make = functools.partial(make_optimizer, config=config)
    step = step_seconds(make, bool(config.max_grad_norm), comm, sum(p.numel() for _, p in trainable))
    before, in_backward, step, moments = comm.exchange([before, in_backward, step, moments])[0]
    moments = {name: min(moment, in_backward) for name, moment in moments.items()}
    return Computed(
        Compute(before, in_backward, step, moments),
        step,
        sorted(moments, key=lambda name: moments[name]),
        _touched(comm, looked_up),
    )


def _look_up(rows: torch.Tensor, _: nn.Module, given: tuple[torch.Tensor, ...], named: dict[str, Any]) -> None:
    rows[(given[0] if given else named["input"]).flatten()] = 1


def _meet(comm: Communicator) -> None:
    comm.all_reduce(torch.zeros(1), "start line", purpose=AGREEMENT)


def step_seconds(make: MakeOptimizer, clips: bool, comm: Communicator, weights: int) -> float:
    """Seconds to step all weights, and to clip if asked, from a part of them. Every rank calls it."""
    stand_in = nn.Parameter(torch.zeros(min(weights, STAND_IN)))
    optimizer = make([("stand-in", stand_in)])
    seconds = 0.0
    for _ in range(2):  # the first step creates the optimizer's state
        stand_in.grad = torch.ones_like(stand_in)
        _meet(comm)
        began = time.perf_counter()
        if clips:
            torch.nn.utils.clip_grad_norm_([stand_in], 1.0)
        optimizer.step()
        seconds = time.perf_counter() - began
    return seconds * weights / stand_in.numel()


def _touched(comm: Communicator, looked_up: dict[nn.Parameter, torch.Tensor]) -> float:
    """The share of the embeddings' bytes whose rows some rank has looked up."""
    used, whole = 0, 0
    for parameter, rows in looked_up.items():
        comm.all_reduce(rows, "rows looked up", purpose=AGREEMENT, op=dist.ReduceOp.MAX)
        width = parameter.shape[1] * parameter.element_size()
        used, whole = used + int(rows.sum()) * width, whole + len(rows) * width
    return used / whole if whole else 1.0
