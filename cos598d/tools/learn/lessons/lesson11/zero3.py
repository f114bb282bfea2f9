"""Lesson 11, second part: layers whose weights are there while they compute, an n-th of everything between steps."""

import gc
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.check.evidence import seed_of
from cos598d.tools.learn.checking import OnLesson
from cos598d.tools.learn.lessons.golf import STEPS, Results, Turn
from cos598d.tools.learn.lessons.lesson11.stepping import OPTIMIZERS, SPARE, Optimizers, judge_bytes, wrong_step

LAYERS = ((7, 48), (48, 48), (48, 48), (48, 5))  # inputs and outputs; not all of their weights divide by 2, 3 or 4
BATCH = 12
ADAMW = "AdamW"
SECONDS_TO_LET_GO = 1.5
HOLDERS = (list, tuple, dict, set, deque)
UNTRACKED = (np.ndarray, array, bytes, bytearray, float)


@Claim
def zero3_steps(on: OnLesson) -> None:
    """After Zero3's step layers compute with the weights of one process that steps by the average."""
    for kind, (steps, _) in OPTIMIZERS.items():
        zero = on.student.Zero3(on.comm, start_weights(on.nonce), Optimizers(kind))
        for step in range(steps):
            forward(zero, on.nonce, step, on.rank, on.world_size, run_layer).backward()
            zero.step()
            on.hand_in(f"{kind}, step {step + 1}", whole_weights(zero))


@zero3_steps.judgement
def _(world: World) -> None:
    for kind, (steps, make) in OPTIMIZERS.items():
        weights = [each.requires_grad_() for each in start_weights(world.nonce)]
        like = {name_of(number): each.detach() for number, each in enumerate(weights)}
        optimizer = make(weights)
        for step in range(steps):
            before = torch.cat([each.detach() for each in weights])
            own = [gradient(weights, world.nonce, step, rank, world.size) for rank in range(world.size)]
            mean = torch.stack(own).mean(dim=0).split([each.numel() for each in weights])
            for each, part in zip(weights, mean, strict=True):
                each.grad = part.clone()
            optimizer.step()
            right = torch.cat([each.detach() for each in weights])
            where = f"Zero3 with {kind}, step {step + 1}"
            for rank, found in enumerate(world.handed_in(f"{kind}, step {step + 1}", like)):
                missing = [name for name, tensor in found.items() if tensor is None]
                world.require(not missing, f"{where}: {' and '.join(missing)} was not run on rank {rank}", rank)
                if not missing:
                    all_of_it = torch.cat([tensor for tensor in found.values() if tensor is not None])
                    words = wrong_step(before, all_of_it, right, own if kind != ADAMW else [], rank)
                    if words and kind == ADAMW and step:
                        words += "; the step before was right, so is there one optimizer for all steps?"
                    world.require(not words, f"{where}, on rank {rank}: {words}", rank)
            if world.findings:
                return


