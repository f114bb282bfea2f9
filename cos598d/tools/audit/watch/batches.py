"""Which samples a batch has: a digest of each row of a module's inputs, by which the batches of ranks are compared."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_VALUES = 256  # of a row of each input, spread over it: enough to recognize it
_MOST_ROWS = 4096


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in arguments, in order, of lists and dictionaries in them too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part, depth - 1)
    elif depth and isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part, depth - 1)


def has_values(value: Any) -> bool:
    """Whether these tensors have values: torch's fake ones and those on `meta` have only shapes, and train nothing."""
    return not any(tensor.is_meta or hasattr(tensor, "fake_mode") for tensor in tensors_in(value))


def batch_size(inputs: list[torch.Tensor]) -> int:
    """The first dimension of the first input that has one; 0 without any."""
    return next((len(each) for each in inputs if each.dim()), 0)


def sample_digests(inputs: list[torch.Tensor]) -> list[str]:
    """A digest of 16 letters for each row of the batch, of all inputs that have as many rows."""
    size = batch_size(inputs)
    with torch.no_grad():
        columns = [_rows(each) for each in inputs if each.dim() and len(each) == size]
    found = []
    for row in range(min(size, _MOST_ROWS)):
        digest = hashlib.blake2b(digest_size=8)
        for values in columns:
            digest.update(values[row].tobytes())
        found.append(digest.hexdigest())
    return found


def _rows(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach()
    if flat.layout is not torch.strided:
        flat = flat.to_dense()
    flat = flat.reshape(len(flat), -1)
    if flat.shape[1] > _VALUES:
        flat = flat[:, :: flat.shape[1] // _VALUES]
    if flat.dtype in (torch.bfloat16, torch.float16):
        flat = flat.float()
    return np.ascontiguousarray(flat.cpu().numpy())
