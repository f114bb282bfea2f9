"""Lesson 8, what goes wrong: six loops, each audited while it trains, and held to the weights of one process."""

import time
from dataclasses import dataclass

import torch
from torch import nn

from cos598d.records.kinds import fault
from cos598d.terminal.words import number_of
from cos598d.tools.audit.book import BOOK_KIND
from cos598d.tools.audit.judge import judge
from cos598d.tools.audit.judge.verdict import FAULT, WASTE
from cos598d.tools.audit.judge.words import WORDS
from cos598d.tools.audit.watch.observer import Observer
from cos598d.tools.audit.watch.writing import book_of
from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.check.evidence import BadEvidence
from cos598d.tools.check.toy import seeded
from cos598d.tools.learn.checking import Check, Checks, OnLesson

STEPS, EXAMPLES = 6, 72
NEAR = 1e-4  # of the largest weight: rounding grows over the steps


@dataclass(frozen=True)
class Loop:
    """What a loop is meant to do: the examples of a step, and the norm that its gradient is clipped to (0: none).

    A rank computes its share of them in so many `parts`.
    """

    name: str
    batch: int = 12
    max_norm: float = 0.0
    parts: int = 1

    @property
    def says(self) -> str:
        """The claim about it."""
        return (
            f"The audit finds nothing in {self.name}, which ends with the weights of one process on the whole batches."
        )


LOOPS = (
    Loop("first_loop", max_norm=0.1),
    Loop("second_loop"),
    Loop("third_loop", max_norm=0.1),
    Loop("fourth_loop", parts=3),
    Loop("fifth_loop"),
    Loop("sixth_loop", batch=11),
)


def network(nonce: int) -> nn.Module:
    """Two layers, with weights drawn from the nonce."""
    return seeded(nonce, lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))


def examples(nonce: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All inputs (72, 8), and their labels (72,)."""
    generator = torch.Generator().manual_seed(nonce + 1)
    inputs = torch.randn(EXAMPLES, 8, generator=generator)
    return inputs, torch.randint(0, 3, (EXAMPLES,), generator=generator)


def one_process(loop: Loop, nonce: int) -> dict[str, torch.Tensor]:
    """The weights of one process that has gone through the loop's batches."""
    model, (inputs, labels) = network(nonce), examples(nonce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        batch = torch.arange(loop.batch * step, loop.batch * (step + 1))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        if loop.max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), loop.max_norm)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def claim_of(loop: Loop) -> Claim:
    """The claim about one loop."""

    def observe(on: OnLesson) -> None:
        model, data = network(on.nonce), examples(on.nonce)
        computed: list[int] = []
        model.register_forward_pre_hook(lambda _, inputs: computed.append(len(inputs[0])))
        began, observer = time.perf_counter(), Observer(STEPS, _nothing, _nothing)
        try:
            getattr(on.student, loop.name)(on.rank, on.world_size, model, *data)
        finally:
            observer.close()
        about = {"run": loop.name, "rank": on.rank, "world_size": on.world_size, "host": "", "script": loop.name}
        on.report("book", book_of(observer, about, time.perf_counter() - began, 0))
        on.report("largest", max(computed, default=0))
        on.hand_in("weights", dict(model.named_parameters()))

    observe.__name__, observe.__doc__ = loop.name, loop.says
    claim = Claim(observe)
    claim.judgement(lambda world: _judge(loop, world))
    return claim


def _judge(loop: Loop, world: World) -> None:
    books = world.reported("book", dict)
    for rank, book in enumerate(books):
        if fault(book, BOOK_KIND) or book["rank"] != rank or book["world_size"] != world.size:
            raise BadEvidence(f"rank {rank} did not hand in the trace of an audit")
    verdict = judge(books)
    for found in (*verdict.of(FAULT), *verdict.of(WASTE)):
        _, line, _ = found.where
        words = f"in {loop.name} {WORDS[found.name].title}: {found.evidence[0]}"
        world.find(0, words, " ".join(found.evidence[1:]), line=line)
    if world.findings:
        return
    if verdict.seen.steps != STEPS:
        steps = f"{loop.name} makes {number_of(verdict.seen.steps, 'step')} on a rank, expected {STEPS}"
        world.find(0, f"{steps}: fix the fault, and do not change the rest")
        return
    for rank, largest in enumerate(world.reported("largest", int)):
        part = loop.batch // world.size // loop.parts
        words = (
            f"{loop.name} computes {number_of(largest, 'example')} at a time on rank {rank} of {world.size}, expected "
        )
        words += f"{part}: compute its share in {loop.parts} parts"
        world.require(loop.parts == 1 or largest == part, words, rank)
    if world.findings:
        return
    right = one_process(loop, world.nonce)
    for rank, weights in enumerate(world.handed_in("weights", right)):
        for name, tensor in right.items():
            found_there = weights[name]
            off = float("inf") if found_there is None else (found_there - tensor).abs().max().item()
            if not off <= NEAR * tensor.abs().max().item():
                what = f"{loop.name} ends with other weights than one process on the whole batches"
                world.find(rank, f"{what}: on rank {rank} {name} is off by {off:.1e}, expected at most rounding")
                return


def _nothing() -> None:
    """What an observer tells of is asked for when the loop is over."""


CHECKS = Checks(tuple(Check(claim_of(loop), (2, 4), about=loop.name) for loop in LOOPS), calls_torch=True)
