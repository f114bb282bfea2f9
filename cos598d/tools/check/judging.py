"""In the parent: whether gradients and weights of the toy model are right, in a sentence."""

from collections.abc import Sequence
from typing import Any

import torch

from cos598d.tools.check.driving import Run, Step
from cos598d.tools.exam.explain import Gradients, explain, is_wrong, mean_of
from cos598d.tools.exam.models import SMALL, Shape, own_gradients, toy_model
from cos598d.tools.exam.ranks import World

LEAST = 3  # of steps that must agree with a rule
Values = Sequence[Sequence[dict[str, Any] | None]]  # by rank, by run


def are_means(
    world: World, seed: int, runs: Sequence[Run], values: Values | None = None, with_weights: bool = True
) -> None:
    """Fail unless every gradient of every step is the mean over the ranks, and no weight changed."""
    for place, run in enumerate(runs):
        by_rank: list[Any] = [value[place] for value in values or world.values]
        if by_rank[0] is None:  # a way of cutting buckets that the sync has not
            continue
        if with_weights:
            are_weights(world, by_rank, seed, run.shape)
        wrong = []
        for number, step in enumerate(run.steps):
            own = owns(seed, step, world.size, run.shape)
            found = [value["grads"][number] for value in by_rank]
            wrong.append(_any_wrong(found, own))
        if not any(wrong):
            continue
        first = wrong.index(True)
        own = owns(seed, run.steps[first], world.size, run.shape)
        before = mean_of(owns(seed, run.steps[first - 1], world.size, run.shape)) if first else None
        told = explain([value["grads"][first] for value in by_rank], own, before)
        assert told is not None
        rank, words, numbers = told
        lost = _lost_pass(by_rank[rank]["grads"][first], seed, run, first, world.size)
        where = f" ({run.label})" if run.label else ""
        world.fail((lost or words) + _only_in(wrong) + where, rank, numbers)


def _only_in(wrong: Sequence[bool]) -> str:
    """Whether one step is wrong, all after some right ones, or every second one; "" if none of it is known."""
    first = [*wrong].index(True)
    if sum(wrong) == 1 and len(wrong) > LEAST:
        return f" (only in step {first + 1})"
    if first and all(wrong[first:]) and len(wrong) - first >= LEAST:
        return f" (right only for the first {first} step{'' if first == 1 else 's'})"
    is_second = [place % 2 == first % 2 for place in range(len(wrong))]
    return " (right only in every second step)" if len(wrong) > LEAST and is_second == [*wrong] else ""


def are_weights(world: World, by_rank: Sequence[Any], seed: int, shape: Shape) -> None:
    """Fail if a weight is not what it was on rank 0 at the start."""
    for rank, value in enumerate(by_rank):
        for name, weight in toy_model(seed, shape).named_parameters():
            is_same = torch.equal(value["weights"][name], weight)
            world.require(is_same, f"the weight {name} was changed on rank {rank}: only its gradient may change", rank)


def owns(seed: int, step: Step, size: int, shape: Shape) -> list[Gradients]:
    """Every rank's own gradients of a step, summed over its passes."""
    return [_sum([_pass(seed, step, rank, number, shape) for number in step.batches]) for rank in range(size)]


def payload_of(seed: int, size: int) -> int:
    """The bytes of the gradients of a step of the toy model."""
    gradients = own_gradients(seed, 0, 0, SMALL).values()
    return sum(each.nbytes for each in gradients if each is not None)


def _pass(seed: int, step: Step, rank: int, number: int, shape: Shape) -> Gradients:
    return own_gradients(seed, rank, number, shape, step.users is None or rank in step.users)


def _sum(passes: Sequence[Gradients]) -> Gradients:
    found: dict[str, torch.Tensor | None] = {}
    for name in passes[0]:
        there = [gradient for each in passes if (gradient := each[name]) is not None]
        found[name] = torch.stack(there).sum(dim=0) if there else None
    return found


def _any_wrong(found: Sequence[Gradients], own: Sequence[Gradients]) -> bool:
    right = mean_of(own)
    return any(is_wrong(each[name], right[name], [g[name] for g in own]) for each in found for name in right)


def _lost_pass(found: Gradients, seed: int, run: Run, number: int, size: int) -> str:
    """In which way one of two micro-batches is not in the average; "" if that is not it."""
    step = run.steps[number]
    if len(step.batches) != 2:
        return ""
    means = [mean_of([_pass(seed, step, rank, batch, run.shape) for rank in range(size)]) for batch in step.batches]
    for place, what in enumerate(("second", "first")):
        if not _any_wrong([found], [means[place]]):
            return f"the gradient of the {what} micro-batch is lost: the average is of the other one only"
    return ""
