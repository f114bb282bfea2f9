"""Gradient compression, `--compress` of `bucketed`: codecs that sum a bucket over the ranks in fewer bytes.

`start(name, numbers, shapes)` starts the sum of a bucket, and returns what ends it. Call that later, and the bucket has
the sum, the same bits on every rank. What a step did not send is kept and added to the next, and a checkpoint saves it.
This is error feedback (Seide et al. 2014, Karimireddy et al. 2019). If some rank's gradient is not finite, neither is
the sum, and what was kept of it is dropped.
"""

import contextlib
import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from cos598d.errors import UsageError

End = Callable[[], object]


class Codec:
    """No compression: an all-reduce.

    default: the number after a codec's name, if none is given; 0 for a codec without numbers. most: the largest.
    """

    default: float = 0
    most = math.inf

    def __init__(self, number: float = 0, group: dist.ProcessGroup | None = None):
        self.number, self.group = number, group
        self.ranks = dist.get_world_size(group)
        self.kept: dict[str, torch.Tensor] = {}  # from one step to the next, by name

    def start(self, name: str, numbers: torch.Tensor, shapes: list[torch.Size]) -> End:
        """Start the sum of `numbers`, (count,), in place. `shapes`: of the tensors that lie there side by side."""
        return self.start_sum(numbers)

    def start_sum(self, numbers: torch.Tensor) -> End:
        """Start the sum of a tensor over the ranks, in place."""
        return dist.all_reduce(numbers, group=self.group, async_op=True).wait

    def with_error(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """Add what earlier steps did not send to the numbers. Return the tensor for what this one does not send."""
        error = self.kept.setdefault(f"error/{name}", torch.zeros_like(numbers))
        numbers += error.nan_to_num_(0.0, 0.0, 0.0)  # a step that overflowed leaves no trace
        return error.copy_(numbers)


class BFloat16(Codec):
    """bf16: 8 bits of mantissa, float32's range.

    1. Every rank rounds its bucket to 16 bits.
    2. An all-reduce adds up in 16 bits, rounding each sum.
    3. Every rank widens the result.

    Half the bytes. Each of the n roundings has an error of at most 2^-8 of the number.
    """

    dtype = torch.bfloat16

    def start(self, name: str, numbers: torch.Tensor, shapes: list[torch.Size]) -> End:
        narrow = numbers.to(self.dtype)
        end_sum = self.start_sum(narrow)

        def end() -> None:
            end_sum()
            numbers.copy_(narrow)

        return end


class Float16(BFloat16):
    """fp16: as bf16 with 11 bits of mantissa: each rounding has an error of at most 2^-11. But numbers above 65,504
    overflow, and those below 6e-8 become zero."""

    dtype = torch.float16


class TopK(Codec):
    """topk:0.01: the k largest of each bucket's elements (Lin et al. 2018, "Deep Gradient Compression").

    1. Every rank adds what it has not sent before, selects the k elements with the largest absolute values, and keeps
       the others for the next step.
    2. All ranks gather each other's k values and k indices.
    3. Every rank adds them up, in order of rank.

    `topk:0.01`, the default, sends 1 percent. Cost of a bucket of E elements: 1 call; every rank sends and receives
    (n-1) 8 k bytes, compared with 2(n-1)/n 4 E. So the ratio is E / (n k): 25 for 4 ranks at 1 percent, falling with n.
    """

    default, most = 0.01, 1.0

    def start(self, name: str, numbers: torch.Tensor, shapes: list[torch.Size]) -> End:
        error = self.with_error(name, numbers)
        count = max(1, round(self.number * numbers.numel()))
        places = numbers.abs().topk(count, sorted=False).indices
        packed = torch.cat([numbers[places].float(), places.to(torch.int32).view(torch.float32)])
        error[places] = 0
        every = packed.new_empty(self.ranks * len(packed))
        work = dist.all_gather_into_tensor(every, packed, group=self.group, async_op=True)

        def end() -> None:
            work.wait()
            numbers.zero_()
            for values, at in every.view(self.ranks, 2, count):
                numbers.index_add_(0, at.view(torch.int32).long(), values.to(numbers.dtype))

        return end


class Int8(Codec):
    """int8: scaled 8-bit numbers, summed in 32 bits by the rank that owns the part.

    1. Every rank splits its bucket into n parts, and encodes each in blocks of 1,024 elements. x becomes floor(127 x /
       m + u). Here m is the block's largest absolute value, which is sent with the block, and u is a random number in
       [0, 1).
    2. Part r goes to rank r, which decodes and adds the n versions of it, in order of rank.
    3. Rank r encodes its sum and sends it to all. Every rank, the owner too, decodes what was sent.

    Just over a quarter of the bytes: every rank sends and receives 2(n-1) parts of 1 + 4/1024 bytes per element. An
    element's error is less than m/127 in each of the n versions, and once more in the sum. With u an element is rounded
    up in proportion to its size (stochastic rounding, as in QSGD, Alistarh et al. 2017). So the mean over steps is
    right, and no error has to be kept. u is drawn anew in every call, and by each rank by itself.
    """

    BLOCK = 1024  # elements that share a scale
    DRAWN = 16  # blocks that share random numbers with others: generating takes longer than adding

    def start(self, name: str, numbers: torch.Tensor, shapes: list[torch.Size]) -> End:
        count = numbers.numel()
        blocks = -(-count // (self.BLOCK * self.ranks)) * self.ranks
        padded = numbers.new_zeros(blocks * self.BLOCK, dtype=torch.float32)
        padded[:count] = numbers
        coded = self._encode(padded)
        arrived = torch.empty_like(coded)
        work = dist.all_to_all_single(arrived, coded, group=self.group, async_op=True)

        def end() -> None:
            work.wait()
            own = self._encode(self._decode(arrived).view(self.ranks, -1).sum(dim=0))
            every = torch.empty_like(coded)
            dist.all_gather_into_tensor(every, own, group=self.group)
            numbers.copy_(self._decode(every)[:count])

        return end

    def _encode(self, numbers: torch.Tensor) -> torch.Tensor:
        """(blocks x 1024,) as uint8 (blocks x 1028,): of each block the scale, then the numbers."""
        rows = numbers.view(-1, self.BLOCK)
        self.kept["seed"] = self.kept.get("seed", torch.tensor(dist.get_rank(self.group))) + self.ranks
        generator = torch.Generator(numbers.device).manual_seed(int(self.kept["seed"]))
        drawn = torch.rand(self.DRAWN, self.BLOCK, generator=generator, device=numbers.device)
        scales = rows.abs().amax(dim=1, keepdim=True) / 127
        scaled = rows / scales.clamp(min=torch.finfo(torch.float32).tiny)
        for some in scaled.split(self.DRAWN):
            some += drawn[: len(some)]
        whole = scaled.floor_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([scales.view(torch.uint8), whole.view(torch.uint8)], dim=1).flatten()

    def _decode(self, coded: torch.Tensor) -> torch.Tensor:
        rows = coded.view(-1, self.BLOCK + 4)
        return (rows[:, 4:].view(torch.int8) * rows[:, :4].contiguous().view(torch.float32)).flatten()


class PowerSGD(Codec):
    """powersgd:4: low rank by a power iteration per step (Vogels, Karimireddy and Jaggi 2019, algorithms 1 and 2).

    For each matrix M of a bucket, (rows, columns), with Q, (columns, rank), kept from the previous step:
    1. Every rank adds what it has not sent before to M, and computes P = M Q.
    2. All ranks sum P. Each rank makes its columns orthonormal, with the same result.
    3. Every rank computes Q = M' P; all ranks sum Q.
    4. P Q' approximates the sum of the Ms. What a rank's own P Q' misses of its M waits for the next step.
    A vector is a matrix of one column, of whose sum nothing is lost. So is a matrix that would not become smaller.

    `powersgd:4`, the default, is rank 4. Cost of a bucket: 2 calls. Every rank sends and receives 2(n-1)/n times 4 rank
    (rows + columns) bytes per matrix, of one column with rank 1.
    """

    default = 4

    def start(self, name: str, numbers: torch.Tensor, shapes: list[torch.Size]) -> End:
        error, sizes = self.with_error(name, numbers), [shape.numel() for shape in shapes]
        matrices = []  # with the key of their Q, and their error
        parts = zip(numbers.split(sizes), error.split(sizes), shapes, strict=True)
        for place, (part, missed, shape) in enumerate(parts):
            rows = shape[0] if shape else 1
            columns = len(part) // rows
            rank = min(int(self.number), rows, columns)
            if rank * (rows + columns) >= len(part):
                rows, columns, rank = len(part), 1, 1
            key = f"factor/{name}/{place}"
            if key not in self.kept:  # the same on every rank
                generator = torch.Generator().manual_seed(len(self.kept))
                self.kept[key] = torch.randn(columns, rank, generator=generator).to(part)
            matrices.append((key, part.view(rows, columns), missed.view(rows, columns)))
        own = [m @ self.kept[key] for key, m, _ in matrices]
        firsts = torch.cat([p.flatten() for p in own])
        end_sum = self.start_sum(firsts)

        def end() -> None:
            end_sum()
            wide = torch.promote_types(numbers.dtype, torch.float32)  # QR needs it
            sums = zip(firsts.split([p.numel() for p in own]), own, strict=True)
            ps = [torch.linalg.qr(total.view_as(p).to(wide)).Q.to(total) for total, p in sums]
            qs = [m.T @ p for (_, m, _), p in zip(matrices, ps, strict=True)]
            seconds = torch.cat([q.flatten() for q in qs])
            for (_, _, missed), p, q in zip(matrices, ps, qs, strict=True):
                missed.sub_(p @ q.T)
            self.start_sum(seconds)()
            for (key, m, _), p, q, total in zip(matrices, ps, qs, seconds.split([q.numel() for q in qs]), strict=True):
                new = total.view_as(q)
                torch.mm(p, new.T, out=m)
                # A column of zeros, as from a zero gradient, would stay zero forever.
                self.kept[key] = torch.where(new.any(dim=0) & new.isfinite().all(dim=0), new, self.kept[key])

        return end


CODECS: dict[str, type[Codec]] = {
    "bf16": BFloat16,
    "fp16": Float16,
    "int8": Int8,
    "topk": TopK,
    "powersgd": PowerSGD,
}


def get_codec(word: str) -> tuple[type[Codec], float]:
    """The class of a codec, and its number: from `word` ("topk:0.05" sends 5 percent), its default, or 0 for none.

    Raises UsageError for an unknown codec, and for a number that is not valid for it.
    """
    name, colon, number = word.partition(":")
    codec = CODECS.get(name, Codec)
    with contextlib.suppress(ValueError):
        value = type(codec.default)(number) if colon else codec.default
        if (0 < value <= codec.most) if codec.default else (name in CODECS and not colon):
            return codec, value
    raise UsageError(
        f"--compress {word}: unknown compression. Choose bf16, fp16, int8, topk:SHARE (of the elements, above 0 and at "
        "most 1) or powersgd:RANK (a whole number from 1)."
    )
