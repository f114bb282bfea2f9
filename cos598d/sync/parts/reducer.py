"""The inside of torch's DDP, which works in C++: its calls, its memory, and the layout of its buckets."""

import contextlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cos598d.comm.communicator import Communicator
from cos598d.comm.dispatcher import DispatchedCall, listening
from cos598d.comm.ledger import Row, dtype_name
from cos598d.comm.watched import row_of
from cos598d.records.conventions import AGREEMENT, BUFFERS, GRADIENTS

# Modules whose functions run when a DDP makes a call: C++ in backward and for buffers, and torch's hooks.
MAKERS = (__name__, "torch.autograd.", "torch.nn.parallel.", "torch.distributed.utils", "torch.distributed.algorithms.")
FIRST_STEPS = 2  # after these torch does not rebuild its buckets


class Reducer:
    """The reducer of a DistributedDataParallel.

    1. From a forward to `end_step`, all calls of the DDP are noted: rank 0's buffers before the forward, each bucket's
       all-reduce in backward, and which parameters were used. `end_step` enters them in the ledger. Other DDPs may use
       the same process group. So a call belongs to the first DDP that still expects one of its size (`_owner`).
    2. torch rebuilds its buckets once, after the first backward, in the order in which gradients arrived in it. A ring
       adds up an element's terms in an order that depends on its place in its bucket. So a training that resumes in a
       new process needs the same buckets: `arrival` is that order, and `rehearse` builds a new DDP's buckets from it.
    """

    def __init__(self, comm: Communicator, ddp: DistributedDataParallel, has_buckets: bool = True):
        """`has_buckets`: whether a bucket is sent in one call. If not, a hook makes other calls, which are numbered."""
        self._comm, self._ddp, self._has_buckets = comm, ddp, has_buckets
        self._parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        self.steps = 0  # that have ended
        self._rows: list[Row] = []  # of this step
        self._expected: list[int] = []  # elements of the calls that are still expected in this step
        self._buckets: list[int] = []  # elements of each bucket
        self._of_buffers: list[tuple[torch.dtype, int]] = []  # the elements of each call that sends buffers
        self._listening = contextlib.ExitStack()
        self._is_step = False  # a forward has run whose backward may follow
        self._handles = [
            ddp.register_forward_pre_hook(self._listen),
            ddp.register_forward_hook(self._after_forward, always_call=True),
        ]

    @property
    def bucket_bytes(self) -> int:
        """The bytes of the buckets, which live as long as the DDP; 0 before the first step."""
        return sum(p.numel() * p.element_size() for p in self._parameters) if self.steps else 0

    @property
    def has_ended(self) -> bool:
        """Whether torch has made all calls of the step."""
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    def end_step(self) -> None:
        """Forward and backward are over: enter their calls in the ledger."""
        self._listening.close()
        for row in self._rows:
            self._comm.ledger.enter(row)
        self._rows, self._is_step = [], False
        self.steps += 1

    def catch_up(self, has_begun: bool) -> None:
        """Make torch's remaining calls of a step in which gradients are missing, since other ranks wait for them.

        `has_begun`: whether a forward has begun the step.
        """
        if not has_begun:
            self._listen()
            if self._ddp.will_sync_module_buffers():
                self._ddp._sync_buffers()
            self._begin()
        self._mark_ready(range(len(self._parameters)))

    def arrival(self) -> list[int] | None:
        """The indices of the trainable parameters in the order in which their gradients arrived.

        None before the first step, and if buckets are never rebuilt, as with find_unused_parameters. Every rank calls
        it, between two steps. If a rebuild is due at the next forward, it happens now.
        """
        self._rebuild()
        told = self._ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
        return [int(place) for place in told.replace(",", " ").split()] if told else None

    def rehearse(self, order: list[int] | None, steps: int) -> None:
        """Build the buckets as after `steps` steps of another DDP whose `arrival` was `order`, by a backward of zeros.

        Every rank calls it before the first step. Raises ValueError unless the order is one of these parameters.
        """
        if order is not None:
            if sorted(order) != list(range(len(self._parameters))):
                raise ValueError("the order of arrival is not one of this model's gradients")
            self._begin()
            self._mark_ready(order)
            for parameter in self._parameters:
                parameter.grad = None
            self._rebuild()
        self.steps = steps

    def close(self) -> None:
        """Stop listening. If anything still refers to the DDP, it computes as before but no longer averages."""
        self._listening.close()
        for handle in self._handles:
            handle.remove()
        self._ddp._remove_autograd_hooks()
        del self._ddp  # its buckets are freed with it

    def _begin(self) -> None:
        self._ddp.reducer.prepare_for_forward()
        self._ddp.reducer.prepare_for_backward([])

    def _mark_ready(self, order: Iterable[int]) -> None:
        """Report to torch that the gradients of the parameters at these indices are ready, and wait for its calls."""

        def mark_all(_: torch.Tensor) -> None:
            for place in order:
                with contextlib.suppress(RuntimeError):  # it was ready already
                    self._ddp.reducer._autograd_hook(place)  # type: ignore[attr-defined]

        root = torch.zeros((), device=self._comm.device, requires_grad=True)
        root.register_hook(mark_all)  # torch waits for the calls at the end of a backward
        root.backward()

    def _rebuild(self) -> None:
        assert self._ddp.logger is not None
        self._ddp.reducer._rebuild_buckets()
        self._ddp.logger.set_runtime_stats_and_log()  # otherwise its data are the previous step's

    def _listen(self, *_: object) -> None:
        self._listening.close()
        self._listening.enter_context(listening(_share))
        self._listening.callback(_listeners.remove, self)
        _listeners.append(self)
        self._is_step = self._is_step or torch.is_grad_enabled()
        self._expect()

    def _after_forward(self, *_: object) -> None:
        if not self._is_step:  # an evaluation: no backward follows
            self._listening.close()

    def _expect(self) -> None:
        """Find the sizes of the expected calls. Within a call torch has locked its reducer."""
        if torch.is_grad_enabled() and (self.steps <= FIRST_STEPS or not self._buckets):
            self._ddp.reducer._rebuild_buckets()  # the forward would do it next, if it is due
            self._buckets = [len(bucket.buffer()) for bucket in self._ddp.reducer._get_zeros_like_grad_buckets()]
        buffers: list[torch.Tensor] = self._ddp.modules_buffers
        calls: list[list[int]] = []
        if buffers:  # torch sends those of one dtype together, up to this size
            calls, _ = dist._compute_bucket_assignment_by_size(buffers, [self._ddp.broadcast_bucket_size])
        self._of_buffers = [(buffers[call[0]].dtype, sum(buffers[place].numel() for place in call)) for call in calls]
        self._expected = [*self._buckets, *(elements for _, elements in self._of_buffers), len(self._parameters)]

    def expects(self, elements: int) -> bool:
        """Whether a call of this number of elements is still expected in this step; a hook's calls have any size."""
        return not self._has_buckets or elements in self._expected

    def is_of(self, call: DispatchedCall) -> bool:
        """Whether the call is in this DDP's process group."""
        return call.group.group_name == self._ddp.process_group.group_name

    def note(self, call: DispatchedCall) -> None:
        """Record a call of this DDP."""
        with contextlib.suppress(ValueError):  # a communication hook's calls have other sizes
            self._expected.remove(call.tensors[0].numel())
        dtype, purpose = call.tensors[0].dtype, GRADIENTS
        if call.op == "broadcast":
            if (dtype, call.tensors[0].numel()) not in self._of_buffers:
                return  # the layout of rank 0's buckets
            purpose, name = BUFFERS, f"buffers of {dtype_name(dtype)}"
        elif dtype == torch.int32:
            purpose, name = AGREEMENT, "ranks that used each parameter"
        elif self._has_buckets:
            name = f"bucket {sum(row.purpose == GRADIENTS for row in self._rows)}"
        else:
            name = f"{call.op} {len(self._comm.ledger.rows) + len(self._rows)}"
        row = row_of(self._comm, call, purpose, name)
        if row is not None:
            self._rows.append(row)


_listeners: list[Reducer] = []  # between their forward and the end of their step


def _share(call: DispatchedCall) -> None:
    """Let the reducer that made the call record it."""
    is_torchs = not call.module or call.module.startswith(MAKERS)
    if is_torchs and call.tensors and (owner := _owner(call)):
        owner.note(call)


def _owner(call: DispatchedCall) -> Reducer | None:
    """The first reducer of the call's group that expects a call of its size; None for a call of another DDP."""
    elements = call.tensors[0].numel()
    return next((reducer for reducer in _listeners if reducer.is_of(call) and reducer.expects(elements)), None)
