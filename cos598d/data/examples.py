"""The examples of a part of a task: their number, their lengths, and how batches are made."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # imported where it is used: importing torch takes seconds
    import torch

_DEV_SHARE = 5  # in data without parts, one example in this many of each class is evaluated on
_SEED = 598

Draw = tuple[int, ...]  # the seed of random changes of examples


class Examples(ABC):
    """The examples of one part, in the order of the data.

    lengths: int32 (examples,), each example's tokens that go through the model.
    targets: what the model's head is trained on, each (examples,); "labels" for classes and scores.
    is_slow: whether `collate` is so slow that a separate thread should run it during training.
    """

    lengths: np.ndarray
    targets: Mapping[str, np.ndarray]
    is_slow = False

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def labels(self) -> np.ndarray:
        """int64 class ids or float32 scores, (examples,)."""
        return self.targets["labels"]

    def counts(self, indices: np.ndarray) -> dict[str, int]:
        """The examples' units of speed, by name: here their tokens, without padding."""
        return {"tokens": int(self.lengths[indices].sum())}

    @abstractmethod
    def collate(self, indices: Sequence[int] | np.ndarray, draw: Draw | None = None) -> dict[str, "torch.Tensor"]:
        """A batch of the examples at `indices`, in that order: the model's inputs by name, and the targets.

        If a task changes its examples at random in training, an example's changes depend only on `draw` and its index,
        not on the rest of the batch. Without `draw` they are unchanged.
        """

    @abstractmethod
    def digest(self) -> str:
        """A digest of everything: equal digests mean equal examples."""


def spread(count: int, limit: int | None) -> np.ndarray:
    """`limit` of the indices 0 to count - 1, spread evenly, in order; all of them if there are no more."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.arange(limit) * count // limit


def split(labels: Sequence[int] | np.ndarray, part: str) -> np.ndarray:
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
