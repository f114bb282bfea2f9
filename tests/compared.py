"""A training by a strategy, and the same by one process on all ranks' examples: models, and steps of both."""

import contextlib
import copy

import torch
from torch import nn

from cos598d.sync.options import SyncOptions

WORDS, WIDTH, EXAMPLES = 29, 8, 3
SMALL_BUCKETS = SyncOptions(bucket_mb=600 / 2**20, first_bucket_mb=200 / 2**20)  # a word embedding is larger
ONE_EACH = SyncOptions(bucket_mb=16 / 2**20, first_bucket_mb=16 / 2**20)  # a bucket for each weight


class Layered(nn.Module):
    """Layers in a list, one of them used twice, and tied, frozen, unused and tiny weights."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(97, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.order = (0, 1, 2, 1)
        self.gain = nn.Parameter(torch.ones(1))  # one element: most ranks hold nothing of it
        self.output = nn.Linear(WIDTH, WORDS)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, ids, labels):
        state = self.embedding(ids).mean(dim=1) + self.positions(ids[:, 0])
        state = self.frozen(state) * self.scale
        for place in self.order:
            state = self.blocks[place](state) + state
        logits = self.output(state * self.gain)
        return nn.functional.cross_entropy(logits.float(), labels), logits


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, state):
        return torch.tanh(self.norm(self.linear(state)))


def layered(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Layered()


def batch(step, micro, rank):
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    ids = torch.randint(0, WORDS, (EXAMPLES, 5), generator=generator)
    return {"ids": ids, "labels": torch.randint(0, WORDS, (EXAMPLES,), generator=generator)}


def layered_loss(module, rank, step, micro):
    return module(**batch(step, micro, rank))[0]


def sgd(named):
    return torch.optim.SGD(_groups(named), lr=0.5, momentum=0.9)


def adamw(named):
    return torch.optim.AdamW(_groups(named), lr=0.01, fused=True)


def _groups(named):
    decayed, plain = [], []
    for name, p in named:
        if p.requires_grad:
            (plain if name.endswith("bias") else decayed).append(p)
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def sum_by(strategy, module, comm, step, loss_of=layered_loss, micros=1, max_norm=0.0, unsynced=None):
    """A step's gradients, summed and clipped by a strategy: their norm.

    `unsynced` is the number of micro-batches under no_sync: by default all but the last.
    """
    unsynced = micros - 1 if unsynced is None else unsynced
    for micro in range(micros):
        with strategy.no_sync() if micro < unsynced else contextlib.nullcontext():
            strategy.backward(loss_of(module, comm.rank, step, micro) / (comm.world_size * micros))
    strategy.finish()
    return strategy.clip(max_norm)


def step_by(strategy, *arguments, **options):
    """One step by a strategy, with the arguments of `sum_by`: its norm, and whether it counts."""
    norm = sum_by(strategy, *arguments, **options)
    return norm, strategy.step()


def train_sharded(strategy, module, comm, steps, micros, max_norm, first=0):
    """Steps of the layered model, all of which count: their norms."""
    norms = []
    for step in range(first, first + steps):
        norm, counts = step_by(strategy, module, comm, step, micros=micros, max_norm=max_norm)
        assert counts
        norms.append(norm.item())
    return norms


class Compared:
    """A model that a strategy trains, and a copy that one process trains on all ranks' examples."""

    def __init__(self, comm, strategy, model, make, loss_of=layered_loss, reference=None):
        """loss_of(module, rank, step, micro) is a rank's loss. `reference` is the model of the one process (a copy)."""
        self.comm, self.strategy, self.model, self.loss_of = comm, strategy, model, loss_of
        self.reference = copy.deepcopy(model) if reference is None else reference
        self.module = strategy.attach(model, make)
        self.optimizer = make(self.reference.named_parameters())

    def step(self, step, micros=1, max_norm=0.0, precision="fp32"):
        """One step of both: the norms, by the strategy and by one process."""
        norm, _ = step_by(self.strategy, self.module, self.comm, step, self.loss_of, micros, max_norm)
        return norm, self.step_reference(step, micros, max_norm, precision)

    def step_reference(self, step, micros=1, max_norm=0.0, precision="fp32"):
        """One step of the one process: the norm."""
        for micro in range(micros):
            for rank in range(self.comm.world_size):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                    loss = self.loss_of(self.reference, rank, step, micro)
                (loss / (self.comm.world_size * micros)).backward()
        norm = nn.utils.clip_grad_norm_(self.reference.parameters(), max_norm) if max_norm else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def end(self):
        """Detach the strategy. Return the distance of the weights."""
        self.strategy.settle()
        apart = distance(self.model, self.reference)
        self.strategy.detach()
        return apart


def distance(model, other):
    """The largest difference of any weight, relative to the tensor's largest."""
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for (_, a), (_, b) in pairs)
