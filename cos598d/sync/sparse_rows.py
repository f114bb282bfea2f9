"""The rows of an embedding that a batch touched travel, the zeros of all others stay where they are."""

from collections.abc import Sequence

import torch
from torch import nn

from cos598d.comm import Call
from cos598d.errors import UserError
from cos598d.measure.ledger import AGREEMENT
from cos598d.sync.bucketed import Bucketed
from cos598d.sync.buckets import MIB, Named
from cos598d.sync.codecs.base import Pending

LEAST_BYTES = MIB  # a smaller embedding fits into a bucket and costs next to nothing there


class SparseRows(Bucketed):
    """As `bucketed`, but of an embedding's gradient only the rows that some rank looked up; nothing is lost.

    BERT's word embedding is a fifth of its gradient (of MiniLM's a half), it arrives last in backward, when nothing is
    left to hide its travel, and all its rows but those of the batch's tokens are zero.

    1. In forward every rank notes the ids that each large embedding is asked for, in all micro-batches of the step.
    2. When backward has its first gradient, forward is over: the ranks start to agree on the union of their ids,
       by an all-reduce (maximum) of one byte a row. It runs beside backward.
    3. When an embedding's gradient arrives, every rank copies the rows of the union into a buffer, divided by n, and
       starts its all-reduce; all other parameters travel in buckets meanwhile.
    4. After backward every rank waits, and copies the averaged rows back into its own gradient.

    An embedding whose weight also serves elsewhere (as an output layer) has a dense gradient and travels in a bucket.

    Cost for a gradient of S bytes, E of them of R rows of embeddings, of which U rows were touched: B calls for the
    buckets, 1 for the ids and 1 for the rows of each embedding; every rank sends and receives
    2(n-1)/n (S - E + E U/R), and 2(n-1)/n R for the ids. Choose it for any model with a large vocabulary, and the more
    the slower the links are; with large batches U nears R and it becomes `bucketed`.
    """

    def attach(self, model: nn.Module) -> nn.Module:
        self._lookups = _large_embeddings(model)
        self._touched = {p: torch.zeros(len(p), dtype=torch.uint8, device=p.device) for p in self._lookups}
        self._agreements: dict[nn.Parameter, Call] = {}
        self._handed: dict[nn.Parameter, int] = {}  # where the gradients of the last step are
        self._agreed: dict[nn.Parameter, torch.Tensor] = {}  # where more was touched since
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        module = super().attach(model)
        for parameter, embedding in self._lookups.items():
            self._handles.append(embedding.register_forward_pre_hook(self._noting(parameter)))
        return module

    def make_units(self, parameters: Sequence[Named]) -> list[list[Named]]:
        dense = [named for named in parameters if named[1] not in self._lookups]
        embeddings = [[named] for named in reversed(parameters) if named[1] in self._lookups]
        units = super().make_units(dense) if dense else []
        self._first_sparse = len(units)
        return units + embeddings

    def ready(self, unit: int, place: int) -> None:
        if not self._agreements:
            for ((name, parameter),) in self._units[self._first_sparse :]:
                if parameter.grad is not None and parameter.grad.data_ptr() == self._handed.get(parameter):
                    # The last step's average is still there, and this step's gradient is added to it.
                    self._touched[parameter][(parameter.grad != 0).flatten(1).any(dim=1)] = 1
                self._agreements[parameter] = self.comm.all_reduce(
                    self._touched[parameter], f"rows touched of {name}",
                    purpose=AGREEMENT, async_op=True, op=torch.distributed.ReduceOp.MAX,
                )  # fmt: skip
        if unit < self._first_sparse:
            super().ready(unit, place)

    def start(self, unit: int) -> Pending:
        if unit < self._first_sparse:
            return super().start(unit)
        name, parameter = self._units[unit][0]
        self._agreements[parameter].wait()
        rows = self._agreed.pop(parameter, self._touched[parameter]).nonzero().flatten()
        if parameter.grad is None:
            values = torch.zeros(len(rows), *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
        else:
            values = parameter.grad[rows]
            if torch.count_nonzero(values) != torch.count_nonzero(parameter.grad):
                raise UserError(
                    f"{name} has a gradient outside the rows that its embedding looked up, so it serves elsewhere too: "
                    "train this model with --sync bucketed."
                )
            values /= self.comm.world_size
        self._rows[unit] = rows, values
        return self.sum_up(values, name)

    def end(self, unit: int, is_used: Sequence[bool]) -> None:
        if unit < self._first_sparse:
            super().end(unit, is_used)
            return
        parameter = self._units[unit][0][1]
        rows, values = self._rows.pop(unit)
        if not is_used[0]:
            parameter.grad = None
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad[rows] = values

    def _average(self) -> None:
        super()._average()
        self._agreements, self._agreed = {}, {}

    def finish(self) -> None:
        super().finish()
        self._handed = {p: p.grad.data_ptr() for p in self._touched if p.grad is not None}
        # Not before: what a second backward of the step finds in .grad are the rows of the first one's union.
        for touched in self._touched.values():
            touched.zero_()

    def detach(self) -> None:
        super().detach()
        self._lookups, self._touched, self._agreed = {}, {}, {}

    def _noting(self, parameter: nn.Parameter):
        def note(module: nn.Module, arguments: tuple) -> None:
            if torch.is_grad_enabled():
                if parameter in self._agreements and parameter not in self._agreed:
                    # A second forward in one step: what the ranks agree on stays as it is, for its gradient to travel.
                    self._agreements[parameter].wait()
                    self._agreed[parameter] = self._touched[parameter].clone()
                self._touched[parameter][arguments[0].flatten()] = 1

        return note


def _large_embeddings(model: nn.Module) -> dict[nn.Parameter, nn.Embedding]:
    """The weights that are embeddings and nothing else, by their modules; those of at least LEAST_BYTES."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    return {
        parameter: modules[0]
        for parameter, modules in owners.items()
        if parameter.requires_grad
        and len(modules) == 1
        and isinstance(modules[0], nn.Embedding)
        and parameter.numel() * parameter.element_size() >= LEAST_BYTES
    }
