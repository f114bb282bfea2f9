"""Gradients as 16-bit numbers."""

from collections.abc import Sequence

import torch

from cos598d.sync.buckets import Bucket
from cos598d.sync.codecs.base import Codec, Coded
from cos598d.sync.estimate import Tensor


class BFloat16(Codec[Coded]):
    """8 bits of mantissa, float32's range: half the bytes.

    1. Every rank rounds its bucket to 16 bits.
    2. The all-reduce adds up in 16 bits, rounding each sum.
    3. Every rank widens the result.

    Ratio 2. Each of the n roundings has an error of at most 2^-8 of the number.
    """

    dtype = torch.bfloat16

    @classmethod
    def payloads(cls, bucket: Sequence[Tensor], ranks: int, number: float) -> list[tuple[int, int]]:
        return [(sum(tensor.numel() for tensor in bucket), cls.dtype.itemsize)]

    def start(self, bucket: Bucket, scale: float = 1.0) -> Coded:
        narrow = bucket.buffer.to(self.dtype)
        return Coded(narrow, self.all_reduce(narrow, bucket.name))

    def finish(self, bucket: Bucket, pending: Coded) -> None:
        pending.wait()
        bucket.buffer.copy_(pending.content)


class Float16(BFloat16):
    """As BFloat16 with 11 bits of mantissa: each rounding has an error of at most 2^-11. But numbers above 65,504
    overflow, and those below 6e-8 become zero."""

    dtype = torch.float16
