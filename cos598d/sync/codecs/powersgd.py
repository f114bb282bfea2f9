"""Each matrix of gradients as a product of two thin ones."""

from typing import NamedTuple

import torch

from cos598d.comm import Communicator
from cos598d.sync.buckets import Bucket
from cos598d.sync.codecs.base import AllReduce, Codec, Coded, Feedback

RANK = 4


class PowerSGD(Codec):
    """Low rank by one power iteration a step (Vogels, Karimireddy and Jaggi 2019, algorithms 1 and 2), error feedback.

    For each matrix M of a bucket, (rows, columns), with Q, (columns, rank), kept from the step before:
    1. Every rank adds what it did not send before to M, and computes P = M Q.
    2. All ranks sum P (all-reduce), and make its columns orthonormal, each by itself and alike.
    3. Every rank computes Q = M' P; all ranks sum Q (all-reduce).
    4. The sum of the Ms is taken for P Q'; what of its own M a rank's P Q' misses waits for the next step.
    Vectors, and matrices that rank columns would not make smaller, travel whole beside P.

    `powersgd:4`, the default, is rank 4. Cost of a bucket: 2 calls; every rank sends and receives 2(n-1)/n times
    4 rank (rows + columns) bytes a matrix, and 4 bytes for each element that travels whole.
    """

    number_words = "the rank, a whole number from 1"

    def __init__(self, comm: Communicator, all_reduce: AllReduce, number: float | None = None):
        super().__init__(comm, all_reduce, number)
        self._rank = RANK if number is None else int(number)
        self._feedback = Feedback()
        self._qs: dict[str, torch.Tensor] = {}

    @classmethod
    def takes(cls, number: float) -> bool:
        return number >= 1 and number == int(number)

    def start(self, bucket: Bucket) -> Coded:
        error = self._feedback.add_to(bucket)
        error.copy_(bucket.buffer)
        matrices, whole = [], []
        for (name, _), view in zip(bucket.parameters, bucket.views, strict=True):
            matrix = view.view(view.shape[0], -1) if view.dim() > 1 else view.view(-1, 1)
            rank = min(self._rank, *matrix.shape)
            if rank * sum(matrix.shape) < matrix.numel():
                if name not in self._qs:
                    self._qs[name] = _first_q(matrix, rank, len(self._qs))
                matrices.append((name, matrix))
            else:
                whole.append(view)
        ps = [matrix @ self._qs[name] for name, matrix in matrices]
        packed = _pack([*ps, *whole], bucket.buffer)
        return Coded(_FirstHalf(matrices, whole, ps, packed), self.all_reduce(packed, bucket.name))

    def finish(self, bucket: Bucket, pending: Coded) -> None:
        pending.wait()
        half: _FirstHalf = pending.content
        parts = half.packed.split([tensor.numel() for tensor in (*half.ps, *half.whole)])
        ps = [torch.linalg.qr(part.view_as(p)).Q for part, p in zip(parts[: len(half.ps)], half.ps, strict=True)]
        qs = [matrix.T @ p for (_, matrix), p in zip(half.matrices, ps, strict=True)]
        sums = _pack(qs, bucket.buffer)
        call = self.all_reduce(sums, f"{bucket.name}, second factors") if qs else None
        # Of the local gradient, what the product of both factors holds is sent: kept is the rest.
        local = {name: p @ q.T for (name, _), p, q in zip(half.matrices, ps, qs, strict=True)}
        self._keep_errors(bucket, local)
        if call:
            call.wait()
        summed = sums.split([q.numel() for q in qs]) if qs else ()
        for (name, matrix), p, q, part in zip(half.matrices, ps, qs, summed, strict=True):
            self._qs[name] = part.view_as(q).clone()
            torch.mm(p, self._qs[name].T, out=matrix)
        for view, part in zip(half.whole, parts[len(half.ps) :], strict=True):
            view.copy_(part.view_as(view))

    def _keep_errors(self, bucket: Bucket, local: dict[str, torch.Tensor]) -> None:
        error = self._feedback.of(bucket)
        sizes = [view.numel() for view in bucket.views]
        for (name, _), part in zip(bucket.parameters, error.split(sizes), strict=True):
            if name in local:
                part -= local[name].flatten()
            else:
                part.zero_()


class _FirstHalf(NamedTuple):
    """The matrices by name, what travels whole, the first factors, and both packed as they travel."""

    matrices: list[tuple[str, torch.Tensor]]
    whole: list[torch.Tensor]
    ps: list[torch.Tensor]
    packed: torch.Tensor


def _pack(tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]) if tensors else like.new_empty(0)


def _first_q(matrix: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    """Random columns, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(matrix.shape[1], rank, generator=generator).to(matrix)
