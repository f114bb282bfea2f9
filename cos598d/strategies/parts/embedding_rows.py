"""One embedding's gradient in rows: this rank's own, on its way, and the sum over all ranks, on every rank."""

import warnings
from collections.abc import Sequence

import torch

from cos598d.comm.calls import Pending
from cos598d.comm.communicator import Communicator
from cos598d.comm.messages import Messages, PointToPointCollective
from cos598d.strategies.parts.units import Unit
from cos598d.sync.buckets import MIB


class EmbeddingRows:
    """An embedding's gradient, (rows, width).

    1. `add` keeps this rank's own gradient of a backward, sparse as torch computes it, each row once.
    2. `start`: all ranks know by now which rows each of them has noted. Every rank sends the values of its own straight
       to all others. Where a ring all-reduce of the rows that some rank has noted would send a MiB less, it is that: it
       is more messages, one after the other.
    3. `end` adds them to `sums`, zeros but for such rows, in order of rank: on every rank to the same bits.
    A gradient that is more than what was noted, as one of a weight that is also read as it is: its rank says so in a
    last row beside the values, and all ranks all-reduce it as a whole, this time and from then on.
    """

    def __init__(self, comm: Communicator, unit: Unit):
        ((self._name, self.parameter),) = unit.parameters
        self._comm, self._tag = comm, unit.gradients_tag
        self.sums = torch.zeros_like(self.parameter.data, memory_format=torch.contiguous_format)
        self.is_summed = torch.zeros(len(self.sums), dtype=torch.bool, device=self.sums.device)  # what is not zeros
        self._is_old = False  # what is summed is an earlier step's
        self._is_whole = False  # it travels as a whole
        self._own: torch.Tensor | None = None
        self._terms: list[tuple[torch.Tensor, torch.Tensor]] = []  # rows, and values with the last row
        self._under_way: Pending | None = None

    def add(self, gradient: torch.Tensor) -> None:
        """Add to this rank's own gradient, sparse or, where the weight was not only looked up, dense."""
        own = gradient if self._own is None else _sum(self._own, gradient)
        self._own = own.coalesce() if own.is_sparse else own

    def start(self, noted: Sequence[torch.Tensor]) -> None:
        """This rank's own gradient of a backward is complete: start its sum. noted: (rows,) bool, in order of rank."""
        if self._is_whole:
            self._terms = [(_all_rows(self.sums), self._whole())]
            self._under_way = self._comm.all_reduce(self._terms[0][1], self._name, async_op=True)
            return
        ranks, rank = self._comm.world_size, self._comm.rank
        union = torch.stack(list(noted)).any(dim=0)
        rows = [each.nonzero().flatten() for each in noted]
        directly = (ranks - 1) * max(map(len, rows))
        in_a_ring = 2 * (ranks - 1) * int(union.sum()) / ranks
        if (directly - in_a_ring) * self.sums[0].nbytes > MIB:
            values = self._values(union, noted[rank])
            self._terms = [(union.nonzero().flatten(), values)]
            self._under_way = self._comm.all_reduce(values, self._name, async_op=True)
            return
        own = self._values(noted[rank], noted[rank])
        self._terms = [
            (each, own if other == rank else own.new_empty(len(each) + 1, own.shape[1]))
            for other, each in enumerate(rows)
        ]
        others = self._comm.others
        call = self._comm.compose("all_gather", own, self._name)
        messages = call.start(
            [(own, other) for other in others], [(self._terms[other][1], other) for other in others], self._tag
        )
        self._under_way = _RowExchange(call, messages)

    def end(self) -> None:
        """Block until the sum over all ranks of what was started is in `sums`, beside what is there of this step."""
        assert self._under_way is not None
        self._under_way.wait()
        if not self._is_whole and any(values[-1, 0] for _, values in self._terms):
            self._is_whole = True
            self._terms = [(_all_rows(self.sums), self._whole())]
            self._comm.all_reduce(self._terms[0][1], self._name)
            if self._comm.rank == 0:
                warnings.warn(
                    f"{self._name} is used otherwise than by its embedding's forward, so that any row may have a "
                    "gradient: all of them travel.",
                    stacklevel=2,
                )
        if self._is_old:
            self.sums[self.is_summed] = 0
            self.is_summed.zero_()
            self._is_old = False
        for rows, values in self._terms:
            self.sums.index_add_(0, rows, values[: len(rows)])
            self.is_summed[rows] = True
        self._own, self._under_way, self._terms = None, None, []

    def forget(self) -> None:
        """The step is over."""
        self._own, self._is_old = None, True

    def squares(self, part: int, parts: int) -> torch.Tensor:
        """The sum of the squares of one of so many parts of the sums, in float64."""
        rows = self.is_summed.nonzero().flatten().tensor_split(parts)[part]
        return torch.linalg.vector_norm(self.sums[rows]).double().square()

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply the sums in place. Zeros stay zeros, though the factor may be no number."""
        self.sums[self.is_summed] *= factor

    def tensors(self) -> list[torch.Tensor]:
        """What holds gradients."""
        held = [self.sums, *(values for _, values in self._terms)]
        if self._own is not None:
            held += [self._own._indices(), self._own._values()] if self._own.is_sparse else [self._own]
        return held

    def _values(self, rows: torch.Tensor, noted: torch.Tensor) -> torch.Tensor:
        """This rank's gradient in those rows, (rows,) bool, and a last row: ones where it is not all in noted ones."""
        values = self.sums.new_zeros(int(rows.sum()) + 1, self.sums.shape[1])
        own = self._own
        if own is not None and own.is_sparse and bool(noted[own.indices()[0]].all()):
            places = rows.cumsum(0) - 1
            values[places[own.indices()[0]]] = own.values()
        elif own is not None:
            values[-1] = 1
        return values

    def _whole(self) -> torch.Tensor:
        """This rank's gradient in all rows, to be written."""
        whole = torch.zeros_like(self.sums)
        return whole if self._own is None else whole.add_(self._own)


class _RowExchange:
    """Rows under way to all ranks; `wait` blocks until all have come, and enters them in the ledger."""

    def __init__(self, call: PointToPointCollective, messages: Messages):
        self._call, self._messages = call, messages

    def wait(self) -> None:
        self._messages.wait()
        self._call.end()


def _sum(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Of sparse or dense tensors: torch adds a sparse one to a dense one, and not the other way round."""
    return second + first if first.is_sparse else first + second


def _all_rows(sums: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(sums), device=sums.device)
