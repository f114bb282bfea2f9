"""Lesson 0: the losses and the weights of a few steps, compared with the right ones and those of the usual mistakes."""

from typing import Any

import torch

from cos598d.terminal.printable import printable
from cos598d.tools.check.claims.base import Claim, NotAsAgreed, World
from cos598d.tools.check.toy import local_batch
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.lessons.common import ALL_USED

STEPS = 8
SMALLER, LARGER = 0.3, 20.0  # the toy's gradients have norms between
MAX_NORMS = [LARGER if number == 4 else SMALLER for number in range(STEPS)]
LEARNING_RATE, MOMENTUM = 0.1, 0.9
CLOSE = 1e-5


@Claim
def same_losses(on: OnLesson) -> None:
    """The losses of 8 steps, and the weights after them, are those of the reference."""
    model = on.model(ALL_USED)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, momentum=MOMENTUM)
    losses = []
    for number in range(STEPS):
        loss = on.student.step(model, optimizer, _batch(on.nonce, number), MAX_NORMS[number])
        if not isinstance(loss, float):
            what = "a tensor, which keeps all of forward in memory: return loss.item()"
            what = (
                what if isinstance(loss, torch.Tensor) else f"{printable(repr(loss), 60)}: return the loss as a float"
            )
            raise NotAsAgreed(f"step returned {what}")
        losses.append(loss)
    on.report("losses", losses)
    on.hand_in("weights", dict(model.named_parameters()))


@same_losses.judgement
def _(world: World) -> None:
    found = world.reported("losses", list)[0]
    weights = world.handed_in("weights", dict(world.model(ALL_USED).named_parameters()))[0]
    if _agree((found, weights), _train(world, "")):
        return
    why = next((words for kind, words in MISTAKES.items() if _agree((found, weights), _train(world, kind))), "")
    right, _ = _train(world, "")
    place = next((i for i, (a, b) in enumerate(zip(found, right)) if not _is_close(a, b)), None)
    if place is None:
        told = "the losses are right, and the weights after the last step are not"
    else:
        told = f"expected a loss of {right[place]:.6g} in step {place}, got {found[place]:.6g}"
    world.find(0, why or "the losses are not those of the reference, and no known mistake explains them", told)


# What is left out, or done elsewhere, with the words for it.
MISTAKES = {
    "never zeroed": "gradients of earlier steps are still there: backward adds to .grad, so empty it in every step "
    "(optimizer.zero_grad())",
    "zeroed before the step": "the weights never change: .grad is emptied between backward and optimizer.step()",
    "never clipped": "the gradients are not clipped: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) "
    "belongs between backward and optimizer.step()",
    "clipped too late": "the gradients are clipped after optimizer.step(), which has already used them: clip before it",
    "scaled to the norm": "gradients whose norm is below max_norm are scaled up to it: clipping only makes them "
    "smaller, by min(1, max_norm / norm)",
    "clipped by value": "each element of the gradients is clamped to max_norm: clip their norm instead "
    "(clip_grad_norm_, not clip_grad_value_)",
    "clipped one by one": "each parameter's gradient is clipped by itself: clip by the norm of all of them together",
    "stepped before backward": "optimizer.step() comes before backward, so it uses the gradients of the step before",
    "loss after the step": "the loss returned is computed after optimizer.step(): return the one before it",
    "never stepped": "the weights never change: optimizer.step() is missing",
    "stepped twice": "the weights move twice in every step: optimizer.step() is called twice",
}


def _train(world: World, mistake: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and weights of the reference, or of one that makes a mistake."""
    model = world.model(ALL_USED)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    moments: dict[str, torch.Tensor] = {}
    losses = []

    def move() -> None:
        with torch.no_grad():
            for name, p in named.items():
                if p.grad is None:
                    continue
                moments[name] = MOMENTUM * moments[name] + p.grad if name in moments else p.grad.clone()
                p.sub_(LEARNING_RATE * moments[name])

    for number in range(STEPS):
        batch = _batch(world.nonce, number)
        loss = model(**batch)[0]
        if mistake == "stepped before backward":
            move()
        if mistake != "never zeroed":
            model.zero_grad()
        loss = model(**batch)[0] if mistake == "stepped before backward" else loss
        loss.backward()
        _clip(named, mistake, MAX_NORMS[number])
        if mistake not in ("zeroed before the step", "never stepped", "stepped before backward"):
            move()
        if mistake == "stepped twice":
            move()
        losses.append(model(**batch)[0].item() if mistake == "loss after the step" else loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def _clip(named: dict[str, Any], mistake: str, max_norm: float) -> None:
    gradients = [p.grad for p in named.values() if p.grad is not None]
    if mistake in ("never clipped", "clipped too late"):
        return
    if mistake == "clipped by value":
        for gradient in gradients:
            gradient.clamp_(-max_norm, max_norm)
        return
    norms = [gradient.norm().float() for gradient in gradients]
    whole = torch.stack(norms).norm()
    for gradient, norm in zip(gradients, norms, strict=True):
        own = norm if mistake == "clipped one by one" else whole
        factor = (max_norm / (own + 1e-6)).item()
        gradient *= factor if mistake == "scaled to the norm" else min(1.0, factor)


def _agree(found: tuple[list, dict], other: tuple[list, dict]) -> bool:
    losses = len(found[0]) == len(other[0]) and all(_is_close(a, b) for a, b in zip(found[0], other[0], strict=True))
    return losses and all((found[1][name] - tensor).abs().max() < CLOSE for name, tensor in other[1].items())


def _is_close(found: Any, right: float) -> bool:
    return isinstance(found, float) and abs(found - right) < CLOSE * max(1.0, abs(right))


def _batch(nonce: int, number: int) -> dict[str, torch.Tensor]:
    return local_batch(0, number, seed=nonce)


CHECKS = Checks((Check(same_losses, (1,)),))
