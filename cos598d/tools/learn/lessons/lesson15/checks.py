"""Lesson 15, memory: formulas against counted bytes, a checkpointed block against equal gradients and held bytes."""

import random
from functools import partial
from typing import Any

import torch

from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.lessons.common import furthest_off
from cos598d.tools.learn.lessons.formulas import formula_check, is_number, right_of
from cos598d.tools.learn.lessons.lesson15.blocks import (
    DROPOUT,
    INNER,
    LAYERS,
    ROWS,
    WIDTH,
    Stack,
    memory_of_a_step,
    plainly,
    steps_of,
)

SLACK = 0.1  # of the bytes of all inputs: a random state for each block, say
PEAK = 1.25  # times that of a right checkpoint: what autograd holds for a moment differs from way to way
INPUT = 4 * ROWS * WIDTH  # bytes


def settings(name: str, nonce: int) -> list[tuple[Any, ...]]:
    """Models of all kinds: wide and narrow blocks, and segments of several blocks."""
    draw = random.Random(f"{name} {nonce}")
    if name == "held":
        return [(draw.randint(10**4, 10**6), ("sgd", "momentum", "adamw")[number % 3]) for number in range(6)]
    found = []
    for number in range(6):
        width, every = draw.randint(4, 12), 2 + number % 3
        layers = every * draw.randint(2, 4)
        shape = layers, width, draw.randint(2, 5) * width, draw.randint(8, 64)
        found.append((*shape, every) if name == "checkpointed" else shape)
    return found


@Claim
def same_gradients(on: OnLesson) -> None:
    """The gradients of a checkpointed stack are those of a plain one, bit for bit, with dropout too."""
    torch.set_num_threads(1)
    for dropout in (0.0, DROPOUT):
        for step, gradients in enumerate(steps_of(on.nonce, on.student.checkpoint, dropout)):
            on.hand_in(moment(dropout, step), gradients)


def moment(dropout: float, step: int) -> str:
    """What a step is called."""
    return f"{'with' if dropout else 'without'} dropout, step {step + 1}"


@same_gradients.judgement
def _(world: World) -> None:
    like = dict(Stack().named_parameters())
    for dropout in (0.0, DROPOUT):
        right = steps_of(world.nonce, plainly, dropout)
        found = [world.handed_in(moment(dropout, step), like)[0] for step in range(len(right))]
        wrong = [
            (step, name) for step, each in enumerate(right) for name in each if not same(found[step][name], each[name])
        ]
        if not wrong:
            continue
        step, name = wrong[0]
        where = moment(dropout, step)
        of_blocks = [name for name in like if name.startswith("blocks")]
        if all(found[step][name] is None for name in of_blocks):
            words = "the blocks' parameters have no gradient: outputs.backward(gradient) gives them theirs"
        elif found[step]["stem.weight"] is None:
            words = "no gradient leaves the first block: return that of the input"
        else:
            one, other = found[step][name], right[step][name]
            off = "is missing" if one is None or other is None else f"is off: {furthest_off(one, other)}"
            words = f"the gradient of {name} {off}, as without checkpoints"
            ways = right_of(15)
            for way, said in ways.GRADIENTS.items():
                made = steps_of(world.nonce, ways.through(way), dropout)
                if all(same(found[step][name], each[name]) for step, each in enumerate(made) for name in each):
                    words = said
                    break
        world.find(0, f"{where}: {words}", at="Again.backward")
        return


def same(found: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Whether both are nothing, or equal bit for bit."""
    return found is right if found is None or right is None else torch.equal(found, right)


@Claim
def keeps_inputs_only(on: OnLesson) -> None:
    """Forward leaves the input of each block for backward, and backward computes one block at a time again."""
    torch.set_num_threads(1)
    # The plain stack is measured before and after: what the file does to the watch shows there.
    ways = (plainly, on.student.checkpoint, plainly)
    on.report("steps", [memory_of_a_step(on.nonce, way) | {"curve": []} for way in ways])


@keeps_inputs_only.judgement
def _(world: World) -> None:
    steps = world.reported("steps", list)[0]
    names = ("kept", "peak", "calls")
    world.require(all(is_number(step[name]) for step in steps for name in names), "the bytes are no numbers")
    plain, own, again = steps
    ways = right_of(15)
    known, best = (memory_of_a_step(world.nonce, way) for way in (plainly, ways.through()))
    for step in (plain, again):
        if step["kept"] != known["kept"] or step["calls"] != 1 or step["peak"] > PEAK * known["peak"]:
            world.find(
                0, f"a stack without checkpoints was found to keep {step['kept']} bytes, and keeps {known['kept']}"
            )
            return
    inputs = LAYERS * INPUT
    shape = f"{LAYERS} blocks of width {WIDTH} and {INNER}, {ROWS} rows"
    words = f"{shape}: forward leaves {own['kept']:,} bytes for backward, expected {inputs:,}, the blocks' inputs"
    if own["kept"] > (1 + SLACK) * inputs:
        if own["kept"] > 0.9 * known["kept"]:
            words += ": everything is kept, as without a checkpoint"
        elif own["kept"] > 1.8 * inputs:
            words += ": a copy is kept next to each input; keep the tensor itself"
        world.find(0, words)
    elif own["kept"] < inputs:
        world.find(0, words)
    elif own["calls"] != 2:
        world.find(0, f"a block runs {own['calls']:g} times per step, expected 2: once in forward, once in backward")
    elif own["peak"] > PEAK * best["peak"]:
        words = f"{shape}: backward holds up to {own['peak']:,} bytes, and a right checkpoint {best['peak']:,}: "
        world.find(0, f"{words}let go of a block's activations before the next one is computed")


@Claim
def record(on: OnLesson) -> None:
    """The bytes of a step's moments, with the file's checkpoints and without."""
    torch.set_num_threads(1)
    found = {}
    for name, way in (("with your checkpoint", on.student.checkpoint), ("without checkpoints", plainly)):
        curve = memory_of_a_step(on.nonce, way)["curve"]
        found[name] = [(number / len(curve), size / 1e6) for number, size in enumerate(curve)]
    words = {"x": "operations of the step, in order", "y": f"MB held, of {LAYERS} blocks and {ROWS} rows"}
    on.report("curves", words | {"lines": found})


_formula = partial(formula_check, 15, settings)
CHECKS = Checks(
    (
        _formula("held", "counts_what_is_held", "Bytes of parameters, gradients and optimizer state, as counted."),
        _formula("kept", "counts_activations", "Bytes of activations that autograd saves in forward, as counted."),
        _formula(
            "checkpointed",
            "counts_checkpoints",
            "Bytes of activations with checkpoints, at the fullest moment.",
        ),
        Check(same_gradients, (1,), about="checkpoint"),
        Check(keeps_inputs_only, (1,), about="checkpoint"),
    ),
    record=record,
)