@Claim
def zero3_holds(on: OnLesson) -> None:
    """Between steps a rank holds an n-th of weights and state; forward keeps no layer's whole weights for backward."""
    before = held_bytes()
    layers = start_weights(on.nonce)
    given = GatheredLayers(layers)
    zero = on.student.Zero3(on.comm, layers, Optimizers(ADAMW))
    del layers
    on.report("kept of what was given", settled(given.bytes_left, 0))
    whole = GatheredLayers()

    def run(number: int, weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        whole.note(weights)
        return run_layer(number, weights, inputs)

    loss = forward(zero, on.nonce, 0, on.rank, on.world_size, run)
    on.report("left by forward", settled(whole.bytes_left, 0))
    loss.backward()
    zero.step()
    del loss
    on.report("held after a step", settled(lambda: held_bytes() - before, most_held(on.world_size)))


@zero3_holds.judgement
def _(world: World) -> None:
    whole, most = whole_bytes(), most_held(world.size)
    for rank in range(world.size):
        who = f"Zero3 on rank {rank} of {world.size}"
        kept, left, held = (
            world.reported(name, int)[rank]
            for name in ("kept of what was given", "left by forward", "held after a step")
        )
        words = (
            f"{who}: {kept:,} bytes of whole weights are still there after the constructor has returned, expected none"
        )
        world.require(
            not kept, f"{words}: keep a clone of your part, since a slice keeps the tensor that it is a slice of", rank
        )
        words = f"{who}: {left:,} bytes of layers' whole weights are still there after forward, expected none"
        world.require(not left, f"{words}: backward has to gather them once more", rank)
        words = f"{who} holds {held:,} bytes after a step, expected at most {most:,.0f}, its n-th of {3 * whole:,}"
        world.require(held <= most, f"{words} bytes of weights and AdamW's state, and a quarter more", rank)


@Claim
def zero3_sends(on: OnLesson) -> None:
    """In a step of Zero3 a rank sends at most 4(n-1)/n S bytes: two all-gathers and an all-reduce."""
    zero, sent = on.student.Zero3(on.comm, start_weights(on.nonce), Optimizers(ADAMW)), []
    for step in range(2):
        ledger = on.fresh_ledger()
        forward(zero, on.nonce, step, on.rank, on.world_size, run_layer).backward()
        zero.step()
        sent.append(sum(row.bytes_sent for row in ledger.rows))
    on.report("sent", sent)


@zero3_sends.judgement
def _(world: World) -> None:
    weights = start_weights(0)
    judge_bytes(world, "Zero3", 4, sum(each.nbytes for each in weights), 2 * len(weights))


def start_weights(nonce: int) -> list[torch.Tensor]:
    """The flat weights of each layer: a matrix and a bias."""
    generator = torch.Generator().manual_seed(nonce + 3)
    return [torch.randn(wide * (narrow + 1), generator=generator) * narrow**-0.5 for narrow, wide in LAYERS]


def name_of(number: int) -> str:
    """A layer's."""
    return f"layer {number}"


def run_layer(number: int, weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """A layer: linear, and tanh but for the last."""
    narrow, wide = LAYERS[number]
    outputs = functional.linear(inputs, weights[: narrow * wide].view(wide, narrow), weights[narrow * wide :])
    return outputs if number == len(LAYERS) - 1 else torch.tanh(outputs)


def examples(nonce: int, step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's share of a step's batch, a `size`-th: inputs (share, 7) and targets (share, 5)."""
    generator = torch.Generator().manual_seed(seed_of(nonce, rank) + 11 + step)
    batch = (torch.randn(BATCH, width, generator=generator) for width in (LAYERS[0][0], LAYERS[-1][1]))
    inputs, targets = (each[rank::size].clone() for each in batch)
    return inputs, targets


def forward(zero: Any, nonce: int, step: int, rank: int, size: int, run: Callable) -> torch.Tensor:
    """The loss of a rank's share, through the layers of a student's Zero3."""
    state, targets = examples(nonce, step, rank, size)
    state.requires_grad_()
    for number in range(len(LAYERS)):
        state = zero.layer(number, lambda weights, inputs, number=number: run(number, weights, inputs), state)
    return functional.mse_loss(state, targets)


def whole_weights(zero: Any) -> dict[str, torch.Tensor]:
    """The weights that the layers of a student's Zero3 compute with, by name."""
    seen: dict[str, torch.Tensor] = {}
    for number, (narrow, _) in enumerate(LAYERS):

        def look(weights: torch.Tensor, inputs: torch.Tensor, number: int = number) -> torch.Tensor:
            seen[name_of(number)] = weights.detach().clone()
            return inputs

        with torch.no_grad():
            zero.layer(number, look, torch.zeros(1, narrow))
    return seen


def gradient(weights: Sequence[torch.Tensor], nonce: int, step: int, rank: int, size: int) -> torch.Tensor:
    """A rank's own gradient, flat."""
    state, targets = examples(nonce, step, rank, size)
    for number, each in enumerate(weights):
        state = run_layer(number, each, state)
    return torch.cat(torch.autograd.grad(functional.mse_loss(state, targets), list(weights)))


def golf_start(on: OnLesson) -> Turn:
    """Steps of a student's Zero3 with SGD."""
    zero = on.student.Zero3(on.comm, start_weights(on.nonce), Optimizers("SGD"))

    def turn(step: int):
        def run() -> None:
            forward(zero, on.nonce, step, on.rank, on.world_size, run_layer).backward()
            zero.step()

        return run, lambda: whole_weights(zero)

    return turn


def golf_weights(nonce: int, ranks: int) -> list[Results]:
    """The layers' weights after each of these steps, of one process that steps by the average."""
    weights = [each.requires_grad_() for each in start_weights(nonce)]
    found: list[Results] = []
    optimizer = OPTIMIZERS["SGD"][1](weights)
    for step in range(STEPS):
        mean = torch.stack([gradient(weights, nonce, step, rank, ranks) for rank in range(ranks)]).mean(dim=0)
        for each, part in zip(weights, mean.split([each.numel() for each in weights]), strict=True):
            each.grad = part.clone()
        optimizer.step()
        found.append({name_of(number): each.detach().clone() for number, each in enumerate(weights)})
    return found


class GatheredLayers:
    """Layers' whole weights, each noted once, and how much of them is still somewhere in memory."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()):
        self._storages: list[tuple[StorageWeakRef, int]] = []
        for tensor in tensors:
            self.note(tensor)

    def note(self, tensor: torch.Tensor) -> None:
        """Look at this one's memory, whoever has it."""
        self._storages.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))

    def bytes_left(self) -> int:
        """Of those whose memory is still in use."""
        return sum(size for storage, size in self._storages if not storage.expired())


def whole_bytes() -> int:
    """All layers' weights."""
    return sum(each.nbytes for each in start_weights(0))


def most_held(size: int) -> float:
    """Bytes of weights and AdamW's state that one of `size` ranks may hold between steps."""
    return SPARE * 3 * whole_bytes() / size


def settled(count: Callable[[], int], most: float) -> int:
    """The first count that is at most `most`, or else the last: gloo's threads let go of what they have sent a little
    after the call that waits for it has returned, on a busy machine much later."""
    until = time.monotonic() + SECONDS_TO_LET_GO
    while (found := count()) > most and time.monotonic() < until:
        time.sleep(0.05)
    return found


def held_bytes() -> int:
    """Of all numbers that this process has in Python: tensors, each memory once, arrays, and lists of numbers."""
    gc.collect()
    tensors, places, seen = {}, {}, set()
    left = gc.get_objects()
    while left:
        each = left.pop()
        if issubclass(type(each), torch.Tensor):
            tensors[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        # What Python does not keep track of is found where it is held; the rest is in the list.
        for inner in gc.get_referents(each):
            if not gc.is_tracked(inner) and id(inner) not in seen and isinstance(inner, (*UNTRACKED, *HOLDERS)):
                seen.add(id(inner))
                places[id(inner)] = _own_bytes(inner)
                if isinstance(inner, HOLDERS):
                    left.append(inner)
    return sum(tensors.values()) + sum(places.values())


def _own_bytes(value: Any) -> int:
    """What an array, a text of bytes or a number takes by itself; nothing for what shares another one's memory."""
    if isinstance(value, np.ndarray):
        return value.nbytes if value.base is None else 0
    return 0 if isinstance(value, HOLDERS) else sys.getsizeof(value)
