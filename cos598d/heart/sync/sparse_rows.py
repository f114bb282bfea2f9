"""Sends only the rows of an embedding that a batch used; the other rows are zeros."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.heart.sync.bucketed import Bucketed
from cos598d.heart.sync.buckets import MIB
from cos598d.records.conventions import AGREEMENT

MAX = dist.ReduceOp.MAX


class SparseRows(Bucketed):
    """As `bucketed`, but sends only the embedding rows that some rank looked up. All other rows are zero.

    1. In forward every rank marks the rows that each embedding of at least a MiB is asked for.
    2. When backward has its first gradient, forward is over: the ranks start to agree on the union of their rows, by an
       all-reduce (maximum) of one byte per row. It runs during backward.
    3. At backward's end every rank copies the rows of the union into a buffer, and an all-reduce sums the buffers.
    An embedding whose weight is also used elsewhere has a dense gradient: every rank raises an error.

    Cost for a gradient of S bytes, of which E are R rows of embeddings and U rows were touched: 2 calls for each
    embedding, B for the buckets; every rank sends and receives 2(n-1)/n (S - E + E U/R + R). For a large vocabulary.
    """

    least_bytes = MIB

    def attach(self, model):
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        self._marks = {
            module.weight: torch.zeros(len(module.weight) + 1, dtype=torch.uint8)  # the last: there are other rows
            for module in tables
            if module.weight.requires_grad and module.weight.nbytes >= self.least_bytes
        }
        call = super().attach(model)
        self._handles = [module.register_forward_hook(self._mark) for module in tables if module.weight in self._marks]
        return call

    def plan(self, parameters):
        return super().plan([(name, p) for name, p in parameters if p not in self._marks])

    def ready(self, parameter: nn.Parameter) -> None:
        if not self._agreeing:
            with self.ledger.naming("rows touched", AGREEMENT):
                self._agreeing = [
                    dist.all_reduce(mark, MAX, self.group, async_op=True) for mark in self._marks.values()
                ]
        if parameter not in self._marks:
            super().ready(parameter)

    def finish(self) -> None:
        super().finish()
        for call in self._agreeing:
            call.wait()
        for name, p in self.parameters:
            if p in self._marks and self.is_used[p]:
                self._average_rows(name, p)
        for mark in self._marks.values():
            mark.zero_()
        self._agreeing = []

    def _average_rows(self, name: str, p: nn.Parameter) -> None:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        rows = self._marks[p][:-1].nonzero().flatten()
        values = p.grad[rows]
        outside = (values.count_nonzero() != p.grad.count_nonzero()).to(p.dtype)
        together = torch.cat([values.flatten(), outside.view(1)])
        with self.ledger.naming(name):
            dist.all_reduce(together, group=self.group)
        if together[-1]:
            raise ValueError(f"{name} has a gradient outside the rows that were looked up. Choose bucketed.")
        p.grad[rows] = together[:-1].view_as(values) / self.ranks

    def _begin(self) -> None:
        super()._begin()
        self._agreeing: list[Any] = []

    def _mark(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if output.requires_grad:
            self._marks[module.weight][inputs[0].flatten()] = 1

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        super().detach()
