"""A training with everything that a checkpoint has to keep, in one process or on ranks of `ranks.world`."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from worlds import these_ranks

from cos598d.checkpoints.folder import Found, newest, place_of
from cos598d.checkpoints.saving import Checkpoints
from cos598d.data.sampler import micro_batches
from cos598d.loop import step
from cos598d.optimizers import OptimizerFlags, make_optimizer, remembered
from cos598d.parallel import parallelize
from cos598d.plan import Position
from cos598d.sync import get_sync

STEPS, EXAMPLES = 6, 12
SEED = 5


class Small(nn.Module):
    """A model with dropout, a tied and a frozen weight, a buffer, and a layer that is never used."""

    def __init__(self, dropout: float):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(3000, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.last, self.never = nn.Linear(8, 3), nn.Linear(2, 2)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("shift", torch.full((8,), 0.5))
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        x = self.table(ids).mean(dim=1) + self.shift
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x))) + self.frozen(x)
        return (nn.functional.cross_entropy(self.last(x), labels),)


def train(
    sync: str,
    *,
    folder: str | None = None,
    save_at: Sequence[int] = (),
    steps: int = STEPS,
    dropout: float = 0.0,
    precision: str = "fp32",
    options: dict[str, Any] | None = None,
    keep: int = 2,
) -> dict[str, Any]:
    """Train on all ranks of the group, from the newest checkpoint in `folder` if there is one.

    Return the losses of these steps, and a digest of the weights of this rank.
    """
    ranks = these_ranks()
    model, flags = Small(dropout), OptimizerFlags(weight_decay=0.01, learning_rate=0.01)
    torch.manual_seed(SEED + ranks.rank)
    options = {"find_unused_parameters": True, **(options or {})}
    known = {name: options[name] for name in get_sync(sync).takes if name in options}
    parallel, _ = parallelize(
        model, lambda _: make_optimizer(model, flags, precision), sync, ledger=ranks.ledger, **known
    )
    scaler, losses, place = ShardedGradScaler("cpu", enabled=precision == "fp16"), [], Path(folder or ".")
    found: Found | None = newest(place)[0] if folder else None  # all ranks see the folder
    checkpoints = Checkpoints(place, ranks, keep, describe, {"sync": sync} | known, found, print, {"seed": SEED})
    position, said = Position(), ""
    if found:
        training, said = checkpoints.restore(parallel, scaler, remembered(flags))
        position = training.position
    for iteration in range(position.iteration + 1, steps + 1):
        ranks.ledger.begin(iteration)
        random = np.random.default_rng(iteration)
        batch = {"ids": random.integers(0, 3000, (EXAMPLES, 4)), "labels": random.integers(0, 3, EXAMPLES)}
        has_stepped, (loss,) = step(
            parallel,
            micro_batches(np.arange(EXAMPLES), ranks.rank, ranks.world_size, 2),
            lambda part, batch=batch: {name: torch.tensor(values[part.indices]) for name, values in batch.items()},
            0.5,
            scaler,
            precision,
        )
        assert has_stepped
        losses.append(loss)
        if iteration in save_at:
            checkpoints.save(parallel, scaler, Position(iteration, iteration), lambda: None)
    parallel.settle()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    parallel.detach()
    return {"losses": losses, "weights": weights, "digest": digest, "said": said}


def describe(folder: Path) -> None:
    """A model's other files."""
    (folder / "config.json").write_text("{}")


def damage(folder: Path, iteration: int) -> Path:
    """An empty checkpoint's folder."""
    place_of(folder, iteration).mkdir(parents=True)
    return place_of(folder, iteration)
