"""What training and evaluation know of a part of a task: how many examples, how long, and how batches are made."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # imported where it is used: torch takes seconds
    import torch

_DEV_SHARE = 5  # of data that come as one, one example in so many of each class is evaluated on
_SEED = 598

Draw = tuple[int, ...]  # numbers from which random changes of examples are drawn


class Examples(ABC):
    """The examples of one part, in the order of the data.

    lengths: int32 (examples), the tokens of each that go through the model.
    targets: what the model's head is trained on, each (examples,); of classes and scores "labels".
    is_slow: whether `collate` takes so long that a thread of its own is to do it beside training.
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
        """What the examples at `indices` come to, by what a speed is told in: their tokens, without padding."""
        return {"tokens": int(self.lengths[indices].sum())}

    @abstractmethod
    def collate(self, indices: Sequence[int] | np.ndarray, draw: Draw | None = None) -> dict[str, "torch.Tensor"]:
        """A batch of the examples at `indices`, in that order: the model's inputs by name, and the targets.

        Where a task changes its examples at random in training, an example's changes are drawn from `draw` and its
        index alone, whatever else is in the batch; without `draw` they are as they are.
        """

    @abstractmethod
    def digest(self) -> str:
        """A digest of everything: equal digests, equal examples."""


def spread(count: int, limit: int | None) -> np.ndarray:
    """`limit` of the places 0 to count - 1, spread evenly, in order; all of them without a limit or below it."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.arange(limit) * count // limit


def split(labels: Sequence[int] | np.ndarray, part: str) -> np.ndarray:
    """The places of `part`, "train" or "dev", in data that come as one: of each class one fifth is for evaluation.

    Which examples these are is the same for every run and every machine, whatever its --seed.
    """
    labels = np.asarray(labels)
    is_dev = np.zeros(len(labels), dtype=bool)
    generator = np.random.default_rng(_SEED)
    for label in np.unique(labels):
        places = generator.permutation(np.flatnonzero(labels == label))
        is_dev[places[: len(places) // _DEV_SHARE]] = True
    return np.flatnonzero(is_dev == (part == "dev"))
