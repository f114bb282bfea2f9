"""The facts of a gradient sync (options, cost, memory, state), and what it does between steps.

The loop, the cost model and the checkpoints ask for it. A sync that averages gradients and keeps nothing from step
to step need not define any of them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cos598d.records.conventions import BUFFERS
from cos598d.sync.cost import ALL_REDUCE, CollectiveCall, Step
from cos598d.sync.options import DEFAULTS, SyncOptions

if TYPE_CHECKING:
    from cos598d.comm.communicator import Communicator
    from cos598d.sync.estimate import Buffers, Cost, Sizes, Tensor


class SyncFacts:
    """Everything about a gradient sync except how it averages, with defaults that suit most syncs.

    options_kind: the class of its options: SyncOptions, or a subclass of it that adds the sync's own.
    uses: the names of the options that have an effect on it. It refuses the others.
    overlaps: whether its calls begin while backward still runs.
    averages_weights: whether it averages weights after the optimizer's step, in place of gradients before it.
    keeps_nothing: whether it keeps no memory from step to step.
    sends_buffers: whether rank 0's buffers are sent to all ranks in every step.
    takes_sparse: whether it averages the sparse gradients of `nn.Embedding(..., sparse=True)`.
    one_host: whether all ranks must be on one host. shares_memory: whether a host's ranks must be able to share memory.
    replicas_equal: whether all ranks hold the same weights now, between two steps, and can be held to it.
    not_modelled: why the cost model (`scale`) leaves it out, as words that follow "for"; None if it includes it.
    chooses_calls: whether a library makes the calls, and as many as it likes.
    exact: whether it passes every test of `cos598d.tools.check.claims`; if not, `claims` names those that it passes.
    never_kept: what starts from scratch even if a run resumes with its `own_state`, as a phrase; None if nothing.
    """

    options_kind: type[SyncOptions] = SyncOptions
    uses: tuple[str, ...] = ()
    overlaps = False
    averages_weights = False
    keeps_nothing = False
    sends_buffers = False
    takes_sparse = False
    one_host = shares_memory = False
    replicas_equal = True
    not_modelled: str | None = None
    exact = True
    chooses_calls = False
    claims: tuple[str, ...] = ()
    never_kept: str | None = None

    comm: "Communicator"
    _model: nn.Module | None = None  # set by `attach`

    @classmethod
    def check_options(cls, options: SyncOptions, backend: str) -> None:
        """Raise UsageError for options that `uses` names but whose values this sync cannot take."""

    @classmethod
    def remark(cls, model: nn.Module) -> str | None:
        """A sentence for the user about this sync with this model; None for nothing."""
        return None

    # Cost and memory, predicted before a step

    @classmethod
    def codec_of_calls(cls, options: SyncOptions) -> str | None:
        """The compressor of its calls (`cos598d/sync/codecs`); None if they are not compressed."""
        return options.compress

    @classmethod
    def changes_calls(cls, options: SyncOptions) -> bool:
        """Whether it makes other calls than `calls` lists after its first steps."""
        return False

    @classmethod
    def calls(cls, step: Step) -> list[CollectiveCall] | None:
        """The gradients' calls of one step among several ranks, in order; None if they are not known before the step.

        The cost of a step follows from them, here and in the cost model: see `cos598d/sync/cost.py`.
        """
        return None

    @classmethod
    def expected(
        cls,
        tensors: "Sizes",
        ranks: int,
        rank: int,
        options: SyncOptions = DEFAULTS,
        hosts: Sequence[Sequence[int]] = (),
    ) -> "Cost | None":
        """What one step's gradients cost `rank`, as its ledger must show; None if it is known only after the step.

        tensors: (elements, bytes per element) of the trainable parameters of one dtype, in the model's order, all of
        them used and uncompressed. hosts: the ranks of each host; without it all ranks share one.
        """
        from cos598d.sync.estimate import Cost, Tensor

        sized = [Tensor("", (elements,), "", elements * element_bytes) for elements, element_bytes in tensors]
        calls = cls.calls(Step(sized, options, hosts or [range(ranks)], sized[::-1]))
        if calls is None:
            return None
        moved = [call.moved(ranks, rank) for call in calls] if ranks > 1 else []
        count = None if cls.chooses_calls else len(moved)
        return Cost(count, sum(sent for sent, _ in moved), sum(received for _, received in moved))

    @classmethod
    def averages(cls, step: Step) -> list[CollectiveCall]:
        """For a sync that averages weights: the calls that average all of them once, in the form of `calls`."""
        return [CollectiveCall(ALL_REDUCE, step.tensors)]

    @classmethod
    def round_steps(cls, options: SyncOptions) -> int:
        """For a sync that averages weights: the number of steps in which all of them are averaged once."""
        return options.sync_every

    @classmethod
    def buffers(cls, tensors: Sequence["Tensor"], options: SyncOptions) -> "Buffers":
        """What it keeps in memory from step to step, for trainable tensors in the model's order, all of them used."""
        from cos598d.sync.estimate import Buffers

        return Buffers() if cls.keeps_nothing else Buffers(unsaid="this sync has no prediction of its memory")

    def hidden_bytes(self) -> int:
        """The bytes that a library keeps for this sync outside of any tensor that is visible here."""
        return 0

    # State in a checkpoint

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What this rank's sync keeps from one step to the next, as JSON and as named tensors.

        Every rank calls it between two steps, when a run is saved. Weights that differ from the other ranks' are saved
        elsewhere. The tensors may be live memory.
        """
        return {}, {}

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Continue from what the same rank's `own_state` gave, with the same options and number of ranks.

        Called after `attach`, before the first step. Raises UserError if `facts` and `tensors` do not fit.
        """

    @property
    def own_is_lost(self) -> str | None:
        """What is lost if a run resumes without its `own_state`, as a phrase for the user; None if nothing is."""
        return None

    # Between steps

    def after_step(self) -> None:
        """Called after the optimizer has changed the weights. Nothing to do for syncs that average gradients."""

    def forget_step(self) -> None:
        """Called instead of `after_step` when the optimizer skips the step: drop what this step kept for the next.

        A gradient was not finite, so everything computed from it may not be finite either.
        """

    def settle(self) -> None:
        """Make the replicas equal: give every rank rank 0's buffers, and its weights too if they drift apart."""
        self.send_buffers([buffer for _, buffer in self._model.named_buffers()] if self._model else [])

    def send_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Give every rank rank 0's values of these buffers, whose shapes and dtypes are equal on all ranks."""
        if not buffers or self.comm.world_size == 1:
            return
        # Packed as bytes, so that one call sends all of them, whatever their dtypes.
        parts = [buffer.data.contiguous().view(-1).view(torch.uint8) for buffer in buffers]
        together = torch.cat(parts)
        self.comm.broadcast(together, "buffers", purpose=BUFFERS)
        for buffer, part in zip(buffers, together.split([len(part) for part in parts]), strict=True):
            # .data: the graph of an earlier forward may have saved the buffer, as with torch's DDP.
            buffer.data.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def agree_on_finite(self, is_finite: bool) -> bool:
        """Whether every rank's gradients are finite. `is_finite` is this rank's result after `finish`.

        Only fp16 needs it. An average is the same on every rank, so nothing has to be sent.
        """
        return is_finite
