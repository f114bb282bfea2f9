"""The optimizers of a run, their flags, and the learning rate's schedule."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cos598d.terminal.fields import flag

TRAINING = "training"  # the heading of the flags below in --help
# The learning rate's factor, as a function of the share of the steps after warm-up that is left.
SCHEDULERS: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "constant": lambda left: 1.0,
    "cosine": lambda left: (1 + math.cos(math.pi * (1 - left))) / 2,
}
NO_WEIGHT_DECAY = re.compile(r"bias$|layer_?norm[^/]*weight$", re.IGNORECASE)
# The flags that only this optimizer uses. Each steps every element by itself, since ranks may step parts of tensors.
OPTIMIZERS = {"adamw": ("adam_epsilon",), "sgd": ("momentum",)}


@dataclass(frozen=True)
class OptimizerFlags:
    """The flags for the optimizer and its learning rate."""

    optimizer: str = flag("adamw", "optimizer: {choices}", group=TRAINING, choices=tuple(OPTIMIZERS))
    learning_rate: float = flag(5e-5, "the optimizer's peak learning rate", group=TRAINING, least=0)
    weight_decay: float = flag(
        0.0, "the optimizer's weight decay, on all but biases and layer norms", group=TRAINING, least=0
    )
    adam_epsilon: float = flag(1e-8, "AdamW's epsilon", group=TRAINING, least=0)
    momentum: float = flag(0.0, "SGD's momentum", group=TRAINING, least=0, below=1)
    warmup_steps: int = flag(0, "steps over which the learning rate rises from 0", group=TRAINING, least=0)
    lr_scheduler: str = flag(
        "linear",
        "learning rate after the warm-up: {choices} (linear: down to 0; cosine: down to 0 along half a cosine)",
        group=TRAINING,
        choices=tuple(SCHEDULERS),
    )


def make_optimizer(model: nn.Module, flags: OptimizerFlags, precision: str = "fp32") -> torch.optim.Optimizer:
    """The optimizer that the flags name, with weight decay on all parameters except biases and layer norms.

    Frozen parameters are left out. AdamW is fused: one pass over the weights instead of several, which saves time on
    CPUs that ranks share; not for fp16, since on a CPU torch's scaler cannot unscale for a fused one. SGD never is:
    torch's fails if a parameter's first gradient comes later than the others'.
    """
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": each} for each in (flags.weight_decay, 0.0)]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[bool(NO_WEIGHT_DECAY.search(name))]["params"].append(parameter)
    groups = [group for group in groups if group["params"]]
    if flags.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=flags.learning_rate, momentum=flags.momentum)
    return torch.optim.AdamW(groups, lr=flags.learning_rate, eps=flags.adam_epsilon, fused=precision != "fp16")


def remembered(flags: OptimizerFlags) -> tuple[str, ...]:
    """The names of what the optimizer remembers: a number per weight each, and the step, one per parameter."""
    if flags.optimizer == "sgd":
        return ("momentum_buffer",) if flags.momentum else ()
    return "step", "exp_avg", "exp_avg_sq"


def schedule(kind: str, learning_rate: float, warmup_steps: int, steps: int) -> Callable[[int], float]:
    """The learning rate as a function of the steps so far: from 0 up over `warmup_steps`, then by SCHEDULERS[kind]."""
    factor = SCHEDULERS[kind]

    def rate(done: int) -> float:
        if done < warmup_steps:
            return learning_rate * (done / warmup_steps)
        return learning_rate * factor(max(0.0, (steps - done) / max(1, steps - warmup_steps)))

    return rate
