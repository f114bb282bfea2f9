"""Random sentences for the toy model of `exam/models.py`, as the trainer takes them."""

import numpy as np
from cos598d.data.text.features import Features
from cos598d.data.text.layout import Layout

from cos598d.tools.exam.models import WORDS


class ToyFeatures(Features):
    """Random sentences of random length; the same on every rank."""

    def __init__(self, examples, seed=0):
        generator = np.random.default_rng(seed)
        lengths = generator.integers(2, 9, examples)
        labels = generator.integers(0, WORDS // 3, examples)
        words = generator.integers(0, WORDS, lengths.sum()).astype(np.int32)
        layout = Layout(uses_segments=False)
        super().__init__(words, np.append(0, np.cumsum(lengths)), lengths, {"labels": labels}, layout, pad_id=0)
