"""The optimizers of a run: one declaration per optimizer, their flags, and the learning rate's schedule."""

import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cos598d.terminal.fields import flag
from cos598d.terminal.program import importing

TRAINING = "training"  # the heading of the flags below in --help
# The learning rate's factor, as a function of the share of the steps after warm-up that is left.
SCHEDULERS: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "constant": lambda left: 1.0,
    "cosine": lambda left: (1 + math.cos(math.pi * (1 - left))) / 2,
}
NO_WEIGHT_DECAY = re.compile(r"bias$|layer_?norm[^/]*weight$", re.IGNORECASE)


@dataclass(frozen=True)
class OptimizerKind:
    """One value of --optimizer.

    make                make(parameter groups, flags) -> the optimizer; it must step every element by itself, since
                        sharded strategies give it parts of tensors
    numbers_per_weight  numbers_per_weight(flags) -> the state's size per weight that it steps, in numbers
    bytes_per_tensor    the state's size per parameter in addition, in bytes, such as a step counter
    flags               the flags of OptimizerFlags that only this optimizer uses
    """

    make: Callable[[list[dict[str, Any]], "OptimizerFlags"], torch.optim.Optimizer]
    numbers_per_weight: Callable[["OptimizerFlags"], int]
    bytes_per_tensor: int
    flags: tuple[str, ...] = ()


OPTIMIZERS = {
    "adamw": OptimizerKind(
        # fused: one pass over the weights instead of several, which saves time on CPUs that ranks share.
        make=lambda groups, flags: torch.optim.AdamW(
            groups, lr=flags.learning_rate, eps=flags.adam_epsilon, fused=True
        ),
        numbers_per_weight=lambda flags: 2,
        bytes_per_tensor=4,
        flags=("adam_epsilon",),
    ),
    "sgd": OptimizerKind(
        # Not fused: torch's fused SGD fails if a parameter's first gradient comes later than the others'.
        make=lambda groups, flags: torch.optim.SGD(groups, lr=flags.learning_rate, momentum=flags.momentum),
        numbers_per_weight=lambda flags: int(flags.momentum > 0),
        bytes_per_tensor=0,
        flags=("momentum",),
    ),
}


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


def load_compiler() -> None:
    """Import torch's compiler, which torch imports with the first optimizer. It takes a second."""
    if "torch._dynamo" not in sys.modules:
        with importing():
            importlib.import_module("torch._dynamo")


def make_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerFlags
) -> torch.optim.Optimizer:
    """The optimizer that the flags name, with weight decay on all parameters except biases and layer norms.

    The names are the model's, so a shard of a parameter decays if the whole would. Frozen parameters are left out.
    """
    load_compiler()
    decayed, plain = decayed_and_plain(named_parameters)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return OPTIMIZERS[config.optimizer].make(groups, config)


def decayed_and_plain(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[list[nn.Parameter]]:
    """The trainable parameters in two groups: those whose weights decay, and the others."""
    groups: list[list[nn.Parameter]] = [[], []]
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            groups[bool(NO_WEIGHT_DECAY.search(name))].append(parameter)
    return groups


def states_per_weight(config: OptimizerFlags) -> int:
    """How many numbers the optimizer's state has per weight that it steps."""
    return OPTIMIZERS[config.optimizer].numbers_per_weight(config)


def counter_bytes(config: OptimizerFlags) -> int:
    """How many bytes the optimizer's state has per parameter in addition."""
    return OPTIMIZERS[config.optimizer].bytes_per_tensor


def schedule(kind: str, learning_rate: float, warmup_steps: int, steps: int) -> Callable[[int], float]:
    """The learning rate as a function of the steps so far: from 0 up over `warmup_steps`, then by SCHEDULERS[kind]."""
    factor = SCHEDULERS[kind]

    def rate(done: int) -> float:
        if done < warmup_steps:
            return learning_rate * (done / warmup_steps)
        return learning_rate * factor(max(0.0, (steps - done) / max(1, steps - warmup_steps)))

    return rate


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate
