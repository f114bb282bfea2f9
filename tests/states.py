"""Trainings that are left and taken up again, for the tests of strategies' states."""

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from test_engines import Model, a_part
from torch import nn

from cos598d.comm.ledger import Ledger
from cos598d.strategies import class_of, get_strategy
from cos598d.strategies.replicas import digest
from cos598d.strategies.state import FullTensor
from cos598d.tools.exam.models import local_batch, plain_model, toy_model

MICROS, MAX_NORM = 2, 0.5
BUCKETS = {"bucket_mb": 0.004, "first_bucket_mb": 0.001}  # several of them in a toy


@dataclass(frozen=True)
class Case:
    """A training: by which strategy, of which model ("toy", "layers", "plain" or "bert"), with which optimizer.

    It is left after so many steps, and ends after so many.
    """

    sync: str
    options: dict = field(default_factory=dict)
    model: str = "toy"
    optimizer: str = "adamw"
    precision: str = "fp32"
    left: int = 3
    end: int = 6

    @property
    def label(self):
        said = [self.sync, *(f"{name}={value}" for name, value in self.options.items() if name not in BUCKETS)]
        return " ".join([*said, self.model, self.optimizer, self.precision, f"left after {self.left}"])


class Norms(nn.Module):
    """A plain model whose running statistics follow each rank's own examples."""

    def __init__(self):
        super().__init__()
        self.plain, self.norm = plain_model(), nn.BatchNorm1d(251)

    def forward(self, inputs):
        return self.norm(self.plain(inputs))


def make_model(kind, seed):
    if kind == "toy":
        return toy_model(seed)
    if kind == "layers":
        return Model(seed)
    if kind == "bert":
        from cos598d.models.build import build_model, find_model

        return build_model(find_model("tiny"), "sequence_classification", 2, 0.0, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Norms()


def loss_of(kind, module, rank, step, micro, is_used=True):
    """A rank's loss on examples that only it sees; `is_used`: of the toy also the layer that some examples use."""
    if kind == "plain":
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
        return module(inputs=torch.randn(16, 256, generator=generator)).square().mean()
    if kind == "toy":
        return module(**local_batch(rank, 10 * step + micro, with_first_label=is_used))[0]
    if kind == "layers":
        return module(**a_part(step, 10 * micro + rank))[0]
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    ids = torch.randint(5, 900, (3, 9), generator=generator)
    labels = torch.randint(0, 2, (3,), generator=generator)
    return module(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)[0]


def make_optimizer(named, kind):
    groups = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in named:
        if parameter.requires_grad:
            groups[name.endswith("bias")]["params"].append(parameter)
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.01, fused=True)
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9 if kind == "momentum" else 0.0)


class Training:
    """One training on this rank, whose steps are numbered from 0."""

    def __init__(self, comm, case, seed=0):
        comm.ledger = Ledger()
        self.comm, self.case = comm, case
        self.model = make_model(case.model, seed)
        uses_all = case.model in ("plain", "bert")
        options = class_of(case.sync).options_kind(**case.options)
        self.strategy = get_strategy(case.sync)(comm, not uses_all, options, case.precision)
        self.module = self.strategy.attach(self.model, lambda named: make_optimizer(named, case.optimizer))
        self.losses = []

    def steps(self, first, end):
        """Steps from `first` to before `end`; the layer that some examples use is used from step 2 on, by rank 0."""
        comm, case = self.comm, self.case
        for step in range(first, end):
            comm.ledger.begin(step + 1, 0.0)
            for group in self.strategy.optimizer.param_groups:
                group["lr"] = 0.01 / (step + 1)
            for micro in range(MICROS):
                with self.strategy.no_sync() if micro < MICROS - 1 else contextlib.nullcontext():
                    is_used = step >= 2 and comm.rank == 0
                    loss = loss_of(case.model, self.module, comm.rank, step, micro, is_used)
                    self.strategy.backward(loss / (comm.world_size * MICROS))
                    self.losses.append(loss.item().hex())
            self.strategy.finish()
            self.strategy.clip(MAX_NORM)
            self.strategy.step()
        return self

    def pieces(self):
        """All of this rank's pieces, copied."""
        return [
            (piece.kind, piece.name, piece.shape, piece.begin, piece.values.detach().cpu().clone())
            for piece in self.strategy.state()
        ]

    def save(self, folder):
        """Write this rank's part of the state; every rank calls it."""
        facts, tensors = self.strategy.own_state()
        own = (facts, {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})
        torch.save((self.pieces(), self.strategy.scalars(), own), Path(folder) / f"rank{self.comm.rank}.pt")

    def load(self, folder, with_own=True):
        """Go on from what ranks have saved, as many as there were; `with_own` needs as many as there are."""
        self.strategy.load_state(wholes(folder))
        _, scalars, (facts, tensors) = torch.load(Path(folder) / f"rank{self.comm.rank if with_own else 0}.pt")
        self.strategy.load_scalars(scalars)
        if with_own:
            self.strategy.load_own_state(facts, tensors)
        return self

    def found(self):
        """Digests of what this rank has now: its losses so far, its pieces of the state, and what it alone keeps."""
        pieces = {f"{kind}/{name}@{begin}": digest(values) for kind, name, _, begin, values in self.pieces()}
        facts, tensors = self.strategy.own_state()
        own = {name: digest(tensor.detach()) for name, tensor in tensors.items()}
        later = [row for row in self.comm.ledger.rows if row.iteration > self.case.left]
        # Calls of libraries are numbered by what is in the ledger.
        rows = [[row.op, row.op if row.tensor.startswith(row.op) else row.tensor, row.bytes_sent] for row in later]
        answer = {"losses": self.losses, "pieces": pieces, "facts": facts, "own": own, "rows": rows}
        answer["scalars"] = self.strategy.scalars()
        self.strategy.settle()
        answer["model"] = {name: digest(t) for name, t in self.model.state_dict().items()}
        self.strategy.detach()
        return answer


def wholes(folder):
    """The state that ranks have saved, put together; every element has to be there once."""
    parts = defaultdict(list)
    for file in sorted(Path(folder).glob("rank*.pt")):
        for kind, name, shape, begin, values in torch.load(file)[0]:
            parts[kind, name, shape].append((begin, values.flatten()))
    assert len({(kind, name) for kind, name, _ in parts}) == len(parts), "a tensor has two shapes"
    found = []
    for (kind, name, shape), pieces in parts.items():
        pieces.sort(key=lambda piece: piece[0])
        begins = [begin for begin, _ in pieces]
        ends = [begin + len(values) for begin, values in pieces]
        assert begins == [0, *ends[:-1]], (kind, name, begins, ends)
        assert ends[-1] == torch.Size(shape).numel(), (kind, name)
        found.append(FullTensor(kind, name, torch.cat([values for _, values in pieces]).view(shape)))
    return found
