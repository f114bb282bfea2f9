"""A model with all that a sync of shards has to get right, its batches, and a training of it."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from cos598d.comm.ledger import Ledger
from cos598d.parallel import parallelize

ROWS = 12  # of a micro-batch, over all ranks


class Net(nn.Module):
    """Strides of its own, a tied, a frozen, an unused and a scalar weight, one without elements, two dtypes, a table of
    looked-up rows that is large, and a layer that rank 1 leaves out."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(2048, 64)
        self.tokens = nn.Embedding(40, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.wide = nn.Linear(64, 8).double()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.sometimes, self.unused = nn.Linear(8, 8), nn.Linear(3, 3)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        hidden = self.tokens(ids % 40) + self.wide(self.words(ids).double()).float()
        hidden = hidden + self.conv(hidden.movedim(2, 1).unsqueeze(3)).squeeze(3).movedim(1, 2)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        hidden = self.frozen(hidden) * self.scale
        some = self.sometimes(hidden)
        hidden = hidden if rank == 1 else hidden + some
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())


def batch(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(100 * step + micro)
    return torch.randint(0, 2048, (ROWS, 4), generator=random), torch.randint(0, 40, (ROWS, 4), generator=random)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    for p in parameters:
        groups[p.dim() < 2]["params"].append(p)
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-3, fused=True)  # a small eps turns last bits into steps


def options_of(sync: str, **options: Any) -> dict[str, Any]:
    """Small buckets, so that there are many."""
    takes_buckets = sync in ("bucketed", "zero1", "zero2", "sparse_zero1", "shared_weights")
    return options | ({"bucket_mb": 0.002, "first_bucket_mb": 0.001} if takes_buckets else {})


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    ranks: int,
    steps: Iterable[int],
    micro: int = 1,
    clip: float = 0.0,
    precision: torch.dtype = torch.float32,
    skips: bool = False,
    each: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Some steps of an ordinary loop; the losses, over all ranks. `skips`: rank 1 leaves a layer out. `each` is called
    just before every step of the optimizer."""
    losses, is_wrapped = [], hasattr(model, "no_sync")
    kind = ShardedGradScaler if is_wrapped else torch.amp.GradScaler
    scaler = kind("cpu", init_scale=2.0**10) if precision == torch.float16 else None
    for step in steps:
        total = torch.zeros(())
        for place in range(micro):
            ids, labels = (part.tensor_split(ranks)[rank] for part in batch(step, place))
            last = place == micro - 1 or not is_wrapped
            cast = torch.autocast("cpu", precision, enabled=precision != torch.float32)
            with contextlib.nullcontext() if last else model.no_sync(), cast:
                loss = model(ids, labels, rank if skips else None) * len(ids) / ROWS / micro
            (scaler.scale(loss * ranks) if scaler else loss * ranks).backward()
            total += loss.detach()
        if scaler:
            scaler.unscale_(optimizer)
        if clip and is_wrapped:
            model.clip_grad_norm_(clip)
        elif clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        each()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def trained(rank: int, ranks: int, sync: str, make: Callable, options: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Four steps under a sync: losses, the weights when step() has returned and when settled, bytes sent in a step."""
    ledger = Ledger()
    net = Net(seed=rank)  # rank 0's is the one that counts
    with ledger:
        model, optimizer = parallelize(net, make, sync, ledger=ledger, **options_of(sync, **options))
        losses = train(model, optimizer, rank, ranks, range(3), **how)
        ledger.begin(1)
        losses += train(model, optimizer, rank, ranks, range(3, 4), **how)
        ledger.begin(2)
        after = weights_of(net)
        model.settle()
        found = {"losses": losses, "after step": after, "weights": weights_of(net)}
        found["sent"] = ledger.sent("gradients", "parameters", iteration=1)
        model.detach()
    return found
