"""Where a part's images come from, before they are brought to a model's size."""

from abc import ABC, abstractmethod

import numpy as np

from cos598d.data.cache import checksum
from cos598d.data.images.encoder import ImageEncoder

_BLOCK = 256  # images that are brought to the model's size at a time


class ImageSource(ABC):
    """labels: int64 (images,), the number of each one's class. digest: over the images and their classes."""

    labels: np.ndarray
    digest: str

    @abstractmethod
    def pixels(self, places: np.ndarray, encoder: ImageEncoder) -> np.ndarray:
        """The images at `places` as `encoder.fit` makes them. Raises UserError for one that is refused."""


class ImagesInMemory(ImageSource):
    """Images of one size, uint8 (images, height, width, channels)."""

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        self.labels, self._images = labels.astype(np.int64), images
        self.digest = checksum({"images": images, "labels": self.labels})

    def pixels(self, places: np.ndarray, encoder: ImageEncoder) -> np.ndarray:
        blocks = [places[start : start + _BLOCK] for start in range(0, len(places), _BLOCK)]
        return np.concatenate([encoder.fit(self._images[block]) for block in blocks])
