"""Do all ranks hold a model of the same tensors? They compare digests before anything of it is sent."""

import hashlib
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
    tensors = [*model.named_parameters(), *model.named_buffers()]
    problem = next((f"{name} {why}" for name, tensor in tensors if (why := _why_not_sent(tensor))), "")
    sparse = sparse_weights(model)
    mine = problem or [
        [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), _order(tensor)]
        + [" frozen" * (not tensor.requires_grad), " sparse" * (tensor in sparse)]
        for name, tensor in tensors
    ]
    digests = exchange([hashlib.sha256(json.dumps(mine).encode()).hexdigest(), bool(problem)])
    if all(digest == digests[0] for digest in digests) and not problem:
        return
    models = exchange(mine)
    for rank, one in enumerate(models):
        if isinstance(one, str):
            raise UserError(f"rank {rank}'s {one}.")
    rank = next(r for r, other in enumerate(models) if other != models[0])
    theirs, first = models[rank], models[0]
    place = next((i for i, pair in enumerate(zip(theirs, first)) if pair[0] != pair[1]), min(len(theirs), len(first)))
    raise UserError(
        f"the ranks' models differ: rank {rank} has {_described(theirs, place)} where rank 0 has "
        f"{_described(first, place)}. Start every rank with the same model."
    )


def sparse_weights(model: nn.Module) -> set[torch.Tensor]:
    """The trainable weights with sparse gradients, as `nn.Embedding(..., sparse=True)` has."""
    tables = (one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse)
    return {table.weight for table in tables if table.weight.requires_grad}


def _described(model: list, place: int) -> str:
    if place >= len(model):
        return f"only {len(model)} tensors"
    name, shape, *words = model[place]
    return f"{name} {tuple(shape)} {''.join(words)}"


def _order(tensor: torch.Tensor) -> str:
    """The order of a tensor's elements in memory, if it is not the usual one."""
    return "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"


def _why_not_sent(tensor: torch.Tensor) -> str | None:
    """Why a parameter or buffer cannot be made equal on all ranks, and what to do; None if it can."""
    if nn.parameter.is_lazy(tensor):
        return "has no shape yet. Call the model once with an example before it is wrapped"
    if tensor.layout != torch.strided:
        return f"has the layout {str(tensor.layout)[6:]}. Keep its parts as dense buffers"
    if torch._debug_has_internal_overlap(tensor) == 1:
        return "has elements that share memory. Give it memory of its own by .clone()"
    return None
