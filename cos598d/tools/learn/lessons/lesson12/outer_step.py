"""Lesson 12's network, and ways to take the outer step of local SGD, right and wrong, simulated in one process."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from cos598d.tools.check.nonce import seed_of

RATE = 0.2
NEAR = 1e-5

Weights = dict[str, torch.Tensor]


class TwoLayers(nn.Module):
    """Two layers, and one between them that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.frozen.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(batch, 12) to (batch, 3)."""
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(inputs)))))


def network(nonce: int) -> TwoLayers:
    """Its weights drawn from the nonce."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(nonce)
        return TwoLayers()


def batch(nonce: int, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank sees in a step: inputs (16, 12) from its own corner, and what a teacher says of them (16, 3)."""
    generator = torch.Generator().manual_seed(nonce + 7)
    teacher = torch.randn(12, 3, generator=generator) / 3
    generator.manual_seed(seed_of(nonce, rank) + step)
    inputs = torch.randn(16, 12, generator=generator)
    inputs[:, rank % 12] += 2.0  # ranks whose data are alike would need no talk
    return inputs, torch.sin(inputs @ teacher)


def train_step(model: nn.Module, nonce: int, rank: int, step: int) -> None:
    """A step of plain SGD on a rank's own batch."""
    inputs, targets = batch(nonce, rank, step)
    nn.functional.mse_loss(model(inputs), targets).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.data -= RATE * p.grad
            p.grad = None


@dataclass(frozen=True)
class OuterStepVariant:
    """A way to do the outer step, right or wrong; `words` say what is wrong with it."""

    words: str
    average: str = "mean"
    sign: float = -1.0
    momentum: str = "nesterov"
    agreed: str = "moves"
    put_back: bool = True


RIGHT = OuterStepVariant("")
MISTAKES = (
    OuterStepVariant("the weights are the sum over the ranks and should be their average: divide by n", average="sum"),
    OuterStepVariant(
        "the weights were not averaged over the ranks: each rank steps by how far it moved itself", average="own"
    ),
    OuterStepVariant("the outer step goes the wrong way: moved is agreed - average, and is taken off", sign=1.0),
    OuterStepVariant(
        "momentum is not looked ahead: step by moved + outer_momentum * momentum, not by momentum alone",
        momentum="heavy",
    ),
    OuterStepVariant("momentum does not build up: it is outer_momentum * (what it was) + moved", momentum="forgotten"),
    OuterStepVariant("the outer step has no momentum", momentum="none"),
    OuterStepVariant(
        "what was agreed on stays what it was at the start: keep the weights after each round", agreed="stays"
    ),
    OuterStepVariant(
        "the average replaces what was agreed on: keep the weights after the outer step", agreed="average"
    ),
    OuterStepVariant(
        "a round leaves the ranks' own weights: put what was agreed on back into the model", put_back=False
    ),
)


def simulate(
    nonce: int, size: int, every: int, steps: int, outer: tuple[float, float], way: OuterStepVariant
) -> list[list[Weights]]:
    """The weights by name after each step: [step][rank]."""
    rate, mu = outer
    models = [network(nonce) for _ in range(size)]
    flats = [_flat(model) for model in models]
    agreed, momentum = [flat.clone() for flat in flats], [torch.zeros_like(flat) for flat in flats]
    found = []
    for step in range(steps):
        for rank, model in enumerate(models):
            train_step(model, nonce, rank, step)
        if (step + 1) % every == 0:
            flats = [_flat(model) for model in models]
            total = torch.stack(flats).sum(dim=0)
            for rank, model in enumerate(models):
                average = {"mean": total / size, "sum": total, "own": flats[rank]}[way.average]
                moved = agreed[rank] - average
                momentum[rank] = (0.0 if way.momentum == "forgotten" else mu) * momentum[rank] + moved
                ahead = {"heavy": momentum[rank], "none": moved}.get(way.momentum, moved + mu * momentum[rank])
                new = agreed[rank] + way.sign * rate * ahead
                if way.agreed != "stays":
                    agreed[rank] = average if way.agreed == "average" else new
                if way.put_back:
                    _put(model, new)
        found.append([{name: p.detach().clone() for name, p in model.named_parameters()} for model in models])
    return found


def same(found: Mapping[str, torch.Tensor | None], right: Weights) -> bool:
    """Whether weights by name are equal up to rounding."""
    return all(near(found[name], tensor) for name, tensor in right.items())


def near(found: torch.Tensor | None, right: torch.Tensor) -> bool:
    """Whether they are equal up to rounding; NaN is near nothing."""
    return found is not None and bool((found - right).abs().max() <= NEAR * right.abs().max())


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.data.flatten() for p in model.parameters() if p.requires_grad])


def _put(model: nn.Module, flat: torch.Tensor) -> None:
    weights = [p for p in model.parameters() if p.requires_grad]
    for p, part in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
        p.data.copy_(part.view_as(p))
