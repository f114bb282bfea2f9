"""The dtypes in which a model computes."""

import contextlib
from collections.abc import Callable

import torch

from cos598d.records.conventions import PRECISIONS

DTYPES = dict(zip(PRECISIONS, (None, torch.bfloat16, torch.float16), strict=True))


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """torch's autocast to the dtype of `precision` ("fp32" leaves it off). Weights and gradients stay float32."""
    dtype = DTYPES[precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def computing_in(precision: str, device: torch.device, module: Callable[..., tuple]) -> Callable[..., tuple]:
    """`module` as it is called for training in `precision`: its forward runs under `autocast`."""
    if precision == "fp32":
        return module

    def forward(**inputs: torch.Tensor) -> tuple:
        with autocast(precision, device):
            return module(**inputs)

    return forward
