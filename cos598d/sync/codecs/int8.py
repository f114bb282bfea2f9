"""Gradients as 8-bit integers with a scale for each block."""

from collections.abc import Mapping, Sequence

import torch

from cos598d.comm.messages import Messages, PointToPointCollective
from cos598d.sync.buckets import Bucket
from cos598d.sync.codecs.base import Codec
from cos598d.sync.cost import Even, both_ways
from cos598d.sync.estimate import Tensor

BLOCK = 1024  # elements that share a scale
SCALE_BYTES = 4
DRAWN = 16  # blocks for which random numbers are generated


class Int8(Codec["_ChunkExchange"]):
    """Scaled 8-bit numbers, summed in 32 bits by the rank that owns the part.

    1. Every rank splits its bucket into n parts, and encodes each in blocks of 1,024 elements. x becomes floor(127 x /
       m + u). Here m is the block's largest absolute value, which is sent with the block, and u is a random number in
       [0, 1).
    2. Part r goes to rank r, which decodes and adds the n versions of it.
    3. Rank r encodes its sum and sends it to all. Every rank, the owner too, decodes what was sent.

    Ratio just under 4: every rank sends and receives 2(n-1) parts of 1 + 4/1024 bytes per element. An element's error
    is less than m/127 in each of the n versions, and once more in the sum. With rounding to nearest, an element below
    m/254 would always be 0. With u it is rounded up in proportion to its size (stochastic rounding, as in QSGD,
    Alistarh et al. 2017). So the mean over steps is right, and no error has to be kept. u comes from each rank's own
    generator, seeded by the rank: the same training gives the same bits.
    """

    collective = Even("all_reduce", lambda ranks: 2, both_ways)  # directly to the part's owner, and directly back
    memory = "the random numbers by which int8 rounds"

    def set_up(self) -> None:
        self.generator = torch.Generator(self.comm.device).manual_seed(self.comm.rank)

    @classmethod
    def payloads(cls, bucket: Sequence[Tensor], ranks: int, number: float) -> list[tuple[int, int]]:
        return [(ranks * _blocks(sum(tensor.numel() for tensor in bucket), ranks) * (BLOCK + SCALE_BYTES), 1)]

    def start(self, bucket: Bucket, scale: float = 1.0) -> "_ChunkExchange":
        return _ChunkExchange(self, bucket)

    def finish(self, bucket: Bucket, pending: "_ChunkExchange") -> None:
        bucket.buffer.copy_(pending.result(bucket))

    def own_state(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_own_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if "generator" in tensors:
            self.generator.set_state(tensors["generator"])


class _ChunkExchange:
    """One bucket being exchanged: first the parts to their owners, then the sums to everybody."""

    def __init__(self, codec: Int8, bucket: Bucket):
        comm, self._members = codec.comm, codec.members
        self._mine, count = self._members.index(comm.rank), len(self._members)
        self._others = [place for place in range(count) if place != self._mine]
        blocks = _blocks(bucket.buffer.numel(), count)
        # Replaces the bucket's encoded parts, whose size the ledger asks for before they exist.
        coded = torch.empty(count * blocks * (BLOCK + SCALE_BYTES), dtype=torch.uint8, device="meta")
        self._call: PointToPointCollective = comm.compose("int8_all_reduce", coded, bucket.name)
        padded = torch.zeros(count * blocks * BLOCK, dtype=torch.float32, device=bucket.buffer.device)
        padded[: bucket.buffer.numel()] = bucket.buffer
        self._generator = codec.generator
        self._parts = [encode(part, self._generator) for part in padded.split(blocks * BLOCK)]
        self._arrived = {k: torch.empty_like(self._parts[k]) for k in self._others}
        self._under_way: Messages = self._call.start(
            [(self._parts[k], self._members[k]) for k in self._others],
            [(self._arrived[k], self._members[k]) for k in self._others],
        )

    def wait(self) -> None:
        self._under_way.wait()

    def result(self, bucket: Bucket) -> torch.Tensor:
        """The sum as every rank decodes it, (elements,)."""
        self.wait()
        # In order of rank, so that the sum does not depend on which rank computes it.
        places = range(len(self._members))
        first, *others = (decode(self._parts[k] if k == self._mine else self._arrived[k]) for k in places)
        total = sum(others, first)
        sums = [torch.empty_like(part) for part in self._parts]
        sums[self._mine] = encode(total, self._generator)
        self._call.swap(
            [(sums[self._mine], self._members[k]) for k in self._others],
            [(sums[k], self._members[k]) for k in self._others],
        )
        self._call.end()
        return torch.cat([decode(part) for part in sums])[: bucket.buffer.numel()]


def _blocks(elements: int, ranks: int) -> int:
    """How many blocks each rank's part of a bucket has."""
    return max(1, -(-elements // (BLOCK * ranks)))


def encode(part: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Encode float32 (blocks x BLOCK,) as uint8 (blocks x (BLOCK + 4),): scales, then randomly rounded numbers."""
    blocks = part.view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    numbers = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)
    # Generating takes far longer than adding: blocks that are DRAWN apart share a step's random numbers.
    drawn = torch.rand(DRAWN, BLOCK, generator=generator, device=part.device)
    whole = len(blocks) // DRAWN * DRAWN
    numbers[:whole].view(-1, *drawn.shape).add_(drawn)
    numbers[whole:] += drawn[: len(blocks) - whole]
    numbers = numbers.floor_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8).flatten(), numbers.view(torch.uint8).flatten()])


def decode(coded: torch.Tensor) -> torch.Tensor:
    """The inverse of `encode`, float32 (blocks x BLOCK,)."""
    blocks = coded.numel() // (BLOCK + SCALE_BYTES)
    scales = coded[: blocks * SCALE_BYTES].clone().view(torch.float32)
    numbers = coded[blocks * SCALE_BYTES :].view(torch.int8).view(blocks, BLOCK)
    return (numbers * scales.unsqueeze(1)).flatten()
