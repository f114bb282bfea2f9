"""One part of a task as pixels of the model's size, with the number of each image's class."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cos598d.data.cache import checksum
from cos598d.data.examples import Draw, Examples
from cos598d.data.images.augment import augment
from cos598d.data.images.encoder import ImageEncoder

if TYPE_CHECKING:
    import torch


class Images(Examples):
    """Images in the order of the data.

    pixels: uint8 (examples, size, size, channels), as `encoder.fit` makes them.
    augments: whether they are changed at random in training; mirrors: whether that may mirror them.
    """

    is_slow = True

    def __init__(
        self,
        pixels: np.ndarray,
        labels: np.ndarray,
        encoder: ImageEncoder,
        augments: bool = False,
        mirrors: bool = False,
    ):
        self.pixels, self.targets = pixels, {"labels": labels}
        self.lengths = np.ones(len(pixels), dtype=np.int32)  # all alike, so that nothing is gained by grouping them
        self._encoder, self._augments, self._mirrors = encoder, augments, mirrors

    def counts(self, indices: np.ndarray) -> dict[str, int]:
        """How many images they are."""
        return {"images": len(indices)}

    def collate(self, indices: Sequence[int] | np.ndarray, draw: Draw | None = None) -> dict[str, "torch.Tensor"]:
        """`pixel_values`, float32 (batch, channels, size, size), and `labels`, int64 (batch,)."""
        import torch

        chosen = np.asarray(indices, dtype=np.int64)
        pixels = self.pixels[chosen]
        if self._augments and draw is not None:
            pixels = augment(pixels, chosen, draw, self._mirrors)
        labels = torch.from_numpy(self.labels[chosen])
        return {"pixel_values": self._encoder.scale(pixels), "labels": labels}

    def digest(self) -> str:
        return checksum({"pixels": self.pixels, **self.targets})
