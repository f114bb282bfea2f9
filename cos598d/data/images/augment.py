"""Random changes of images in training, which say the same of a class: a model that has seen them learns the rest."""

from collections.abc import Iterable

import numpy as np

from cos598d.data.examples import Draw


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
