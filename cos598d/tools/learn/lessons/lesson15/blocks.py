"""The blocks of lesson 15, and a watch over the bytes that a step of them holds."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cos598d.tools.check.toy import seeded

LAYERS, WIDTH, INNER, ROWS = 6, 64, 256, 512
DROPOUT = 0.1

Checkpoint = Callable[[nn.Module, torch.Tensor], torch.Tensor]


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

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(CountedBlock(WIDTH, INNER, dropout) for _ in range(LAYERS))

    def loss(self, inputs: torch.Tensor, through: Checkpoint) -> torch.Tensor:
        """The sum over all outputs of (rows, 8) inputs, a different weight for each row."""
        outputs = self.stem(inputs)
        for block in self.blocks:
            outputs = through(block, outputs)
        return outputs.mean(dim=1) @ torch.linspace(-1, 1, len(outputs))


def plainly(block: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """A block as it is."""
    return block(inputs)


def rows_of(nonce: int, step: int, rows: int = ROWS) -> torch.Tensor:
    """What a step sees: (rows, 8)."""
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(nonce + step))


def steps_of(nonce: int, through: Checkpoint, dropout: float) -> list[dict[str, torch.Tensor | None]]:
    """The gradients by name of two steps, whose masks follow one another."""
    model = seeded(nonce, lambda: Stack(dropout))

    def step(number: int) -> dict[str, torch.Tensor | None]:
        model.zero_grad(set_to_none=True)
        model.loss(rows_of(nonce, number, 24), through).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    return seeded(nonce + 1, lambda: [step(0), step(1)])


class HeldBytes(TorchDispatchMode):
    """After each operation: the bytes of all storages that operations made and that something still holds."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.curve: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given:
                storage = each.untyped_storage()
                reference = StorageWeakRef(storage)
                self._held[reference.cdata] = reference, storage.nbytes()
        self.curve.append(self.now())
        return found

    def now(self) -> int:
        """The bytes that are held now."""
        self._held = {place: pair for place, pair in self._held.items() if not pair[0].expired()}
        return sum(size for _, size in self._held.values())


def memory_of_a_step(nonce: int, through: Checkpoint) -> dict[str, Any]:
    """Bytes that forward leaves for backward, the most that backward holds, calls of a block, and bytes all along."""
    model, inputs = seeded(nonce, Stack), rows_of(nonce, 0)
    with HeldBytes() as held:
        loss = model.loss(inputs, through)
        kept, moments = held.now(), len(held.curve)
        loss.backward()
    return {
        "kept": kept,
        "peak": max(held.curve[moments:], default=0),
        "calls": sum(block.calls for block in model.modules() if isinstance(block, CountedBlock)) / LAYERS,
        "curve": held.curve,
    }
