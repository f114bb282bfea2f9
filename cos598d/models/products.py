"""The speed of matrix products on one core, in each precision."""

from functools import partial

import torch
from torch.nn import functional

from cos598d.precision import DTYPES
from cos598d.world.processor import seconds_in_turn

PEAK_SIDE = 512  # side of the square matrices whose product measures a core's peak


def seconds_of_product(rows: int, inputs: int, outputs: int, precision: str) -> float:
    """Seconds of one core for (rows, inputs) times a weight (outputs, inputs), transposed, measured now."""
    given, weight = (torch.ones(size, inputs, dtype=DTYPES[precision]) for size in (rows, outputs))
    return seconds_in_turn({precision: partial(functional.linear, given, weight)})[precision]


def core_peak(precision: str) -> float:
    """Operations per second of one core in a product of two square matrices, measured now. A multiplication and an
    addition count as two."""
    return 2 * PEAK_SIDE**3 / seconds_of_product(PEAK_SIDE, PEAK_SIDE, PEAK_SIDE, precision)
