"""Sends only the rows of an embedding that a batch used; the other rows are zeros."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.errors import UserError
from cos598d.records.conventions import AGREEMENT
from cos598d.sync.bucketed import Bucketed
from cos598d.sync.buckets import MIB, as_real

LEAST_BYTES = MIB  # a smaller embedding fits into a bucket and costs almost nothing there


class SparseRows(Bucketed):
    """As `bucketed`, but sends only the embedding rows that some rank looked up. All other rows are zero.

    BERT's word embedding is a fifth of its gradient (a half of MiniLM's). It arrives last in backward, when nothing is
    left to hide its call, and only the rows of the batch's tokens are not zero.

    1. In forward every rank marks the rows that each embedding of at least a MiB is asked for, in all micro-batches of
       the step.
    2. When backward has its first gradient, forward is over: the ranks start to agree on the union of their rows, by an
       all-reduce (maximum) of one byte per row. It runs during backward.
    3. At backward's end every rank copies the rows of the union into a buffer, divided by n, and an all-reduce sums the
       buffers. One number more tells whether some rank has a gradient outside these rows. In that case every rank
       raises an error. All other parameters are sent in buckets meanwhile.
    An embedding whose weight another layer has too (as an output layer) has a dense gradient and is sent in a bucket.

    Cost for a gradient of S bytes, of which E are R rows of embeddings, of which U rows were touched: B calls for the
    buckets, and for each embedding 1 for the marks and 1 for the rows. Every rank sends and receives 2(n-1)/n (S - E +
    E U/R), and 2(n-1)/n R for the marks. `--compress` compresses the buckets. Choose it for any model with a large
    vocabulary, especially on slow links. With large batches U approaches R, and it becomes `bucketed`.
    """

    def attach(self, model: nn.Module) -> Callable:
        self._marks = {
            p: torch.zeros(len(p), dtype=torch.uint8, device=p.device) for p in large_embeddings(model, LEAST_BYTES)
        }
        self._handles = [
            module.register_forward_hook(self._mark, with_kwargs=True, prepend=True)
            for module in model.modules()
            if isinstance(module, nn.Embedding) and module.weight in self._marks
        ]
        self._unions: dict[nn.Parameter, tuple[torch.Tensor, Any]] = {}  # with the call that makes each
        return super().attach(model)

    def plan(self, parameters):
        return super().plan([(name, p) for name, p in parameters if p not in self._marks])

    def ready(self, parameter: nn.Parameter) -> None:
        self._agree_on_rows()
        if parameter not in self._marks:
            super().ready(parameter)

    def finish(self) -> None:
        self._agree_on_rows()
        super().finish()
        for name, p in self.parameters:
            if p in self._unions:
                union, call = self._unions.pop(p)
                call.wait()
                if self.is_used[p]:
                    self._average_rows(name, p, union)
        for mark in self._marks.values():
            mark.zero_()

    def _agree_on_rows(self) -> None:
        """Start to agree on the union of all ranks' rows, once in a step, before any bucket is sent."""
        for name, p in self.parameters:
            if p in self._marks and p not in self._unions:
                union = self._marks[p].clone()
                with self.ledger.naming(f"rows touched of {name}", AGREEMENT):
                    self._unions[p] = union, dist.all_reduce(union, dist.ReduceOp.MAX, self.group, async_op=True)

    def _average_rows(self, name: str, p: nn.Parameter, union: torch.Tensor) -> None:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        rows = union.nonzero().flatten()
        values = p.grad[rows]
        outside = (values.count_nonzero() != p.grad.count_nonzero()).to(p.dtype)
        together = torch.cat([values.flatten() / self.ranks, outside.view(1)])
        with self.ledger.naming(name):
            dist.all_reduce(as_real(together), group=self.group)
        if together[-1].abs() > 0:
            raise UserError(
                f"{name} has a gradient outside the rows that its embedding was asked for, maybe of an earlier average "
                "in this step, so sparse_rows cannot send it. Choose bucketed."
            )
        p.grad[rows] = together[:-1].view_as(values)

    def _mark(self, module: nn.Module, inputs: tuple, keywords: dict[str, Any], output: torch.Tensor) -> None:
        mark = self._marks.get(module.weight)  # type: ignore[call-overload]
        if mark is not None and (output.requires_grad or module.training):
            ids = inputs[0] if inputs else keywords["input"]
            mark[ids.flatten()] = 1

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._marks, self._handles = {}, []
        super().detach()


def large_embeddings(model: nn.Module, least_bytes: int) -> list[nn.Parameter]:
    """The trainable weights of at least `least_bytes` that one embedding has, and no other layer."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners.setdefault(p, []).append(module)
    return [
        p
        for p, (first, *others) in owners.items()
        if isinstance(first, nn.Embedding) and not others and p.requires_grad and p.nbytes >= least_bytes
    ]
