"""Do all ranks hold a model of the same tensors? They compare digests before anything of it is sent."""

import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cos598d.errors import UserError


def check_models(model: nn.Module, exchange: Callable[[Any], list[Any]]) -> None:
    """Compare the model's parameters and buffers with the other ranks': names, order, shapes, dtypes, strides,
    which are frozen, and which have sparse gradients. `exchange(value)` returns every rank's value, in order of rank.

    Every rank calls it. Raises UserError, the same on every rank. It names the first tensor that differs from rank 0's,
    or the first that cannot be sent on some rank.
    """
    tensors, sparse = [*model.named_parameters(), *model.named_buffers()], sparse_weights(model)
    problem = next((f"{name} {why}" for name, tensor in tensors if (why := _why_not_sent(tensor))), "")
    mine = problem or [_described(name, tensor, tensor in sparse) for name, tensor in tensors]
    digests = exchange(hashlib.sha256(json.dumps(mine).encode()).hexdigest())
    if all(digest == digests[0] for digest in digests) and not problem:
        return
    models = exchange(mine)
    for rank, one in enumerate(models):
        if isinstance(one, str):
            raise UserError(f"rank {rank}'s {one}.")
    rank = next(r for r, other in enumerate(models) if other != models[0])
    pairs = itertools.zip_longest(models[rank], models[0], fillvalue="no further tensor")
    theirs, first = next(pair for pair in pairs if pair[0] != pair[1])
    raise UserError(
        f"the ranks' models differ: rank {rank} has {theirs} where rank 0 has {first}. Start every rank with the same "
        "model."
    )


def sparse_weights(model: nn.Module) -> set[torch.Tensor]:
    """The trainable weights with sparse gradients, as `nn.Embedding(..., sparse=True)` has."""
    tables = (one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse)
    return {table.weight for table in tables if table.weight.requires_grad}


def _described(name: str, tensor: torch.Tensor, is_sparse: bool) -> str:
    words = f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    order = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    return words + order + " frozen" * (not tensor.requires_grad) + " sparse" * is_sparse


def _why_not_sent(tensor: torch.Tensor) -> str | None:
    """Why a parameter or buffer cannot be made equal on all ranks, and what to do; None if it can."""
    if nn.parameter.is_lazy(tensor):
        return "has no shape yet. Call the model once with an example before it is wrapped"
    if tensor.layout != torch.strided:
        return f"has the layout {str(tensor.layout)[6:]}. Keep its parts as dense buffers"
    if torch._debug_has_internal_overlap(tensor) == 1:
        return "has elements that share memory. Give it memory of its own by .clone()"
    return None
