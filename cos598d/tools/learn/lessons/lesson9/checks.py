"""Lesson 9, the wire: predicted bytes against the communication log's formulas, seconds against the cost model.

Predictions are compared with formulas: no link is made for it, and nothing is timed.
"""

import random
from functools import partial
from typing import Any

import torch

from cos598d.tools.learn.checking import Checks, OnLesson
from cos598d.tools.learn.lessons.formulas import formula_check, right_of
from cos598d.tools.learn.lessons.golf import STEPS as GOLF_STEPS
from cos598d.tools.learn.lessons.golf import Results, Turn, golf_of

WAYS = ("gather_scatter", "exchange", "ring")
WITHIN = 0.1
SETTINGS = 10


def settings(function: str, nonce: int) -> list[tuple[Any, ...]]:
    """The arguments of the calls of a function: two of them way by way, for tensors, ranks and links of all kinds."""
    if function == "step_seconds":
        return steps(nonce)
    draw = random.Random(nonce)
    drawn = []
    for number in range(SETTINGS):
        ranks, rate = draw.randint(3, 12), 10 ** draw.uniform(7, 10)
        delay = 10 ** draw.uniform(-4, -1.5)
        # The bytes' share of a ring's seconds: in some bytes take most of the time, in some the delay, in some both.
        balance = (0.02, 0.3, 1.0, 3.0, 50.0)[number % 5]
        drawn.append((round(balance * delay * rate / 8 * ranks), ranks, rate, delay))
    if function == "seconds":
        return [(way, *each) for way in WAYS for each in drawn]
    return [(way, size, ranks, rank) for way in WAYS for size, ranks, *_ in drawn for rank in range(ranks)]


def steps(nonce: int) -> list[tuple[Any, ...]]:
    """Steps of all kinds: hidden altogether, queueing one after the other, waiting for gradients; by rate, by delay."""
    draw = random.Random(nonce + 1)
    found = []
    for number in range(SETTINGS):
        ranks, backward, count = draw.randint(2, 8), draw.uniform(0.2, 2.0), draw.randint(3, 6)
        # In every other step the last gradients are there before backward ends: the first layers do not train.
        last = backward if number % 2 == 0 else 0.5 * backward
        ready = sorted(draw.uniform(0.1, 0.95) * last for _ in range(count - 1)) + [last]
        sizes = [draw.randint(1, 30) * 10**6 for _ in ready]
        # What all buckets take together, beside backward, and the delays' part of it.
        load, part = (0.3, 0.8, 1.5, 3.0, 0.05)[number % 5], (0.2, 0.5, 0.9)[number % 3]
        rate = 2 * (ranks - 1) / ranks * 8 * sum(sizes) / ((1 - part) * load * backward)
        delay = part * load * backward / (2 * (ranks - 1) * count)
        found.append((list(zip(ready, sizes, strict=True)), backward, ranks, rate, delay))
    return found


def _golf(on: OnLesson) -> Turn:
    def turn(step: int):
        given = steps(on.nonce + step + 1)
        found: list[float] = []

        def run() -> None:
            found.extend(on.student.step_seconds(*each) for each in given)

        return run, lambda: {"step_seconds": torch.tensor(found, dtype=torch.float64)}

    return turn


def _golf_steps(nonce: int, ranks: int) -> list[Results]:
    by_step = [[right_of(9).step_seconds(*each) for each in steps(nonce + step + 1)] for step in range(GOLF_STEPS)]
    return [{"step_seconds": torch.tensor(found, dtype=torch.float64)} for found in by_step]


_formula = partial(formula_check, 9, settings, within=WITHIN)
CHECKS = Checks(
    (
        _formula(
            "sent",
            "predicts_bytes",
            "The bytes that each rank sends to average a tensor, as the communication log counts them, in all three "
            "ways.",
        ),
        _formula(
            "seconds",
            "predicts_seconds",
            "The seconds of each way, within 10 % of the cost model, on links where bytes decide and where delays do.",
        ),
        _formula(
            "step_seconds",
            "predicts_a_step",
            "The seconds until backward has ended and all buckets sent during it have arrived, within 10 %.",
        ),
    ),
    golf=golf_of(f"{SETTINGS} calls of step_seconds", 1, 0, _golf, _golf_steps, tolerance=WITHIN),
)
