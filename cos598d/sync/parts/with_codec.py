"""What syncs share whose buckets may be compressed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cos598d.comm.calls import Pending
from cos598d.errors import UserError
from cos598d.sync.base import GradientSync
from cos598d.sync.codecs import make_codec


class WithCodec(GradientSync):
    """A sync that sends buckets, compressed as `--compress` asks. A subclass defines

    sum_up(tensor, name)   start to sum a tensor, (elements,), over the ranks, in place: its own way to send bytes
    codec_ranks()          the ranks among which a codec's calls are made; by default all

    and passes each bucket of a step to the codec, in the same order on every rank, instead of summing it:

    pending = self.codec.start(bucket, self.loss_scale)
    ... other work ...
    self.codec.finish(bucket, pending)                      its buffer is the sum
    self.codec.put_back_unused(bucket, is_used)

    Without `--compress`, the codec sums the buffer itself by `sum_up`. Codecs whose payload can be added up (bf16,
    fp16, powersgd) also use `sum_up`. The payload of int8 and topk cannot, so they use an exchange of their own in
    every sync.
    """

    uses: tuple[str, ...] = ("compress",)

    def attach(self, model: nn.Module) -> nn.Module:
        module = super().attach(model)
        odd = next((name for name, p in self.parameters if p.is_complex()), None) if self.options.compress else None
        if odd is not None:
            raise UserError(
                f"{odd} has complex numbers, which --compress {self.options.compress} cannot compress. Leave "
                "compress out for this model."
            )
        self.codec = make_codec(self.options.compress, self.comm, self.sum_up, self.codec_ranks())
        return module

    def sum_up(self, tensor: torch.Tensor, name: str) -> Pending:
        """Start to replace a tensor, (elements,), by its sum over the ranks."""
        raise NotImplementedError(f"{type(self).__name__} has no sum_up()")

    def codec_ranks(self) -> Sequence[int]:
        """The ranks among which buckets are sent, once the model is attached."""
        return range(self.comm.world_size)

    def forget_step(self) -> None:
        self.codec.forget_step()

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return {}, self.codec.own_state()

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.codec.load_own_state(tensors)

    def detach(self) -> None:
        # A new codec, without state: the old one's error feedback is as large as the model.
        self.codec = make_codec(self.options.compress, self.comm, self.sum_up, self.codec_ranks())
        super().detach()

    @property
    def own_is_lost(self) -> str | None:
        return self.codec.memory
