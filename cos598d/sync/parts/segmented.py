"""What syncs share that build a collective from messages: long tensors are sent in several segments at once."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from cos598d.comm.calls import Call
from cos598d.comm.messages import PointToPointCollective
from cos598d.sync.base import GradientSync
from cos598d.sync.estimate import Buffers, Tensor
from cos598d.sync.options import SyncOptions

Place = tuple[torch.Tensor, int]  # a tensor, and the rank to which or from which it is sent


class ByMessages(GradientSync):
    """A sync of whole buffers (`Flat`) whose sum over ranks a subclass makes of messages.

    A subclass has both as its bases, this one first, and defines:

    op                                              the collective's name in the ledger
    sum_over_ranks(call, buffer, scratch)           put the sum into `buffer`, on every rank
    collective                                      the bytes of that (`cos598d/sync/cost.py`)

    Terms of the sum arrive in `scratch`, (`in_flight`, elements of a segment). It is allocated once, since fresh memory
    costs a page fault for every 4 KiB. Adding one segment overlaps with the transfer of the next ones.
    """

    op: str
    # A compromise: each segment costs some 0.2 ms of CPU time in addition to its bytes (four ranks on two cores), but a
    # large one may have left the CPU's cache before it is added.
    segment_bytes = 2 << 20
    in_flight = 4

    def attach(self, model: nn.Module) -> nn.Module:
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        return super().attach(model)

    def sum_up(self, tensor: torch.Tensor, name: str) -> Call:
        """As in `WithCodec`, but the sum is complete when this returns."""
        key = name, tensor.dtype
        if key not in self._scratch:
            self._scratch[key] = make_scratch(tensor, self.segment_bytes, self.in_flight)
        with self.comm.composed(self.op, tensor, name) as call:
            self.sum_over_ranks(call, tensor, self._scratch[key])
        return Call.done()

    def sum_over_ranks(self, call: PointToPointCollective, buffer: torch.Tensor, scratch: torch.Tensor) -> None:
        """Replace `buffer` by its sum over the ranks."""
        raise NotImplementedError(f"{type(self).__name__} has no sum_over_ranks()")

    @classmethod
    def buffers(cls, tensors: Sequence[Tensor], options: SyncOptions) -> Buffers:
        """The whole buffers of the other base class, and the scratch of each."""
        whole = super().buffers(tensors, options)
        if whole.unsaid:
            return whole
        sizes = (sum(tensor.bytes for tensor in group) for group in whole.groups)
        return replace(whole, scratch=sum(cls.in_flight * min(cls.segment_bytes, size) for size in sizes))

    def detach(self) -> None:
        self._scratch = {}
        super().detach()


def make_scratch(
    buffer: torch.Tensor, segment_bytes: int, in_flight: int, old: torch.Tensor | None = None
) -> torch.Tensor:
    """A tensor in which segments of `buffer` arrive before they are added: (in_flight, elements of a segment).

    `old` is existing scratch of this dtype. It is returned if it is long enough.
    """
    elements = max(1, min(segment_bytes // buffer.element_size(), buffer.numel()))
    return old if old is not None and old.shape[1] >= elements else buffer.new_empty(in_flight, elements)


@dataclass(frozen=True)
class Exchange:
    """One segment sent to a rank while one is received from a rank. Either may be None or empty, and is skipped then.

    `adds`: whether the received segment is added to the tensor `incoming`, or replaces it.
    """

    outgoing: Place | None
    incoming: Place | None
    adds: bool = False


def pipeline(call: PointToPointCollective, exchanges: Iterable[Exchange], scratch: torch.Tensor) -> None:
    """Make the exchanges in order, `len(scratch)` of them at any moment, and wait for the last.

    An exchange starts when the one `len(scratch)` places before it is done: what it sends must be final by then.
    """
    under_way: deque[tuple] = deque()

    def end_first() -> None:
        messages, target, landing = under_way.popleft()
        messages.wait()
        if landing is not None:
            target += landing

    for number, exchange in enumerate(exchanges):
        if len(under_way) == len(scratch):
            end_first()
        sends = [exchange.outgoing] if exchange.outgoing and exchange.outgoing[0].numel() else []
        receives, target, landing = [], None, None
        if exchange.incoming and exchange.incoming[0].numel():
            target, source = exchange.incoming
            landing = scratch[number % len(scratch)][: target.numel()] if exchange.adds else None
            receives = [(target if landing is None else landing, source)]
        under_way.append((call.start(sends, receives), target, landing))
    while under_way:
        end_first()


def move(
    call: PointToPointCollective,
    scratch: torch.Tensor,
    outgoing: Place | None = None,
    incoming: Place | None = None,
    adds: bool = False,
) -> None:
    """Send one tensor and receive another (or only one of the two), in segments; `adds` as in `Exchange`.

    The rank at the other end must make the matching call: it splits the same tensors in the same way.
    """
    count = max(segment_count(place[0], scratch) for place in (outgoing, incoming) if place)

    def cut(place: Place | None) -> list[Place | None]:
        return [(segment, place[1]) for segment in place[0].tensor_split(count)] if place else [None] * count

    pipeline(call, (Exchange(out, come, adds) for out, come in zip(cut(outgoing), cut(incoming), strict=True)), scratch)


def segment_count(tensor: torch.Tensor, scratch: torch.Tensor) -> int:
    """The number of segments of `tensor`, at least one, so that each fits into a row of `scratch`."""
    return max(1, -(-tensor.numel() // scratch.shape[1]))
