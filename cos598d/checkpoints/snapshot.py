"""The copy that begins a save: what a rank contributes to a checkpoint, as it is between two steps."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cos598d.checkpoints.layout import MODEL, OPTIMIZER, OWN, RANK
from cos598d.errors import UserError, first_line
from cos598d.strategies.base import Strategy
from cos598d.strategies.state import BUFFERS, WEIGHTS
from cos598d.terminal.files import json_text

SLAB_BYTES, ALIGNED_TO = 256 << 20, 64
OF_TRAINING, OF_STRATEGY = "training", "strategy"  # the owners of facts and tensors
RECORD = "record"  # the fact in which every rank has its position in the record
CPU, CUDA = "random_cpu", "random_cuda"


def _nothing() -> None:
    """Nothing to complete."""


@dataclass(frozen=True)
class RankState:
    """One rank's own state in addition to its strategy's: facts as JSON, and named tensors (random states).

    complete: syncs to the disk what the facts refer to, such as rows of a record. The writing thread calls it before
    the checkpoint is complete. Raises OSError if it fails.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    complete: Callable[[], None] = _nothing


@dataclass
class CheckpointPart:
    """One rank's part of a checkpoint: files of named tensors with their metadata, and texts, by file.

    complete: that of a `RankState`, for a rank of this process.
    """

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    complete: Callable[[], None] = _nothing

    def add(self, name: str, tensors: dict[str, torch.Tensor], **metadata: Any) -> None:
        """Add a file of tensors, if there are any; `metadata` are JSON values."""
        if tensors:
            self.tensors[name] = tensors
            # Readers of models require "format", the framework of these shapes and dtypes.
            self.metadata[name] = {"format": "pt"} | {key: json.dumps(value) for key, value in metadata.items()}


class HostMemory:
    """Host memory for copies of tensors, reused by later saves: fresh pages cost more than the copy.

    It is cut from large slabs, of which the system only provides what is used. It is pinned if tensors come from a GPU,
    so that the copy overlaps with the host's work.
    """

    def __init__(self, device: torch.device):
        self._device, self._is_pinned = device, device.type == "cuda"
        self._kept: dict[str, torch.Tensor] = {}  # bytes
        self._slab = torch.empty(0, dtype=torch.uint8)  # the rest of the current slab
        self._copied: torch.cuda.Event | None = None

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` on the host, valid after `wait`. The next copy under `name` overwrites it."""
        place = self.empty(name, tuple(tensor.shape), tensor.dtype)
        place.copy_(tensor.detach(), non_blocking=True)
        return place

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor, of the kind that `copy` uses."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if name not in self._kept or self._kept[name].numel() < size:
            taken = -(-size // ALIGNED_TO) * ALIGNED_TO
            if taken > self._slab.numel():
                self._slab = self._new(max(taken, SLAB_BYTES))
            self._kept[name], self._slab = self._slab[:size], self._slab[taken:]
        return self._kept[name][:size].view(dtype).view(shape)

    def mark(self) -> None:
        """Make `wait` cover the copies so far."""
        if self._is_pinned:
            self._copied = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Wait, on any thread, until the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()

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
    kept = {f"{OF_STRATEGY}/{name}": tensor for name, tensor in tensors.items()}
    kept |= {f"{OF_TRAINING}/{name}": tensor for name, tensor in mine.tensors.items()}
    kept = {name: memory.copy(name, tensor) for name, tensor in kept.items()}
    memory.mark()

    text = json_text({OF_TRAINING: mine.facts, OF_STRATEGY: facts})
    part = CheckpointPart(texts={RANK.format(rank=rank): text}, complete=mine.complete)
    part.add(MODEL, model, buffers=buffers)
    part.add(OPTIMIZER.format(rank=rank), optimizer, shapes=shapes)
    part.add(OWN.format(rank=rank), kept)
    return part


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's generators that a training on `device` uses, by name: dropout resumes from them."""
    states = {CPU: torch.get_rng_state()}
    if device.type == "cuda":
        states[CUDA] = torch.cuda.get_rng_state(device)
    return states


def load_random_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Continue from `random_states`, on the same kind of device. Call it last before the next step.

    A generator that is missing in `states` does not change. Raises UserError if they cannot be such states.
    """
    try:
        if CPU in states:
            torch.set_rng_state(states[CPU])
        if device.type == "cuda" and CUDA in states:
            torch.cuda.set_rng_state(states[CUDA], device)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"the checkpoint's random states cannot be restored ({first_line(error)}). Resume from another checkpoint."
        ) from None
