"""Task 3: torch's DistributedDataParallel, unchanged."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel

from cos598d.comm.communicator import Communicator
from cos598d.comm.watched import watched
from cos598d.errors import UsageError
from cos598d.records.conventions import GRADIENTS
from cos598d.records.kinds import COUNT, FLAG, Fields, ListOf, OrNone, ValueKind, expect
from cos598d.sync.agreement import UNUSED
from cos598d.sync.base import GradientSync
from cos598d.sync.buckets import MIB
from cos598d.sync.cost import ALL_REDUCE, CollectiveCall, Step
from cos598d.sync.estimate import Buffers, Cost, Sizes, Tensor
from cos598d.sync.options import DEFAULTS, SYNC_GROUP, SyncOptions
from cos598d.sync.parts.own_loop import CHANGED
from cos598d.sync.parts.reducer import Reducer
from cos598d.terminal.fields import flag

# Value of --compress -> torch's communication hook, and the dtype that is sent.
HOOKS = {"fp16": (fp16_compress_hook, torch.float16), "bf16": (bf16_compress_hook, torch.bfloat16)}
LATER = ("powersgd", "post_localsgd")  # torch's hooks that change to another algorithm after PLAIN_STEPS
# What torch's PowerSGD keeps for each bucket.
POWERSGD = ("error_dict", "p_memory_dict", "q_memory_dict")
# Steps of plain averages before powersgd and post_localsgd begin: torch rebuilds its buckets after the first.
PLAIN_STEPS = 10
# The facts of `own_state` in addition to the hook's steps.
OWN: dict[str, ValueKind] = {
    "arrival": OrNone(ListOf(COUNT)),
    **dict.fromkeys(("steps", "steps_made"), COUNT),
    "replicas_equal": FLAG,
}


@dataclass(frozen=True)
class DDPOptions(SyncOptions):
    """The options of torch's DDP.

    bucket_view: whether gradients are views of its buckets, so that none is copied back.
    ddp_hook: its communication hook; None: its own all-reduce.
    """

    bucket_view: bool = flag(
        False, "let gradients be views of the buckets, for ddp: torch's gradient_as_bucket_view", group=SYNC_GROUP
    )
    ddp_hook: str | None = flag(
        None,
        "communication hook of torch's DDP, for ddp: one of {choices}",
        group=SYNC_GROUP,
        choices=("fp16", "powersgd", "post_localsgd"),
    )


class DDP(GradientSync):
    """Averaging in buckets while backward runs, by torch (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2).

    1. Gradients are assigned to buckets of 25 MiB (the first of 1 MiB), at first in the reverse order of registration.
       After the first backward, the order is the one in which they arrived.
    2. A hook on each parameter copies its gradient into its bucket; a full bucket's all-reduce starts at once, while
       backward computes the next gradients.
    3. The end of backward waits for the buckets and copies the averages back.
    4. Before a step's first forward, rank 0 sends its buffers, if the model has any, to all.

    Cost for a gradient of S bytes in B buckets: B calls; every rank sends and receives 2(n-1)/n S. Only the last bucket
    cannot overlap with backward. With unused parameters allowed, one more all-reduce of 4 bytes per parameter; with
    buffers of b bytes, one more broadcast for each of their dtypes: rank 0 sends ceil(log2 n) b. Choose it for real
    work.

    torch makes these calls itself, without a communication hook of ours, which would slow it. The ledger records them
    as torch's dispatcher sees them (`parts/reducer.py`).

    `bucket_view` is torch's `gradient_as_bucket_view`: step 3 copies nothing back, and a gradient takes no memory next
    to its bucket. `compress` registers torch's own communication hook of that name: half of the bytes. `ddp_hook`
    registers other hooks of torch's. The last two change to another algorithm after 10 steps of plain averages:

    fp16            the same as `compress` fp16
    powersgd        each bucket's matrices as factors of rank 1, with error feedback (Vogels et al., NeurIPS 2019): for
                    an (a, b) matrix a + b numbers are sent, not a b, in three all-reduces. All gradients are one
                    bucket, so nothing overlaps with backward
    post_localsgd   gradients are not sent any more, and the weights are averaged every `sync_every` steps (Lin et al.,
                    "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020): 2(n-1)/n S / H per step
    """

    options: DDPOptions
    options_kind = DDPOptions
    uses = ("bucket_mb", "bucket_view", "compress", "ddp_hook", "sync_every")
    overlaps = sends_buffers = takes_sparse = chooses_calls = True

    def __init__(self, comm: Communicator, find_unused_parameters: bool = True, options: SyncOptions = DEFAULTS):
        super().__init__(comm, find_unused_parameters, options)
        self.check_options(self.options, comm.backend)
        self._ddp: DistributedDataParallel | None = None
        word = self.codec_of_calls(options)
        self._hook = HOOKS[word] if word and comm.world_size > 1 else None
        # The hook of another algorithm, and its state.
        changes = comm.world_size > 1 and self.changes_calls(options)
        self._later = self.options.ddp_hook if changes else None
        self._kept: PowerSGDState | PostLocalSGDState | None = None
        self.averages_weights = self._later == "post_localsgd"
        self._steps_made = 0
        self.replicas_equal = True

    @classmethod
    def check_options(cls, options: SyncOptions, backend: str) -> None:
        if options.compress is None:
            return
        if (hook := DDPOptions.of(options).ddp_hook) is not None:
            raise UsageError(f"--compress and --ddp_hook {hook} exclude each other. Give one.")
        if options.compress not in HOOKS:
            raise UsageError(
                f"--compress {options.compress} with --sync ddp: torch's own hooks are {' and '.join(HOOKS)}. "
                "Choose one, or --sync bucketed, which takes every codec."
            )
        if options.compress == "bf16" and backend != "nccl":
            raise UsageError(
                f"--compress bf16 with --sync ddp: torch's hook is for nccl, and the backend is {backend}. "
                "Choose fp16, or --sync bucketed."
            )

    @classmethod
    def check_config(cls, config: Any, world_size: int) -> None:
        """Raise UsageError for a run's flags that do not fit together."""
        if config.sync_every != DEFAULTS.sync_every and config.ddp_hook != "post_localsgd":
            raise UsageError("--sync_every with --sync ddp needs --ddp_hook post_localsgd. Add it, or leave it out.")

    def attach(self, model: nn.Module) -> nn.Module:
        super().attach(model)
        words: dict[str, Any] = {} if self.options.broadcast_buffers else {"broadcast_buffers": False}
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[self.comm.device] if self.comm.device.type == "cuda" else None,
            process_group=self.comm.group,
            find_unused_parameters=self.find_unused_parameters,
            init_sync=False,  # `attach` has just done it
            # Passed only if it differs: torch then has no small first bucket.
            bucket_cap_mb=self._bucket_mb(),
            gradient_as_bucket_view=self.options.bucket_view,
            # Passed only if it differs: torch 2.13 warns about its name.
            **words,
        )
        if self._hook:
            self._ddp.register_comm_hook(self.comm.group, self._hook[0])
        if self._later == "powersgd":
            self._kept = PowerSGDState(self.comm.group, start_powerSGD_iter=PLAIN_STEPS)
            self._ddp.register_comm_hook(self._kept, powerSGD_hook)
        elif self._later:
            self._kept = PostLocalSGDState(self.comm.group, None, PLAIN_STEPS, post_local_gradient_allreduce=False)
            self._ddp.register_comm_hook(self._kept, post_localSGD_hook)
        self._reducer = Reducer(self.comm, self._ddp, has_buckets=not self._later)
        self._bucket_places: set[int] = set()  # gradients are views of these, once they are averages
        return self._ddp

    def finish(self) -> None:
        """Enter this step's calls in the ledger. Nothing to wait for: forward and backward have waited."""
        if self.heeds_faults and self.fault is None and not self._reducer.has_ended:
            self.fault = UNUSED.format("a parameter")
        if self.fault is not None:
            self._reducer.catch_up(has_begun=self.fault != CHANGED)
        self._reducer.end_step()
        if self.options.bucket_view:
            self._bucket_places = set(self._places_of_gradients())

    @classmethod
    def codec_of_calls(cls, options: SyncOptions) -> str | None:
        """The dtype of torch's hook: that of `compress`, or of `ddp_hook`."""
        return "fp16" if DDPOptions.of(options).ddp_hook == "fp16" else options.compress

    @classmethod
    def changes_calls(cls, options: SyncOptions) -> bool:
        return DDPOptions.of(options).ddp_hook in LATER

    @classmethod
    def calls(cls, step: Step) -> list[CollectiveCall]:
        """torch's buckets: in the order of arrival, each closed by the tensor that fills it (the first by 1 MiB)."""
        options = step.options
        limit = options.first_bucket_mb if options.bucket_mb == DEFAULTS.bucket_mb else options.bucket_mb
        travels, bucket = [], []
        for tensor in step.arrival:
            bucket.append(tensor)
            if sum(each.bytes for each in bucket) >= limit * MIB:
                travels.append(CollectiveCall(ALL_REDUCE, bucket))
                bucket, limit = [], options.bucket_mb
        return [*travels, CollectiveCall(ALL_REDUCE, bucket)] if bucket else travels

    @classmethod
    def expected(
        cls,
        tensors: Sizes,
        ranks: int,
        rank: int,
        options: SyncOptions = DEFAULTS,
        hosts: Sequence[Sequence[int]] = (),
    ) -> Cost | None:
        """As in every sync, with buckets in the dtype of torch's hook: exact to a byte per bucket."""
        word = cls.codec_of_calls(options)
        if word:
            tensors = [(elements, HOOKS[word][1].itemsize) for elements, _ in tensors]
        return super().expected(tensors, ranks, rank, options, hosts)

    @classmethod
    def buffers(cls, tensors: Sequence[Tensor], options: SyncOptions) -> Buffers:
        """torch's buckets: S in total, however it divides them."""
        if cls.changes_calls(options):
            return Buffers(unsaid="the memory of torch's hook is not predicted")
        # Gradients arrive in the reverse order of their tensors; the hosts do not matter.
        travels = cls.calls(Step(tensors, options, [], tensors[::-1]))
        return Buffers([travel.tensors for travel in travels], at_once=DDPOptions.of(options).bucket_view)

    def hidden_bytes(self) -> int:
        """The buckets, except for those whose views are gradients now."""
        if self._ddp is None:
            return 0
        shown = {place: size for place, size in self._places_of_gradients().items() if place in self._bucket_places}
        return self._reducer.bucket_bytes - sum(shown.values())

    def _places_of_gradients(self) -> dict[int, int]:
        """The addresses of the gradients' memory, and the bytes at each."""
        storages = [p.grad.untyped_storage() for _, p in self.parameters if p.grad is not None]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._attached.no_sync():
            yield

    def detach(self) -> None:
        super().detach()
        if self._ddp is not None:
            self._reducer.close()
        self._ddp = None

    @property
    def _attached(self) -> DistributedDataParallel:
        """torch's module, between `attach` and `detach`."""
        assert self._ddp is not None
        return self._ddp

    def _bucket_mb(self) -> float | None:
        """The capacity of a bucket in MiB; None for torch's own, whose first is smaller."""
        if self.options.ddp_hook == "powersgd":
            # It makes a bucket's later calls when earlier ones end, on gloo's threads. Two buckets could be in another
            # order on each rank, so there is only one.
            return sum(p.numel() * p.element_size() for _, p in self.parameters) / MIB + 1
        return None if self.options.bucket_mb == DEFAULTS.bucket_mb else self.options.bucket_mb

    def after_step(self) -> None:
        # As torch's PeriodicModelAverager, which skips parameters without a gradient; here none have one any more.
        self._steps_made += 1
        later = self._steps_made - 1 - PLAIN_STEPS
        self.replicas_equal = not self.averages_weights or later < 0
        if not self.replicas_equal and later % self.options.sync_every == 0:
            self._average_weights()

    def agree_on_finite(self, is_finite: bool) -> bool:
        if not self.averages_weights:
            return is_finite
        return self.all_finite(is_finite)

    def settle(self) -> None:
        if not self.replicas_equal:
            self._average_weights()
        super().settle()

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """As in the interface: the order of torch's buckets, and the state of its hook."""
        tensors = {}
        if isinstance(self._kept, PowerSGDState):
            tensors = {f"{name}/{n}": tensor for name in POWERSGD for n, tensor in getattr(self._kept, name).items()}
        facts = {
            "arrival": self._reducer.arrival(),
            "steps": self._reducer.steps,
            "steps_made": self._steps_made,
            "replicas_equal": self.replicas_equal,
            "hook_steps": self._kept and self._kept.iter,
        }
        return facts, tensors

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        hook_steps = COUNT if self._kept is not None else OrNone(COUNT)
        expect(facts, Fields(OWN | {"hook_steps": hook_steps}))
        self._reducer.rehearse(facts["arrival"], facts["steps"])
        self._steps_made, self.replicas_equal = facts["steps_made"], facts["replicas_equal"]
        if self._kept is not None:
            self._kept.iter = facts["hook_steps"]
            for key, tensor in tensors.items():
                name, _, bucket = key.partition("/")
                if name in POWERSGD:
                    getattr(self._kept, name)[int(bucket)] = tensor.to(self.comm.device, copy=True)

    @property
    def own_is_lost(self) -> str | None:
        return f"the state of torch's {self._later} hook, which each rank has for itself" if self._later else None

    def _average_weights(self) -> None:
        group = self.comm.group or dist.group.WORLD
        assert group is not None  # opened before the model was attached
        with watched(self.comm, GRADIENTS):
            average_parameters(iter([p for _, p in self.parameters]), group)
        self.replicas_equal = True
