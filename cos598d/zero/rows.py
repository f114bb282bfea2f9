"""A unit that is an embedding, of whose gradient only the rows that were looked up are computed and handled."""

import torch

from cos598d.zero.unit import Piece, Unit

Rows = tuple[torch.Tensor, torch.Tensor]  # their numbers, (u,), each once, and their values, (u, width)


class Table(Unit):
    """An embedding as a unit. rows: of this rank's gradient, of a backward. All of them, if it is dense.
    every: those of each rank, when they are here. The number is -1 where there is no row.
    """

    rows: Rows
    every: list[Rows]

    def put(self, piece: Piece, gradient: torch.Tensor | None) -> None:
        weight = piece.parameter
        if gradient is None:
            self.rows = torch.empty(0, dtype=torch.int64), weight.new_empty(0, weight.shape[1])
        elif gradient.layout == torch.strided:
            self.rows = torch.arange(len(weight)), gradient
        else:
            together = gradient.coalesce()
            self.rows = together.indices()[0], together.values()

    def average_rows(self, ranks: int) -> torch.Tensor:
        """The average of all ranks' rows in this rank's part, (length,): zeros where nobody has a row."""
        ((_, weight),) = self.named
        average = weight.new_zeros(self.length // weight.shape[1], weight.shape[1])
        first = self.rank * len(average)
        for numbers, values in self.every:
            mine = ((numbers >= first) & (numbers < first + len(average))).nonzero().flatten()
            average.index_add_(0, numbers[mine] - first, values[mine], alpha=1 / ranks)
        return average.view(-1)
