"""The ledger: one row for every collective call that this process makes, with the bytes that it sent and received.

Nothing of torch.distributed is replaced. torch's dispatcher tells the ledger of each call (`comm/dispatcher.py`). So it
does not matter who calls: a sync, a student's file, FSDP, or DDP's reducer in C++. Calls in any process group count.

The bytes are those of gloo's algorithms (`comm/gloo.py`). nccl chooses other algorithms by size and links, and does not
report them. Its calls are assumed to send as many bytes as gloo's.
"""

import contextlib
import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from cos598d.comm.dispatcher import DispatchedCall, listening
from cos598d.comm.gloo import bytes_moved
from cos598d.records.conventions import AGREEMENT, BUFFERS, GRADIENTS, PARAMETERS, SYNCHRONIZING

BEFORE_TRAINING = 0


class Row(msgspec.Struct, eq=False):
    """One collective call of one rank.

    `iteration` counts from 1; 0 is before training. A call belongs to the iteration in which it started; after an
    iteration's end, to that one until the next begins. `payload_bytes` is the tensor's size. `bytes_sent` and
    `bytes_received` are this rank's bytes by the algorithm's formula, rounded to a byte. `seconds` is from the call to
    its completion, on whatever thread; None while it runs, on CUDA, and if the backend does not tell, as for gloo's
    messages. `started` is in seconds since the iteration began; None before training. Both are rounded to nanoseconds,
    the clock's resolution.
    """

    iteration: int
    purpose: str
    op: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    payload_bytes: int
    bytes_sent: int
    bytes_received: int
    seconds: float | None = None
    started: float | None = None


