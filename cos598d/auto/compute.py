"""What an iteration computes: the model's own passes over the first global batch, timed before training begins.

1. All ranks start together; each goes forward and backward over its share, and notes when gradients arrive.
2. Which rows of large embeddings any rank looks up is summed over the ranks.
3. A step of the optimizer, and clipping, are timed on a stand-in of some of the weights.
Nothing of it is left: gradients are dropped, buffers and random states put back, and weights are not stepped.
"""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig
from cos598d.data.examples import Examples
from cos598d.data.sampler import micro_batches
from cos598d.models.padding import cuts_by_length
from cos598d.plan import Plan
from cos598d.records.conventions import AGREEMENT
from cos598d.scale.records import Compute
from cos598d.strategies.optimizers import make_optimizer
from cos598d.strategies.precision import autocast
from cos598d.sync.parts.embeddings import large_embeddings

SECONDS, MOST = 1.0, 5  # how long passes are repeated, about, and how often at most
STAND_IN = 1 << 22  # elements of the weights that stand for all


@dataclass(frozen=True)
class Computed:
    """An iteration without a sync, the same on every rank. step_seconds: of it, clipping and the optimizer's step.

    arrival: the tensors' names in the order in which their gradients come. touched: the share of the rows of large
    embeddings that some rank looks up; 1 without such an embedding.
    """

    compute: Compute
    step_seconds: float
    arrival: Sequence[str]
    touched: float


def time_compute(config: RunConfig, comm: Communicator, model: nn.Module, examples: Examples) -> Computed:
    """Time it; every rank calls it with the same model."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    _, batch = next(Plan(config, len(examples), comm.world_size).batches(after=0))
    share = micro_batches(
        batch,
        examples.lengths,
        comm.rank,
        comm.world_size,
        config.gradient_accumulation_steps,
        group_by_length=cuts_by_length(model, comm.device.type == "cpu"),
    )
    inputs = [examples.collate(one.indices, (config.seed, 1)) for one in share]
    buffers = [buffer.clone() for buffer in model.buffers()]
    embeddings = large_embeddings(model)
    looked_up = {p: torch.zeros(len(p), dtype=torch.uint8) for p in embeddings}
    arrived: dict[str, float] = {}
    hooks = [p.register_post_accumulate_grad_hook(lambda _, name=name: _note(arrived, name)) for name, p in trainable]
    hooks += [
        module.register_forward_pre_hook(functools.partial(_look_up, looked_up[p]), with_kwargs=True)
        for p, module in embeddings.items()
    ]
    was_training = model.training
    model.train()
    rows: list[tuple[float, float]] = []
    with torch.random.fork_rng(devices=[]):
        count = 1
        while len(rows) <= count:  # the first one warms up
            _meet(comm)
            began = backward = time.perf_counter()
            for number, given in enumerate(inputs):
                with autocast(config.precision, comm.device):
                    loss = model(**given)[0]
                backward = time.perf_counter()
                (loss * share[number].weight).backward()
            _meet(comm)
            rows.append((backward - began, time.perf_counter() - backward))
            for _, p in trainable:
                p.grad = None
            if len(rows) == 1:
                slowest = max(comm.exchange(sum(rows[0])))
                count = max(1, min(MOST, int(SECONDS / slowest)))
    for hook in hooks:
        hook.remove()
    model.train(was_training)
    with torch.no_grad():
        for buffer, kept in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(kept)
    before, in_backward = min(rows[1:], key=sum)
    moments = {name: max(0.0, moment - backward) for name, moment in arrived.items()}
    moments |= {name: in_backward for name, _ in trainable if name not in moments}  # it travels at the end
    step = _step_seconds(config, comm, sum(p.numel() for _, p in trainable))
    before, in_backward, step, moments = comm.exchange([before, in_backward, step, moments])[0]
    moments = {name: min(moment, in_backward) for name, moment in moments.items()}
    return Computed(
        Compute(before, in_backward, step, moments),
        step,
        sorted(moments, key=lambda name: moments[name]),
        _touched(comm, looked_up),
    )


def _note(arrived: dict[str, float], name: str) -> None:
    arrived[name] = time.perf_counter()


def _look_up(rows: torch.Tensor, _: nn.Module, given: tuple[torch.Tensor, ...], named: dict[str, Any]) -> None:
    rows[(given[0] if given else named["input"]).flatten()] = 1


def _meet(comm: Communicator) -> None:
    comm.all_reduce(torch.zeros(1), "start line", purpose=AGREEMENT)


def _step_seconds(config: RunConfig, comm: Communicator, weights: int) -> float:
    """What clipping and stepping all weights takes, by a stand-in's."""
    stand_in = nn.Parameter(torch.zeros(min(weights, STAND_IN)))
    optimizer = make_optimizer([("stand-in", stand_in)], config)
    seconds = 0.0
    for _ in range(2):  # the first makes the optimizer's state
        stand_in.grad = torch.ones_like(stand_in)
        _meet(comm)
        began = time.perf_counter()
        if config.max_grad_norm:
            torch.nn.utils.clip_grad_norm_([stand_in], config.max_grad_norm)
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
