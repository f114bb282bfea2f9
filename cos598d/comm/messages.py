"""Messages between two ranks, from which a sync builds its own collective."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cos598d.comm.endpoint import Endpoint
from cos598d.comm.ledger import size_in_bytes

Places = Sequence[tuple[torch.Tensor, int]]  # tensors, each with the rank to or from which it is sent


class Messages:
    """Messages being sent. `wait` blocks until all are received, and the sent tensors may be changed."""

    def __init__(
        self,
        works: list[Any],
        landings: list[tuple[torch.Tensor, torch.Tensor]],
        departures: list[torch.Tensor],
        waits_for: Callable[[str], None],
        what: str,
    ):
        """`what` is a phrase for what arrives, of which `waits_for` is told."""
        self._works, self._landings, self._departures = works, landings, departures  # kept alive until they are sent
        self._waits_for, self._what = waits_for, what

    def wait(self) -> None:
        """Block until all have arrived. May be called more than once."""
        self._waits_for(self._what)
        for work in self._works:
            work.wait()
        self._waits_for("")
        for landing, tensor in self._landings:
            tensor.copy_(landing)
        self._works, self._landings, self._departures = [], [], []


class PostedReceives:
    """Receives that are posted before this rank sends its own messages of the same exchange.

    A message is sent only after its receiver has reported that it is ready. On a slow link that costs one more delay,
    unless the report comes early. Only messages with tags can be distinguished so early.
    """

    def __init__(self, comm: Endpoint, receives: Places, tag: int):
        self.receives = receives
        self.landings = [(comm.to_host(tensor), tensor) for tensor, _ in receives]
        self.works: list[dist.Work | None] = [
            dist.irecv(landing, comm.peer(rank), group=comm.group, tag=tag)
            for (landing, _), (_, rank) in zip(self.landings, receives, strict=True)
        ]


class PointToPointCollective:
    """A collective that a sync builds from messages. It counts what this rank really sends; `end` enters its row."""

    def __init__(self, comm: Endpoint, op: str, tensor: torch.Tensor, name: str, purpose: str):
        self._comm, self._entry, self._started = comm, (op, tensor, name, purpose), comm.time.now()
        self.messages = self.bytes_sent = self.bytes_received = 0

    def start(
        self,
        sends: Places = (),
        receives: Places = (),
        tag: int = 0,
        expected: PostedReceives | None = None,
    ) -> Messages:
        """Start to send tensors to ranks, and to receive tensors from ranks. All must be contiguous.

        Between two ranks, messages of one `tag` arrive in the order in which they were started. nccl has no tags, so
        there all messages do. `expected`: receives that were posted before.
        """
        operations: list[tuple[Callable[..., dist.Work | None], torch.Tensor, int]] = []
        landings, departures = [], []
        # Receives first: gloo sends on the calling thread, and a peer may wait for our ready message.
        for tensor, rank in receives:
            landing = self._comm.to_host(tensor)
            if landing is not tensor:
                landings.append((landing, tensor))
            operations.append((dist.irecv, landing, self._comm.peer(rank)))
            self.bytes_received += size_in_bytes(tensor)
        for tensor, rank in sends:
            departures.append(self._comm.to_host(tensor))
            operations.append((dist.isend, departures[-1], self._comm.peer(rank)))
            self.messages += 1
            self.bytes_sent += size_in_bytes(tensor)
        group = self._comm.group
        if self._comm.messages_have_tags:
            started: list[Any] = [
                self._comm.guard(functools.partial(operation, tensor, peer, group=group, tag=tag), self._entry[2])
                for operation, tensor, peer in operations
            ]
        elif operations:  # nccl may wait for a message's other end, so it needs all messages at once
            started = [*dist.batch_isend_irecv([dist.P2POp(*each, group=group) for each in operations])]
        else:
            started = []
        if expected is not None:
            landings += [pair for pair in expected.landings if pair[0] is not pair[1]]
            self.bytes_received += sum(size_in_bytes(tensor) for tensor, _ in expected.receives)
            started += expected.works
        works = [work for work in started if work is not None]
        _, _, name, purpose = self._entry
        return Messages(works, landings, departures, self._comm.waits_for, f"the {purpose} of {name}")

    def swap(self, sends: Places = (), receives: Places = ()) -> None:
        """As `start`, then wait."""
        self.start(sends, receives).wait()

    def end(self) -> None:
        """End the collective and enter it in the ledger."""
        if self._comm.world_size > 1:
            row = self._comm.row(*self._entry, self.bytes_sent, self.bytes_received) | {"messages": self.messages}
            self._comm.ledger.enter_call(row, self._comm.time, self._started, self._comm.time.now())
