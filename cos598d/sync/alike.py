"""Do all ranks hold a model of the same tensors? They compare descriptions before anything of it is sent."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cos598d.errors import UserError


def check_models(model: nn.Module, exchange: Callable[[Any], list[Any]]) -> None:
    """Compare the model's parameters and buffers with the other ranks': names, order, shapes, dtypes, strides, and
    which are frozen. `exchange(value)` returns every rank's value, in order of rank.

    Every rank calls it. Raises UserError, the same on every rank, which names the first tensor that differs from rank
    0's.
    """
    models = exchange([_described(*named) for named in (*model.named_parameters(), *model.named_buffers())])
    for rank, other in enumerate(models):
        for theirs, first in itertools.zip_longest(other, models[0], fillvalue="no further tensor"):
            if theirs != first:
                raise UserError(
                    f"the ranks' models differ: rank {rank} has {theirs} where rank 0 has {first}. Start every rank "
                    "with the same model."
                )


def _described(name: str, tensor: torch.Tensor) -> str:
    words = f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    order = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    return words + order + " frozen" * (not tensor.requires_grad)
