"""What lessons share: a model with gradients to average, the checks of averages and of traffic, and named mistakes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cos598d.tools.exam.explain import explain, mean_of
from cos598d.tools.exam.models import Shape, gradients_of, local_batch, own_gradients, toy_model
from cos598d.tools.exam.notes import LessonComm
from cos598d.tools.exam.ranks import World

SHAPE = Shape(all_used=True)
STEPS = 3
Average = Callable[[LessonComm, dict[str, torch.Tensor]], None]


def average_steps(
    comm: LessonComm, module: Any, seed: int, make: Callable[[Any], Any], has_hooks: bool = False
) -> dict[str, Any]:
    """On a rank: .grad after each of some steps, the weights at the end, and what the last step sent.

    make: of the student's module, makes what averages all gradients by name; if it `has_hooks`, what makes an object
    of the communicator and the model, whose `finish()` ends the averages that its hooks have begun.
    """
    model, grads, rows = toy_model(seed, SHAPE), [], comm.rows
    average = _finish(make(module)(comm, model)) if has_hooks else make(module)
    for step in range(STEPS):
        begun = len(comm.rows)
        model(**local_batch(comm.rank, step, True, seed))[0].backward()
        average(comm, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        grads.append(gradients_of(model))
        rows = comm.rows[begun:]
        model.zero_grad(set_to_none=True)
    traffic = {"calls": len(rows)}
    for way in ("sent", "received"):
        traffic[way] = sum(getattr(row, f"bytes_{way}") for row in rows)
    return {"grads": grads, "weights": dict(model.named_parameters()), "traffic": traffic}


def _finish(averager: Any) -> Average:
    return lambda comm, gradients: averager.finish()


def are_averages(world: World, seed: int, words: Mapping[str, str] | None = None) -> None:
    """Fail unless every rank has the mean of all gradients after every step, and no weight has changed."""
    for rank, value in enumerate(world.values):
        for name, weight in toy_model(seed, SHAPE).named_parameters():
            is_same = torch.equal(value["weights"][name], weight)
            world.require(is_same, f"the weight {name} was changed: only its gradient may change", rank)
    before = None
    for step in range(STEPS):
        own = [own_gradients(seed, rank, step, SHAPE) for rank in range(world.size)]
        wrong = explain([value["grads"][step] for value in world.values], own, before, words)
        if wrong:
            rank, told, detail = wrong
            only = f" (right only for the first {step} step{'s' if step > 1 else ''})" if step else ""
            world.fail(told + only, rank, detail)
        before = mean_of(own)


def tensors(dtype: torch.dtype | None = None) -> list[torch.nn.Parameter]:
    """The parameters whose gradients are averaged; only those of `dtype`, if it is given."""
    return [p for p in toy_model(0, SHAPE).parameters() if p.requires_grad and dtype in (None, p.dtype)]


def near(found: Any, right: Any, within: float = 1e-5) -> bool:
    """Whether numbers, tensors, or lists and dictionaries of them are equal up to `within` of the largest element."""
    if right is None or found is None:
        return found is right
    if isinstance(right, dict):
        is_alike = isinstance(found, dict) and found.keys() == right.keys()
        return is_alike and all(near(found[key], each, within) for key, each in right.items())
    if isinstance(right, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(right):
            return False
        return all(near(mine, each, within) for mine, each in zip(found, right, strict=True))
    if isinstance(right, torch.Tensor):
        if not isinstance(found, torch.Tensor) or found.shape != right.shape:
            return False
        return not right.numel() or bool((found - right).abs().max() <= within * right.abs().max())
    return isinstance(found, int | float) and abs(found - right) <= within * abs(right)


def name_mistake(found: Any, right: Any, made: Mapping[str, Callable[[], Any]]) -> str:
    """The words of the first mistake that explains what was found; else the number that is furthest off.

    made: by the words for a mistake, a function that gives what it makes.
    """
    return next((words for words, make in made.items() if near(found, make())), "") or furthest(found, right)


def furthest(found: Any, right: Any, place: str = "") -> str:
    """The first number that is not right, in words."""
    if isinstance(right, dict | list | tuple):
        pairs = right.items() if isinstance(right, dict) else enumerate(right)
        key = next(key for key, each in pairs if not near(found[key], each))
        return furthest(found[key], right[key], f"{place} {key}".strip())
    if not isinstance(right, torch.Tensor):
        return f"{place} is {found:.6g}, expected {right:.6g}"
    at = int((found - right).abs().nan_to_num(float("inf")).argmax())
    return f"{place}, element {at} is {found.flatten()[at]:.6g}, expected {right.flatten()[at]:.6g}"