@dataclass(frozen=True)
class Totals:
    """Sums over synchronizing calls: of gradients, or of weights that are held in shards.

    A tensor that is sent in several calls (gathered, then scattered) counts once in `tensors` and `payload_bytes`.
    """

    calls: int = 0
    tensors: int = 0
    payload_bytes: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class Ledger:
    """The rows of one process, in the order of its calls. `with ledger:` around a training writes them down.

    Several ledgers may be entered at once: each gets every call. The loop calls `begin` for each iteration. Without
    `output`, all rows stay in `rows`. With it, `take` writes those of the iterations that it `keeps` as JSON lines (to
    its `writelines`), and drops them; `by_purpose` has the sums of all.
    """

    def __init__(self, output: Any = None, keeps: Callable[[int], bool] = lambda iteration: True):
        self.iteration = BEFORE_TRAINING
        self.rows: list[Row] = []
        # By purpose: calls, bytes of payload, bytes sent, bytes received.
        self.by_purpose: dict[str, tuple[int, int, int, int]] = {}
        self._output, self._keeps = output, keeps
        self._began: float | None = None  # when the iteration did
        self._since: list[Row] = []  # the rows since the last `take`
        self._under_way: set[Row] = set()  # their seconds will come
        self._call: tuple[str, str] | None = None  # the purpose and tensor of the calls that are made now
        self._composed: Row | None = None  # a collective that is being made of calls
        self._unnamed = 0  # calls of this iteration that nobody has named
        self._entered, self._is_heard = contextlib.ExitStack(), False

    def __enter__(self) -> "Ledger":
        self._entered.enter_context(listening(self._listen))
        self._is_heard = True
        return self

    def __exit__(self, *_: Any) -> None:
        self._entered.close()
        self._is_heard = False

    def begin(self, iteration: int, began: float | None = None) -> None:
        """The next rows belong to this iteration, which began at this time.perf_counter(), by default now."""
        self.iteration, self._unnamed = iteration, 0
        self._began = time.perf_counter() if began is None else began

    @contextlib.contextmanager
    def naming(self, tensor: str, purpose: str = GRADIENTS) -> Iterator[None]:
        """A context in which calls are about `tensor`, for a `purpose`. Contexts may be nested: the innermost counts.

        Outside of any, a call's purpose is told by its operation, and it is numbered.
        """
        before = self._call, self._composed
        self._call, self._composed = (purpose, tensor), None
        try:
            yield
        finally:
            self._call, self._composed = before

    @contextlib.contextmanager
    def composing(
        self, op: str, tensor: torch.Tensor, name: str, purpose: str = GRADIENTS, ends_later: bool = False
    ) -> Iterator[Callable[[], None]]:
        """A context whose calls together are one collective `op` on `tensor`: one row, with what was really sent.

        Calls that `naming` names within it have rows of their own. The collective ends with the context; if it
        `ends_later`, when what the context gives is called.
        """
        began = time.perf_counter()
        row = self._row((purpose, name), op, [tensor], _payload([tensor]), (0, 0), began)
        end = functools.partial(self._end, row, began)
        with self.naming(name, purpose):
            self._composed = row
            yield end
        if self._is_heard:
            self._enter(row)
            self._under_way.add(row)
        if not ends_later:
            end()

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """A context whose calls have no rows, such as those of a resume, which an uninterrupted training has not."""
        was, self._is_heard = self._is_heard, False
        try:
            yield
        finally:
            self._is_heard = was

    @property
    def named(self) -> str:
        """What calls are about now, as `naming` says; "" outside of any."""
        return self._call[1] if self._call else ""

    def sent(self, *purposes: str, iteration: int | None = None) -> int:
        """The bytes that this rank has sent for these purposes (default: all), in an iteration or in all of them."""
        chosen = (row for row in self.rows if iteration in (None, row.iteration))
        return sum(row.bytes_sent for row in chosen if row.purpose in purposes or not purposes)

    def take(self) -> tuple[tuple[int, int], Totals]:
        """The sums since the last `take`: bytes sent and received, and the synchronizing calls. Write rows, if asked.

        A call that has not ended yet counts, and its row is written by a later `take`.
        """
        since, self._since = self._since, []
        moved = sum(row.bytes_sent for row in since), sum(row.bytes_received for row in since)
        if self._output is not None:
            done = [row for row in self.rows if row not in self._under_way]
            self.rows = [row for row in self.rows if row in self._under_way]
            kept = (msgspec.structs.asdict(row) for row in done if self._keeps(row.iteration))
            self._output.writelines(json.dumps(row) + "\n" for row in kept)
        return moved, total([row for row in since if row.purpose in SYNCHRONIZING])

    def _listen(self, call: DispatchedCall) -> None:
        """Enter a call that torch has made."""
        if not self._is_heard or not call.tensors:  # as a barrier has none
            return
        is_far, payload, group = call.tensors[0].device.type != "cpu", _payload(call.tensors), call.group
        moved = bytes_moved(call.op, payload, group.size(), group.rank(), call.root, is_ideal=is_far)
        if row := self._composed:
            row.bytes_sent += moved[0]
            row.bytes_received += moved[1]
        elif any(moved):
            row = self._row(self._call or self._default(call), call.op, call.tensors, payload, moved, call.began)
            self._enter(row)
            if not is_far and call.work is not None:
                with contextlib.suppress(RuntimeError):  # gloo's messages have no future
                    future = call.work.get_future()
                    self._under_way.add(row)
                    future.add_done_callback(functools.partial(self._end, row, call.began))

    def _row(
        self, call: tuple[str, str], op: str, tensors: list[torch.Tensor], payload: int, moved: Any, began: float
    ) -> Row:
        first, *others = tensors
        shape = (sum(tensor.numel() for tensor in tensors),) if others else tuple(first.shape)
        started = None if self._began is None else round(began - self._began, 9)
        dtype = str(first.dtype)[6:]
        return Row(self.iteration, call[0], op, call[1], shape, dtype, payload, moved[0], moved[1], None, started)

    def _enter(self, row: Row) -> None:
        self.rows.append(row)
        self._since.append(row)
        calls, payload, sent, received = self.by_purpose.get(row.purpose, (0, 0, 0, 0))
        moved = (payload + row.payload_bytes, sent + row.bytes_sent, received + row.bytes_received)
        self.by_purpose[row.purpose] = (calls + 1, *moved)

    def _end(self, row: Row, began: float, *_: Any) -> None:
        """The row's call has ended, maybe on the backend's thread."""
        row.seconds = round(time.perf_counter() - began, 9)
        self._under_way.discard(row)

    def _default(self, call: DispatchedCall) -> tuple[str, str]:
        """The purpose and name of a call that nobody has named, such as one of DDP's reducer."""
        first = call.tensors[0]
        if first.dtype == torch.int32 or sum(tensor.numel() for tensor in call.tensors) == 1:
            return AGREEMENT, "what the ranks agree on"
        if call.op == "broadcast":
            return BUFFERS, "buffers"
        self._unnamed += 1
        return PARAMETERS if call.op == "all_gather" else GRADIENTS, f"call {self._unnamed}"


def _payload(tensors: list[torch.Tensor]) -> int:
    """The tensors' bytes; of a sparse one those of its dense form, since it has no `nbytes`."""
    return sum(each.numel() * each.element_size() for each in tensors)


def total(rows: list[Row]) -> Totals:
    """The sums of some rows."""
    # A tensor may be sent in pieces (take the sum) and in several ways, such as out and back (take the largest).
    by_op: dict[tuple[tuple[int, str], str], int] = defaultdict(int)
    for row in rows:
        by_op[(row.iteration, row.tensor), row.op] += row.payload_bytes
    payloads: dict[tuple[int, str], int] = defaultdict(int)
    for (tensor, _), payload in by_op.items():
        payloads[tensor] = max(payloads[tensor], payload)
    sent, received = sum(row.bytes_sent for row in rows), sum(row.bytes_received for row in rows)
    return Totals(len(rows), len(payloads), sum(payloads.values()), sent, received)
