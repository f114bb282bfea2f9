"""The examples of a part of a task, in memory: their inputs, their targets, and how batches are made of them."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from cos598d.data.encoders import ImageEncoder, Text, TextEncoder

_BLOCK = 1024  # texts that are encoded at a time: an Encoding is large, its ids are small
_DEV_SHARE, _SEED = 5, 598  # in data without parts, one example in five of each class is evaluated on
Draw = tuple[int, ...]  # the seed of random changes of examples


class Examples(ABC):
    """The examples of one part, in the order of the data.

    lengths: int32 (examples,), each example's tokens that go through the model; 1 for an image.
    targets: what the model's head is trained on, each (examples,); "labels" for classes and scores.
    """

    unit = "tokens"  # of speed, whose number per example is `lengths`

    def __init__(self, lengths: np.ndarray, targets: Mapping[str, np.ndarray]):
        self.lengths, self.targets = lengths.astype(np.int32), dict(targets)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def labels(self) -> np.ndarray:
        """int64 class ids or float32 scores, (examples,)."""
        return self.targets["labels"]

    def counts(self, indices: np.ndarray) -> dict[str, int]:
        """The examples' units of speed, by name; tokens without padding."""
        return {self.unit: int(self.lengths[indices].sum())}

    def collate(self, indices: Sequence[int] | np.ndarray, draw: Draw | None = None) -> dict[str, torch.Tensor]:
        """A batch of the examples at `indices`: the model's inputs and the targets, by name.

        Random changes of an example depend only on `draw` and its index; without `draw` there are none.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        targets = {name: torch.from_numpy(values[chosen]) for name, values in self.targets.items()}
        return self.inputs(chosen, draw) | targets

    @abstractmethod
    def inputs(self, indices: np.ndarray, draw: Draw | None = None) -> dict[str, torch.Tensor]:
        """The batch without its targets."""

    @abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """What the inputs are made of."""

    def digest(self) -> str:
        """Equal digests mean equal examples: ranks compare them."""
        digest = hashlib.blake2b(digest_size=16)
        for name, array in sorted((self.arrays() | self.targets).items()):
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


class Texts(Examples):
    """Texts as tokens.

    tokens: int32, of all examples one after the other, with special tokens; example i has lengths[i] of them.
    splits: int32 (examples,), the index at which each example's second segment begins; its length if it has none.
    """

    def __init__(
        self,
        tokens: Sequence[np.ndarray],
        splits: Sequence[int],
        targets: Mapping[str, np.ndarray],
        encoder: TextEncoder,
    ):
        super().__init__(np.array([len(one) for one in tokens]), targets)
        self.tokens, self.splits = np.concatenate(tokens).astype(np.int32), np.array(splits, dtype=np.int32)
        self.pad_id, self.has_segments = encoder.pad_id, encoder.has_segments
        self.starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def inputs(self, indices: np.ndarray, draw: Draw | None = None) -> dict[str, torch.Tensor]:
        """input_ids, attention_mask and perhaps token_type_ids, int64 (batch, longest of these), padded at the end."""
        lengths, starts = self.lengths[indices][:, None], self.starts[indices][:, None]
        places = np.arange(lengths.max())[None, :]
        is_token = places < lengths
        ids = np.where(is_token, self.tokens[np.where(is_token, starts + places, 0)], self.pad_id)
        found = {"input_ids": ids, "attention_mask": is_token}
        if self.has_segments:
            found["token_type_ids"] = is_token & (places >= self.splits[indices][:, None])
        return {name: torch.from_numpy(array.astype(np.int64)) for name, array in found.items()}

    def arrays(self) -> dict[str, np.ndarray]:
        return {"tokens": self.tokens, "lengths": self.lengths, "splits": self.splits}


class Images(Examples):
    """Images as pixels, uint8 (examples, size, size, channels); `augments` shifts them, `mirrors` also mirrors half."""

    unit = "images"

    def __init__(
        self,
        pixels: np.ndarray,
        labels: np.ndarray,
        encoder: ImageEncoder,
        augments: bool = False,
        mirrors: bool = False,
    ):
        super().__init__(np.ones(len(pixels)), {"labels": labels.astype(np.int64)})
        self.pixels, self._encoder, self._augments, self._mirrors = pixels, encoder, augments, mirrors

    def inputs(self, indices: np.ndarray, draw: Draw | None = None) -> dict[str, torch.Tensor]:
        """pixel_values, float32 (batch, channels, size, size)."""
        pixels = self.pixels[indices]
        if self._augments and draw is not None:
            pixels = augment(pixels, indices, draw, self._mirrors)
        return {"pixel_values": self._encoder.scale(pixels)}

    def arrays(self) -> dict[str, np.ndarray]:
        return {"pixels": self.pixels}


def encode(rows: Sequence[Text], labels: np.ndarray, encoder: TextEncoder, most: int) -> Texts:
    """Texts or pairs as examples of at most `most` tokens."""
    tokens, splits = [], []
    for start in range(0, len(rows), _BLOCK):
        for one in encoder.encode(rows[start : start + _BLOCK], most):
            tokens.append(np.array(one.ids, dtype=np.int32))
            splits.append(one.type_ids.index(1) if 1 in one.type_ids else len(one.ids))
    return Texts(tokens, splits, {"labels": labels}, encoder)


def augment(pixels: np.ndarray, indices: Iterable[int], draw: Draw, mirrors: bool) -> np.ndarray:
    """Shift each image by up to an eighth of its side, over black; if it `mirrors`, mirror half of them at random.

    An example's changes depend only on `draw` and its index, not on the rank that computes it.
    """
    size = pixels.shape[1]
    margin = max(1, size // 8)
    padded = np.pad(pixels, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    changed = np.empty_like(pixels)
    for place, index in enumerate(indices):
        top, left, side = np.random.default_rng((*draw, int(index))).integers(0, (2 * margin + 1, 2 * margin + 1, 2))
        shifted = padded[place, top : top + size, left : left + size]
        changed[place] = shifted[:, ::-1] if mirrors and side else shifted
    return changed


def spread(count: int, limit: int | None) -> np.ndarray:
    """`limit` of the indices 0 to count - 1, spread evenly, in order; all of them if there are no more."""
    return np.arange(count) if limit is None or limit >= count else np.arange(limit) * count // limit


def split(labels: Sequence[int] | Sequence[str] | np.ndarray, part: str) -> np.ndarray:
    """The indices of `part`, "train" or "dev", in data without parts: one fifth of each class is for evaluation.

    The choice is the same for every run and every machine, whatever the --seed.
    """
    labels = np.asarray(labels)
    is_dev = np.zeros(len(labels), dtype=bool)
    generator = np.random.default_rng(_SEED)
    for label in np.unique(labels):
        places = generator.permutation(np.flatnonzero(labels == label))
        is_dev[places[: len(places) // _DEV_SHARE]] = True
    return np.flatnonzero(is_dev == (part == "dev"))
