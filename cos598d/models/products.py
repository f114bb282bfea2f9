"""The speed of matrix products on one core, in each precision, for the shape of a model's widest layer."""

from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from cos598d.world.processor import seconds_in_turn

LEAST_ROWS, MOST_ROWS = 64, 1024  # tokens of the product
# of the product: a narrow layer gets more rows, and only some outputs of a wide one are computed
MOST_OPERATIONS = 80e6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PEAK_SIDE = 512  # side of the square matrices whose product measures a core's peak


class ProductShape(NamedTuple):
    """The shape of a product: rows (rows, inputs) times a weight (outputs, inputs), transposed."""

    rows: int
    inputs: int
    outputs: int

    @property
    def operations(self) -> int:
        """Additions and multiplications of one product."""
        return 2 * self.rows * self.inputs * self.outputs

    def __str__(self) -> str:
        return f"{self.rows} x {self.inputs} by {self.inputs} x {self.outputs}"


def widest_product(model: nn.Module) -> ProductShape:
    """The product of some tokens and the model's largest linear layer, limited to MOST_OPERATIONS."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    widest = max(layers, key=lambda layer: layer.in_features * layer.out_features)
    inputs, outputs = widest.in_features, widest.out_features
    rows = min(MOST_ROWS, max(LEAST_ROWS, int(MOST_OPERATIONS // (2 * inputs * outputs))))
    return ProductShape(rows, inputs, max(1, min(outputs, int(MOST_OPERATIONS // (2 * rows * inputs)))))


def seconds_of_product(shape: ProductShape, *precisions: str) -> dict[str, float]:
    """Seconds of one core for one product of this shape in each of these precisions, measured now, in turn."""
    rows, weight = torch.ones(shape.rows, shape.inputs), torch.ones(shape.outputs, shape.inputs)
    calls = {}
    for precision in precisions:
        dtype = DTYPES[precision]
        calls[precision] = partial(functional.linear, rows.to(dtype), weight.to(dtype))
    return seconds_in_turn(calls)


def core_peak(precision: str) -> float:
    """Operations per second of one core in a product of two square matrices, measured now."""
    shape = ProductShape(PEAK_SIDE, PEAK_SIDE, PEAK_SIDE)
    return shape.operations / seconds_of_product(shape, precision)[precision]
