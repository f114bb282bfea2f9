"""Lesson 14, how far data parallelism carries: operations, roofline, MFU, a step's seconds and a large model's numbers.

What a file predicts is compared with the library's formulas and with recorded benches. Nothing is timed.
"""

import math
import random
from functools import partial
from typing import Any

import torch

from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.given import given
from cos598d.tools.learn.lessons.formulas import as_json, formula_check, is_near, is_number, right_of, shown
from cos598d.tools.learn.lessons.lesson14 import machine

OF_BENCHES = 0.3  # that share may a prediction be off
SETTINGS = 8
# Llama 3.1 405B on 16,384 H100s, as the lesson's page has it.
LLAMA = {"parameters": 405e9, "tokens": 15.6e12, "batch": 16.0 * 2**20, "gpus": 16384, "peak": 989e12, "share": 0.41}
LLAMA |= {"bandwidth": 50e9, "memory": 80e9}


def settings(name: str, nonce: int) -> list[tuple[Any, ...]]:
    """The arguments of the calls of a function, drawn again each time: cases of all kinds."""
    draw = random.Random(f"{name} {nonce}")
    found: list[tuple[Any, ...]] = []
    for number in range(SETTINGS):
        ranks, rate = draw.randint(3, 16), 10 ** draw.uniform(9, 13)
        bandwidth, latency = 10 ** draw.uniform(6, 10), 10 ** draw.uniform(-5, -2)
        seconds, balance = 10 ** draw.uniform(-3, 1), (0.2, 0.7, 1.5, 6.0)[number % 4]
        if name == "flops":
            width = 64 * draw.randint(2, 24)
            found.append((draw.randint(2, 40), width, draw.randint(2, 5) * width, width * draw.randint(1, 8) // 2))
        elif name == "roofline":
            found.append((seconds * rate, balance * seconds * bandwidth, rate, bandwidth))
        elif name == "shares":
            each = (seconds, seconds * balance, seconds * 3)
            found.append(([[draw.uniform(0.05, 0.9) * long * rate, long] for long in each], rate))
        elif name == "step_seconds":
            # The ring's bytes and its latencies take shares of the time of computing that differ.
            size = balance * seconds * bandwidth / 2
            latency = (0.1, 0.5, 2.0)[number % 3] * seconds / (2 * (ranks - 1))
            found.append((seconds * rate, rate, float(round(size)), bandwidth, latency, ranks))
        else:
            found.append((rate, bandwidth, ranks, (1.0, 2.0, 4.0)[number % 3]))
    return found


def models(nonce: int) -> list[dict[str, Any]]:
    """Llama 3.1 405B, and others that are drawn: for some of them a link decides."""
    draw = random.Random(nonce + 14)
    found = [dict(LLAMA)]
    for number in range(4):
        gpus, peak, share = 2 ** draw.randint(3, 12), draw.uniform(1, 20) * 1e14, draw.uniform(0.2, 0.6)
        bandwidth = draw.uniform(10, 400) * 1e9
        batch = float(round((0.3, 4.0)[number % 2] * gpus * peak * share / bandwidth))
        of = draw.uniform(1, 500) * 1e9, draw.uniform(1, 20) * 1e12, batch, gpus, peak, share, bandwidth
        found.append(dict(zip(LLAMA, (*of, draw.choice((24e9, 40e9, 80e9, 141e9))), strict=True)))
    return found


@Claim
def keeps_to_benches(on: OnLesson) -> None:
    """The seconds of recorded benches on emulated links, within 30 %."""
    on.report("found", [float(on.student.step_seconds(*of_bench(bench))) for bench in given("links")["benches"]])


def of_bench(bench: dict[str, Any]) -> tuple[Any, ...]:
    """A bench's arguments of step_seconds; its rate is what its floor, which sends nothing, was computed with."""
    rate = bench["operations"] / bench["floor_seconds"]
    return bench["operations"], rate, bench["gradient_bytes"], bench["bandwidth"], bench["latency"], bench["ranks"]


@keeps_to_benches.judgement
def _(world: World) -> None:
    found = world.reported("found", list)[0]
    for told, bench in zip(found, given("links")["benches"], strict=True):
        measured = bench["flat_seconds"]
        words = f"{bench['ranks']} hosts at {bench['link']} took {measured:.3g} s per step of {bench['model']}"
        words += f", and your prediction is {shown(told)} s, more than 30 % off"
        if not is_near(told, measured, OF_BENCHES):
            world.require(False, words)
            return


@Claim
def carries_a_large_model(on: OnLesson) -> None:
    """All numbers of Llama 3.1 405B, and of models that are drawn."""
    on.report("found", [as_json(dict(on.student.large_model(**each))) for each in models(on.nonce)])


@carries_a_large_model.judgement
def _(world: World) -> None:
    found = world.reported("found", list)[0]
    for told, model in zip(found, models(world.nonce), strict=True):
        name = "Llama 3.1 405B" if model == LLAMA else f"a model of {model['parameters'] / 1e9:.0f} billion parameters"
        expected = right_of(14).large_model(**model)
        for key, value in expected.items():
            if key not in told:
                world.find(0, f"large_model has no {key!r} of {name}")
                return
            if is_near(told[key], value) if isinstance(value, float) else told[key] == value:
                continue
            factors = right_of(14).FACTORS.get(key, {})
            why = next((f": {words}" for words, by in factors.items() if is_near(told[key], by(model) * value)), "")
            if key == "gpus_to_hold" and is_number(told[key]) and abs(told[key] - value) <= 1:
                why = ": a GPU is whole, and the last one need not be full"
            if key == "link_decides":
                each, least = (expected[name] for name in ("tokens_each", "least_tokens"))
                why = f": each GPU has {each:,.0f} tokens, and the ring is hidden from {least:,.0f} on"
            world.find(0, f"{key} of {name} is {shown(told[key])}, expected {shown(value)}{why}")
            return


@Claim
def record(on: OnLesson) -> None:
    """This machine's products of growing batches, under the file's roofline."""
    torch.set_num_threads(1)
    found = machine.products(machine.peak(), machine.memory_bandwidth(), on.student.roofline)
    lines = {
        "your roofline": [(math.log2(rows), float(limit) / 1e9) for rows, _, limit, _ in found],
        "measured": [(math.log2(rows), measured / 1e9) for rows, _, _, measured in found],
    }
    on.report(
        "curves", {"x": f"rows: from 1 to {machine.ROWS[-1]}, by doubling", "y": "GFLOP/s of one core", "lines": lines}
    )


_formula = partial(formula_check, 14, settings)
CHECKS = Checks(
    (
        _formula(
            "flops",
            "counts_operations",
            "The operations of a transformer's forward and backward are those of the library.",
        ),
        _formula("roofline", "finds_the_roofline", "The least seconds, where computing decides and where memory does."),
        _formula("shares", "knows_the_share", "The MFU of each phase, and of the whole step."),
        _formula(
            "step_seconds", "predicts_steps", "A step's seconds, where bytes, latencies or computing take most of them."
        ),
        Check(keeps_to_benches, (1,), about="step_seconds"),
        _formula("least_tokens", "finds_the_batch", "The tokens per rank from which backward hides the ring."),
        Check(carries_a_large_model, (1,), about="large_model"),
    ),
    record=record,
)
