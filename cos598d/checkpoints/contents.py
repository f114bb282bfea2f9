"""What the files of a checkpoint say: tensors by name, in pieces of several ranks, and what each rank remembered."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cos598d.checkpoints.layout import MODEL, OPTIMIZER, OWN, RANK, TRAINING, Damaged, Manifest, read_json_inside
from cos598d.checkpoints.snapshot import OF_STRATEGY, OF_TRAINING
from cos598d.checkpoints.tensors import DTYPES
from cos598d.comm.ledger import dtype_name
from cos598d.errors import UserError, first_line
from cos598d.records.kinds import COUNT, DEEPEST, TEXT, Fields, OrNone, ValueKind, fault, is_too_deep
from cos598d.records.saved import SCALARS
from cos598d.strategies.state import BUFFERS, WEIGHTS
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import parse_json

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
MOST_DIMENSIONS, MOST_ELEMENTS = 16, 1 << 60
ANYTHING = Fields()  # as long as it is an object


@dataclass(frozen=True)
class Forms:
    """What the values must be that a run has put into its checkpoints, which somebody may have changed meanwhile.

    training: by the checkpoint's iteration, that of `Checkpoints.save`'s `training`. facts: by iteration and rank,
    that of each rank's `Own.facts`.
    """

    training: Callable[[int], ValueKind] = lambda _: ANYTHING
    facts: Callable[[int, int], ValueKind] = lambda *_: ANYTHING


@dataclass(frozen=True)
class Stored:
    """Some elements of a tensor, from `begin` of the flattened whole, and where they are."""

    begin: int
    elements: int
    file: str
    key: str
    dtype: torch.dtype


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the state, and the pieces that make it whole, in order."""

    kind: str
    name: str
    shape: tuple[int, ...]
    pieces: Sequence[Stored]

    @property
    def dtype(self) -> torch.dtype:
        """That of its elements."""
        return self.pieces[0].dtype

    def facts(self) -> tuple[str, str, tuple[int, ...], str, str]:
        """What another rank has to know to receive it; the last is its file, of several the first."""
        return self.kind, self.name, self.shape, dtype_name(self.dtype), self.pieces[0].file


