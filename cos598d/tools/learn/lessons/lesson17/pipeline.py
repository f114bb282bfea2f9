"""Lesson 17, second part: a pipeline of stages, compared with one process, and its time in units."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cos598d.terminal.words import number_of
from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.learn.checking import OnLesson
from cos598d.tools.learn.events import CALL, COMPUTE, RECEIVE, SEND, Event, from_rows
from cos598d.tools.learn.lessons.common import furthest_off, near

MICRO_ROWS, WIDTH = 3, 6
FORWARD, BACKWARD = "forward", "backward"


class Stage(nn.Module):
    """One rank's layers of a pipeline, which puts down every forward and backward of a micro-batch."""

    def __init__(self, nonce: int, rank: int, on: OnLesson | None = None, seconds: float = 0.0):
        super().__init__()
        draw = torch.Generator().manual_seed(nonce + 1000 + rank)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=draw))
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=draw))
        self._on, self._seconds, self._calls = on, seconds, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(rows, width) to (rows, width)."""
        number, self._calls = self._calls, self._calls + 1
        outputs = torch.tanh(NotedUnit.apply(inputs, self, number) @ self.weight + self.bias)
        self.computed(FORWARD, number)
        return outputs

    def computed(self, what: str, number: int) -> None:
        """Put down that a micro-batch was computed here."""
        if self._on is not None:
            time.sleep(self._seconds)
            self._on.comm.computed(f"{what} {number}")


class NotedUnit(torch.autograd.Function):
    """Tells a stage when the backward of a micro-batch has come to its inputs."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, stage: Stage, number: int) -> torch.Tensor:
        """The inputs, unchanged."""
        ctx.stage, ctx.number = stage, number
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The gradient, unchanged."""
        ctx.stage.computed(BACKWARD, ctx.number)
        return gradients[0], None, None


def micro_batches(nonce: int, count: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs, which require a gradient, and targets of each micro-batch; by default 3 to 6 of them."""
    draw = torch.Generator().manual_seed(nonce + 2000)
    count = count or int(torch.randint(3, 7, (), generator=draw))
    inputs, targets = torch.randn(2, count, MICRO_ROWS, WIDTH, generator=draw)
    return [each.clone().requires_grad_() for each in inputs], list(targets)


def run_pipeline(on: OnLesson, count: int = 0, seconds: float = 0.0) -> tuple[Stage, list[torch.Tensor], Any]:
    """A step of the student's pipeline, recorded: this rank's stage, the inputs, and what was returned."""
    stage = Stage(on.nonce, on.rank, on, seconds)
    inputs, targets = micro_batches(on.nonce, count)
    shape = (len(inputs), MICRO_ROWS, WIDTH)
    is_last = on.rank == on.world_size - 1
    on.comm.exchange("all are here")
    on.comm.begin_record()
    given = (inputs if on.rank == 0 else None, targets if is_last else None)
    returned = on.student.pipeline(on.comm, stage, *given, functional.mse_loss, shape)
    return stage, inputs, returned


@Claim
def pipeline_is_that_of_one_process(on: OnLesson) -> None:
    """The pipeline's losses and the gradients of the inputs and of every stage's weights are those of one process."""
    stage, inputs, returned = run_pipeline(on)
    on.report_events()
    losses = returned if isinstance(returned, list | tuple) else []
    on.report("losses", torch.as_tensor([torch.as_tensor(each).detach() for each in losses]).tolist())
    gradients = {name: p.grad for name, p in stage.named_parameters()}
    on.hand_in("gradients", gradients)
    if on.rank == 0:
        on.hand_in("inputs", {str(k): each.grad for k, each in enumerate(inputs)})


@pipeline_is_that_of_one_process.judgement
def _(world: World) -> None:
    inputs, targets = micro_batches(world.nonce)
    stages, m = [Stage(world.nonce, rank) for rank in range(world.size)], len(inputs)
    right = [functional.mse_loss(nn.Sequential(*stages)(x), y) for x, y in zip(inputs, targets, strict=True)]
    told = world.reported("losses", list)[-1]
    words = f"pipeline on the last rank of {world.size} returns {len(told)} losses, expected {m}"
    world.require(len(told) == m, words, world.size - 1)
    for k, (found, loss) in enumerate(zip(told, right)):
        words = f"the loss of micro-batch {k} is {found:.5g}, expected {loss.item():.5g}: "
        is_divided = near(torch.tensor(float(found)) * m, loss.detach())
        words += "it is divided by m, which is only for backward" if is_divided else "return each one's mean, in order"
        world.require(near(torch.tensor(float(found)), loss.detach()), words, world.size - 1, at="pipeline")
    each_own = [
        torch.autograd.grad(loss, [p for s in stages for p in s.parameters()], retain_graph=True) for loss in right
    ]
    (torch.stack(right).mean()).backward()
    like = {str(k): x.grad for k, x in enumerate(inputs) if x.grad is not None}
    found_by_rank = [world.evidence[0].get(world.claim, "inputs", like)]
    rights, names = [like], ["the gradient of micro-batch {}'s inputs on rank 0"]
    for rank, stage in enumerate(stages):
        like = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
        found_by_rank.append(world.evidence[rank].get(world.claim, "gradients", like))
        rights.append(like)
        names.append(f"the gradient of the stage's {{}} on rank {rank}")
    for place, (found, like, name) in enumerate(zip(found_by_rank, rights, names, strict=True)):
        for number, (each, tensor) in enumerate(like.items()):
            known = {}
            if place:
                own = [gradients[2 * (place - 1) + number] for gradients in each_own]
                known = {f"micro-batch {k}'s only, divided by m: add up those of all": g / m for k, g in enumerate(own)}
                known |= {f"micro-batch {k}'s only: take the mean over all": g for k, g in enumerate(own)}
            if not near(found[each], tensor):
                why = "it is that of the sum of the losses, expected that of their mean: divide each by m"
                words, hint = wrong_tensor(found[each], tensor, known, m, why), ""
                if found[each] is None:
                    hint = ": what a stage receives needs requires_grad_(), before stage(...)"
                elif words.startswith("wrong"):
                    hint = ": do both neighbours take the micro-batches in the same order?"
                world.find(max(place - 1, 0), f"{name.format(each)} is {words}{hint}", at="pipeline")
                return


