"""The copy that a save begins with: what a rank contributes to a checkpoint, as it is between two steps."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cos598d.checkpoints.layout import MODEL, OPTIMIZER, OWN, RANK
from cos598d.strategies.base import Strategy
from cos598d.strategies.state import BUFFERS, WEIGHTS
from cos598d.terminal.files import json_text

SLAB_BYTES = 256 << 20
ALIGNED_TO = 64
OF_TRAINING, OF_STRATEGY = "training", "strategy"  # whose own facts and tensors


def _nothing() -> None:
    """There is nothing to complete."""


@dataclass(frozen=True)
class RankState:
    """What one rank alone remembers, beside its strategy: facts as JSON, and named tensors (random states).

    complete: brings what the facts speak of, such as rows of a record, to the disk; called on the thread that writes,
    before the checkpoint is whole. Raises OSError where it cannot be.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    complete: Callable[[], None] = _nothing


@dataclass
class CheckpointPart:
    """What of a checkpoint comes from one rank: files of named tensors with their metadata, and texts, by file.

    complete: `Own`'s, of a rank that is here.
    """

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    complete: Callable[[], None] = _nothing


class HostMemory:
    """Memory of the host for copies of tensors, kept from one save to the next: fresh pages cost more than the copy.

    Cut from large slabs, of which the system gives only what is used; pinned where tensors come from a GPU, so that the
    copy runs beside the host's work. Not in huge pages: to find them may take longer than to clear small ones.
    """

    def __init__(self, device: torch.device):
        self._device, self._is_pinned = device, device.type == "cuda"
        self._kept: dict[str, torch.Tensor] = {}  # bytes
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor`, on the host as soon as `wait` returns; the next copy under `name` overwrites it."""
        place = self._place(name, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor.detach(), non_blocking=True)
        return place

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor, as `copy` would use it."""
        return self._place(name, torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)

    def mark(self) -> None:
        """What `wait` waits for is what was copied until here."""
        if self._is_pinned:
            self._copied = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Wait, on whichever thread, until the copies are there."""
        if self._copied is not None:
            self._copied.synchronize()

    def _place(self, name: str, size: int) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = self._cut(size)
        elif kept.numel() < size:
            kept = self._kept[name] = self._new(size)
        return kept[:size]

    def _cut(self, size: int) -> torch.Tensor:
        taken = -(-size // ALIGNED_TO) * ALIGNED_TO
        if taken > self._rest.numel():
            self._rest = self._new(max(taken, SLAB_BYTES))
        place, self._rest = self._rest[:size], self._rest[taken:]
        return place

    def _new(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)


def take(strategy: Strategy, rank: int, own: Callable[[], RankState], memory: HostMemory) -> CheckpointPart:
    """Copy what this rank contributes. Every rank calls it between two steps, since the strategy may communicate."""
    model: dict[str, torch.Tensor] = {}
    buffers: list[str] = []
    optimizer: dict[str, torch.Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in strategy.state():
        whole = f"{piece.kind}/{piece.name}"
        if piece.kind in (WEIGHTS, BUFFERS):
            if rank or piece.begin or piece.values.numel() != torch.Size(piece.shape).numel():
                raise ValueError(
                    f"{whole} comes from rank {rank} in pieces: weights and buffers come whole, from rank 0"
                )
            model[piece.name] = memory.copy(whole, piece.values.view(piece.shape))
            buffers += [piece.name] * (piece.kind == BUFFERS)
        else:
            key = f"{whole}@{piece.begin}"
            optimizer[key] = memory.copy(key, piece.values.reshape(-1))
            shapes[whole] = piece.shape
    facts, tensors = strategy.own_state()
    mine = own()
    kept = {f"{OF_STRATEGY}/{name}": memory.copy(f"{OF_STRATEGY}/{name}", t) for name, t in tensors.items()}
    kept |= {f"{OF_TRAINING}/{name}": memory.copy(f"{OF_TRAINING}/{name}", t) for name, t in mine.tensors.items()}
    memory.mark()

    text = json_text({OF_TRAINING: mine.facts, OF_STRATEGY: facts})
    part = CheckpointPart(texts={RANK.format(rank=rank): text}, complete=mine.complete)
    if rank == 0:
        _add(part, MODEL, model, {"buffers": json.dumps(buffers)})
    if optimizer:
        _add(part, OPTIMIZER.format(rank=rank), optimizer, {"shapes": json.dumps(shapes)})
    if kept:
        _add(part, OWN.format(rank=rank), kept, {})
    return part


def _add(part: CheckpointPart, name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    # Readers of models ask for "format", which says whose shapes and dtypes these are.
    part.tensors[name], part.metadata[name] = tensors, {"format": "pt", **metadata}
