"""The contract of a gradient sync: what the training loop calls, and what every way of averaging must keep."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import AGREEMENT, BUFFERS, STATE
from cos598d.errors import UserError
from cos598d.fields import flag
from cos598d.sync.alike import check_models, sparse_weights
from cos598d.sync.cost import NOTHING, CollectiveCall, Cost, Sizes, Step, Tensor, cost_of
from cos598d.sync.cost.memory import Buffers

SYNC_GROUP = "gradient sync"  # where --help lists the flags below


@dataclass(frozen=True)
class SyncFlags:
    """The flags of a sync. One that does not name a flag among those it `uses` refuses it.

    bucket_mb: capacity of a bucket in MiB (torch DDP's figure).
    compress: the codec in which buckets travel (`cos598d/sync/codecs`); None: as they are.
    sync_every: the steps from one average to the next, for syncs that average weights.
    fragments: in how many parts weights are averaged, one after the other, where they are averaged in parts.
    outer_learning_rate, outer_momentum: of the step along such an average.
    bucket_view: whether torch's DDP lets gradients be views of its buckets, so that none is copied back.
    ddp_hook: the communication hook of torch's DDP; None: its own all-reduce.
    reshard: "yes" frees gathered parameters after their layer's forward and gathers them again for backward.
    reduce_scatter: whose sums gradients by shards: "ours", by messages, or "torch", the backend's.
    zero_stage: what DeepSpeed cuts over the ranks: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too.
    fabric_strategy: what Lightning Fabric trains with.
    pack_gradients: whether gradients travel in fewer bits, and arrive to the last one.
    """

    bucket_mb: float = flag(25.0, "capacity of a bucket in MiB, for syncs with buckets", group=SYNC_GROUP, above=0)
    compress: str | None = None  # a flag in RunConfig, which knows the codecs' names
    sync_every: int = flag(
        1, "steps from one average of the weights to the next, for local_sgd and diloco", group=SYNC_GROUP, least=1
    )
    fragments: int = flag(
        16, "parts of the weights, of which diloco averages one at a time", group=SYNC_GROUP, least=1, below=10_000
    )
    outer_learning_rate: float = flag(
        0.7, "step along an average of what the ranks moved, for diloco", group=SYNC_GROUP, above=0
    )
    outer_momentum: float = flag(
        0.9, "Nesterov's momentum of these steps, for diloco", group=SYNC_GROUP, least=0, below=1
    )
    bucket_view: bool = flag(
        False, "gradients are views of the buckets, for ddp: torch's gradient_as_bucket_view", group=SYNC_GROUP
    )
    ddp_hook: str | None = flag(
        None,
        "communication hook of torch's DDP, for ddp: one of {choices}",
        group=SYNC_GROUP,
        choices=("fp16", "powersgd", "post_localsgd"),
    )
    reshard: str = flag(
        "yes",
        "whether gathered weights are freed after their layer's forward, for torch_fsdp and fabric: {choices}",
        group=SYNC_GROUP,
        choices=("yes", "no"),
    )
    reduce_scatter: str = flag(
        "ours",
        "whose reduce-scatter sums gradients, for torch_fsdp: {choices}",
        group=SYNC_GROUP,
        choices=("ours", "torch"),
    )
    zero_stage: int = flag(
        2, "ZeRO's stage for deepspeed: 0 cuts nothing, 3 everything", group=SYNC_GROUP, least=0, below=4
    )
    fabric_strategy: str = flag("ddp", "what fabric trains with: {choices}", group=SYNC_GROUP, choices=("ddp", "fsdp2"))
    pack_gradients: bool = flag(
        False,
        "gradients travel in an eighth fewer bits, and arrive to the last bit, for sparse_zero1",
        group=SYNC_GROUP,
    )


@dataclass(frozen=True)
class SyncOptions(SyncFlags):
    """What a sync is made with: its flags, each of use to some kinds, and what no flag says.

    first_bucket_mb: capacity in MiB of the first bucket to be full, which is small so that the first call starts early
    (torch DDP's figure).
    copies_gradients: whether averages are copied back into the gradients that autograd made, so that one that a script
    keeps stays as it is. The training loop keeps none, and its gradients are views of the buckets.
    broadcast_buffers: whether rank 0's buffers are sent at the start, and by torch's DDP before a step's first forward.
    """

    first_bucket_mb: float = 1.0
    copies_gradients: bool = False
    broadcast_buffers: bool = True


DEFAULTS = SyncOptions()
UNUSED = (
    "{} got no gradient in this step, although find_unused_parameters is off: turn it on for a model that leaves "
    "parameters unused."
)


class GradientSync:
    """One way for replicas to agree on their gradients. The loop uses it like this:

        module = sync.attach(model)          # rank 0's state on every rank
        ...
        with sync.no_sync():                 # for all micro-batches of a step but the last
            module(...).backward()
        module(...).backward()
        sync.finish()                        # every rank's .grad is the average over ranks
        optimizer.step()
        sync.after_step()                    # for syncs that average weights instead
        # or, where the gradients are not finite and fp16's loss scale is lowered, nothing but:
        sync.forget_step()                   # the step leaves no trace
        ...
        sync.settle()                        # before the model is evaluated or saved: weights and buffers are equal
        sync.detach()

    A subclass of the simplest kind, which acts after backward, implements `average` alone.
    Other ranks are reached only through `self.comm`.

    `find_unused_parameters` (torch DDP's word): whether a step may leave a trainable parameter without a gradient
    on some rank. If so the ranks agree on each step's set before they average, which costs a small all-reduce;
    if not, a missing gradient is an error.

    Buffers, such as BatchNorm's running statistics, follow each rank's own examples while it trains. Rank 0's count:
    `settle` gives them to all, so that the model that is evaluated and saved is the one that torch's DDP makes. DDP
    itself sends rank 0's before every step as well, which only a buffer that training reads would notice: so does
    `data_parallel`, by calling `settle` there.

    `replicas_equal`: whether all ranks hold the same weights now, between two steps, and can be held to it.

    `loss_scale`: what the losses of this step are multiplied by, and so its gradients; 1 but for fp16. The loop sets it
    before backward. It differs from step to step: what a sync keeps of a gradient it keeps divided by it.

    `heeds_faults`: whether the ranks tell each other in every step whether one has a `fault`: words for why its
    gradients do not count. Only in a script of one's own can a rank go on after that (`cos598d.parallel`).
    `has_fault`: whether some rank has one, once they have agreed on it; None before.

    uses: the names of the SyncOptions that mean anything to it.
    overlaps: whether its calls begin while backward still runs.
    averages_weights: whether it averages weights after the optimizer's step in place of gradients before it.
    keeps_nothing: whether it keeps no memory from step to step.
    sends_buffers: whether rank 0's buffers are sent to all in every step.
    takes_sparse: whether it averages the sparse gradients of `nn.Embedding(..., sparse=True)`.
    one_host: whether all ranks must be on one host. shares_memory: whether a host's ranks must be able to share memory.
    not_modelled: why the model of cost (`scale`) leaves it out, in words that follow "for"; None where it does not.
    exact: whether it keeps every claim of `cos598d.tools.check.claims`; if not, `claims` names those that it keeps.
    never_kept: what begins afresh even where a run goes on with its `own_state`, in words; None where nothing does.
    """

    loss_scale = 1.0
    heeds_faults = False
    fault: str | None = None
    has_fault: bool | None = None
    replicas_equal = True
    uses: tuple[str, ...] = ()
    overlaps = False
    averages_weights = False
    keeps_nothing = False
    sends_buffers = False
    takes_sparse = True
    one_host = shares_memory = False
    not_modelled: str | None = None
    exact = True
    claims: tuple[str, ...] = ()
    never_kept: str | None = None

    def __init__(self, comm: Communicator, find_unused_parameters: bool = True, options: SyncOptions = DEFAULTS):
        self.comm = comm
        self.find_unused_parameters = find_unused_parameters
        self.options = options
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self._model: nn.Module | None = None
        self._sparse: set[torch.Tensor] = set()

    @classmethod
    def check_options(cls, options: SyncOptions, backend: str) -> None:
        """Raise UsageError for options that `uses` names and that this sync cannot take all the same."""

    @classmethod
    def calls(cls, step: Step) -> list[CollectiveCall] | None:
        """The gradients' calls of one step among several ranks, in order; None where nothing states them beforehand.

        What a step costs follows from them, here and in the model of cost: see `cos598d/sync/cost`.
        """
        return None

    @classmethod
    def expected(
        cls,
        tensors: Sizes,
        ranks: int,
        rank: int,
        options: SyncOptions = DEFAULTS,
        hosts: Sequence[Sequence[int]] = (),
    ) -> Cost | None:
        """What one step's gradients cost `rank`, as its ledger must show; None where only the step itself can tell.

        tensors: (elements, bytes per element) of the trainable parameters of one dtype, in the model's order, all of
        them used; they travel as they are, in no codec's form. hosts: the ranks of each host; without them all share
        one.
        """
        sized = [Tensor("", (elements,), "", elements * element_bytes) for elements, element_bytes in tensors]
        travels = cls.calls(Step(sized, options, hosts or [range(ranks)], sized[::-1]))
        if travels is None:
            return None
        return cost_of(travels, ranks, rank) if ranks > 1 else NOTHING

    @classmethod
    def buffers(cls, tensors: Sequence[Tensor], options: SyncOptions) -> Buffers:
        """What it keeps in memory from step to step, for trainable tensors in the model's order, all of them used."""
        return Buffers() if cls.keeps_nothing else Buffers(unsaid="this sync does not say what it keeps")

    @classmethod
    def remark(cls, model: nn.Module) -> str | None:
        """What the user should know of this sync with this model, in a sentence; None for nothing."""
        return None

    def hidden_bytes(self) -> int:
        """Of what it keeps now, the bytes that a library has in its name, and that no tensor here shows."""
        return 0

    def attach(self, model: nn.Module) -> nn.Module:
        """Make every rank's model equal rank 0's and return the module to call in its place.

        Trainable parameters, frozen ones and buffers are sent; tied weights once. Raises UserError, the same on every
        rank, when the ranks' parameters differ in name, order, shape, dtype or requires_grad, when a tensor cannot be
        sent, and when a gradient will be sparse that this sync cannot average.
        """
        check_models(self.comm, model)
        self._sparse = sparse_weights(model)
        if self._sparse and not self.takes_sparse:
            name = next(name for name, p in model.named_parameters() if p in self._sparse)
            raise UserError(
                f"{name} has sparse gradients, which {type(self).__name__} does not average. Choose all_reduce, "
                "overlap or ddp, or make the layer without sparse=True."
            )
        with torch.no_grad():
            buffers = model.named_buffers() if self.options.broadcast_buffers else ()
            for name, tensor in (*model.named_parameters(), *buffers):
                self.comm.broadcast(tensor.data, name, purpose=STATE)
        self.parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._model = model
        return model

    def finish(self) -> None:
        """Block until every trainable parameter's .grad is the average over all ranks, on every rank.

        A parameter that no rank used keeps None; where only some ranks used it, the others count as zero.
        """
        for name, gradient in self.gradients():
            self.average(name, gradient)

    def average(self, name: str, gradient: torch.Tensor) -> None:
        """Replace `gradient` by its average over the ranks, in place. Called in the same order on every rank."""
        raise NotImplementedError(f"{type(self).__name__} has no average()")

    def after_step(self) -> None:
        """The optimizer has changed the weights. Nothing to do for syncs that average gradients."""

    def all_finite(self, is_finite: bool) -> bool:
        """Whether it is so on every rank: for syncs whose gradients do not tell, by an all-reduce of 4 bytes."""
        overflowed = torch.tensor(not is_finite, dtype=torch.int32, device=self.comm.device)
        self.comm.all_reduce(overflowed, "ranks whose gradients are not finite", purpose=AGREEMENT)
        return overflowed.item() == 0

    def agree_on_finite(self, is_finite: bool) -> bool:
        """From whether this rank's gradients are finite after `finish`, whether every rank's are.

        Asked under fp16 alone. An average is the same everywhere, so nothing has to travel.
        """
        return is_finite

    def forget_step(self) -> None:
        """Called instead of `after_step` when the optimizer leaves the step out: drop what the step left to the next.

        A gradient of it was not finite, and so may be whatever was made of it.
        """

    def settle(self) -> None:
        """Make the replicas equal: give every rank rank 0's buffers; weights too, where they part between steps."""
        model = getattr(self, "_model", None)  # a class of the user's own may attach in another way
        self.send_buffers([buffer for _, buffer in model.named_buffers()] if model else [])

    def send_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Give every rank rank 0's of these buffers, which are alike in shapes and dtypes on all ranks."""
        if not buffers or self.comm.world_size == 1:
            return
        # As bytes side by side, so that all of them travel in one call, whatever their dtypes.
        parts = [buffer.data.contiguous().view(-1).view(torch.uint8) for buffer in buffers]
        together = torch.cat(parts)
        self.comm.broadcast(together, "buffers", purpose=BUFFERS)
        for buffer, part in zip(buffers, together.split([len(part) for part in parts]), strict=True):
            # .data: a graph of an earlier forward may have saved the buffer, as with torch's DDP.
            buffer.data.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, which covers forward and backward, gradients only accumulate."""
        yield

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What this rank's sync remembers from one step to the next, as JSON and as named tensors.

        Asked of every rank between two steps, when a run is saved. Weights that part from the other ranks' are saved
        without it. The tensors may lie in live memory.
        """
        return {}, {}

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from what the same rank's `own_state` gave, with the same options on as many ranks.

        Called after `attach`, before the first step. Raises UserError where it cannot be that.
        """

    @property
    def own_is_lost(self) -> str | None:
        """What is not carried over where a run goes on without its `own_state`, in words; None for nothing."""
        return None

    def detach(self) -> None:
        """Remove hooks and free buffers; the model stays as it is."""
        self.parameters = []
        self._model = None

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """The gradients to average in this step, the same list on every rank, zeros filled in where a rank has none."""
        is_used = self.agree_on_used([p.grad is not None for _, p in self.parameters])
        agreed = []
        for name, p in self.parameters:
            if not is_used[p]:
                continue
            agreed.append((name, self.fill_in(p)))
        return agreed

    def fill_in(self, p: nn.Parameter) -> torch.Tensor:
        """The parameter's gradient, zeros where it has none, in the layout that it has on the other ranks."""
        if p in self._sparse:
            dense = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = dense if dense.is_sparse else dense.to_sparse(1)
        elif p.grad is None:
            p.grad = torch.zeros_like(p)
        return p.grad

    def agree_on_used(self, has: list[bool]) -> dict[nn.Parameter, bool]:
        """From whether this rank `has` a gradient of each of `parameters`, whether any rank has, by parameter.

        A small all-reduce; with find_unused_parameters off nothing travels: all are used, or UserError is raised.
        Where the sync heeds faults, whether a rank has one travels too, and a missing gradient is such a fault.
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
        """From whether this rank has a `fault`, whether any rank has (`has_fault`): an all-reduce of 4 bytes."""
        faults = torch.tensor(self.fault is not None, dtype=torch.int32, device=self.comm.device)
        self.comm.all_reduce(faults, "ranks whose gradients do not count", purpose=AGREEMENT)
        self.has_fault = bool(self.has_fault) or faults.item() > 0
