"""Sends only the rows of an embedding that a batch used; the other rows are zeros."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from cos598d.comm.calls import Call, Pending
from cos598d.errors import UserError
from cos598d.records.conventions import AGREEMENT
from cos598d.sync.bucketed import Bucketed
from cos598d.sync.buckets import Named, RowBucket, in_buckets
from cos598d.sync.cost import ALL_REDUCE, CollectiveCall, Step
from cos598d.sync.estimate import Buffers, Tensor
from cos598d.sync.options import SyncOptions
from cos598d.sync.parts.embeddings import LEAST_BYTES, large_embeddings, why_no_rows


class SparseRows(Bucketed):
    """As `bucketed`, but sends only the embedding rows that some rank looked up. All other rows are zero.

    BERT's word embedding is a fifth of its gradient (a half of MiniLM's). It arrives last in backward, when nothing is
    left to hide its call, and only the rows of the batch's tokens are not zero.

    1. In forward every rank records the ids that each large embedding is asked for, in all micro-batches of the step.
       Ids of a forward whose backward has not run yet also count for the next step.
    2. When backward has its first gradient, forward is over: the ranks start to agree on the union of their ids, by an
       all-reduce (maximum) of one byte per row. It runs during backward.
    3. When an embedding's gradient arrives, every rank copies the rows of the union into a buffer, divided by n, and
       starts its all-reduce. All other parameters are sent in buckets meanwhile. One number is sent with it: which rank
       has a gradient outside these rows, if any. In that case every rank raises an error.
    4. After backward every rank waits, and copies the averaged rows back into its own gradient.

    An embedding whose weight is also used elsewhere (as an output layer) has a dense gradient and is sent in a bucket.

    Cost for a gradient of S bytes, of which E are R rows of embeddings, of which U rows were touched: B calls for the
    buckets, and for each embedding 1 for the ids, 1 for the rows and 1 of 4 bytes. Every rank sends and receives
    2(n-1)/n (S - E + E U/R), and 2(n-1)/n R for the ids. `--compress` compresses the rows of the union as one more
    bucket. Error feedback is kept per row, and waits until a step looks the row up again. Choose it for any model with
    a large vocabulary, especially on slow links. With large batches U approaches R, and it becomes `bucketed`.
    """

    def attach(self, model: nn.Module) -> nn.Module:
        self._lookups = large_embeddings(model)
        self._touched = {p: torch.zeros(len(p), dtype=torch.uint8, device=p.device) for p in self._lookups}
        self._handed: dict[nn.Parameter, TensorWeakRef] = {}  # the gradients that the last step produced
        self._open: dict[nn.Parameter, WeakSet[_Lookup]] = {p: WeakSet() for p in self._lookups}
        self._rows: dict[int, RowBucket] = {}  # those being sent, by unit
        self._outside: list[tuple[str, torch.Tensor, Call]] = []
        module = super().attach(model)
        for parameter, embedding in self._lookups.items():
            handle = embedding.register_forward_hook(self._noting(parameter), with_kwargs=True, prepend=True)
            self.hooks.append(handle)
        return module

    def make_units(self, parameters: Sequence[Named]) -> list[list[Named]]:
        dense = [named for named in parameters if named[1] not in self._lookups]
        embeddings = [[named] for named in reversed(parameters) if named[1] in self._lookups]
        units = super().make_units(dense)
        self._first_sparse = len(units)
        return units + embeddings

    def ready(self, unit: int, place: int) -> None:
        if not self._agreements:
            for ((name, parameter),) in self.units[self._first_sparse :]:
                handed = self._handed.get(parameter)
                if handed is not None and parameter.grad is not None and handed() is parameter.grad:
                    # The last step's average is still in .grad, and this step's gradient is added to it.
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
        name, parameter = self.units[unit][0]
        self._agreements[parameter].wait()
        rows = self._agreed.pop(parameter, self._touched[parameter]).nonzero().flatten()
        outside = torch.zeros((), dtype=torch.int32, device=self.comm.device)
        if parameter.grad is None:
            values = torch.zeros(len(rows), *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
        else:
            values = parameter.grad[rows]
            if torch.count_nonzero(values) != torch.count_nonzero(parameter.grad):
                outside.fill_(1 + self.comm.rank)
            values /= self.comm.world_size
        # Sent with the rows, so that no rank waits for it: a rank that raised now would leave the others waiting.
        call = self.comm.all_reduce(
            outside, f"ranks with a gradient outside the rows of {name}",
            purpose=AGREEMENT, async_op=True, op=torch.distributed.ReduceOp.MAX,
        )  # fmt: skip
        self._outside.append((name, outside, call))
        self._rows[unit] = RowBucket(name, parameter, rows, values)
        return self.send(unit, self._rows[unit])

    def _average(self) -> None:
        super()._average()
        found, self._outside = self._outside, []
        for _, _, call in found:
            call.wait()
        for name, outside, _ in found:
            if outside.item():
                self.codec.forget_step()
                for _, p in self.parameters:
                    p.grad = None  # some of its rows are missing
                raise UserError(
                    f"{name} has a gradient on rank {outside.item() - 1} outside the rows that its embedding looked up "
                    "in forward: the weight is also used elsewhere, or a checkpoint looks it up again in backward. "
                    "Choose bucketed for this model."
                )

    def end(self, unit: int, is_used: Sequence[bool]) -> None:
        if unit < self._first_sparse:
            super().end(unit, is_used)
            return
        parameter = self.units[unit][0][1]
        self.receive(unit, is_used)
        bucket = self._rows.pop(unit)
        if not is_used[0]:
            parameter.grad = None
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad[bucket.rows] = bucket.views[0]

    @classmethod
    def calls(cls, step: Step) -> list[CollectiveCall] | None:
        """None unless the step is known, since the number of rows depends on its batch."""
        if step.touched is None:
            return None
        large = [t for t in step.tensors if "embedding" in t.name and len(t.shape) == 2 and t.bytes >= LEAST_BYTES]
        dense = [tensor for tensor in step.tensors if tensor not in large]
        buckets = in_buckets(dense, step.options)
        # One byte per row marks the touched rows. It is sent during backward, and waited for with the rows.
        rows = [CollectiveCall(ALL_REDUCE, [t], share=step.touched, agreed=t.shape[0]) for t in reversed(large)]
        return [*(CollectiveCall(ALL_REDUCE, bucket) for bucket in buckets), *rows]

    @classmethod
    def buffers(cls, tensors: Sequence[Tensor], options: SyncOptions) -> Buffers:
        return Buffers(unsaid="it depends on how many embedding rows the batch uses")

    @classmethod
    def remark(cls, model: nn.Module) -> str | None:
        """A sentence that it equals `bucketed` without an embedding whose rows it could leave out, and why."""
        why = why_no_rows(model)
        if why is None:
            return None
        return f"sparse_rows sends what bucketed sends, because it can only leave out rows of a large embedding: {why}"

    def begin_step(self) -> None:
        super().begin_step()
        self._agreements: dict[nn.Parameter, Call] = {}
        self._agreed: dict[nn.Parameter, torch.Tensor] = {}  # if more was touched since

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            self._handed = {p: TensorWeakRef(p.grad) for p in self._touched if p.grad is not None}
            # Not earlier: a second backward of the step finds only the rows of the first one's union in .grad.
            for parameter, touched in self._touched.items():
                touched.zero_()
                for lookup in list(self._open[parameter]):
                    touched[lookup.ids] = 1

    def detach(self) -> None:
        super().detach()
        self._lookups, self._touched, self._agreed, self._handed, self._open = {}, {}, {}, {}, {}

    def _noting(self, parameter: nn.Parameter):
        def note(module: nn.Module, arguments: tuple, keywords: dict[str, Any], output: torch.Tensor) -> None:
            if output.requires_grad:
                ids = (arguments[0] if arguments else keywords["input"]).flatten()
                if parameter in self._agreements and parameter not in self._agreed:
                    # A second forward in one step: the first agreement stays unchanged, so that its gradient can be
                    # sent.
                    self._agreements[parameter].wait()
                    self._agreed[parameter] = self._touched[parameter].clone()
                self._touched[parameter][ids] = 1
                output.register_hook(_Lookup(ids, self._open[parameter]))

        return note


class _Lookup:
    """The ids of one forward, (lookups,): in the set `still_open` as long as its backward may come.

    It is the hook of the embedding's output, so only autograd's graph holds it, and it is freed with a graph that is
    dropped. A backward that does not retain the graph is the last one.
    """

    def __init__(self, ids: torch.Tensor, still_open: "WeakSet[_Lookup]"):
        self.ids, self._still_open = ids, still_open
        still_open.add(self)

    def __call__(self, gradient: torch.Tensor) -> None:
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._still_open.discard(self)
