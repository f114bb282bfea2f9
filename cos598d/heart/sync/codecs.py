"""Gradient compression, `--compress`: codecs that sum a bucket over the ranks in fewer bytes.

`start(name, buffer)` starts the sum of a float32 buffer, and returns what ends it: call that later, and the buffer has
the sum, the same bits on every rank. What a step did not send is kept in `kept` and added to the next (error feedback,
Karimireddy et al. 2019); a checkpoint saves it.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

End = Callable[[], None]


class Codec:
    """No compression: an all-reduce of the buffer itself."""

    def __init__(self, number: float | None = None, group: dist.ProcessGroup | None = None):
        self.number, self.group = number, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.kept: dict[str, torch.Tensor] = {}

    def start(self, name: str, buffer: torch.Tensor, shapes: list[torch.Size]) -> End:
        """`shapes`: those of the gradients that lie side by side in the buffer."""
        return dist.all_reduce(buffer, group=self.group, async_op=True).wait

    def with_error(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Add what earlier steps did not send to the buffer. Return the tensor for what this one does not send."""
        error = self.kept.setdefault(name, torch.zeros_like(buffer))
        buffer += error
        return error.copy_(buffer)


class Half(Codec):
    """bf16, fp16: the sum in 16 bits. Half the bytes; each of the n roundings has an error of 2^-8 or 2^-11."""

    dtype = torch.bfloat16

    def start(self, name: str, buffer: torch.Tensor, shapes: list[torch.Size]) -> End:
        narrow = buffer.to(self.dtype)
        work = dist.all_reduce(narrow, group=self.group, async_op=True)
        return lambda: (work.wait(), buffer.copy_(narrow)) and None


class Float16(Half):
    """As Half with 11 bits of mantissa; numbers above 65,504 overflow."""

    dtype = torch.float16


class TopK(Codec):
    """topk:0.01: the k largest elements of each bucket (Lin et al. 2018); the others wait for the next step.

    Every rank gathers all ranks' k values and k indices: (n-1) 8 k bytes.
    """

    def start(self, name: str, buffer: torch.Tensor, shapes: list[torch.Size]) -> End:
        error = self.with_error(name, buffer)
        count = max(1, round((self.number or 0.01) * buffer.numel()))
        places = buffer.abs().topk(count, sorted=False).indices
        packed = torch.cat([buffer[places], places.to(torch.int32).view(torch.float32)])
        error[places] = 0
        every = packed.new_empty(self.ranks * len(packed))
        work = dist.all_gather_into_tensor(every, packed, group=self.group, async_op=True)

        def end() -> None:
            work.wait()
            buffer.zero_()
            for part in every.view(self.ranks, 2, count):
                buffer.index_add_(0, part[1].view(torch.int32).long(), part[0])

        return end


class Int8(Codec):
    """int8: 8-bit integers with a scale for each block of 1,024, rounded up or down at random (QSGD, Alistarh 2017).

    Part r of the bucket goes to rank r, which decodes and adds the n versions of it, encodes the sum and sends it to
    all: two exchanges of just over a quarter of the bytes.
    """

    BLOCK = 1024

    def start(self, name: str, buffer: torch.Tensor, shapes: list[torch.Size]) -> End:
        blocks = -(-buffer.numel() // (self.BLOCK * self.ranks)) * self.ranks
        padded = buffer.new_zeros(blocks * self.BLOCK)
        padded[: buffer.numel()] = buffer
        coded = self._encode(padded)
        arrived = torch.empty_like(coded)
        work = dist.all_to_all_single(arrived, coded, group=self.group, async_op=True)

        def end() -> None:
            work.wait()
            own = self._encode(self._decode(arrived).view(self.ranks, -1).sum(dim=0))
            every = torch.empty_like(coded)
            dist.all_gather_into_tensor(every, own, group=self.group)
            buffer.copy_(self._decode(every)[: buffer.numel()])

        return end

    def _encode(self, numbers: torch.Tensor) -> torch.Tensor:
        """(blocks x 1024,) as uint8 (blocks, 4 + 1024): the scale, then the numbers."""
        rows = numbers.view(-1, self.BLOCK)
        scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        whole = (rows / scales + torch.rand_like(rows)).floor_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([scales.view(torch.uint8), whole.view(torch.uint8)], dim=1).flatten()

    def _decode(self, coded: torch.Tensor) -> torch.Tensor:
        rows = coded.view(-1, self.BLOCK + 4)
        return (rows[:, 4:].view(torch.int8) * rows[:, :4].contiguous().view(torch.float32)).flatten()


class PowerSGD(Codec):
    """powersgd:4: each matrix as a product of two thin ones (Vogels, Karimireddy and Jaggi 2019, algorithms 1 and 2).

    For each matrix M, (rows, columns), with Q, (columns, rank), of the last step: the ranks sum P = M Q, make its
    columns orthonormal, and sum Q = M' P. P Q' approximates the sum of the Ms. What a rank's own P Q' misses of its M
    waits for the next step. Vectors are sent whole, with P.
    """

    def start(self, name: str, buffer: torch.Tensor, shapes: list[torch.Size]) -> End:
        error, rank = self.with_error(name, buffer), int(self.number or 4)
        parts = buffer.split([shape.numel() for shape in shapes])
        matrices, whole = [], []
        for place, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
            rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, shape.numel())
            if rank * (rows + columns) < rows * columns:
                key = f"{name}/factor {place}"
                generator = torch.Generator().manual_seed(place)
                first = torch.randn(columns, rank, generator=generator).to(buffer)
                matrices.append((key, part.view(rows, columns), self.kept.setdefault(key, first)))
            else:
                whole.append(part)
        firsts = torch.cat([t.flatten() for t in ([m @ q for _, m, q in matrices] + whole)])
        work = dist.all_reduce(firsts, group=self.group, async_op=True)

        def end() -> None:
            work.wait()
            sizes = [len(m) * rank for _, m, _ in matrices]
            *ps, rest = firsts.split([*sizes, len(firsts) - sum(sizes)])
            ps = [torch.linalg.qr(p.view(-1, rank)).Q for p in ps]
            qs = [m.T @ p for (_, m, _), p in zip(matrices, ps, strict=True)]
            seconds = torch.cat([q.flatten() for q in qs]) if qs else buffer.new_empty(0)
            own = [p @ q.T for p, q in zip(ps, qs, strict=True)]
            dist.all_reduce(seconds, group=self.group)
            for (key, m, old), p, mine, q in zip(
                matrices, ps, own, seconds.split([q.numel() for q in qs]), strict=True
            ):
                place = m.storage_offset() - buffer.storage_offset()
                error[place : place + m.numel()].sub_(mine.flatten())
                q = q.view(-1, rank)
                self.kept[key] = torch.where(q.any(dim=0), q, old)  # a column of zeros would stay zero forever
                torch.mm(p, q.T, out=m)
            for part, summed in zip(whole, rest.split([len(part) for part in whole]), strict=True):
                place = part.storage_offset() - buffer.storage_offset()
                error[place : place + len(part)].zero_()
                part.copy_(summed)

        return end


CODECS = {"bf16": Half, "fp16": Float16, "int8": Int8, "topk": TopK, "powersgd": PowerSGD}


def make_codec(word: str | None, group: dist.ProcessGroup | None = None) -> Codec:
    """The codec that `word` names, such as "topk:0.05". Raises ValueError for an unknown one."""
    name, _, number = (word or "").partition(":")
    if word and name not in CODECS:
        raise ValueError(f"--compress {word}: unknown compression. Choose one of {', '.join(CODECS)}.")
    return CODECS.get(name, Codec)(float(number) if number else None, group)
