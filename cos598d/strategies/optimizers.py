"""The optimizers of a run, by the names of the parameters they are given, and the learning rate's schedule."""

import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:  # which syncs and strategies there are is what a config asks, so it may import them and not they it
    from cos598d.config import RunConfig

# By the share of the steps after the warm-up that is left, the factor of the peak learning rate.
SCHEDULERS: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "constant": lambda left: 1.0,
    "cosine": lambda left: (1 + math.cos(math.pi * (1 - left))) / 2,
}
NO_WEIGHT_DECAY = re.compile(r"bias$|layer_?norm[^/]*weight$", re.IGNORECASE)


def make_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], config: "RunConfig") -> torch.optim.Optimizer:
    """AdamW as BERT is fine-tuned, or SGD: with either, weight decay on all but biases and layer norms.

    The names are the model's, so that a shard of a parameter decays as the whole would. Frozen ones are left out.
    """
    decayed, plain = decayed_and_plain(named_parameters)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if config.optimizer == "sgd":
        # Not fused: torch's fused SGD fails where a parameter's first gradient comes later than the others'.
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    # fused: one pass over the weights instead of several; on a CPU shared by the ranks that is time.
    return torch.optim.AdamW(groups, lr=config.learning_rate, eps=config.adam_epsilon, fused=True)


def decayed_and_plain(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[list[nn.Parameter]]:
    """The parameters that train in two groups: those whose weights decay, and the others."""
    groups: list[list[nn.Parameter]] = [[], []]
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            groups[bool(NO_WEIGHT_DECAY.search(name))].append(parameter)
    return groups


def states_per_weight(config: "RunConfig") -> int:
    """How many numbers the optimizer remembers of every weight that it steps."""
    return 2 if config.optimizer == "adamw" else int(config.momentum > 0)


def counter_bytes(config: "RunConfig") -> int:
    """How many bytes it remembers of every parameter beside them: AdamW counts the steps of each."""
    return 4 if config.optimizer == "adamw" else 0


def schedule(kind: str, learning_rate: float, warmup_steps: int, steps: int) -> Callable[[int], float]:
    """The learning rate after so many steps: up from 0 over `warmup_steps`, then as the SCHEDULERS' `kind` says."""
    factor = SCHEDULERS[kind]

    def rate(done: int) -> float:
        if done < warmup_steps:
            return learning_rate * (done / warmup_steps)
        return learning_rate * factor(max(0.0, (steps - done) / max(1, steps - warmup_steps)))

    return rate


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of the next step, of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate
