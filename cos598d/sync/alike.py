"""Do all ranks hold a model of the same tensors? They compare descriptions before anything of it is sent."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cos598d.errors import UserError


def check_models(model: nn.Module, exchange: Callable[[Any], list[Any]]) -> None:
    """Compare the model's parameters and buffers with the other ranks': names, order, shapes, dtypes, strides,
    which are frozen, and which have sparse gradients. `exchange(value)` returns every rank's value, in order of rank.

    Every rank calls it. Raises UserError, the same on every rank, which names the first tensor that differs from rank
    0's.
    """
    sparse = sparse_weights(model)
    models = exchange([_described(*named, sparse) for named in (*model.named_parameters(), *model.named_buffers())])
    for rank, other in enumerate(models):
        for theirs, first in itertools.zip_longest(other, models[0], fillvalue="no further tensor"):
            if theirs != first:
                raise UserError(
                    f"the ranks' models differ: rank {rank} has {theirs} where rank 0 has {first}. Start every rank "
                    "with the same model."
                )


def sparse_weights(model: nn.Module) -> set[torch.Tensor]:
    """The trainable weights with sparse gradients, as `nn.Embedding(..., sparse=True)` has."""
    tables = (one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse)
    return {table.weight for table in tables if table.weight.requires_grad}


def _described(name: str, tensor: torch.Tensor, sparse: set[torch.Tensor]) -> str:
    words = f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    order = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    return words + order + " frozen" * (not tensor.requires_grad) + " sparse" * (tensor in sparse)
