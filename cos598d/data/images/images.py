"""One part of a task as pixels of the model's size, with the number of each image's class."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cos598d.data.cache import checksum
from cos598d.data.examples import Draw, Examples
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


def augment(pixels: np.ndarray, indices: Iterable[int], draw: Draw, mirrors: bool) -> np.ndarray:
    """Shift each image by up to an eighth of its side, black coming in; where it `mirrors`, mirror every second one.

    pixels: uint8 (images, size, size, channels), of the examples `indices`; what is returned is alike. The changes of
    an example are drawn from `draw` and its index, so that they do not depend on which rank computes it.
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
