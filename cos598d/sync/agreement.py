"""What the ranks agree on in each step before they average: which gradients exist, and whether they count."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from cos598d.errors import UserError
from cos598d.records.conventions import AGREEMENT

if TYPE_CHECKING:
    from cos598d.comm.communicator import Communicator

UNUSED = (
    "{} got no gradient in this step, although find_unused_parameters is False. Give find_unused_parameters=True for "
    "a model that leaves parameters unused."
)


class Agreement:
    """One rank's part in the agreements. Each agreement is a small all-reduce.

    heeds_faults: whether the ranks report a `fault` to each other in every step: the reason why a rank's gradients do
        not count. Only your own script can continue after that (`cos598d.doors.parallel`).
    has_fault: whether some rank has one, once they have agreed on it; None before.
    """

    comm: "Communicator"
    find_unused_parameters: bool
    parameters: list[tuple[str, nn.Parameter]]
    heeds_faults = False
    fault: str | None = None
    has_fault: bool | None = None
    _sparse: set[torch.Tensor]

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """The gradients to average in this step, the same list on every rank. A rank without a gradient gets zeros."""
        is_used = self.agree_on_used([p.grad is not None for _, p in self.parameters])
        return [(name, self.fill_in(p)) for name, p in self.parameters if is_used[p]]

    def fill_in(self, p: nn.Parameter) -> torch.Tensor:
        """The parameter's gradient, or zeros if it has none, in the layout that it has on the other ranks."""
        if p in self._sparse:
            dense = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = dense if dense.is_sparse else dense.to_sparse(1)
        elif p.grad is None:
            p.grad = torch.zeros_like(p)
        return p.grad

    def agree_on_used(self, has: list[bool]) -> dict[nn.Parameter, bool]:
        """Whether any rank has a gradient, by parameter. `has` is whether this rank has one, for each of `parameters`.

        It is a small all-reduce. With find_unused_parameters off, nothing is sent: all parameters are used, or
        UserError is raised. If the sync heeds faults, the all-reduce reports them; a missing gradient is one.
        """
        if not self.find_unused_parameters:
            if not all(has) and self.fault is None:
                words = UNUSED.format(self.parameters[has.index(False)][0])
                if not self.heeds_faults:
                    raise UserError(words)
                self.fault = words
            if self.heeds_faults:
                self.agree_on_faults()
            return {p: True for _, p in self.parameters}
        faults = [self.fault is not None] if self.heeds_faults else []
        users = torch.tensor([*has, *faults], dtype=torch.int32, device=self.comm.device)
        self.comm.all_reduce(users, "ranks that used each parameter", purpose=AGREEMENT)
        counts = users.tolist()
        if self.heeds_faults:
            self.has_fault = counts.pop() > 0 or bool(self.has_fault)
        return {p: count > 0 for (_, p), count in zip(self.parameters, counts, strict=True)}

    def agree_on_faults(self) -> None:
        """Set `has_fault` to whether any rank has a `fault`: an all-reduce of 4 bytes."""
        faults = torch.tensor(self.fault is not None, dtype=torch.int32, device=self.comm.device)
        self.comm.all_reduce(faults, "ranks whose gradients do not count", purpose=AGREEMENT)
        self.has_fault = bool(self.has_fault) or faults.item() > 0

    def all_finite(self, is_finite: bool) -> bool:
        """Whether all ranks' gradients are finite: an all-reduce of 4 bytes, if gradients differ by rank."""
        overflowed = torch.tensor(not is_finite, dtype=torch.int32, device=self.comm.device)
        self.comm.all_reduce(overflowed, "ranks whose gradients are not finite", purpose=AGREEMENT)
        return overflowed.item() == 0
