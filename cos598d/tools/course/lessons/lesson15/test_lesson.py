"""Lesson 15, memory: formulas against counted bytes, a checkpointed block against equal gradients and held bytes."""

import random
from typing import Any

import torch

from cos598d.tools.course.common import furthest
from cos598d.tools.course.formulas import is_right
from cos598d.tools.course.lessons.lesson15 import right
from cos598d.tools.course.lessons.lesson15.blocks import (
    DROPOUT,
    GRADIENTS,
    checkpoint,
    memory_of_a_step,
    plainly,
    shape_of,
    steps_of,
)

SLACK = 0.1  # of the bytes of all inputs: a random state for each block, say
PEAK = 1.25  # times that of a right checkpoint: what autograd holds for a moment differs from way to way


def settings(name: str, seed: int) -> list[tuple[Any, ...]]:
    """Models of all kinds: wide and narrow blocks, and segments of several blocks."""
    draw = random.Random(f"{name} {seed}")
    if name == "held":
        return [(draw.randint(10**4, 10**6), ("sgd", "momentum", "adamw")[number % 3]) for number in range(6)]
    found = []
    for number in range(6):
        width, every = draw.randint(4, 12), 2 + number % 3
        shape = every * draw.randint(2, 4), width, draw.randint(2, 5) * width, draw.randint(8, 64)
        found.append((*shape, every) if name == "checkpointed" else shape)
    return found


def test_counts_what_is_held(ranks, seed, n):
    """Bytes of parameters, gradients and optimizer state, as counted."""
    is_right(ranks, n, right, "held", settings("held", seed))


def test_counts_activations(ranks, seed, n):
    """Bytes of activations that autograd saves in forward, as counted."""
    is_right(ranks, n, right, "kept", settings("kept", seed))


def test_counts_checkpoints(ranks, seed, n):
    """Bytes of activations with checkpoints, at the fullest moment."""
    is_right(ranks, n, right, "checkpointed", settings("checkpointed", seed))


def gradients(comm: Any, module: Any, seed: int) -> list[list[dict[str, torch.Tensor | None]]]:
    """On a rank: the gradients of two steps through the file's checkpoint, without dropout and with it."""
    return [steps_of(seed, module.checkpoint, dropout) for dropout in (0.0, DROPOUT)]


def test_same_gradients(ranks, seed, n):
    """The gradients of a checkpointed stack are those of a plain one, bit for bit, with dropout too."""
    world = ranks(n, gradients, seed)
    torch.set_num_threads(1)  # as on a rank: more would add in another order
    for dropout, found in zip((0.0, DROPOUT), world.values[0], strict=True):
        known = steps_of(seed, plainly, dropout)
        wrong = [(s, name) for s, each in enumerate(known) for name in each if not same(found[s][name], each[name])]
        if wrong:
            step, name = wrong[0]
            words = wrong_gradients(found, known, step, name, seed, dropout)
            where = f"{'with' if dropout else 'without'} dropout, step {step + 1}"
            world.fail(f"{where}: {words}", about="Again.backward")


def wrong_gradients(found: Any, known: Any, step: int, name: str, seed: int, dropout: float) -> str:
    """What is wrong with the gradients of two steps, of which that of `name` in `step` is the first wrong one."""
    if all(each is None for key, each in found[step].items() if key.startswith("blocks")):
        return "the blocks' parameters have no gradient: outputs.backward(gradient) gives them theirs"
    if found[step]["stem.weight"] is None:
        return "no gradient leaves the first block: return that of the input"
    for way, words in GRADIENTS.items():
        made = steps_of(seed, checkpoint(way), dropout)
        if all(same(found[s][key], each[key]) for s, each in enumerate(made) for key in each):
            return words
    one, other = found[step][name], known[step][name]
    off = "is missing" if one is None or other is None else f"is off{furthest(one, other)}"
    return f"the gradient of {name} {off}, as without checkpoints"


def same(found: torch.Tensor | None, known: torch.Tensor | None) -> bool:
    """Whether both are nothing, or equal bit for bit."""
    return found is known if found is None or known is None else torch.equal(found, known)


def memory(comm: Any, module: Any, seed: int) -> dict[str, float]:
    """On a rank: what a step through the file's checkpoint holds."""
    return memory_of_a_step(seed, module.checkpoint)


def test_keeps_inputs_only(ranks, seed, n):
    """Forward leaves the input of each block for backward, and backward computes one block at a time again."""
    world, shape = ranks(n, memory, seed), shape_of(seed)
    own, plain, best = world.values[0], memory_of_a_step(seed, plainly), memory_of_a_step(seed, checkpoint())
    inputs = shape.layers * 4 * shape.rows * shape.width
    what = f"{shape.layers} blocks of width {shape.width} and {shape.inner}, {shape.rows} rows"
    words = f"{what}: forward leaves {own['kept']:,} bytes for backward, expected {inputs:,}, the blocks' inputs"
    if own["kept"] > 0.9 * plain["kept"]:
        words += ": everything is kept, as without a checkpoint"
    elif own["kept"] > 1.8 * inputs:
        words += ": a copy is kept next to each input; keep the tensor itself"
    world.require(inputs <= own["kept"] <= (1 + SLACK) * inputs, words, about="checkpoint")
    words = f"a block runs {own['calls']:g} times per step, expected 2: once in forward, once in backward"
    world.require(own["calls"] == 2, words, about="checkpoint")
    words = f"{what}: backward holds up to {own['peak']:,} bytes, and a right checkpoint {best['peak']:,}: "
    words += "let go of a block's activations before the next one is computed"
    world.require(own["peak"] <= PEAK * best["peak"], words, about="checkpoint")
