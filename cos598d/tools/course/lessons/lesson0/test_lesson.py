"""Lesson 0: the losses and the weights of a few steps, compared with the right ones and those of the usual mistakes."""

import torch

from cos598d.tools.course.common import SHAPE, near
from cos598d.tools.exam.models import local_batch, toy_model
from cos598d.tools.exam.notes import NotAsAgreed

STEPS = 8
SMALLER, LARGER = 0.3, 20.0  # the toy's gradients have norms between
MAX_NORMS = [LARGER if number == 4 else SMALLER for number in range(STEPS)]
RATE, MOMENTUM = 0.1, 0.9
CLOSE = 1e-5
# What is left out, or done elsewhere, with the words for it.
MISTAKES = {
    "never zeroed": "gradients of earlier steps are still there: backward adds to .grad, so empty it in every step "
    "(optimizer.zero_grad())",
    "zeroed before the step": "the weights never change: .grad is emptied between backward and optimizer.step()",
    "never clipped": "the gradients are not clipped: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) "
    "belongs between backward and optimizer.step()",
    "scaled to the norm": "gradients whose norm is below max_norm are scaled up to it: clipping only makes them "
    "smaller, by min(1, max_norm / norm)",
    "clipped by value": "each element of the gradients is clamped to max_norm: clip their norm instead "
    "(clip_grad_norm_, not clip_grad_value_)",
    "clipped one by one": "each parameter's gradient is clipped by itself: clip by the norm of all of them together",
    "stepped before backward": "optimizer.step() comes before backward, so it uses the gradients of the step before",
    "loss after the step": "the loss returned is computed after optimizer.step(): return the one before it",
    "stepped twice": "the weights move twice in every step: optimizer.step() is called twice",
}


def train(comm, module, seed):
    """The losses that the student's steps return, and the weights after them."""
    model, losses = toy_model(seed, SHAPE), []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=MOMENTUM)
    for number in range(STEPS):
        loss = module.step(model, optimizer, local_batch(0, number, seed=seed), MAX_NORMS[number])
        if not isinstance(loss, float):
            what = f"{loss!r:.60}: return the loss as a float"
            if isinstance(loss, torch.Tensor):
                what = "a tensor, which keeps all of forward in memory: return loss.item()"
            raise NotAsAgreed(f"step returned {what}")
        losses.append(loss)
    return {"losses": losses, "weights": dict(model.named_parameters())}


def test_same_losses(ranks, seed, n):
    """The losses of 8 steps, and the weights after them, are those of the reference."""
    world = ranks(n, train, seed)
    (found,), right = world.values, reference(seed, "")
    if agree(found, right):
        return
    why = next((words for kind, words in MISTAKES.items() if agree(found, reference(seed, kind))), "")
    pairs = zip(found["losses"], right["losses"], strict=True)
    place = next((number for number, (mine, its) in enumerate(pairs) if not near(mine, its, CLOSE)), None)
    told = "the losses are right, and the weights after the last step are not"
    if place is not None:
        losses = right["losses"][place], found["losses"][place]
        told = f"expected a loss of {losses[0]:.6g} in step {place}, got {losses[1]:.6g}"
    world.fail(why or "the losses are not those of the reference, and no known mistake explains them", detail=told)


def agree(found, right):
    """Whether losses and weights are equal up to rounding."""
    is_close = all((found["weights"][name] - each).abs().max() < CLOSE for name, each in right["weights"].items())
    return is_close and near(found["losses"], right["losses"], CLOSE)


def reference(seed, mistake):
    """The losses and weights of the right steps, or of steps with one mistake."""
    model, moments, losses = toy_model(seed, SHAPE), {}, []

    def move():
        for name, p in model.named_parameters():
            if p.grad is not None:
                moments[name] = MOMENTUM * moments[name] + p.grad if name in moments else p.grad.clone()
                p.data.sub_(RATE * moments[name])

    for number in range(STEPS):
        batch = local_batch(0, number, seed=seed)
        if mistake == "stepped before backward":
            move()
        if mistake != "never zeroed":
            model.zero_grad()
        loss = model(**batch)[0]
        loss.backward()
        clip([p.grad for p in model.parameters() if p.grad is not None], mistake, MAX_NORMS[number])
        if mistake not in ("zeroed before the step", "stepped before backward"):
            move()
        if mistake == "stepped twice":
            move()
        losses.append(model(**batch)[0].item() if mistake == "loss after the step" else loss.item())
    return {"losses": losses, "weights": {name: p.detach() for name, p in model.named_parameters()}}


def clip(gradients, mistake, max_norm):
    """Clip as the page says, or with a mistake."""
    whole = torch.stack([gradient.norm().float() for gradient in gradients]).norm()
    for gradient in gradients:
        if mistake == "clipped by value":
            gradient.clamp_(-max_norm, max_norm)
        elif mistake != "never clipped":
            norm = gradient.norm().float() if mistake == "clipped one by one" else whole
            factor = (max_norm / (norm + 1e-6)).item()
            gradient *= factor if mistake == "scaled to the norm" else min(1.0, factor)
