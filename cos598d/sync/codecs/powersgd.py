"""Each matrix of gradients as a product of two thin ones."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from cos598d.sync.buckets import Bucket
from cos598d.sync.codecs.base import Codec, Coded, Feedback, Kept
from cos598d.sync.estimate import Tensor


class PowerSGD(Codec[Coded]):
    """Low rank by a power iteration per step (Vogels, Karimireddy and Jaggi 2019, algorithms 1 and 2), error feedback.

    For each matrix M of a bucket, (rows, columns), with Q, (columns, rank), kept from the previous step:
    1. Every rank adds what it has not sent before to M, and computes P = M Q.
    2. All ranks sum P (all-reduce). Each rank makes its columns orthonormal, with the same result.
    3. Every rank computes Q = M' P; all ranks sum Q (all-reduce).
    4. P Q' approximates the sum of the Ms. What a rank's own P Q' misses of its M waits for the next step.
    5. Q and the errors are kept for the next step, divided by the loss scale.
    Vectors are sent whole, together with P. So are matrices that would not become smaller.

    `powersgd:4`, the default, is rank 4. Cost of a bucket: 2 calls. Every rank sends and receives 2(n-1)/n times 4 rank
    (rows + columns) bytes per matrix, and 4 bytes per element that is sent whole.
    """

    default = 4
    number_words = "the rank, a whole number from 1"
    memory = "powersgd's factors and what it has held back (its error feedback)"

    def set_up(self) -> None:
        self._feedback, self._qs = self.keep(Feedback(), "error/"), self.keep(Kept(), "factor/")

    @classmethod
    def takes(cls, number: float) -> bool:
        return number >= 1 and number == int(number)

    @classmethod
    def payloads(cls, bucket: Sequence[Tensor], ranks: int, number: float) -> list[tuple[int, int]]:
        firsts = seconds = 0
        for tensor in bucket:
            shape = _as_matrix(tensor.shape)
            rank = _rank_of(shape, int(number))
            firsts += rank * shape[0] if rank else tensor.numel()
            seconds += rank * shape[1]
        size = bucket[0].element_size()
        return [(firsts, size), (seconds, size)] if seconds else [(firsts, size)]

    def start(self, bucket: Bucket, scale: float = 1.0) -> Coded:
        error = self._feedback.add_to(bucket, scale)
        torch.mul(bucket.buffer, 1 / scale, out=error)
        matrices, whole, old_qs = [], [], []
        for (name, _), view in zip(bucket.parameters, bucket.views, strict=True):
            matrix = view.view(_as_matrix(view.shape))
            rank = _rank_of(matrix.shape, int(self.number))
            if rank:
                first = partial(_first_q, matrix, rank, len(self._qs))
                old_qs.append(self._qs.begin(name, first)[0])
                matrices.append((name, matrix))
            else:
                whole.append(view)
        ps = [matrix @ q for (_, matrix), q in zip(matrices, old_qs, strict=True)]
        packed = _pack([*ps, *whole], bucket.buffer)
        named_qs = {name: q for (name, _), q in zip(matrices, old_qs, strict=True)}
        half = _FirstHalf(matrices, named_qs, whole, ps, packed, scale)
        return Coded(half, self.all_reduce(packed, bucket.name))

    def finish(self, bucket: Bucket, pending: Coded) -> None:
        pending.wait()
        half: _FirstHalf = pending.content
        parts = half.packed.split([tensor.numel() for tensor in (*half.ps, *half.whole)])
        ps = [_orthonormal(part.view_as(p)) for part, p in zip(parts[: len(half.ps)], half.ps, strict=True)]
        qs = [matrix.T @ p for (_, matrix), p in zip(half.matrices, ps, strict=True)]
        sums = _pack(qs, bucket.buffer)
        call = self.all_reduce(sums, f"{bucket.name}, second factors") if qs else None
        # The product of both local factors is what was sent of the local gradient; the rest is kept.
        local = {name: p @ q.T for (name, _), p, q in zip(half.matrices, ps, qs, strict=True)}
        self._keep_errors(bucket, local, half.scale)
        if call:
            call.wait()
        is_finite = half.packed.isfinite().all() & sums.isfinite().all()
        self._feedback.keep_if(is_finite, bucket.name)
        summed = sums.split([q.numel() for q in qs]) if qs else ()
        for (name, matrix), p, q, part in zip(half.matrices, ps, qs, summed, strict=True):
            new = self._qs.left(name)
            torch.mul(part.view_as(q), 1 / half.scale, out=new)
            # A column of zeros, as from a zero gradient, would stay zero forever: keep the previous column instead.
            new.copy_(torch.where(new.any(dim=0), new, half.old_qs[name]))
            self._qs.keep_if(is_finite, name)
            torch.mm(p, part.view_as(q).T, out=matrix)
        for view, part in zip(half.whole, parts[len(half.ps) :], strict=True):
            view.copy_(part.view_as(view))

    def put_back_unused(self, bucket: Bucket, is_used: Sequence[bool]) -> None:
        self._feedback.put_back(bucket, is_used)
        for (name, _), used in zip(bucket.parameters, is_used, strict=True):
            if not used:
                self._qs.forget(name)

    def _keep_errors(self, bucket: Bucket, local: dict[str, torch.Tensor], scale: float) -> None:
        error = self._feedback.left(bucket.name)
        sizes = [view.numel() for view in bucket.views]
        for (name, _), part in zip(bucket.parameters, error.split(sizes), strict=True):
            if name in local:
                part.sub_(local[name].flatten(), alpha=1 / scale)
            else:
                part.zero_()


def _as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """The rows and columns of a tensor as a matrix."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (math.prod(shape), 1)


def _rank_of(shape: Sequence[int], most: int) -> int:
    """The rank that compresses a matrix; 0 if its factors would not be smaller."""
    rank = min(most, *shape)
    return rank if rank * sum(shape) < math.prod(shape) else 0


class _FirstHalf(NamedTuple):
    """The matrices by name, their Qs of the previous step, the tensors sent whole, the first factors, both packed as
    they are sent, and the loss scale."""

    matrices: list[tuple[str, torch.Tensor]]
    old_qs: dict[str, torch.Tensor]
    whole: list[torch.Tensor]
    ps: list[torch.Tensor]
    packed: torch.Tensor
    scale: float


def _pack(tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]) if tensors else like.new_empty(0)


def _orthonormal(p: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns of p, (rows, rank), computed in at least 32 bits: QR needs them."""
    return torch.linalg.qr(p.to(torch.promote_types(p.dtype, torch.float32))).Q.to(p.dtype)


def _first_q(matrix: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    """Random columns, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(matrix.shape[1], rank, generator=generator).to(matrix)
