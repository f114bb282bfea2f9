"""The right bytes of lesson 15, counted from tensors, and those of mistakes."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from cos598d.tools.course.lessons.lesson15.blocks import CountedBlock

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
}


@cache
def held(parameters: int, optimizer: str) -> dict[str, float]:
    """Counted from one tensor that an optimizer has stepped once."""
    weights = torch.zeros(parameters, requires_grad=True)
    weights.grad = torch.ones_like(weights)
    made = OPTIMIZERS[optimizer]([weights])
    made.step()
    kept = [each for each in made.state[weights].values() if isinstance(each, torch.Tensor)]
    found = {"parameters": [weights], "gradients": [weights.grad], "state": kept}
    return {name: float(sum(each.nbytes for each in tensors)) for name, tensors in found.items()}


@cache
def kept(layers: int, width: int, inner: int, rows: int) -> float:
    """Counted: the bytes that autograd saves of the activations of all blocks; each storage once."""
    blocks = nn.Sequential(*(CountedBlock(width, inner, 0.0) for _ in range(layers)))
    weights = {each.untyped_storage().data_ptr() for each in blocks.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # which are kept, so that none takes another's place

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        blocks(torch.zeros(rows, width, requires_grad=True))
    return float(sum(storage.nbytes() for storage in saved.values()))


def checkpointed(layers: int, width: int, inner: int, rows: int, every: int) -> float:
    """The inputs of all segments, and what one segment of `every` blocks keeps more than its input."""
    given = 4.0 * rows * width
    return layers // every * given + kept(every, width, inner, rows) - given


def _kept(parts: str, layers: int, width: int, inner: int, rows: int) -> float:
    """By formula, with other parts: n for the norm's input, s for its statistics, u, g, d for the other layers'."""
    sizes = {"n": width, "s": 2, "u": width, "g": inner, "d": inner, "o": width, "a": width}
    return 4.0 * layers * rows * sum(sizes[part] for part in parts)


# By function: what is said of results that are those of a mistake, in every setting.
MISTAKES: dict[str, dict[str, Callable[..., Any]]] = {
    "held": {
        "AdamW keeps two moments per parameter, momentum one, plain SGD none": (
            lambda p, o: held(p, o) | {"state": 4.0 * p * (o != "sgd")}
        ),
        "that is three for AdamW: it keeps two moments per parameter, and the gradient is counted apart": (
            lambda p, o: held(p, o) | {"state": 12.0 * p if o == "adamw" else held(p, o)["state"]}
        ),
        "that has the gradients in it: the state is only what the optimizer keeps from step to step": (
            lambda p, o: held(p, o) | {"state": held(p, o)["state"] + 4.0 * p}
        ),
        "plain SGD keeps nothing": lambda p, o: (
            held(p, o) | {"state": held(p, o if o != "sgd" else "momentum")["state"]}
        ),
        "a number in float32 has 4 bytes": lambda p, o: {name: size / 4 for name, size in held(p, o).items()},
        "in float32, not in 16 bits": lambda p, o: {name: size / 2 for name, size in held(p, o).items()},
        "gradients are as large as parameters": lambda p, o: held(p, o) | {"gradients": 0.0},
    },
    "kept": {
        "the norm also keeps two numbers per row, the mean and the inverse deviation": partial(_kept, "nugd"),
        "a number in float32 has 4 bytes": lambda *of: kept(*of) / 4,
        "gelu's input or its output is left out: its slope depends on the one, and `down` needs the other": (
            partial(_kept, "nsud")
        ),
        "the block's input or that of `up` is left out: the norm needs the one, and the weight of `up` the other": (
            partial(_kept, "nsgd")
        ),
        "that has the output of `down` in it: an addition needs nothing for backward": partial(_kept, "nsugdo"),
        "that has the output of `down` and the sum in it: an addition needs nothing for backward": (
            partial(_kept, "nsugdoa")
        ),
        "that is one block: there are as many as `layers`": lambda n, *of: kept(1, *of),
        "that is one row: there are `rows`": lambda n, w, i, r: kept(n, w, i, r) / r,
    },
    "checkpointed": {
        "the input of the segment that is computed again is there already: count it once": (
            lambda n, w, i, r, e: checkpointed(n, w, i, r, e) + 4.0 * r * w
        ),
        "while a segment is computed again, its activations are there too": lambda n, w, i, r, e: n // e * 4.0 * r * w,
        "only the inputs of segments are kept, not those of all blocks": (
            lambda n, w, i, r, e: n * 4.0 * r * w + kept(e, w, i, r) - 4.0 * r * w
        ),
        "a segment has `every` blocks, all of which are computed again": (
            lambda n, w, i, r, e: n // e * 4.0 * r * w + kept(1, w, i, r) - 4.0 * r * w
        ),
        "that is without checkpoints": lambda n, w, i, r, e: kept(n, w, i, r),
        "the inputs of the other segments are there too": lambda n, w, i, r, e: kept(e, w, i, r),
        "a number in float32 has 4 bytes": lambda *of: checkpointed(*of) / 4,
    },
}
