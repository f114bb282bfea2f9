"""Handwritten digits that need no download: scikit-learn includes them."""

import os
from collections.abc import Mapping

import numpy as np

from cos598d.data.examples import split
from cos598d.data.images.task import ImagesInMemory, ImageTask
from cos598d.errors import UserError

_MOST = 16  # a pixel's largest value in scikit-learn's copy


class DigitsTask(ImageTask):
    """1,797 digits of 8 x 8 pixels: the test part of UCI's Optical Recognition of Handwritten Digits (Alpaydin and
    Kaynak 1998). A fixed fifth of each class is evaluated on. They are always available: a location is None."""

    name = "digits"
    classes = tuple("0123456789")
    num_labels = len(classes)
    size, channels = 8, 1
    defaults = {**ImageTask.defaults, "num_train_epochs": 15.0}

    def locate(self, data_dir: str | None, environ: Mapping[str, str] = os.environ) -> tuple[None, str]:
        if data_dir:
            raise UserError(f"The digits are scikit-learn's own, not in {data_dir}. Leave --data_dir out.")
        return None, "scikit-learn's digits"

    def source(self, part: str, location: None) -> ImagesInMemory:
        from sklearn.datasets import load_digits

        found = load_digits()
        places = split(found.target, part)
        images = np.rint(found.images[places] * (255 / _MOST)).astype(np.uint8)
        return ImagesInMemory(images[..., None], found.target[places])
