"""A data set that comes as one is cut into a part to train on and one to evaluate on."""

from collections.abc import Sequence

import numpy as np

_DEV_SHARE = 5  # one in so many of each class is evaluated on
_SEED = 598


def split(labels: Sequence[int] | np.ndarray, part: str) -> np.ndarray:
    """The places of `part`, "train" or "dev", in data that come as one: of each class one fifth is for evaluation.

    Which images these are is the same for every run and every machine, whatever its --seed.
    """
    labels = np.asarray(labels)
    is_dev = np.zeros(len(labels), dtype=bool)
    generator = np.random.default_rng(_SEED)
    for label in np.unique(labels):
        places = generator.permutation(np.flatnonzero(labels == label))
        is_dev[places[: len(places) // _DEV_SHARE]] = True
    return np.flatnonzero(is_dev == (part == "dev"))
