"""Claims about what a sync keeps: buffers that it settles, memory that it frees, several models."""

import gc
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from cos598d.tools.check.claims.base import Claim, OnRank, World
from cos598d.tools.check.claims.drawn import Driven, hold
from cos598d.tools.check.drawn import Draw, random_of, training

SETTLED_AFTER = (2, 3)  # steps
FILLED_AFTER, MEASURED_AFTER = 6, 18  # steps: by then everything that is kept permanently exists
SETTLE_SECONDS = 1.0
TENSORS, ELEMENTS = 8, 20_000
# Relative to a step's gradients: the memory after more steps, and after detach, may differ by this share.
MOST_HELD = 0.05


class _Counting(nn.Module):
    """Has buffers of several dtypes, which each rank's forward changes by its own examples."""

    mean: torch.Tensor
    seen: torch.Tensor
    short: torch.Tensor
    flags: torch.Tensor

    def __init__(self, nonce: int, rank: int):
        super().__init__()
        generator = torch.Generator().manual_seed(nonce + rank)
        self.weight = nn.Parameter(torch.rand(3, generator=generator))
        self.register_buffer("mean", torch.rand(5, 3, generator=generator))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("short", torch.rand(7, generator=generator).half())
        self.register_buffer("flags", torch.zeros(11, dtype=torch.bool))

    def forward(self, examples: torch.Tensor) -> tuple[torch.Tensor]:
        """Examples, (5, 3): the loss."""
        self.mean.mul_(0.9).add_(0.1 * examples)
        self.seen += int(examples.sum().abs() * 1000)
        self.short += examples.flatten()[:7].half()
        self.flags[int(self.seen) % 11] = True
        return ((self.weight * examples).sum(),)


@Claim
def settles_buffers(on: OnRank) -> None:
    """After settle every rank's buffers are rank 0's, whatever its own forward made of them; no weight has changed."""
    model = _Counting(on.nonce, on.rank)
    sync, module = on.attached(model)
    step = 0
    for steps in SETTLED_AFTER:
        for _ in range(steps):
            module(examples=_examples(on.nonce, step, on.rank))[0].backward()
            sync.finish()
            model.zero_grad(set_to_none=True)
            step += 1
        sync.settle()
        on.hand_in(f"after {step} steps", model.state_dict())


@settles_buffers.judgement
def _(world: World) -> None:
    model = _Counting(world.nonce, 0)
    for step in range(sum(SETTLED_AFTER)):
        model(_examples(world.nonce, step, 0))
        if step + 1 in (SETTLED_AFTER[0], sum(SETTLED_AFTER)):
            found = world.handed_in(f"after {step + 1} steps", model.state_dict())
            for name, right in model.state_dict().items():
                for rank, each in enumerate(found):
                    own = each[name]
                    if own is None or not torch.equal(own, right):
                        words = f"{name} after settle ({step + 1} steps): expected rank 0's {_first(right)}"
                        is_weight = isinstance(dict(model.named_parameters()).get(name), nn.Parameter)
                        cause = "settle changes weights" if is_weight else "settle does not give all ranks rank 0's"
                        world.find(rank, f"{words}, got {_first(own)}", cause + ("" if is_weight else " buffers"))


@Claim
def frees_memory(on: OnRank) -> None:
    """What it holds does not grow from step to step; after detach it holds nothing that grew with the model."""
    shapes = [(ELEMENTS,)] * TENSORS
    gc.collect()
    gc.freeze()  # what exists now is not counted
    try:
        model = nn.ParameterList(torch.rand(shape) for shape in shapes)
        before = _held(model)
        sync, module = on.attached(_Used(model))
        on.report("before", before)
        for step in range(MEASURED_AFTER):
            module(torch.full((1,), float(on.rank + step)))[0].backward()
            sync.finish()
            sync.after_step()
            model.zero_grad(set_to_none=True)
            on.comm.not_waited_for()
            if step + 1 == FILLED_AFTER:
                filled = _held(model)
        on.report("filled", filled)
        on.report("later", _settled(model, filled))
        sync.detach()
        del module
        on.report("detached", _settled(model, before))
    finally:
        gc.unfreeze()


