"""One part of a task as integers: ragged arrays that batches are padded from, built once and kept in a file."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cos598d.data.text.encoder import TextEncoder
from cos598d.data.text.layout import Layout
from cos598d.data.text.pieces import batches
from cos598d.errors import UserError
from cos598d.files import cache_folder, whole_file

if TYPE_CHECKING:  # imported where it is used: torch takes seconds
    import torch

FORMAT = 3  # counted up when what is stored changes its meaning, so that old files are no longer found
_BLOCK = 1024  # examples tokenized at a time: enough for the Rust library to work in parallel, little memory
_ARRAYS = ("tokens", "offsets", "splits")

Example = tuple[str, str | None, Mapping[str, int | float]]  # first text, second text or None, targets by name


class Features:
    """The examples of one part, in the order of the data file.

    tokens: int32 (all tokens of all examples), special tokens included, truncated, not padded.
    offsets: int64 (examples + 1); example i is tokens[offsets[i]:offsets[i + 1]].
    splits: int32 (examples), where each example's second segment begins (see `Layout.arrange`).
    targets: what the model's head is trained on, each (examples,); for GLUE "labels".
    extra: what a task keeps beside them for itself, in whatever shapes.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        splits: np.ndarray,
        targets: Mapping[str, np.ndarray],
        layout: Layout,
        pad_id: int,
        extra: Mapping[str, np.ndarray] | None = None,
    ):
        self.tokens, self.offsets, self.splits, self.targets = tokens, offsets, splits, dict(targets)
        self.extra = dict(extra or {})
        self.layout, self.pad_id = layout, pad_id
        self.lengths = np.diff(offsets).astype(np.int32)

    def __len__(self) -> int:
        return len(self.splits)

    @property
    def labels(self) -> np.ndarray:
        """int64 class ids or float32 scores, (examples,)."""
        return self.targets["labels"]

    def take(self, indices: np.ndarray) -> "Features":
        """The examples at `indices` alone, in that order. Only for features without `extra`."""
        rows = [self.tokens[self.offsets[index] : self.offsets[index + 1]] for index in indices]
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum([len(row) for row in rows], dtype=np.int64)])
        targets = {name: values[indices] for name, values in self.targets.items()}
        return Features(np.concatenate(rows), offsets, self.splits[indices], targets, self.layout, self.pad_id)

    def digest(self) -> str:
        """A digest of everything: equal digests, equal features."""
        return _checksum(_arrays(self))

    def collate(self, indices: Sequence[int] | np.ndarray) -> dict[str, "torch.Tensor"]:
        """A batch of the examples at `indices`, in that order, padded to the longest of them.

        input_ids, attention_mask and, where the model type has segments, token_type_ids: int64 (batch, sequence);
        the targets under their names, (batch,): labels int64, or float32 for regression.
        """
        import torch

        chosen = np.asarray(indices, dtype=np.int64)
        rows = [self.tokens[self.offsets[index] : self.offsets[index + 1]] for index in chosen]
        lengths = [len(row) for row in rows]
        width = max(lengths)
        arrays = {
            "input_ids": self.layout.pad(rows, width, self.pad_id),
            "attention_mask": self.layout.pad([np.ones(length) for length in lengths], width, 0),
        }
        if self.layout.uses_segments:
            segments = [self.layout.segments(*pair) for pair in zip(self.splits[chosen].tolist(), lengths, strict=True)]
            arrays["token_type_ids"] = self.layout.pad(segments, width, self.layout.pad_segment)
        arrays |= {name: values[chosen] for name, values in self.targets.items()}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def build_features(
    examples: Iterable[Example], encoder: TextEncoder, max_seq_length: int, target_types: Mapping[str, type]
) -> Features:
    """Tokenize and arrange examples, a block at a time; what is kept in memory is four bytes a token.

    target_types: each target's name and numpy type. Raises whatever iterating over `examples` raises, and UserError
    if `max_seq_length` leaves no room for text.
    """
    layout, specials = encoder.layout, (encoder.cls_id, encoder.sep_id)
    tokens, splits, lengths = [], [], []  # of arrays, one a block
    targets: dict[str, list[np.ndarray]] = {name: [] for name in target_types}
    for block in batches(examples, _BLOCK, lambda example: len(example[0]) + len(example[1] or "")):
        # No more than `max_seq_length` tokens of a text can stay, whatever the other is.
        firsts = encoder.encode_starts([first for first, _, _ in block], max_seq_length)
        # The course's rule: an empty second text counts as none, one of white space makes a pair all the same.
        seconds = iter(encoder.encode_starts([second for _, second, _ in block if second], max_seq_length))
        arranged = [
            layout.arrange(first, next(seconds) if second else None, *specials, max_seq_length)
            for first, (_, second, _) in zip(firsts, block, strict=True)
        ]
        tokens.append(np.fromiter((token for sequence, _ in arranged for token in sequence), np.int32))
        splits.append(np.fromiter((split for _, split in arranged), np.int32))
        lengths.append(np.fromiter((len(sequence) for sequence, _ in arranged), np.int64))
        for name, values in targets.items():
            values.append(np.array([target[name] for _, _, target in block], dtype=target_types[name]))
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate(lengths))])
    columns = {name: np.concatenate(values) for name, values in targets.items()}
    return Features(np.concatenate(tokens), offsets, np.concatenate(splits), columns, layout, encoder.pad_id)


