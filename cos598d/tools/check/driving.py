"""On a rank: a sync around a model, the steps that it makes, and the notes of its calls.

A sync is driven through the door, as in any script: `data_parallel` wraps the model, and when `backward()` returns,
every gradient is the average. The calls are those that torch's dispatcher sees, however a file makes them.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.comm.dispatcher import BARRIER, DispatchedCall, listening
from cos598d.comm.ledger import Ledger
from cos598d.parallel import Parallel, data_parallel
from cos598d.records.conventions import AGREEMENT, GRADIENTS
from cos598d.sync import get_sync
from cos598d.sync.base import GradientSync
from cos598d.terminal.own_code import load_file
from cos598d.tools.exam.models import Shape, gradients_of, local_batch, plain_loss, plain_model, toy_model
from cos598d.tools.exam.notes import LessonComm
from cos598d.tools.exam.own_order import compiled_for

# Ways of cutting buckets, for syncs that have them: the default, almost one per tensor, one for all.
BUCKETS: dict[str, dict[str, float]] = {
    "": {},
    "with tiny buckets": {"bucket_mb": 64 / 2**20, "first_bucket_mb": 32 / 2**20},
    "with one bucket": {"bucket_mb": 1e6, "first_bucket_mb": 1e6},
}


@dataclass(frozen=True)
class Step:
    """A step of the toy model: the numbers of its batches, each a backward pass.

    within: whether all passes except the last are in no_sync, one context inside another. users: the ranks whose
    batches use the layer `sometimes`; None for all.
    """

    batches: tuple[int, ...]
    within: bool = False
    users: frozenset[int] | None = None


@dataclass(frozen=True)
class Run:
    """Steps of one toy model under one sync with these options."""

    steps: tuple[Step, ...]
    label: str = ""
    shape: Shape = Shape()
    options: dict[str, Any] = field(default_factory=dict)


def sync_of(name: str) -> type[GradientSync]:
    """The class of a sync, whose file has the hashes and the sets of this rank."""
    if ":" in name:
        load_file(file_of(name), name, compiled_for(dist.get_rank()))
    return get_sync(name)


def wrap(name: str, model: nn.Module, ledger: Ledger | None = None, **options: Any) -> Parallel:
    """The model under the sync called `name`, with those of the options that the sync has."""
    kind = sync_of(name)
    known = {word: value for word, value in options.items() if word in kind.options_kind.names()}
    return data_parallel(model, kind, ledger=ledger, **known)


def drive(comm: LessonComm, module: Any, name: str, seed: int, runs: Sequence[Run]) -> list[dict[str, Any] | None]:
    """Make the steps of each run, from other weights on each rank. Of each run: what `_drive` returns.

    None for a way of cutting buckets, where the sync has none.
    """
    names = sync_of(name).options_kind.names()
    return [
        None if run.label in BUCKETS and not {*run.options} <= {*names} else _drive(comm, name, seed, run)
        for run in runs
    ]


def _drive(comm: LessonComm, name: str, seed: int, run: Run) -> dict[str, Any]:
    """The gradients after each step, the weights at the end, the calls within no_sync, and what was sent."""
    model = toy_model(seed + comm.rank, run.shape)
    ledger, grads, early = Ledger(), [], 0
    trained = [p for p in model.parameters() if p.requires_grad]
    with noted(comm, ledger):
        wrapped = wrap(name, model, ledger, **run.options)
        ledger.rows.clear()
        for step in run.steps:
            first_label = step.users is None or comm.rank in step.users
            for place, number in enumerate(step.batches):
                is_within = step.within and place < len(step.batches) - 1
                with wrapped.no_sync() if is_within else contextlib.nullcontext():
                    if is_within:
                        with wrapped.no_sync():  # whose end does not end the outer one
                            pass
                    loss = wrapped(**local_batch(comm.rank, number, first_label, seed))[0]
                    before = len(ledger.rows)
                    loss.backward()
                    early += len(ledger.rows) - before if is_within else 0
            grads.append(gradients_of(model))
            model.zero_grad(set_to_none=True)
        rows = [*ledger.rows]
        wrapped.detach()
    return {
        "grads": grads,
        "weights": dict(model.named_parameters()),
        "calls within no_sync": early,
        # a sync may agree on something else, such as a norm
        "calls to agree": sum(row.purpose == AGREEMENT and sum(row.shape) == len(trained) for row in rows),
        "payload": sum(row.payload_bytes for row in rows if row.purpose == GRADIENTS),
        "sent": sum(row.bytes_sent for row in rows),
        "received": sum(row.bytes_received for row in rows),
    }


def second_step(comm: LessonComm, module: Any, name: str) -> dict[str, int]:
    """The second of two steps of `plain_model`: where its calls begin, and calls and bytes of gradients. In the first
    one some syncs make their buckets."""
    ledger, model, begun = Ledger(), plain_model(), 0
    with noted(comm, ledger) as notes:
        wrapped = wrap(name, model, ledger, find_unused_parameters=False)
        for step in range(2):
            begun = notes.count
            ledger.rows.clear()
            plain_loss(wrapped, comm.rank, step).backward()
            model.zero_grad(set_to_none=True)
        rows = [row for row in ledger.rows if row.purpose == GRADIENTS]
        wrapped.detach()
    return {"begun": begun, "calls": len(rows), "sent": sum(row.bytes_sent for row in rows)}


@contextlib.contextmanager
def noted(comm: LessonComm, ledger: Ledger) -> Iterator["Notes"]:
    """A context that records calls in the ledger, and tells the judge of each before anything waits for it.

    What ranks wait for is `Work.wait`; who takes a call's future waits for that. Calls that C++ makes and waits for,
    and those of a part of the ranks, are only recorded.
    """
    notes = Notes(comm, ledger)
    wait, get_future = dist.Work.wait, dist.Work.get_future

    def waited(work: dist.Work, *arguments: Any, **options: Any) -> Any:
        return notes.wait(work, lambda: wait(work, *arguments, **options))

    def future_of(work: dist.Work) -> Any:
        notes.wait(work, lambda: None)  # the ledger, which takes it too, comes before the note
        return get_future(work)

    dist.Work.wait = waited  # type: ignore[method-assign, assignment]
    dist.Work.get_future = future_of  # type: ignore[method-assign, assignment]
    try:
        with ledger, listening(notes.has_begun, notes.begin):
            yield notes
        notes.failed()
    finally:
        dist.Work.wait, dist.Work.get_future = wait, get_future  # type: ignore[method-assign]


class Notes:
    """The calls of this rank, told to the judge as those of a lesson are."""

    def __init__(self, comm: LessonComm, ledger: Ledger):
        self._comm, self._ledger, self.count = comm, ledger, 0
        self._numbers: dict[int, tuple[int, dist.Work]] = {}  # by id; the work is kept, so that no other gets its id
        self._making: int | None = None  # the number of a call that is being made
        comm.tell("through", "dist")

    def begin(self, call: DispatchedCall) -> None:
        """A call begins. It is told before it is made, since gloo may abort the process in it."""
        self.failed()
        if call.op == BARRIER or not call.function or not call.tensors:
            return
        if call.group.size() != self._comm.world_size:
            return
        first, *others = call.tensors
        shape = (sum(each.numel() for each in call.tensors),) if others else first.shape
        tensor = torch.empty(shape, dtype=first.dtype, device="meta")  # only the size is told, also of a sparse one
        peer = call.root if call.op in ("send", "recv", "broadcast", "gather", "scatter", "reduce") else None
        self._making = self._comm.begin(call.op, tensor, self._ledger.named or call.op, peer, False)
        self.count += 1

    def has_begun(self, call: DispatchedCall) -> None:
        """The call is under way."""
        if self._making is not None and call.work is not None:
            self._numbers[id(call.work)] = self._making, call.work
            self._making = None

    def failed(self) -> None:
        """Tell that the last call raised an exception in place of beginning, if it did."""
        if self._making is not None:
            self._comm.tell("failed", self._making)
            self._making = None

    def wait(self, work: dist.Work, call: Any) -> Any:
        """Wait for a call, and tell that it ended."""
        number, _ = self._numbers.pop(id(work), (None, None))
        if number is None:
            return call()
        self._comm.tell("waits", number, self._comm.line(), False)
        return self._comm.watched(number, call)


def file_of(name: str) -> Path:
    """The file of a sync: that of FILE.py:CLASS, or the module of a built-in one. Raises UsageError."""
    if ":" in name:
        return Path(name.rpartition(":")[0])
    return Path(inspect.getfile(get_sync(name)))


def hooks_of(model: nn.Module) -> list[str]:
    """The model's modules and parameters, each once per hook on it."""
    of_module = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_parameter = ("_backward_hooks", "_post_accumulate_grad_hooks")
    owners: list[tuple[str, object, tuple[str, ...]]] = []
    owners += [(name or "the model", module, of_module) for name, module in model.named_modules()]
    owners += [(name, parameter, of_parameter) for name, parameter in model.named_parameters()]
    return [
        f"{kind.strip('_')[:-1].replace('_', ' ')} of {name} {number}".removesuffix(" 0")
        for name, owner, kinds in owners
        for kind in kinds
        for number in range(len(getattr(owner, kind, None) or ()))
    ]


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers by name, those too that no state_dict has."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named}