@frees_memory.judgement
def _(world: World) -> None:
    gradients = 4 * TENSORS * ELEMENTS
    most = int(MOST_HELD * gradients)
    held = {name: world.reported(name, int) for name in ("before", "filled", "later", "detached")}
    for rank, (before, filled, later, detached) in enumerate(zip(*held.values(), strict=True)):
        words = f"after {MEASURED_AFTER} steps it holds {later - filled:,} bytes more than after {FILLED_AFTER}"
        world.require(
            later - filled <= most,
            f"{words}: expected none more; a step's gradients are {gradients:,} bytes",
            rank,
            "memory grows from step to step: something of every step is kept",
        )
        world.require(
            detached - before <= most,
            f"after detach {detached - before:,} bytes of tensors and arrays are still held: expected none",
            rank,
            "after detach it still holds buffers",
        )


@Claim
def keeps_models_apart(on: OnRank) -> None:
    """Two syncs average two models at once, each its own; detaching one does not affect the other, and it can take over
    a model again."""
    one, other, third = _three(on.nonce, on.world_size)
    first, second = Driven(on, one), Driven(on, other)
    for mine, its in zip(one.steps, other.steps, strict=True):
        first.begin(mine)
        second.begin(its)
        for driven, step in ((first, mine), (second, its))[:: 1 if mine.number % 2 else -1]:
            driven.finish(step)
    first.sync.detach()
    left = replace(other, label=f"{other.label} after the first's detach")
    for step in left.steps:
        second.of(left).step(step)
    second.sync.detach()
    Driven(on, third, sync=first.sync).run()


@keeps_models_apart.judgement
def _(world: World) -> None:
    one, other, third = _three(world.nonce, world.size)
    for draw in (one, other, replace(other, label=f"{other.label} after the first's detach")):
        hold(world, draw, with_weights=False)
    hold(world, third)


def _three(nonce: int, ranks: int) -> tuple[Draw, Draw, Draw]:
    one, other, third = (
        training(nonce, ranks, label, 4, 4)
        for label in ("the first of two models", "the second of two models", "a model after detach and attach")
    )
    return one, other, third


class _Used(nn.Module):
    """Parameters, all of which are used."""

    def __init__(self, parameters: nn.ParameterList):
        super().__init__()
        self.own = parameters

    def forward(self, factor: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.stack([(parameter * factor).sum() for parameter in self.own]).sum(),)


def _settled(model: nn.Module, least: int) -> int:
    """As `_held`, once it is down to `least`: the thread that made a call frees its tensor a moment later."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (held := _held(model)) > least and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def _held(model: nn.Module) -> int:
    """Bytes of tensors, arrays and strings that were created since `gc.freeze`, except the model's parameters."""
    gc.collect()
    storages = {}
    for each in _made():
        kind = type(each)
        if issubclass(kind, torch.Tensor):
            with torch.no_grad():
                storage = each.untyped_storage()  # type: ignore[attr-defined]
            storages[storage.data_ptr()] = storage.nbytes()
        elif issubclass(kind, np.ndarray):
            storages[each.__array_interface__["data"][0]] = each.nbytes  # type: ignore[attr-defined]
        elif kind in (bytes, bytearray):
            storages[id(each)] = len(each)  # type: ignore[arg-type]
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def _made() -> Iterator[object]:
    for each in gc.get_objects():
        yield each
        if type(each) in (list, tuple, dict):
            yield from gc.get_referents(each)


def _examples(nonce: int, step: int, rank: int) -> torch.Tensor:
    return torch.from_numpy(random_of(nonce, "examples", step, rank).random((5, 3), dtype=np.float32))


def _first(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.flatten()[:3].tolist()}"