def cached_features(
    name: str, key: Sequence[str], build: Callable[[], Features], encoder: TextEncoder, overwrite: bool = False
) -> Features:
    """The features kept in the cache folder under `name` and the content `key`, or built and put there.

    However many processes ask at the same moment, one builds and the others wait for its file; a file that is
    damaged is built anew. `overwrite` builds anew even so, once for all processes that wait together.
    What is returned is mapped from the file, so that processes on one machine share its memory.
    Raises UserError if the cache folder cannot be written, and whatever `build` raises.
    """
    from filelock import FileLock

    digest = hashlib.sha256("\0".join((str(FORMAT), encoder.fingerprint, *key)).encode()).hexdigest()[:32]
    file = cache_folder() / "features" / f"{name}-{digest}.safetensors"
    before = _identity(file)
    if before and not overwrite and (kept := _read(file, encoder)):
        return kept
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            # Whoever waited for the lock finds the file that another process wrote in the meantime.
            if not (_identity(file) != before and (kept := _read(file, encoder))):
                _write(file, build())
                kept = _read(file, encoder)
    except OSError as error:
        raise UserError(
            f"Features cannot be kept in {file.parent} ({error.strerror or error}): "
            "set COS598D_CACHE to a folder that can be written."
        ) from error
    if kept is None:
        raise UserError(f"What was written to {file} cannot be read back: check that disk, or set COS598D_CACHE.")
    return kept


def spread(count: int, limit: int | None) -> np.ndarray:
    """`limit` of the places 0 to count - 1, spread evenly, in order; all of them without a limit or below it."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.arange(limit) * count // limit


def _identity(file: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        state = file.stat()
        return state.st_ino, state.st_mtime_ns
    return None


def _arrays(features: Features) -> dict[str, np.ndarray]:
    arrays = {name: getattr(features, name) for name in _ARRAYS}
    arrays |= {f"target.{name}": values for name, values in features.targets.items()}
    return arrays | {f"extra.{name}": values for name, values in features.extra.items()}


def _write(file: Path, features: Features) -> None:
    from safetensors.numpy import save

    arrays = _arrays(features)
    content = save(arrays, metadata={"checksum": _checksum(arrays)})
    with whole_file(file, "wb") as handle:
        handle.write(content)


def _read(file: Path, encoder: TextEncoder) -> Features | None:
    """The features in the file, mapped, or None if it is missing or damaged in any way."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as stored:  # as torch tensors, since only those stay in the file
            checksum = (stored.metadata() or {}).get("checksum")
            arrays = {name: stored.get_tensor(name).numpy() for name in stored.keys()}  # noqa: SIM118, no mapping
    except (OSError, SafetensorError):
        return None
    if checksum != _checksum(arrays):
        return None
    targets, extra = (
        {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        for prefix in ("target.", "extra.")
    )
    tokens, offsets, splits = (arrays[name] for name in _ARRAYS)
    return Features(tokens, offsets, splits, targets, encoder.layout, encoder.pad_id, extra)


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
