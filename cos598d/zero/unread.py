"""What .grad is when each rank has only its part of the average."""

import torch
from torch import nn

from cos598d.errors import UserError


class Unread(torch.Tensor):
    """Stands in a parameter's .grad for an average of which each rank has only its part.

    Whoever reads it is told what to do: a part's norm or sign would be a wrong number without a word.
    """

    @staticmethod
    def __new__(cls, parameter: nn.Parameter) -> "Unread":
        return torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise UserError(
            "this rank has only its part of the averaged gradient, so .grad cannot be read or changed. Clip by "
            "model.clip_grad_norm_(max_norm), or choose a sync without shards, such as bucketed."
        )
