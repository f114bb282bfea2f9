"""Lesson 8, what goes wrong: six loops, each audited while it trains, and held to the weights of one process."""

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from cos598d.tools.audit.judge import judge
from cos598d.tools.audit.judge.verdict import FAULT, WASTE
from cos598d.tools.audit.judge.words import WORDS
from cos598d.tools.audit.watch.observer import Observer
from cos598d.tools.audit.watch.writing import book_of
from cos598d.tools.course.common import near
from cos598d.tools.exam.models import seeded
from cos598d.tools.exam.ranks import Wrong

pytestmark = pytest.mark.calls_torch
STEPS, EXAMPLES = 6, 72
NEAR = 1e-4  # of the largest weight: rounding grows over the steps


@dataclass(frozen=True)
class Loop:
    """What a loop is meant to do: the examples of a step, and the norm that its gradient is clipped to (0: none).

    A rank computes its share of them in so many `parts`.
    """

    batch: int = 12
    max_norm: float = 0.0
    parts: int = 1


LOOPS = {
    "first_loop": Loop(max_norm=0.1),
    "second_loop": Loop(),
    "third_loop": Loop(max_norm=0.1),
    "fourth_loop": Loop(parts=3),
    "fifth_loop": Loop(),
    "sixth_loop": Loop(batch=11),
}


def network(seed: int) -> nn.Module:
    """Two layers, of a width that is drawn."""
    hidden = 12 + seed % 9
    return seeded(seed, lambda: nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 3)))


def examples(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All inputs (72, 8), and their labels (72,)."""
    generator = torch.Generator().manual_seed(seed + 1)
    inputs = torch.randn(EXAMPLES, 8, generator=generator)
    return inputs, torch.randint(0, 3, (EXAMPLES,), generator=generator)


def one_process(loop: Loop, seed: int) -> dict[str, torch.Tensor]:
    """The weights of one process that has gone through the loop's batches."""
    model, (inputs, labels) = network(seed), examples(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        batch = torch.arange(loop.batch * step, loop.batch * (step + 1))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        if loop.max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), loop.max_norm)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def audited(comm: Any, module: Any, seed: int) -> list[dict[str, Any]]:
    """On a rank, of each loop: its audit's book, the most examples that it computed at once, and its weights."""
    found = []
    for name in LOOPS:
        model, data, sizes = network(seed), examples(seed), [0]
        model.register_forward_pre_hook(lambda _, inputs, sizes=sizes: sizes.append(len(inputs[0])))
        began, observer = time.perf_counter(), Observer(STEPS, lambda: None, lambda: None)
        try:
            getattr(module, name)(comm.rank, comm.world_size, model, *data)
        finally:
            observer.close()
        about = {"run": name, "rank": comm.rank, "world_size": comm.world_size, "host": "", "script": name}
        book = book_of(observer, about, time.perf_counter() - began, 0)
        found.append({"book": book, "largest": max(sizes), "weights": dict(model.named_parameters())})
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_loops(ranks, seed, n):
    """The audit finds nothing in any loop, and each ends with the weights of one process on the whole batches."""
    world = ranks(n, audited, seed)
    for number, (name, loop) in enumerate(LOOPS.items()):
        by_rank = [value[number] for value in world.values]
        verdict = judge([each["book"] for each in by_rank])
        for found in (*verdict.of(FAULT), *verdict.of(WASTE)):
            words = f"in {name} {WORDS[found.name].title}: {found.evidence[0]}"
            raise Wrong(words, found.where[1], " ".join(found.evidence[1:]))
        made = f"{name} makes {verdict.seen.steps} step{'s' * (verdict.seen.steps != 1)} on a rank, expected {STEPS}"
        fault = f"{made}: fix the fault, and do not change the rest"
        world.require(verdict.seen.steps == STEPS, fault, about=name)
        part = loop.batch // n // loop.parts
        right = one_process(loop, seed)
        for rank, each in enumerate(by_rank):
            words = f"{name} computes {each['largest']} examples at a time on rank {rank} of {n}, expected {part}"
            is_part = loop.parts == 1 or each["largest"] == part
            world.require(is_part, f"{words}: compute its share in {loop.parts} parts", rank, about=name)
            for key, tensor in right.items():
                off = (each["weights"][key] - tensor).abs().max().item()
                words = f"{name} ends with other weights than one process on the whole batches: on rank {rank} {key} "
                words += f"is off by {off:.1e}, expected at most rounding"
                world.require(near(each["weights"][key], tensor, NEAR), words, rank, about=name)
