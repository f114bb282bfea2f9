"""Lesson 11, second part: the layers whose weights are cut, and what a rank does with a student's Zero3."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from cos598d.tools.course.held import SPARE, Watched, held_bytes, settled
from cos598d.tools.course.lessons.lesson11.stepping import ADAMW, OPTIMIZERS

LAYERS = ((7, 48), (48, 48), (48, 48), (48, 5))  # inputs and outputs; not all of their weights divide by 2, 3 or 4
BATCH = 12
Run = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


def start_weights(seed: int) -> list[torch.Tensor]:
    """The flat weights of each layer: a matrix and a bias."""
    generator = torch.Generator().manual_seed(seed + 3)
    return [torch.randn(wide * (narrow + 1), generator=generator) * narrow**-0.5 for narrow, wide in LAYERS]


def run_layer(number: int, weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """A layer: linear, and tanh but for the last."""
    narrow, wide = LAYERS[number]
    outputs = functional.linear(inputs, weights[: narrow * wide].view(wide, narrow), weights[narrow * wide :])
    return outputs if number == len(LAYERS) - 1 else torch.tanh(outputs)


def examples(seed: int, step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's share of a step's batch, a `size`-th: inputs (share, 7) and targets (share, 5)."""
    generator = torch.Generator().manual_seed(seed + 1_000_003 * (rank + 1) + step)
    share = BATCH // size
    return torch.randn(share, LAYERS[0][0], generator=generator), torch.randn(share, LAYERS[-1][1], generator=generator)


def gradient(weights: Sequence[torch.Tensor], seed: int, step: int, rank: int, size: int) -> torch.Tensor:
    """A rank's own gradient, flat."""
    state, targets = examples(seed, step, rank, size)
    for number, each in enumerate(weights):
        state = run_layer(number, each, state)
    return torch.cat(torch.autograd.grad(functional.mse_loss(state, targets), list(weights)))


def forward(zero: Any, comm: Any, seed: int, step: int, run: Run) -> torch.Tensor:
    """The loss of a rank's share, through the layers of a student's Zero3."""
    state, targets = examples(seed, step, comm.rank, comm.world_size)
    state.requires_grad_()
    for number in range(len(LAYERS)):
        state = zero.layer(number, lambda weights, inputs, number=number: run(number, weights, inputs), state)
    return functional.mse_loss(state, targets)


def whole_weights(zero: Any) -> dict[str, torch.Tensor]:
    """The weights that the layers of a student's Zero3 compute with, by name."""
    seen: dict[str, torch.Tensor] = {}
    for number, (narrow, _) in enumerate(LAYERS):

        def look(weights: torch.Tensor, inputs: torch.Tensor, number: int = number) -> torch.Tensor:
            seen[f"layer {number}"] = weights.detach().clone()
            return inputs

        with torch.no_grad():
            zero.layer(number, look, torch.zeros(1, narrow))
    return seen


def zero3_steps(comm: Any, module: Any, seed: int, kind: str) -> dict[str, Any]:
    """On a rank: after each step of a student's Zero3 all weights, and the bytes that the step sent."""
    zero = module.Zero3(comm, start_weights(seed), OPTIMIZERS[kind][1])
    found: dict[str, Any] = {"weights": [], "sent": []}
    for step in range(OPTIMIZERS[kind][0]):
        begun = len(comm.rows)
        forward(zero, comm, seed, step, run_layer).backward()
        zero.step()
        found["sent"].append(sum(row.bytes_sent for row in comm.rows[begun:]))
        found["weights"].append(whole_weights(zero))
    return found


def zero3_memory(comm: Any, module: Any, seed: int) -> dict[str, int]:
    """On a rank: bytes of whole weights left by the constructor and by forward, and all that is held after a step."""
    before, layers = held_bytes(), start_weights(seed)
    given, whole = Watched(layers), Watched()
    zero = module.Zero3(comm, layers, OPTIMIZERS[ADAMW][1])
    del layers
    found = {"kept": settled(given.bytes_left, 0)}

    def run(number: int, weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        whole.note(weights)
        return run_layer(number, weights, inputs)

    loss = forward(zero, comm, seed, 0, run)
    found["left"] = settled(whole.bytes_left, 0)
    loss.backward()
    zero.step()
    del loss
    found["held"] = settled(lambda: held_bytes() - before, most_held(comm.world_size))
    return found


def whole_bytes() -> int:
    """All layers' weights."""
    return sum(each.nbytes for each in start_weights(0))


def most_held(size: int) -> float:
    """Bytes of weights and AdamW's state that one of `size` ranks may hold between steps."""
    return SPARE * 3 * whole_bytes() / size
