"""The contents of a checkpoint's files: tensors by name, in pieces of several ranks, and each rank's own state."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from cos598d.checkpoints.layout import (
    DTYPES,
    MODEL,
    OPTIMIZER,
    OWN,
    RANK,
    TRAINING,
    Count,
    Damaged,
    Manifest,
    read_json_inside,
)
from cos598d.checkpoints.snapshot import OF_STRATEGY, OF_TRAINING
from cos598d.comm.ledger import dtype_name
from cos598d.errors import UserError, first_line
from cos598d.records.kinds import COUNT, DEEPEST, TEXT, Fields, OrNone, ValueKind, fault, is_too_deep
from cos598d.records.saved import SCALARS
from cos598d.strategies.state import BUFFERS, WEIGHTS
from cos598d.terminal.printable import printable

MOST_ELEMENTS = 1 << 60
ANYTHING = Fields()  # any object

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]


@dataclass(frozen=True)
class Forms:
    """The forms of the values in a run's checkpoints, which may have been edited since.

    training: from a checkpoint's iteration, the form of `training` in `Checkpoints.save`. facts: from iteration and
    rank, the form of that rank's `RankState.facts`.
    """

    training: Callable[[int], ValueKind] = lambda _: ANYTHING
    facts: Callable[[int, int], ValueKind] = lambda *_: ANYTHING


class Stored(NamedTuple):
    """Some elements of a tensor, from `begin` of the flattened whole, and the file that has them."""

    begin: int
    elements: int
    file: str
    key: str
    dtype: torch.dtype


class TensorEntry(NamedTuple):
    """A tensor of the state, and the pieces that make it complete, in order."""

    kind: str
    name: str
    shape: tuple[int, ...]
    pieces: Sequence[Stored]

    def facts(self) -> tuple[str, str, tuple[int, ...], str, str]:
        """What another rank needs to receive it: kind, name, shape, dtype, and its (first) file."""
        return self.kind, self.name, self.shape, dtype_name(self.pieces[0].dtype), self.pieces[0].file


class OpenCheckpoint:
    """The open files of a checkpoint. `entries` are the state's tensors, weights first; `training` is training.json.

    Raises Damaged if they do not fit each other or `forms`.
    """

    def __init__(self, folder: Path, manifest: Manifest, forms: Forms):
        self._folder, self._manifest = folder, manifest
        self._open: dict[str, Any] = {}
        iteration, ranks = manifest.iteration, range(manifest.world_size)
        common = {"iteration": COUNT, "world_size": COUNT, "sync": ANYTHING, "scalars": SCALARS}
        of_training = Fields(common | {"training": forms.training(iteration)}, {"own_is_lost": OrNone(TEXT)})
        self.training = self._object(TRAINING, of_training)
        if (self.training["iteration"], self.training["world_size"]) != (iteration, manifest.world_size):
            raise Damaged(f"{TRAINING} belongs to another checkpoint")
        self._ranks = [
            self._object(
                RANK.format(rank=rank), Fields({OF_TRAINING: forms.facts(iteration, rank), OF_STRATEGY: ANYTHING})
            )
            for rank in ranks
        ]
        self.entries = [*self._model_entries(), *self._optimizer_entries()]
        self._own_keys: dict[str, list[str]] = {}  # by file
        for name in (OWN.format(rank=rank) for rank in ranks):
            if name in manifest.files:
                with self._checked(name) as file:
                    self._own_keys[name] = list(file.keys())
                    for key in self._own_keys[name]:
                        _stored(file, name, key, 0)

    def read(self, place: int) -> torch.Tensor:
        """The tensor of `entries[place]`, on the host."""
        entry = self.entries[place]
        parts = [self._tensor(piece.file, piece.key).reshape(-1) for piece in entry.pieces]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(entry.shape)

    def own(self, rank: int, whose: Sequence[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """A rank's own state: facts by owner, and tensors, whose names begin with their owner."""
        name = OWN.format(rank=rank)
        keys = [key for key in self._own_keys.get(name, ()) if key.split("/")[0] in whose]
        return {one: self._ranks[rank][one] for one in whose}, {key: self._tensor(name, key) for key in keys}

    def close(self) -> None:
        """Close the files until something is read again."""
        self._open.clear()

    def _tensor(self, name: str, key: str) -> torch.Tensor:
        try:
            if name not in self._open:
                self._open[name] = safe_open(self._folder / name, framework="pt")
            return self._open[name].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{self._folder / name} cannot be read any more ({printable(first_line(error))}). Check whether it "
                "was removed, and resume from another checkpoint."
            ) from None

    @contextmanager
    def _checked(self, name: str) -> Iterator[Any]:
        """The file of tensors `name`, whose form is not known yet. Raises Damaged if it cannot be read."""
        try:
            with safe_open(self._folder / name, framework="pt") as file:
                yield file
        except (SafetensorError, OSError, UnicodeError) as error:
            raise Damaged(f"{name} cannot be read: {printable(first_line(error))}") from None

    def _object(self, name: str, form: ValueKind) -> dict[str, Any]:
        """The JSON object in a file, checked for this form."""
        value = read_json_inside(self._folder, name)
        if is_too_deep(value):
            raise Damaged(f"{name} is nested more than {DEEPEST} deep")
        if (wrong := fault(value, form)) is not None:
            raise Damaged(f"{name}: {wrong}")
        return value

    def _model_entries(self) -> Iterator[TensorEntry]:
        with self._checked(MODEL) as file:
            buffers = _metadata(file, MODEL, "buffers", list[str])
            for key in sorted(file.keys(), key=lambda key: (key in buffers, key)):
                shape = tuple(file.get_slice(key).get_shape())
                yield TensorEntry(BUFFERS if key in buffers else WEIGHTS, key, shape, [_stored(file, MODEL, key, 0)])

    def _optimizer_entries(self) -> Iterator[TensorEntry]:
        """The optimizer's tensors, each of consecutive pieces, from any ranks."""
        shapes: dict[str, tuple[int, ...]] = {}
        pieces: dict[str, list[Stored]] = defaultdict(list)
        for name in (OPTIMIZER.format(rank=rank) for rank in range(self._manifest.world_size)):
            if name not in self._manifest.files:
                continue
            with self._checked(name) as file:
                for whole, shape in _metadata(file, name, "shapes", dict[str, Shape]).items():
                    if shapes.setdefault(whole, shape) != shape:
                        raise Damaged(f"{name} has {printable(whole, 200)} in another shape than another rank's file")
                for key in file.keys():  # noqa: SIM118 - a file of tensors is no mapping
                    whole, _, begin = key.rpartition("@")
                    if whole not in shapes or not (begin.isascii() and begin.isdigit() and len(begin) < 20):
                        raise Damaged(f"{name} holds {printable(key, 200)}, which is not a piece of a tensor")
                    pieces[whole].append(_stored(file, name, key, int(begin)))
        for whole, shape in sorted(shapes.items()):
            kind, _, called = whole.partition("/")
            if kind in (WEIGHTS, BUFFERS):
                raise Damaged(f"{printable(whole, 200)} is among the optimizer's tensors")
            end, ordered = 0, sorted(pieces[whole], key=lambda piece: (piece.begin, piece.elements))
            for piece in ordered:
                if piece.begin != end or piece.dtype != ordered[0].dtype:
                    raise Damaged(f"the pieces of {printable(whole, 200)} do not fit together")
                end += piece.elements
            if not ordered or end != _elements(ordered[0].file, whole, shape):
                raise Damaged(f"some pieces of {printable(whole, 200)} are missing")
            yield TensorEntry(kind, called, shape, ordered)


def _stored(file: Any, name: str, key: str, begin: int) -> Stored:
    piece = file.get_slice(key)
    dtype = _BY_NAME.get(piece.get_dtype())
    if dtype is None:
        raise Damaged(f"{name} holds {printable(key, 200)} as {printable(piece.get_dtype(), 40)}")
    return Stored(begin, _elements(name, key, piece.get_shape()), name, key, dtype)


def _metadata(file: Any, name: str, key: str, form: Any) -> Any:
    try:
        return msgspec.json.decode((file.metadata() or {}).get(key, ""), type=form)
    except msgspec.DecodeError as error:
        raise Damaged(f"{name} does not give its {key} ({printable(error, 200)})") from None


def _elements(name: str, key: str, shape: Sequence[int]) -> int:
    """The number of elements of a tensor. Raises Damaged for an impossible number, even if a size is zero."""
    if math.prod(max(1, size) for size in shape) > MOST_ELEMENTS:
        raise Damaged(f"{name} gives {printable(key, 200)} the shape {printable(shape, 100)}")
    return math.prod(shape)
