"""Drawn models under a sync: their steps on a rank, and whether the averages are right to the last bit."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from cos598d.comm.ledger import Ledger
from cos598d.tools.check.drawn import Draw, DrawnStep
from cos598d.tools.check.driving import BUCKETS, noted, wrap
from cos598d.tools.exam.explain import Gradients, explain, mean_of
from cos598d.tools.exam.models import gradients_of
from cos598d.tools.exam.notes import LessonComm
from cos598d.tools.exam.ranks import World

# For float32 sums of random numbers, with a common sign: a rounded 1/n has an error of half an eps, 6e-8.
MOST_DRIFT = 8e-8


def drive_drawn(comm: LessonComm, module: Any, name: str, draws: Sequence[Draw]) -> list[dict[str, Any]]:
    """The steps of each draw: the gradients of each, and the weights at the end; or why they were refused."""
    found = []
    for place, draw in enumerate(draws):
        options: dict[str, Any] = {**[*BUCKETS.values()][place % len(BUCKETS)]}
        options["find_unused_parameters"] = draw.may_be_unused or place % 2 == 0
        try:
            found.append(_steps(comm, name, draw, options))
        except Exception as error:
            if not draw.may_refuse:
                raise
            found.append({"refused": f"{type(error).__name__}: {error}"})
    return found


def _steps(comm: LessonComm, name: str, draw: Draw, options: dict[str, Any]) -> dict[str, Any]:
    model, grads, ledger = draw.model(comm.rank), [], Ledger()
    with noted(comm, ledger):
        wrapped = wrap(name, model, ledger, **options)
        for step in draw.steps:
            for part in range(step.parts):
                is_last = part == step.parts - 1
                with contextlib.nullcontext() if is_last or not step.within else wrapped.no_sync():
                    (wrapped(**draw.gradients(step, part, comm.rank)) * step.scale).backward()
            grads.append(gradients_of(model))
            following = draw.steps[step.number + 1 : step.number + 2]
            model.zero_grad(set_to_none=not any(each.zeroes for each in following))
            ledger.rows.clear()
        wrapped.detach()
    return {"refused": "", "grads": grads, "weights": dict(model.named_parameters())}


def judge_drawn(world: World, draws: Sequence[Draw]) -> None:
    """Fail unless every average is right, the same bits on all ranks, and no weight changed."""
    for place, draw in enumerate(draws):
        by_rank = [value[place] for value in world.values]
        refusals = [value["refused"] for value in by_rank]
        if draw.may_refuse and all(refusals):
            continue
        for rank, words in enumerate(refusals):
            world.require(not words, f"{draw.label}: only some ranks refuse them, such as rank {rank}: {words}", rank)
        for step in draw.steps:
            _is_right(world, draw, step, [value["grads"][step.number] for value in by_rank])
        for step in draw.steps:
            _is_equal(world, draw, step, [value["grads"][step.number] for value in by_rank])
        start = dict(draw.model().named_parameters())
        for rank, value in enumerate(by_rank):
            for name, weight in start.items():
                is_same = torch.equal(value["weights"][name], weight)
                words = f"{draw.label}: the weight {name} is not as it was on rank 0 before the steps, on rank {rank}"
                world.require(is_same, words, rank)


def _is_right(world: World, draw: Draw, step: DrawnStep, found: Sequence[Gradients]) -> None:
    own, bounds = draw.right(step)
    right = mean_of(own)
    is_dropped = any(_is_odd(tensor) for tensor in right.values())  # no rank makes such a step
    for rank, gradients in enumerate(found):
        for name, mean in right.items():
            mine = gradients[name]
            if mine is None or mean is None or mine.shape != mean.shape:
                is_right = mine is mean
            else:
                close = (mine.double() - mean).abs() <= bounds[name]
                good = torch.where(mean.isfinite(), close, ~mine.isfinite())
                is_right = bool((good | ~mine.isfinite() if is_dropped else good).all())
            if not is_right:
                numbers = _words(rank, name, mine, mean)
                world.fail(f"{draw.label}, {step.words()}: {_why(draw, step, found, rank, name)}", rank, numbers)


def _why(draw: Draw, step: DrawnStep, found: Sequence[Gradients], rank: int, name: str) -> str:
    """What is wrong with the gradients of a step, of which this rank's `name` is the first wrong one."""
    own, _ = draw.right(step)
    mine, mean = found[rank][name], mean_of(own)[name]
    if _is_odd(mean):
        return f"{name}'s .grad on rank {rank} is finite where another rank's is not: an overflow must reach all ranks"
    if any(each.infinite >= 0 for each in draw.steps[: step.number + 1]):
        after = f"rank {rank} has infinities or NaN instead of the mean, from an overflow of an earlier step"
        return after if _is_odd(mine) else _words(rank, name, mine, mean)
    before = mean_of(draw.right(draw.steps[step.number - 1])[0]) if step.number else None
    explained = explain(found, own, before)
    return explained[1] if explained else _words(rank, name, mine, mean)


def _is_odd(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and not bool(gradient.isfinite().all())


def _words(rank: int, name: str, found: torch.Tensor | None, right: torch.Tensor | None) -> str:
    """What is wrong with a tensor: the element with the largest error, expected and found."""
    if found is None or right is None:
        should, has = ("None" if gradient is None else "a gradient" for gradient in (right, found))
        return f"{name}'s .grad on rank {rank}: expected {should}, got {has}"
    like = f"{'x'.join(map(str, found.shape)) or 'no dimension'}, {str(found.dtype)[6:]}"
    away = (found.double() - right).abs().nan_to_num(float("inf"), float("inf"))
    error = torch.where(right.isfinite(), away, found.isfinite().double()).flatten()
    place = int(error.argmax())
    expected, got = (float(each.double().flatten()[place]) for each in (right, found))
    digits = 17 if abs(expected - got) < 1e-4 * abs(expected) else 6
    words = f"{name} ({like}), element {place} of {len(error)} on rank {rank}"
    return f"{words}: expected the mean {expected:.{digits}g}, got {got:.{digits}g}"


def _is_equal(world: World, draw: Draw, step: DrawnStep, found: Sequence[Gradients]) -> None:
    """Fail for averages that are right, but not the same numbers on every rank."""
    for rank, each in enumerate(found if step.infinite < 0 else ()):
        for name, mine in each.items():
            first = found[0][name]
            if mine is not None and first is not None and not torch.equal(mine, first):
                words = f"{draw.label}, {step.words()}: {name}'s average on rank {rank} is not rank 0's to the last bit"
                world.fail(f"{words}, so the replicas drift apart: add up in the same order on every rank", rank)


def do_not_drift(world: World, draw: Draw) -> None:
    """Fail if the float32 averages of many steps are off in one direction, by less than one step shows."""
    away = size = 0.0
    for step in (each for each in draw.steps if each.parts == 1 or each.within):  # each further average rounds again
        right = mean_of(draw.right(step)[0])
        for value in world.values:
            for name, mine in value[0]["grads"][step.number].items():
                mean = right[name]
                if mine is not None and mean is not None and mine.dtype == torch.float32:
                    away += float(((mine.double() - mean) * mean.sign()).sum())
                    size += float(mean.abs().sum())
    words = f"gradients drift: over {len(draw.steps)} steps they are off by {away / size:.1e} of their size in one "
    world.require(abs(away) <= MOST_DRIFT * size, f"{words}direction, expected up to {MOST_DRIFT:g}")
