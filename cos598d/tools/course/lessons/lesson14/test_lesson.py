"""Lesson 14, how far data parallelism carries: operations, roofline, MFU, a step's seconds and a large model's numbers.

What a file predicts is compared with formulas and with recorded benches. Nothing is timed.
"""

import random
from typing import Any

from cos598d.tools.course.common import near
from cos598d.tools.course.formulas import WITHIN, as_json, call_each, is_number, is_right, shown
from cos598d.tools.course.given import given
from cos598d.tools.course.lessons.lesson14 import right

OF_BENCHES = 0.3  # that share may a prediction be off
SETTINGS = 8
# Llama 3.1 405B on 16,384 H100s, as the lesson's page has it.
LLAMA = {"parameters": 405e9, "tokens": 15.6e12, "batch": 16.0 * 2**20, "gpus": 16384, "peak": 989e12, "share": 0.41}
LLAMA |= {"bandwidth": 50e9, "memory": 80e9}


def settings(name: str, seed: int) -> list[tuple[Any, ...]]:
    """The arguments of the calls of a function, drawn again each time: cases of all kinds."""
    draw = random.Random(f"{name} {seed}")
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


def test_counts_operations(ranks, seed, n):
    """The operations of a transformer's forward and backward."""
    is_right(ranks, n, right, "flops", settings("flops", seed))


def test_finds_the_roofline(ranks, seed, n):
    """The least seconds, where computing decides and where memory does."""
    is_right(ranks, n, right, "roofline", settings("roofline", seed))


def test_knows_the_share(ranks, seed, n):
    """The MFU of each phase, and of the whole step."""
    is_right(ranks, n, right, "shares", settings("shares", seed))


def test_predicts_steps(ranks, seed, n):
    """A step's seconds, where bytes, latencies or computing take most of them."""
    is_right(ranks, n, right, "step_seconds", settings("step_seconds", seed))


def test_keeps_to_benches(ranks, seed, n):
    """The seconds of recorded benches on emulated links, within 30 %."""
    benches = given("links")["benches"]
    # The rate is what a bench's floor, which sends nothing, was computed with.
    rates = [each["operations"] / each["floor_seconds"] for each in benches]
    names = ("gradient_bytes", "bandwidth", "latency", "ranks")
    calls = [(each["operations"], rate, *(each[k] for k in names)) for each, rate in zip(benches, rates, strict=True)]
    world = ranks(n, call_each, "step_seconds", calls)
    for told, bench in zip(world.values[0], benches, strict=True):
        measured = bench["flat_seconds"]
        words = f"{bench['ranks']} hosts at {bench['link']} took {measured:.3g} s per step of {bench['model']}"
        words += f", and your prediction is {shown(told)} s, more than 30 % off"
        world.require(near(told, measured, OF_BENCHES), words, about="step_seconds")


def test_finds_the_batch(ranks, seed, n):
    """The tokens per rank from which backward hides the ring."""
    is_right(ranks, n, right, "least_tokens", settings("least_tokens", seed))


def models(seed: int) -> list[dict[str, Any]]:
    """Llama 3.1 405B, and others that are drawn: for some of them a link decides."""
    draw = random.Random(seed + 14)
    found = [dict(LLAMA)]
    for number in range(4):
        gpus, peak, share = 2 ** draw.randint(3, 12), draw.uniform(1, 20) * 1e14, draw.uniform(0.2, 0.6)
        bandwidth = draw.uniform(10, 400) * 1e9
        batch = float(round((0.3, 4.0)[number % 2] * gpus * peak * share / bandwidth))
        of = draw.uniform(1, 500) * 1e9, draw.uniform(1, 20) * 1e12, batch, gpus, peak, share, bandwidth
        found.append(dict(zip(LLAMA, (*of, draw.choice((24e9, 40e9, 80e9, 141e9))), strict=True)))
    return found


def large_models(comm: Any, module: Any, seed: int) -> list[dict[str, Any]]:
    """On a rank: the file's numbers of each model."""
    return [as_json(dict(module.large_model(**each))) for each in models(seed)]


def test_carries_a_large_model(ranks, seed, n):
    """All numbers of Llama 3.1 405B, and of models that are drawn."""
    world = ranks(n, large_models, seed)
    for told, model in zip(world.values[0], models(seed), strict=True):
        name = "Llama 3.1 405B" if model == LLAMA else f"a model of {model['parameters'] / 1e9:.0f} billion parameters"
        expected = right.large_model(**model)
        for key, value in expected.items():
            world.require(key in told, f"large_model has no {key!r} of {name}", about="large_model")
            if near(told[key], value, WITHIN) if isinstance(value, float) else told[key] == value:
                continue
            factors = right.FACTORS.get(key, {}).items()
            why = next((f": {words}" for words, by in factors if near(told[key], by(model) * value, WITHIN)), "")
            if key == "gpus_to_hold" and is_number(told[key]) and abs(told[key] - value) <= 1:
                why = ": a GPU is whole, and the last one need not be full"
            if key == "link_decides":
                each, least = expected["tokens_each"], expected["least_tokens"]
                why = f": each GPU has {each:,.0f} tokens, and the ring is hidden from {least:,.0f} on"
            words = f"{key} of {name} is {shown(told[key])}, expected {shown(value)}{why}"
            world.fail(words, about="large_model")
