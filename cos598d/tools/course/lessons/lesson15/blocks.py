"""The blocks of lesson 15, the bytes that a step of them holds, and checkpoints with mistakes."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cos598d.tools.exam.models import seeded

DROPOUT, FEW_ROWS = 0.1, 24
Checkpoint = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Of a stack: its blocks, their two widths, and the rows of its inputs."""

    layers: int
    width: int
    inner: int
    rows: int


def shape_of(seed: int) -> Shape:
    """Drawn again each time."""
    draw = random.Random(seed)
    width = draw.choice((64, 72, 80))
    return Shape(draw.randint(4, 8), width, 4 * width, draw.randint(500, 600))


class CountedBlock(nn.Module):
    """A residual MLP with a norm: (rows, width) to (rows, width)."""

    def __init__(self, width: int, inner: int, dropout: float):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout, self.calls = dropout, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Also counts its calls."""
        self.calls += 1
        hidden = self.down(nn.functional.gelu(self.up(self.norm(inputs))))
        return inputs + (nn.functional.dropout(hidden, self.dropout) if self.dropout else hidden)


class Stack(nn.Module):
    """A linear layer and blocks, each of which is called by `through`."""

    def __init__(self, shape: Shape, dropout: float = 0.0):
        super().__init__()
        self.stem = nn.Linear(8, shape.width)
        self.blocks = nn.ModuleList(CountedBlock(shape.width, shape.inner, dropout) for _ in range(shape.layers))

    def loss(self, inputs: torch.Tensor, through: Checkpoint) -> torch.Tensor:
        """The sum over all outputs of (rows, 8) inputs, a different weight for each row."""
        outputs = self.stem(inputs)
        for block in self.blocks:
            outputs = through(block, outputs)
        return outputs.mean(dim=1) @ torch.linspace(-1, 1, len(outputs))


def plainly(block: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """A block as it is."""
    return block(inputs)


def rows_of(seed: int, step: int, rows: int) -> torch.Tensor:
    """What a step sees: (rows, 8)."""
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed + step))


def steps_of(seed: int, through: Checkpoint, dropout: float) -> list[dict[str, torch.Tensor | None]]:
    """The gradients by name of two steps, whose masks follow one another."""
    model = seeded(seed, lambda: Stack(shape_of(seed), dropout))

    def step(number: int) -> dict[str, torch.Tensor | None]:
        model.zero_grad(set_to_none=True)
        model.loss(rows_of(seed, number, FEW_ROWS), through).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    return seeded(seed + 1, lambda: [step(0), step(1)])


class HeldBytes(TorchDispatchMode):
    """After each operation: the bytes of all storages that operations made and that something still holds."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.curve: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        given = {each.untyped_storage()._cdata for each in leaves if isinstance(each, torch.Tensor)}
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given:
                reference = StorageWeakRef(each.untyped_storage())
                self._held[reference.cdata] = reference, each.untyped_storage().nbytes()
        self.curve.append(self.now())
        return found

    def now(self) -> int:
        """The bytes that are held now."""
        self._held = {place: pair for place, pair in self._held.items() if not pair[0].expired()}
        return sum(size for _, size in self._held.values())


def memory_of_a_step(seed: int, through: Checkpoint) -> dict[str, float]:
    """Bytes that forward leaves for backward, the most that backward holds, and how often a block is called."""
    shape = shape_of(seed)
    model, inputs = seeded(seed, lambda: Stack(shape)), rows_of(seed, 0, shape.rows)
    with HeldBytes() as held:
        loss = model.loss(inputs, through)
        kept, moments = held.now(), len(held.curve)
        loss.backward()
    calls = sum(block.calls for block in model.modules() if isinstance(block, CountedBlock)) / shape.layers
    return {"kept": kept, "peak": max(held.curve[moments:], default=0), "calls": calls}


class Again(torch.autograd.Function):
    """A block that is computed again in backward, rightly or with a mistake."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, block: nn.Module, way: str) -> torch.Tensor:
        ctx.block, ctx.way, ctx.random = block, way, torch.get_rng_state()
        ctx.save_for_backward(inputs)
        outputs = block(inputs)
        if way == "kept after":
            ctx.random = torch.get_rng_state()
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inputs = ctx.saved_tensors[0].detach().requires_grad_()
        after = torch.get_rng_state()
        with torch.enable_grad():
            if not ctx.way.startswith("other mask"):
                torch.set_rng_state(ctx.random)
            outputs = ctx.block(inputs)
        if ctx.way not in ("other mask", "not put back"):
            torch.set_rng_state(after)
        outputs.backward(torch.ones_like(outputs) if ctx.way == "ones" else gradients[0])
        return (gradients[0] if ctx.way == "through" else inputs.grad), None, None


def checkpoint(way: str = "") -> Checkpoint:
    """What calls a block with a checkpoint of that kind, "" for a right one."""
    return lambda block, inputs: Again.apply(inputs, block, way)


OTHER_MASK = "the second forward drops other values than the first: keep torch.get_rng_state(), and set it again"
# What is said of gradients that are those of a mistake.
GRADIENTS = {
    "other mask": OTHER_MASK,
    "other mask, put back": OTHER_MASK,
    "kept after": "the second forward drops other values: keep torch.get_rng_state() before the block runs, not after",
    "through": "backward returns the gradient that it was given: return that of the inputs, inputs.grad",
    "not put back": "backward leaves the random state where the second forward put it: use torch.random.fork_rng()",
    "ones": "the gradient that backward is given is left out: call outputs.backward(gradient)",
}
