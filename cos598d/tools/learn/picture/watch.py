"""On a rank: a note of both ends of every message that a collective is composed of, and of work in shared memory."""

import time
from typing import Any

import torch

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import size_in_bytes
from cos598d.comm.messages import Messages, Places, PointToPointCollective, PostedReceives
from cos598d.records.conventions import GRADIENTS, PARAMETERS, WHOLE_WEIGHTS
from cos598d.sync.shared_memory import SharedMemory
from cos598d.tools.learn.picture.messages import MessageEnd, Shared


class WatchedCommunicator(Communicator):
    """A communicator that does the same, and notes the messages of what its calls are composed of.

    Noted are gradients, and the weights that travel after them; those that a rank gathers before its first gradient
    were made of earlier steps' gradients.
    """

    def __init__(self, comm: Communicator):
        vars(self).update(vars(comm))
        self.ends: list[MessageEnd] = []

    def compose(self, op: str, tensor: torch.Tensor, name: str, *, purpose: str = GRADIENTS) -> PointToPointCollective:
        return _WatchedCall(self, op, tensor, name, purpose)

    def is_noted(self, purpose: str, name: str) -> bool:
        """Whether a message of this tensor is noted now."""
        if purpose in (PARAMETERS, WHOLE_WEIGHTS):
            return any(end.tensor == name for end in self.ends)
        return purpose == GRADIENTS


class _WatchedCall(PointToPointCollective):
    """A call whose messages are noted when they have been waited for."""

    def __init__(self, comm: WatchedCommunicator, op: str, tensor: torch.Tensor, name: str, purpose: str):
        super().__init__(comm, op, tensor, name, purpose)
        self._watch, self._whole, self._name, self._purpose = comm, tensor, name, purpose

    def start(
        self,
        sends: Places = (),
        receives: Places = (),
        tag: int = 0,
        expected: PostedReceives | None = None,
    ) -> Messages:
        now = time.perf_counter()
        coming = [*receives, *(expected.receives if expected is not None else ())]
        begun = super().start(sends, receives, tag, expected)
        if not self._watch.is_noted(self._purpose, self._name):
            return begun
        ends = [
            {
                "rank": self._watch.rank,
                "peer": peer,
                "tensor": self._name,
                "is_sent": is_sent,
                "begin": _place_in(part, self._whole),
                "elements": part.numel(),
                "bytes": size_in_bytes(part),
                "tag": tag,
                "started": now,
            }
            for is_sent, places in ((False, coming), (True, sends))
            for part, peer in places
        ]
        return _WatchedMessages(begun, ends, self._watch.ends)


class _WatchedMessages(Messages):
    """Messages under way that are noted, once, when they have been waited for."""

    def __init__(self, begun: Messages, ends: list[dict[str, Any]], noted: list[MessageEnd]):
        vars(self).update(vars(begun))
        self._ends, self._noted = ends, noted

    def wait(self) -> None:
        super().wait()
        ends, self._ends = self._ends, []
        now = time.perf_counter()
        self._noted.extend(MessageEnd(**end, ended=now) for end in ends)


class WatchedSharedMemory(SharedMemory):
    """Averaging in shared memory that notes, for each bucket, when this rank filled, added up and copied it."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.notes: list[Shared] = []
        self._filled: dict[int, float] = {}
        self._added_at: dict[int, float] = {}

    def start(self, unit: int) -> Any:
        self._filled[unit] = time.perf_counter()
        return super().start(unit)

    def _add_up(self, until: int, waits: bool) -> None:
        # One at a time: others copy a bucket as soon as it is added up, and its moment must be before theirs.
        for unit in range(self._added, until):
            super()._add_up(unit + 1, waits)
            if self._added <= unit:
                return  # some rank has not filled it yet, and no later bucket may be added up first
            self._added_at[unit] = time.perf_counter()

    def average_bucket(self, unit: int, call: PointToPointCollective) -> None:
        super().average_bucket(unit, call)
        result = self.segments.result[unit]
        own = [total for total, *_ in self._blocks[unit]]
        begin = _place_in(own[0], result) if own and len(own[0]) else 0
        self.notes.append(
            Shared(
                rank=self.comm.rank,
                tensor=self.buckets[unit].name,
                begin=begin or 0,
                end=(begin or 0) + sum(map(len, own)),
                element_bytes=result.element_size(),
                filled=self._filled[unit],
                added=self._added_at[unit],
                copied=time.perf_counter(),
            )
        )


def _place_in(part: torch.Tensor, whole: torch.Tensor) -> int | None:
    """The first element of `whole` that `part` is a view of; None if it is no view of it."""
    offset = part.data_ptr() - whole.data_ptr()
    if 0 <= offset < size_in_bytes(whole):
        return offset // whole.element_size()
    return None
