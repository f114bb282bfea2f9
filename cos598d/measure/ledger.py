"""The ledger: one row for every collective call that a rank really made, with the bytes it moved."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import IO

import torch

# What a call was for. Only `GRADIENTS` is the cost of gradient synchronization; the rest is set-up and book-keeping.
STATE, GRADIENTS, AGREEMENT, LOSS, EVALUATION = "state", "gradients", "agreement", "loss", "evaluation"
BEFORE_TRAINING = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One collective call of one rank.

    `iteration` counts from 1; 0 is before training. `payload_bytes` is the tensor's size; `bytes_sent` and
    `bytes_received` are what the algorithm's formula says this rank's links carried, rounded to a byte;
    `seconds` is from the call to its completion, None where the library that made the call does not tell.
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
    seconds: float | None


@dataclass(frozen=True)
class Totals:
    """Sums over the gradient calls of one iteration."""

    calls: int
    payload_bytes: int
    bytes_sent: int
    bytes_received: int


class Ledger:
    """Rows in the order of the calls, written as JSON lines by `flush`, summed by iteration on the way.

    `iteration` is set by the training loop. Without `output` the rows of the iterations so far stay in `rows`.
    """

    def __init__(self, output: IO[str] | None = None):
        self.iteration = BEFORE_TRAINING
        self.rows: list[Row] = []
        self._output = output
        self._sums: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])

    def enter(self, row: Row) -> None:
        """Add one call."""
        self.rows.append(row)

    def flush(self) -> None:
        """Write the rows entered since the last flush and forget them. Called between iterations, off the clock."""
        if self._output is None:
            return
        self._output.writelines(json.dumps(asdict(row)) + "\n" for row in self.rows)
        self._sum(self.rows)
        self.rows = []

    def _sum(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row.purpose == GRADIENTS:
                sums = self._sums[row.iteration]
                for place, amount in enumerate((1, row.payload_bytes, row.bytes_sent, row.bytes_received)):
                    sums[place] += amount

    def totals(self) -> dict[int, Totals]:
        """The gradient calls summed by iteration, those flushed and those not."""
        waiting = Ledger()
        waiting._sums.update({iteration: list(sums) for iteration, sums in self._sums.items()})
        waiting._sum(self.rows)
        return {iteration: Totals(*sums) for iteration, sums in waiting._sums.items()}


def size_in_bytes(tensor: torch.Tensor) -> int:
    """The payload of a tensor: its elements' bytes."""
    return tensor.numel() * tensor.element_size()


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` as "float32"."""
    return str(dtype).removeprefix("torch.")
