"""What every exact way to train must compute: the model, the data, one process on the global batch, and n ranks.

Another test file adds names: `compute_on_ranks` takes any sync by name or class.
"""

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from cos598d.parallel import Parallel, parallelize
from cos598d.sync import get_sync

# The syncs whose gradients are the averages, to the last bits.
EXACT = (
    *("gather_scatter", "reduce_broadcast", "all_reduce", "flat", "overlap", "bucketed", "ring", "halving_doubling"),
    *("tree", "shared_memory", "hierarchical", "sparse_rows", "ddp"),
)
SHARDED = ("zero1", "zero2", "zero3", "sparse_zero1", "shared_weights")
STEPS, ROWS = 3, 10
# Of a training: dtype, micro-batches per step, and the norm to which the gradient is clipped (0: not at all).
SINGLE, DOUBLE = torch.float32, torch.float64
SETTINGS = ((SINGLE, 1, 0.05), (SINGLE, 3, 0.0), (DOUBLE, 1, 0.0), (DOUBLE, 3, 0.05))
TOLERANCE = {SINGLE: 1e-6, DOUBLE: 1e-9}
EVEN_IDS = 1  # the step in which no example uses the layer `sometimes`


class Odd(nn.Module):
    """Tensors of all kinds. Every element of those that train counts for the loss."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20_000, 8)  # larger than a bucket, and large enough for sparse_rows
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.tied, self.twin = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.twin.weight = self.tied.weight
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.sometimes = nn.Linear(12, 12)  # by some examples only, so maybe not by some rank
        self.never = nn.Linear(3, 3)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))  # a number
        self.norm = nn.BatchNorm1d(12).eval()  # its statistics would be each rank's own
        self.last = nn.Linear(12, 3)

    def forward(self, ids, pixels):
        x = torch.cat([self.table(ids).mean(dim=1), self.conv(pixels).mean(dim=(2, 3))], dim=1)
        x = x * self.scale
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.norm(x + self.twin(torch.tanh(self.tied(x))) + self.frozen(x))
        odd, some = ids[:, 0] % 2 == 1, self.sometimes(x)  # called on every rank, as zero3 asks
        if odd.any():
            x = torch.where(odd[:, None], x + some, x)
        double = self.last.weight.dtype  # another dtype than the other layers' in float32
        return self.last(x.to(double))


def make_model(dtype: torch.dtype, seed: int = 0) -> Odd:
    """Of each seed another one. In float32 its last layer is float64, so that dtypes are mixed."""
    torch.manual_seed(seed)
    model = Odd().to(dtype)
    model.last.double()
    return model


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    for p in parameters:
        groups[p.dim() < 2]["params"].append(p)
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-3, fused=True)  # a small eps turns last bits into steps


def shares(step: int, micro_batches: int, rank: int, ranks: int, dtype: torch.dtype) -> Iterator[tuple]:
    """A rank's share of each micro-batch of a step: ids, pixels, and what its mean loss counts for."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 20_000, (ROWS, 3), generator=generator)
    if step == EVEN_IDS:
        ids[:, 0] -= ids[:, 0] % 2
    pixels = torch.randn(ROWS, 2, 5, 5, generator=generator, dtype=torch.float64).to(dtype)
    for part in torch.arange(ROWS).chunk(micro_batches):
        own = part.tensor_split(ranks)[rank]
        yield ids[own], pixels[own], len(own) / ROWS


def loss_of(outputs: torch.Tensor, weight: float) -> torch.Tensor:
    return (outputs - 1).square().mean(dim=1).sum() / max(1, len(outputs)) * weight


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int] = range(STEPS),
    micro_batches: int = 1,
    clip: float = 0.0,
    precision: torch.dtype | None = None,
    each: Callable[[], Any] = lambda: None,
) -> None:
    """An ordinary loop, of one process or of all ranks of a wrapped model. `each` is called before the optimizer."""
    is_wrapped = isinstance(model, Parallel)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if is_wrapped else (0, 1)
    dtype = next(model.parameters()).dtype
    kind = ShardedGradScaler if is_wrapped else torch.amp.GradScaler
    scaler = kind("cpu", init_scale=2.0**10, enabled=precision == torch.float16)
    for step in steps:
        for place, (ids, pixels, weight) in enumerate(shares(step, micro_batches, rank, ranks, dtype)):
            adds = is_wrapped and place < micro_batches - 1
            with model.no_sync() if adds else contextlib.nullcontext():
                with torch.autocast("cpu", precision, enabled=precision is not None):
                    loss = loss_of(model(ids, pixels), weight)
                scaler.scale(loss * ranks).backward()
        scaler.unscale_(optimizer)
        if clip:
            model.clip_grad_norm_(clip) if is_wrapped else nn.utils.clip_grad_norm_(model.parameters(), clip)
        each()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of its weights and buffers."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def one_process(dtype: torch.dtype, *how: Any) -> dict[str, torch.Tensor]:
    """The weights and buffers after all steps on the global batch."""
    model = make_model(dtype)
    train(model, sgd(model.parameters()), range(STEPS), *how)
    return tensors_of(model)


def options_of(sync, **values) -> dict:
    """Small buckets, and these values, where the sync has such options."""
    names = (get_sync(sync) if isinstance(sync, str) else sync).takes
    values = {"bucket_mb": 0.01, "first_bucket_mb": 0.002, **values}
    return {name: value for name, value in values.items() if name in names}


def compute(sync, dtype: torch.dtype, micro_batches: int, clip: float) -> dict[str, torch.Tensor]:
    """The same weights and buffers, by all ranks together. Run on each of them."""
    options = options_of(sync, gradient_as_bucket_view=micro_batches > 1)
    parallel, optimizer = parallelize(make_model(dtype, seed=dist.get_rank()), sgd, sync, **options)
    train(parallel, optimizer, range(STEPS), micro_batches, clip)
    stepped = tensors_of(parallel)
    parallel.settle()
    found = tensors_of(parallel)
    if sync in SHARDED and sync != "zero3":  # whole on every rank when step() has returned
        assert all(torch.equal(stepped[name], value) for name, value in found.items())
    parallel.detach()
    return found


def compute_on_ranks(syncs: Sequence, settings: Sequence[tuple]) -> dict[str, list]:
    """For each sync and setting: a digest of this rank's weights, and on rank 0 the weights. An error ends the list."""
    found = {}
    for sync, setting in itertools.product(syncs, settings):
        key = key_of(sync, setting)
        try:
            weights = compute(sync, *setting)
        except Exception as error:
            found[key] = [f"{type(error).__name__}: {error}", {}]
            break
        digest = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in weights.values())).hexdigest()
        found[key] = [digest, weights if dist.get_rank() == 0 else {}]
    return found


def key_of(sync, setting: tuple) -> str:
    """The key of a case."""
    return f"{sync if isinstance(sync, str) else sync.__name__} {setting}"


def assert_computed(found: list[dict[str, list]], key: str, right: dict[str, torch.Tensor], tolerance: float) -> None:
    """All ranks have the same bits, and they are those of one process up to rounding."""
    assert all(key in rank for rank in found), f"{key} was not reached: {[list(rank.items())[-1] for rank in found]}"
    digests = [rank[key][0] for rank in found]
    weights = found[0][key][1]
    assert weights.keys() == right.keys(), digests
    for name, value in weights.items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=tolerance, msg=f"{key}: {name} is off")
    assert len(set(digests)) == 1, f"{key}: the ranks' weights differ"