class OpenCheckpoint:
    """An open checkpoint. `entries` are the state's tensors, weights first; `training` is training.json's value."""

    def __init__(
        self,
        folder: Path,
        training: dict[str, Any],
        entries: Sequence[TensorEntry],
        ranks: Sequence[dict[str, Any]],
        own_keys: Mapping[str, Sequence[str]],
    ):
        """`ranks` are the values of the ranks' JSON files, `own_keys` the names in each file of what they remember."""
        self.training, self.entries = training, entries
        self._folder, self._ranks, self._own_keys = folder, ranks, own_keys
        self._open: dict[str, Any] = {}

    def read(self, place: int) -> torch.Tensor:
        """The tensor of `entries[place]`, on the host."""
        entry = self.entries[place]
        parts = [self._tensor(piece.file, piece.key).reshape(-1) for piece in entry.pieces]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(entry.shape)

    def own(self, rank: int, whose: Sequence[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What a rank remembered: facts by whose they are, and tensors by names that begin with it."""
        name = OWN.format(rank=rank)
        keys = [key for key in self._own_keys.get(name, ()) if key.split("/")[0] in whose]
        return {one: self._ranks[rank][one] for one in whose}, {key: self._tensor(name, key) for key in keys}

    def close(self) -> None:
        """Let go of the files, until something is read again."""
        self._open.clear()

    def _tensor(self, name: str, key: str) -> torch.Tensor:
        try:
            if name not in self._open:
                self._open[name] = safe_open(self._folder / name, framework="pt")
            return self._open[name].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{self._folder / name} cannot be read any more ({printable(first_line(error))}): was it removed?"
            ) from None


def read_contents(folder: Path, manifest: Manifest, forms: Forms) -> OpenCheckpoint:
    """What the files of a checkpoint say, held to each other and to `forms`. Raises Damaged."""
    iteration = manifest.iteration
    common = {"iteration": COUNT, "world_size": COUNT, "sync": ANYTHING, "scalars": SCALARS}
    training = _object(
        folder, TRAINING, Fields(common | {"training": forms.training(iteration)}, {"own_is_lost": OrNone(TEXT)})
    )
    if (training["iteration"], training["world_size"]) != (iteration, manifest.world_size):
        raise Damaged(f"{TRAINING} is another checkpoint's")
    ranks = [
        _object(
            folder,
            RANK.format(rank=rank),
            Fields({OF_TRAINING: forms.facts(iteration, rank), OF_STRATEGY: ANYTHING}),
        )
        for rank in range(manifest.world_size)
    ]
    entries = [*_model_entries(folder), *_optimizer_entries(folder, manifest)]
    own_keys = {}
    for rank in range(manifest.world_size):
        if (name := OWN.format(rank=rank)) in manifest.files:
            with _opened(folder, name) as file:
                own_keys[name] = _keys(file)
                for key in own_keys[name]:
                    _stored(file, name, key, 0)
    return OpenCheckpoint(folder, training, entries, ranks, own_keys)


def _model_entries(folder: Path) -> Iterator[TensorEntry]:
    with _opened(folder, MODEL) as file:
        buffers = _metadata(file, MODEL, "buffers", list)
        for key in sorted(_keys(file), key=lambda key: (key in buffers, key)):
            shape = _shape(MODEL, file.get_slice(key).get_shape())
            yield TensorEntry(BUFFERS if key in buffers else WEIGHTS, key, shape, [_stored(file, MODEL, key, 0)])


def _optimizer_entries(folder: Path, manifest: Manifest) -> Iterator[TensorEntry]:
    """The optimizer's tensors, each of pieces that lie side by side, whichever ranks they come from."""
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, list[Stored]] = defaultdict(list)
    for rank in range(manifest.world_size):
        name = OPTIMIZER.format(rank=rank)
        if name not in manifest.files:
            continue
        with _opened(folder, name) as file:
            for whole, shape in _metadata(file, name, "shapes", dict).items():
                if shapes.setdefault(whole, _shape(name, shape)) != tuple(shape):
                    raise Damaged(f"{name} has {printable(whole, 200)} in another shape than another rank's")
            for key in _keys(file):
                whole, _, begin = key.rpartition("@")
                if whole not in shapes or not (begin.isascii() and begin.isdigit() and len(begin) < 20):
                    raise Damaged(f"{name} holds {printable(key, 200)}, which is no piece of a tensor")
                pieces[whole].append(_stored(file, name, key, int(begin)))
    for whole, shape in sorted(shapes.items()):
        kind, _, called = whole.partition("/")
        ordered = sorted(pieces[whole], key=lambda piece: (piece.begin, piece.elements))
        end = 0
        for piece in ordered:
            if piece.begin != end or piece.dtype != ordered[0].dtype:
                raise Damaged(f"the pieces of {printable(whole, 200)} do not fit together")
            end += piece.elements
        if not ordered or end != math.prod(shape):
            raise Damaged(f"the pieces of {printable(whole, 200)} are not all there")
        if kind in (WEIGHTS, BUFFERS):
            raise Damaged(f"{printable(whole, 200)} is among the optimizer's tensors")
        yield TensorEntry(kind, called, shape, ordered)


@contextmanager
def _opened(folder: Path, name: str) -> Iterator[Any]:
    try:
        with safe_open(folder / name, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, UnicodeError) as error:
        raise Damaged(f"{name} cannot be read: {printable(first_line(error))}") from None


def _keys(file: Any) -> list[str]:
    return list(file.keys())


def _stored(file: Any, name: str, key: str, begin: int) -> Stored:
    piece = file.get_slice(key)
    dtype = _BY_NAME.get(piece.get_dtype())
    if dtype is None:
        raise Damaged(f"{name} holds {printable(key, 200)} as {printable(piece.get_dtype(), 40)}")
    return Stored(begin, math.prod(_shape(name, piece.get_shape())), name, key, dtype)


def _metadata(file: Any, name: str, key: str, form: type) -> Any:
    try:
        value = parse_json((file.metadata() or {})[key])
    except (KeyError, ValueError):
        value = None
    if not isinstance(value, form):
        raise Damaged(f"{name} does not say its {key}")
    return value


def _shape(name: str, value: Any) -> tuple[int, ...]:
    is_shape = isinstance(value, list) and len(value) <= MOST_DIMENSIONS
    if (
        not is_shape
        or not all(type(size) is int and size >= 0 for size in value)
        or math.prod(max(1, size) for size in value) > MOST_ELEMENTS
    ):
        raise Damaged(f"{name} gives {printable(value, 100)} as a shape")
    return tuple(value)


def _object(folder: Path, name: str, form: ValueKind) -> dict[str, Any]:
    """The JSON object in a file, which has this form."""
    value = read_json_inside(folder, name)
    if is_too_deep(value):
        raise Damaged(f"{name} is nested more than {DEEPEST} deep")
    if (wrong := fault(value, form)) is not None:
        raise Damaged(f"{name}: {wrong}")
    return value