@Claim
def bubble_is_small(on: OnLesson) -> None:
    """Each stage talks to its neighbours, a message for each micro-batch, and the bubble is (p-1)/(m+p-1)."""
    run_pipeline(on)
    on.report_events()


@bubble_is_small.judgement
def _(world: World) -> None:
    m, p = len(micro_batches(world.nonce)[0]), world.size
    events = [from_rows(rows) for rows in world.reported("events", list)]
    size = MICRO_ROWS * WIDTH * 4
    for rank, own in enumerate(events):
        who = f"rank {rank} of {p}"
        called = next((event.name for event in own if event.kind == CALL), "")
        world.require(
            not called, f"{who} makes a call of all ranks ({called}), expected messages between neighbours", rank
        )
        for what in (FORWARD, BACKWARD):
            done = [event for event in own if event.name.startswith(f"{what} ") and event.kind == COMPUTE]
            why = ": what a stage receives needs requires_grad_()" if what == BACKWARD and rank else ""
            words = (
                f"{what} ran through {who}'s stage {number_of(len(done), 'time')}, expected {m}, once each micro-batch"
            )
            world.require(len(done) == m, words + why, rank)
        for kind, verb in ((SEND, "sends"), (RECEIVE, "receives")):
            for peer in range(p):
                messages = [event for event in own if event.kind == kind and event.peer == peer]
                wanted = m if abs(peer - rank) == 1 else 0
                words = (
                    f"{who} {verb} {number_of(len(messages), 'message')} {'to' if kind == SEND else 'from'} rank {peer}"
                )
                world.require(len(messages) == wanted, f"{words}, expected {wanted}, one for each micro-batch", rank)
                sizes = [event.bytes for event in messages if event.bytes != size]
                world.require(not sizes, f"{who} {verb} a message of {sizes[:1]} bytes, expected {size}", rank)
    if world.findings:
        return
    took, least = units_of_time(events), 2 * (m + p - 1)
    words = f"with one unit for each forward and each backward of a stage, {m} micro-batches take {took} units on {p} "
    words += (
        f"ranks, expected {least}: the bubble is {1 - 2 * m / took:.0%} of the time, expected {1 - 2 * m / least:.0%}"
    )
    why = "send each micro-batch on as soon as it is computed"
    if took == 2 * m * p:
        why = "only one stage computes at a time: begin the next micro-batch while the first one is in the next stage"
    world.require(took <= least, f"{words}; {why}")


def units_of_time(events: Sequence[Sequence[Event]]) -> int:
    """How long a step takes by its order alone: a forward or backward of a micro-batch is one unit, a message none."""
    moment = {SEND: lambda event: event.start}  # what is sent is complete then; all else counts when it is over
    left = [sorted(own, key=lambda event: moment.get(event.kind, lambda each: each.end)(event)) for own in events]
    clock, on_the_way = [0] * len(events), defaultdict[tuple[int, int], list[int]](list)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, own in enumerate(left):
            while own:
                event, queue = own[0], on_the_way[own[0].peer or 0, rank]
                if event.kind == RECEIVE and not queue:
                    break
                if event.kind == RECEIVE:
                    clock[rank] = max(clock[rank], queue.pop(0))
                elif event.kind == SEND:
                    on_the_way[rank, event.peer or 0].append(clock[rank])
                elif event.kind == COMPUTE and event.name.startswith((FORWARD, BACKWARD)):
                    clock[rank] += 1
                own.pop(0)
                has_moved = True
    return max(clock)


def wrong_tensor(
    found: torch.Tensor | None, right: torch.Tensor, known: Mapping[str, torch.Tensor], times: int, why: str = ""
) -> str:
    """What a tensor is instead of the right one, in words. `why`: what makes it `times` as large."""
    if found is None:
        return "missing: it is None, so backward did not come there"
    why = why or "backward of SumOverRanks adds nothing, since every rank has the whole gradient"
    known = {**known, f"{times} times too large: {why}": times * right}
    words = next((words for words, tensor in known.items() if near(found, tensor)), "")
    values = furthest_off(found, right)
    return f"{words} ({values})" if words else f"wrong: {values}"
