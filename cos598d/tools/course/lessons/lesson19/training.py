"""Lesson 19's training: a small network on drawn examples, whose loss falls within a few hundred steps."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from cos598d.tools.course.common import add_flat
from cos598d.tools.exam.models import seeded

FEATURES, CLASSES, NOISE = 20, 5, 1.5
BASE_BATCH, BASE_RATE = 16, 0.05  # which suit each other
EXAMPLES, TIMES = 16384, (4, 16, 64)  # of a row in the table, and how many times larger its batch is


class DrawnTraining:
    """A network and its examples, `batch` of each step."""

    def __init__(self, seed: int, steps: int, batch: int):
        draw = torch.Generator().manual_seed(seed)
        self._teacher = torch.randn(FEATURES, CLASSES, generator=draw)
        self._examples = self._drawn(steps * batch, draw)
        self._unseen = self._drawn(1024, draw)
        self._size = batch
        self.model = seeded(seed, lambda: nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES)))
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                layer.weight.data.mul_(2)  # larger than torch's own: fresh weights on which a high rate is too much

    def _drawn(self, count: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(count, FEATURES, generator=draw)
        noise = NOISE * torch.randn(count, CLASSES, generator=draw)
        return inputs, (inputs @ self._teacher + noise).argmax(dim=1)

    def gradient(self, step: int) -> torch.Tensor:
        """The mean gradient over a step's examples, flat."""
        first = step * self._size
        inputs, labels = (each[first : first + self._size] for each in self._examples)
        loss = functional.cross_entropy(self.model(inputs), labels)
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(self.model.parameters()))])

    def step(self, gradient: torch.Tensor, rate: float) -> None:
        """A step of plain SGD."""
        add_flat(self.model.parameters(), -rate * gradient)

    def loss(self) -> float:
        """The mean loss on 1024 examples that no step has."""
        inputs, labels = self._unseen
        with torch.no_grad():
            return functional.cross_entropy(self.model(inputs), labels).item()


def loss_after(rates: Sequence[float], batch: int, seed: int = 0) -> float:
    """The loss after a step with each of these rates."""
    training = DrawnTraining(seed, len(rates), batch)
    for step, rate in enumerate(rates):
        training.step(training.gradient(step), rate)
    return training.loss()


def table(scaled_rate: Callable, warm_up: Callable) -> str:
    """The losses of larger batches on as many examples, with each rule's rate, and by the linear rule with warm-up."""
    steps = EXAMPLES // BASE_BATCH
    lines = [f"before training         loss {loss_after([], BASE_BATCH):.3f}"]
    lines += [f"batch {BASE_BATCH:4}, {steps:4} steps   loss {loss_after([BASE_RATE] * steps, BASE_BATCH):.3f}"]
    for times in TIMES:
        batch, steps = BASE_BATCH * times, EXAMPLES // (BASE_BATCH * times)
        linear, root = (scaled_rate(BASE_RATE, BASE_BATCH, batch, rule) for rule in ("linear", "sqrt"))
        warm = [warm_up(step, steps // 4, BASE_RATE, linear) for step in range(steps)]
        ways = {"same rate": [BASE_RATE] * steps, "sqrt": [root] * steps, "linear": [linear] * steps, "warm-up": warm}
        found = "   ".join(f"{name} {loss_after(rates, batch):.3f}" for name, rates in ways.items())
        lines.append(f"batch {batch:4}, {steps:4} steps   {found}")
    return "\n".join(lines)
