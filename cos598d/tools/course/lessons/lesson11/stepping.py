"""Lesson 11: the optimizers that a student's file is given, and what is wrong with weights after a step, in words."""

import gc
from collections.abc import Callable, Sequence

import torch

from cos598d.tools.course.common import near
from cos598d.tools.exam.ranks import World

ADAMW = "AdamW"
# By name: steps, and what a file is given for `make_optimizer`.
OPTIMIZERS: dict[str, tuple[int, Callable[..., torch.optim.Optimizer]]] = {
    "SGD": (2, lambda tensors: torch.optim.SGD(tensors, lr=0.5)),
    # With a small epsilon AdamW turns rounding noise in small gradients into whole steps.
    ADAMW: (3, lambda tensors: torch.optim.AdamW(tensors, lr=0.02, eps=3e-2, weight_decay=0.1)),
}


def state_bytes() -> int:
    """Of all optimizers of torch's that this process has, whoever made them; a counter of steps does not count."""
    every = [each for each in gc.get_objects() if isinstance(each, torch.optim.Optimizer)]
    kept = [value for each in every for state in each.state.values() for value in state.values()]
    return sum(value.nbytes for value in kept if isinstance(value, torch.Tensor) and value.dim())


def wrong_step(before: torch.Tensor, found: torch.Tensor, right: torch.Tensor, own: Sequence[torch.Tensor]) -> str:
    """What is wrong with flat weights after a step, in words; "" if nothing is.

    own: the ranks' gradients at the weights before it, flat, where a step is a multiple of a gradient; else nothing.
    """
    if not found.isfinite().all():
        return "a weight is not finite"
    if near(found, right):
        return ""
    off = (found - right).abs() > 1e-5 * right.abs().max()
    moved, should, count, total = before - found, before - right, int(off.sum()), len(off)
    if not moved.any():
        return "no weight has moved: copy the new weights back into the model's"
    if not moved[off].any():
        if count < max(len(own), 4):
            return f"the last {count} of {total} weights never move: {total} is not divisible by the number of ranks"
        return f"{count} of {total} weights have not moved: each rank needs the parts that the others have stepped"
    first = int(off.nonzero()[0])
    known = _of_gradients(moved, should, own) if own else ""
    worst = f"weight {first} is {found[first]:.5g} and should be {right[first]:.5g}"
    return known or f"{count} of {total} weights are wrong: {worst}"


def _of_gradients(moved: torch.Tensor, should: torch.Tensor, own: Sequence[torch.Tensor]) -> str:
    """Which multiple of which gradient the weights have moved by, in words; "" where it is none."""
    n = len(own)
    factor = (moved @ should / (should @ should)).item()
    if near(moved, factor * should, 1e-3):
        is_sum = abs(factor - n) < 1e-2 * n
        why = f": by the sum of {n} ranks' gradients, not by their average" if is_sum else ""
        return f"the weights have moved {factor:.3g} times as far as they should{why}"
    rate = (should.norm() / torch.stack([*own]).mean(dim=0).norm()).item()
    by_one = torch.stack([(moved - rate * gradient).abs() for gradient in own]).amin(dim=0)
    if bool((by_one <= 1e-4 * moved.abs().max()).all()):
        return "each part of the weights has moved by the gradient of the rank that stepped it, not by the average"
    return ""


def require_bytes(world: World, name: str, times: int, whole: int, tensors: int) -> None:
    """Fail if a step sends more than `times` (n-1)/n of `whole` bytes; parts may be filled up.

    tensors: of how many tensors each may be filled up to a multiple of n elements.
    """
    share = (world.size - 1) / world.size
    most = times * share * (whole + 4 * world.size * tensors) + 4
    for rank, value in enumerate(world.values):
        for step, sent in enumerate(value["sent"], 1):
            world.require(sent > 0, f"{name} on rank {rank} sends nothing through comm in step {step}", rank)
            words = f"{name} on rank {rank} sends {sent:,} bytes in step {step}, and should send at most"
            words += f" {times * share * whole:,.0f}: {times}(n-1)/n S, of S = {whole:,}"
            world.require(sent <= most, f"{words}; it is {sent / share / whole:.2f}(n-1)/n S", rank)
