"""Lesson 19's training: a small network on drawn examples, whose loss falls within a few hundred steps."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from cos598d.tools.exam.models import seeded

FEATURES, CLASSES, NOISE = 20, 5, 1.5
BASE_BATCH, BASE_RATE = 16, 0.05  # which suit each other
EXAMPLES, TIMES = 16384, (4, 16, 64)  # of a row in the table, and how many times larger its batch is


def loss_after(rates: Sequence[float], batch: int, seed: int = 0) -> float:
    """The mean loss on 1024 examples that no step has seen, after a step of plain SGD with each of these rates."""
    draw = torch.Generator().manual_seed(seed)
    teacher = torch.randn(FEATURES, CLASSES, generator=draw)

    def drawn(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(count, FEATURES, generator=draw)
        return inputs, (inputs @ teacher + NOISE * torch.randn(count, CLASSES, generator=draw)).argmax(dim=1)

    (inputs, labels), (unseen, their_labels) = drawn(len(rates) * batch), drawn(1024)
    model = seeded(seed, lambda: nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES)))
    for layer in (each for each in model if isinstance(each, nn.Linear)):
        layer.weight.data.mul_(2)  # larger than torch's own: fresh weights on which a high rate is too much
    optimizer = torch.optim.SGD(model.parameters())
    for rate, some, right in zip(rates, inputs.split(batch), labels.split(batch)):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        functional.cross_entropy(model(some), right).backward()
        optimizer.step()
    with torch.no_grad():
        return functional.cross_entropy(model(unseen), their_labels).item()


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
