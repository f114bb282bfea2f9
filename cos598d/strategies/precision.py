"""The dtypes in which a model computes."""

import contextlib

import torch

from cos598d.records.conventions import PRECISIONS

DTYPES = dict(zip(PRECISIONS, (None, torch.bfloat16, torch.float16), strict=True))


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """torch's autocast to the dtype of `precision` ("fp32" leaves it off). Weights and gradients stay float32."""
    dtype = DTYPES[precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
