"""The collectives of a process group that a script opened: errors are sentences, and a ledger has only totals."""

import contextlib
import functools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from cos598d.comm.calls import Call, Pending
from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import Ledger, Row
from cos598d.comm.timers import Timer, Timestamp
from cos598d.errors import UserError, one_line
from cos598d.records.conventions import GRADIENTS, STATE

# The end of a sentence about a rank that is missing from a collective.
AS_MANY_BATCHES = "Give every rank the same number of batches."
# How often a waiting rank checks whether another one has left.
LOOK_EVERY = timedelta(seconds=2)
# For the ranks of a group, the number of its next communicator, which is the same on every rank.
_NUMBERS: dict[tuple[int, ...], Iterator[int]] = defaultdict(count)
# For the same key, the next unused tag: several models may train in one script.
_TAGS: dict[tuple[int, ...], int] = defaultdict(lambda: 1)


@dataclass
class TensorTotals:
    """The calls and bytes of one tensor or bucket; bytes by the ledger's formulas."""

    calls: int = 0
    payload_bytes: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class TensorLedger(Ledger):
    """A ledger with totals by purpose and tensor instead of rows, so that it does not grow with the steps."""

    def __init__(self):
        super().__init__()
        self._totals: dict[tuple[str, str], TensorTotals] = {}

    def enter(self, row: Row) -> None:
        total = self._totals.setdefault((row.purpose, row.tensor), TensorTotals())
        total.calls += 1
        total.payload_bytes += row.payload_bytes
        total.bytes_sent += row.bytes_sent
        total.bytes_received += row.bytes_received

    def enter_call(self, facts: dict[str, Any], time: Timer, started: Timestamp, ended: Timestamp) -> None:
        # seconds are not kept, so the host need not wait for them
        self.enter(Row(self.iteration, **facts, seconds=None))

    def bytes_sent(self) -> dict[str, int]:
        """The bytes that this rank has sent so far, by tensor or bucket, for all purposes."""
        sent: dict[str, int] = defaultdict(int)
        for (_, tensor), total in self._totals.items():
            sent[tensor] += total.bytes_sent
        return dict(sent)

    def totals(self, purpose: str = "gradients") -> dict[str, TensorTotals]:
        """What was sent so far, by tensor.

        `purpose`: "gradients", "state" (at the start), "agreement" or "buffers".
        """
        return {tensor: total for (its, tensor), total in self._totals.items() if its == purpose}


def release_groups() -> None:
    """Make torch.distributed.nn's functions look their default group up, in place of one that was open at their import.

    torch.optim imports them, so in most scripts. The group that they keep stays open after `destroy_process_group`,
    and now and then its threads abort the exit: "terminate called without an active exception". None means the default
    group to them, too.
    """
    for function in vars(torch.distributed.nn.functional).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value for value in function.__defaults__
            )


class GroupCommunicator(Communicator):
    """The collectives of a process group that was opened elsewhere (None: torch's default one)."""

    ledger: TensorLedger

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, seconds: float):
        release_groups()
        # One backend, or one per kind of device: "cpu:gloo,cuda:nccl".
        backends = dict(part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part)
        super().__init__(None, backends.get(device.type, dist.get_backend(group)), device, TensorLedger())
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        # a reference to the default group would keep it open after it is destroyed
        self.group = None if group is dist.group.WORLD else group
        self._seconds = seconds
        self.equal_already: set[str] = set()  # names of the parameters and buffers that need not be sent from rank 0
        self.calls = 0  # collectives so far
        self._ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        self._key = f"cos598d/left/{'-'.join(map(str, self._ranks))}/{next(_NUMBERS[self._ranks])}"
        self._store = getattr(dist.distributed_c10d, "_get_default_store", lambda: None)()

    def broadcast(self, tensor: torch.Tensor, name: str, *, root: int = 0, purpose: str = GRADIENTS) -> None:
        if purpose != STATE or name not in self.equal_already:
            super().broadcast(tensor, name, root=root, purpose=purpose)

    @property
    def timeout_seconds(self) -> float:
        return self._seconds

    def take_tags(self, count: int) -> int:
        first = _TAGS[self._ranks]
        _TAGS[self._ranks] += count
        return first

    def leave(self, calls: int) -> None:
        """Tell the ranks that wait for this one in a collective that it takes part only in its first `calls`."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the process with the store may have ended
                self._store.set(f"{self._key}/{self.rank}", str(calls))

    def has_left(self, call: int) -> int | None:
        """A rank that has left before this call and will not make it; None if there is none."""
        if self._store is None:
            return None
        with contextlib.suppress(RuntimeError):
            for rank in self.others:
                if self._store.check([f"{self._key}/{rank}"]) and int(self._store.get(f"{self._key}/{rank}")) < call:
                    return rank
        return None

    def guard(self, start: Callable[[], Pending], name: str) -> Pending:
        return _GuardedCall(self, start, name)

    def _start(self, collective: Callable[[], Any], entry: tuple, *arguments: Any, **options: Any) -> Call:
        self.calls += 1  # the same number on every rank
        return super()._start(
            lambda: _GuardedCall(self, collective, entry[2], self.calls), entry, *arguments, **options
        )

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value`, in order of rank: its JSON's bytes, padded to the longest, by two all-gathers."""
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        lengths = self._gathered(torch.tensor([len(mine)], device=self.device))
        padded = torch.cat([mine, mine.new_zeros(int(max(lengths)) - len(mine))])
        parts = self._gathered(padded)
        return [json.loads(bytes(part[: int(n)].tolist())) for part, n in zip(parts, lengths, strict=True)]

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        collective = functools.partial(dist.all_gather, parts, tensor, group=self.group, async_op=True)
        self.guard(collective, "what the ranks tell each other at the start").wait()
        return parts


class _GuardedCall:
    """A message or collective that has been started. Its `wait` raises a sentence if another rank has left.

    A collective has a number. While it waits, it checks from time to time whether a rank has left before that number.
    """

    def __init__(self, comm: GroupCommunicator, start: Callable[[], Any], name: str, number: int | None = None):
        self._comm, self._name, self._number = comm, name, number
        with self._explained():
            self._work = start()

    def wait(self) -> None:
        with self._explained():
            if self._number is None or self._comm.backend != "gloo":
                self._work.wait()
                return
            while not self._is_over():
                rank = self._comm.has_left(self._number)
                if rank is not None:
                    raise UserError(
                        f"rank {rank} has called detach() or has lost a rank itself, and this rank waits for its part "
                        f"of {self._name}. {AS_MANY_BATCHES}"
                    )

    def _is_over(self) -> bool:
        """Wait for a while. Return whether the call has ended."""
        try:
            self._work.wait(LOOK_EVERY)
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # it has ended in the meantime, maybe with an error of its own
        return True

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not re.search("closed by peer|reset by peer|broken pipe|timed out|timeout", str(error), re.IGNORECASE):
                raise
            # Ranks further along a ring wait for this one, and their connections are intact.
            self._comm.leave(self._comm.calls if self._number is None else self._number - 1)
            raise UserError(
                f"another rank took no part in {self._name}: {one_line(error)}. It failed, or it had fewer batches. "
                f"{AS_MANY_BATCHES}"
            ) from error
