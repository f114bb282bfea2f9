"""Every strategy of ours in anybody's script: a model to call, and an optimizer to step it by, in torch's terms."""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from cos598d.comm.group import GroupCommunicator
from cos598d.doors.optimizer_shards import check_optimizers, cut_optimizer
from cos598d.doors.parallel import DataParallel, device_of, name_of
from cos598d.doors.shards import ParallelOptimizer, ShardedStep
from cos598d.errors import UsageError, UserError, flag_called
from cos598d.strategies import AUTO_SYNC, ENGINES, class_of, options_kind_of, strategy_flags
from cos598d.strategies.base import MakeOptimizer
from cos598d.strategies.sharded import Sharded
from cos598d.strategies.state import BUFFERS, WEIGHTS, FullTensor
from cos598d.sync import or_choose
from cos598d.sync.alike import check_models
from cos598d.sync.base import GradientSync
from cos598d.sync.codecs import get_codec
from cos598d.sync.parts import own_loop
from cos598d.terminal.fields import check_flags, defaults_of

OWN_OPTIONS = ("first_bucket_mb", "copies_gradients", "broadcast_buffers")  # of SyncOptions, which no script gives


def parallelize(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    strategy: str | type[GradientSync] = "bucketed",
    *,
    process_group: dist.ProcessGroup | None = None,
    find_unused_parameters: bool = True,
    broadcast_buffers: bool = True,
    timeout_seconds: float = 300.0,
    **options: Any,
) -> tuple[DataParallel, torch.optim.Optimizer]:
    """Wrap a model and make its optimizer, so that all ranks train it together. Every rank calls it.

    make_optimizer: called once with the model's parameters, whole. It may make groups of them as it likes.
    strategy: a gradient sync, as `data_parallel` takes it, local_sgd and diloco too; or zero1, zero2, zero3,
    sparse_zero1 or shared_weights, whose ranks hold shards. These take optimizers that treat every element by itself.
    auto measures for a second or two, and picks an exact one; rank 0 prints which, and the model's `choice` has it.
    options: those of the strategy by the names of their flags: bucket_mb, compress, sync_every, pack_gradients, ...
    The others are `data_parallel`'s. Gradients are averages over the ranks when backward returns, as with DDP.

    Raises UsageError for a strategy or option that does not exist or fit, for an optimizer that does not fit, and where
    no process group is open; UserError, the same on every rank, where the ranks' models or optimizers differ.
    """
    if not callable(make_optimizer):
        raise UsageError(
            f"make_optimizer is {type(make_optimizer).__name__}, not a function. Give a function that makes the "
            "optimizer: lambda params: torch.optim.AdamW(params, lr=...)."
        )
    device = device_of(model.parameters(), "parallelize")
    if strategy in ENGINES:
        raise UsageError(
            f"strategy {strategy} is another library's engine. Name a gradient sync, zero1, zero2, zero3 or "
            "shared_weights."
        )
    whole, choice = None, None
    if strategy == AUTO_SYNC:
        if options:
            raise UsageError(f"{next(iter(options))} has no effect with auto. Leave it out, or name a strategy.")
        whole = make_optimizer(list(model.parameters()))
        choice = _chosen(
            GroupCommunicator(process_group, device, timeout_seconds), model, whole, find_unused_parameters
        )
        strategy = choice.sync
    with flag_called("strategy", "--sync"):
        kind: Any = class_of(strategy) if isinstance(strategy, str) else strategy
    name = strategy if isinstance(strategy, str) else strategy.__name__
    for word, value in [*options.items()]:
        if value is None and word in defaults_of(strategy_flags()):
            del options[word]  # it has its default
        elif word not in kind.uses or word in OWN_OPTIONS:
            more = "" if word in OWN_OPTIONS else or_choose(word)
            raise UsageError(f"{word} has no effect with {name}. Leave it out{more}.")
    if options.get("compress") is not None:
        get_codec(options["compress"])
    chosen = options_kind_of(kind)(**options, copies_gradients=True, broadcast_buffers=broadcast_buffers)
    check_flags(chosen)
    comm = GroupCommunicator(process_group, device, timeout_seconds)
    if hasattr(kind, "check_options"):
        kind.check_options(chosen, comm.backend)
    if whole is None:
        whole = make_optimizer(list(model.parameters()))
    if issubclass(kind, Sharded):
        check_models(comm, model)
        check_optimizers(comm, whole, dict(model.named_parameters()))
        made = ShardedParallel(model, kind(comm, find_unused_parameters, chosen), whole, comm, broadcast_buffers)
        made.choice, made.sync_name = choice, name
        return made, made.optimizer
    sync = kind(comm, find_unused_parameters, chosen)
    # Local replicas follow their own buffers until they are averaged.
    module = DataParallel(model, sync, comm, broadcast_buffers and not sync.averages_weights)
    module.choice, module.sync_name = choice, name_of(name, chosen.compress)
    if sync.averages_weights:
        whole.register_step_post_hook(lambda *_: sync.after_step())
    return module, whole


def _chosen(comm: GroupCommunicator, model: nn.Module, whole: torch.optim.Optimizer, may_be_unused: bool) -> Any:
    """The Choice of strategy `auto`, the same on every rank; rank 0 prints it to stderr."""
    from cos598d.cost.choice import choose_for_script  # which few scripts need

    check_models(comm, model)
    named = dict(model.named_parameters())
    make = None
    with contextlib.suppress(UsageError):  # the same on every rank
        check_optimizers(comm, whole, named)
        make = cut_optimizer(whole, named)
    choice = choose_for_script(comm, model, may_be_unused, make)
    if comm.rank == 0:
        print(f"strategy auto: {choice.words}", file=sys.stderr, flush=True)
    return choice


class ShardedParallel(DataParallel):
    """A model whose gradients, optimizer and maybe weights are cut over the ranks by a strategy of shards.

    It is as DataParallel, with these differences:
    1. When backward returns, this rank has its parts of the gradients. Each parameter's .grad is a ShardedGradient,
       which stands for the whole.
    2. `optimizer.step()` drops the gradients, as if `zero_grad()` followed.
    3. After it, new weights may be on their way until the forward that needs them. Read weights between two steps by
       `state_dict()`, this module's or the model's, or through this module's `parameters()`; or call `settle()` first.
    4. Parameters that are frozen or trained from now on, change so between a step and the next forward, on every rank.
       New ones are given to `optimizer.add_param_group` then.
    """

    _only_names = False  # state_dict is called for its keys

    def __init__(
        self,
        module: nn.Module,
        strategy: Sharded,
        whole: torch.optim.Optimizer,
        comm: GroupCommunicator,
        broadcast_buffers: bool,
    ):
        """`strategy` is made over `comm`, and not attached yet; `whole` is an optimizer of all parameters."""
        self.strategy = strategy
        self._has_added = False  # the last backward was of a forward inside no_sync
        sync = _ShardsAsSync(strategy, cut_optimizer(whole, dict(module.named_parameters())))
        super().__init__(module, sync, comm, broadcast_buffers)  # type: ignore[arg-type]
        self._step = sync.step = ShardedStep(strategy)
        self.optimizer = ParallelOptimizer(whole, self._step, self._cut_again)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's own forward. Raises UserError if what it trains is not what was cut."""
        if torch.is_grad_enabled() and self._layout is not None:
            self.strategy.check_memory()
        return super().forward(*inputs, **keywords)

    def settle(self) -> None:
        """Make every rank's model whole and equal, weights and buffers, until the next step. Every rank calls it."""
        if self._is_begun:
            self._end_what_was_cut_short()
        self.strategy.settle()

    def detach(self) -> nn.Module:
        """As DataParallel's. From then on a step of the optimizer raises UsageError."""
        module = super().detach()
        self._step.is_over = True
        return module

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As DataParallel's, for the L2 norm and a `max_norm` above 0. Every rank calls it."""
        if norm_type != 2 or not max_norm > 0:
            raise UsageError(
                f"clip_grad_norm_ of shards cannot take norm_type {norm_type} and max_norm {max_norm}. "
                "Give norm_type 2 and a max_norm above 0."
            )
        norm = self._step.clip(max_norm)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the gradients is {norm}, and error_if_nonfinite was given.")
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's."""
        self.optimizer.zero_grad()

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As every module's, once the weights on their way have arrived. Under zero3 they are NaN between steps."""
        self.strategy.wait_for_weights()
        return super().named_parameters(*arguments, **keywords)

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """The model's own, under its plain names. Raises UserError if this rank has only a part of the weights."""
        return super().state_dict(*arguments, **keywords)

    def _attached_to(self, call: nn.Module) -> None:
        super()._attached_to(call)
        # A script may ask the model itself, as with DDP, or a part of it.
        self._handles += [part.register_state_dict_pre_hook(_asking(part, self)) for part in self.module.modules()]

    def before_state_dict(self) -> None:
        """Wait for weights on their way. Raises UserError if this rank has only its shard of them."""
        self.strategy.wait_for_weights()
        if self._layout is not None and not self._only_names and not self.strategy.is_whole:
            raise UserError(
                "this rank has only its shard of the weights. Call full_state_dict() instead of state_dict(), "
                "on every rank."
            )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole weights and buffers, under plain names or under DDP's. Every rank calls it with the same.

        Raises UserError if something is missing or has another shape and, if `strict`, where something is left.
        """
        self._only_names = True
        try:
            known = self.module.state_dict().keys()
        finally:
            self._only_names = False
        given = {name if name in known else name.removeprefix("module."): state_dict[name] for name in state_dict}
        unknown = sorted(given.keys() - known)
        if unknown and strict:
            raise UserError(f"the state has {unknown[0]}, but this model does not. Leave it out, or give strict=False.")
        wholes = [FullTensor(WEIGHTS, name, given[name]) for name, _ in self.module.named_parameters() if name in given]
        wholes += [FullTensor(BUFFERS, name, given.get(name, kept)) for name, kept in self.module.named_buffers()]
        self.strategy.load_state(wholes)
        return _IncompatibleKeys([], unknown)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """As every module's, for `to`, `double` and the like. Raises UsageError for another dtype or device."""
        for p in self._trained.values():
            like = fn(torch.empty(0, dtype=p.dtype, device=p.device))
            if like.dtype != p.dtype or like.device != p.device:
                raise UsageError(
                    f"the model's shards are {str(p.dtype).removeprefix('torch.')} on {p.device}. Move or cast it "
                    "before parallelize."
                )
        return super()._apply(fn, recurse)

    def _cut_again(self) -> None:
        """Cut what of the optimizer's groups trains now, as `ParallelOptimizer` describes."""
        layout, sync, whole = self._layout, cast(_ShardsAsSync, self._sync), self.optimizer.whole
        if layout is None:
            raise UsageError("the model has left training by detach(). Call parallelize again.")
        whole.param_groups = self.optimizer.param_groups
        self.strategy.settle()
        check_models(self._comm, self.module)
        named = dict(self.module.named_parameters())
        check_optimizers(self._comm, whole, named)
        self.optimizer.gather_state()
        frozen = [p for p in layout.trained.values() if not p.requires_grad]  # for a while: they stay cut
        self._let_go()
        self._comm.equal_already = layout.names_of_same(self.module)
        sync.make_optimizer = cut_optimizer(whole, named)
        for p in frozen:
            p.requires_grad_(True)
        self._attached_to(sync.attach(self.module))
        for p in frozen:
            p.requires_grad_(False)
        self._step.cut()
        self.optimizer.cut_state()

    def _came_to_output(self, averages: bool, gradient: torch.Tensor | None = None) -> None:
        if self._layout is not None and not self._is_asked and own_loop.will_get_gradients(self._trained.values()):
            self._has_added = not averages
            self._step.add()
        super()._came_to_output(averages, gradient)

    def _be_quiet(self, is_quiet: bool) -> None:
        if self._has_added and torch._C._current_graph_task_id() == -1:
            super()._be_quiet(False)  # as at the end of a micro-batch
            self._has_added = False
        super()._be_quiet(is_quiet)

    def _end_what_was_cut_short(self) -> None:
        self.strategy.catch_up()
        self._finish(own_loop.CUT_SHORT)

    def _lay_anew(self) -> None:
        layout = self._layout
        assert layout is not None
        trained = {p for p in self.module.parameters() if p.requires_grad}
        if self.module is layout.model and trained.issubset(self._trained.values()):
            return
        known = {p for group in self.optimizer.param_groups for p in group["params"]}
        if self.module is not layout.model or not trained.issubset(known) or self._step.has_gradients:
            raise UsageError(
                "the model trains other parameters than those that its shards were cut for. Call "
                "optimizer.add_param_group with what is new, on every rank, between a step and the next forward."
            )
        self._finish(own_loop.CHANGED)  # ranks whose models are as before are in a step
        self._cut_again()


def _asking(part: nn.Module, parallel: ShardedParallel) -> Callable[..., None]:
    """A hook for `part`'s state_dict that does nothing in copies of it.

    It is a function that refers weakly: copy.deepcopy of the model would copy a method with all that it holds.
    """
    original, owner = weakref.ref(part), weakref.ref(parallel)

    def before(asked: nn.Module, *_: Any) -> None:
        model = owner()
        if model is not None and asked is original():
            model.before_state_dict()

    return before


class _ShardsAsSync:
    """A strategy of shards in the words of the sync that DataParallel calls; the rest its gradients answer."""

    heeds_faults = True
    step: ShardedStep

    def __init__(self, strategy: Sharded, make_optimizer: MakeOptimizer):
        self._strategy, self.make_optimizer = strategy, make_optimizer

    def attach(self, model: nn.Module) -> Any:
        call = self._strategy.attach(model, self.make_optimizer)
        self._strategy.gradients.heeds_faults = True
        return call

    def finish(self) -> None:
        self._strategy.finish()
        if not self._strategy.gradients.has_fault:
            self.step.receive()

    def forget_step(self) -> None:
        self._strategy.forget_step()
        self._strategy.wait_for_weights()
        self.step.begin()

    def detach(self) -> None:
        self._strategy.detach()
        self.step.begin()

    @property
    def fault(self) -> str | None:
        return self._strategy.gradients.fault

    @fault.setter
    def fault(self, fault: str | None) -> None:
        self._strategy.gradients.fault = fault

    @property
    def has_fault(self) -> bool | None:
        return self._strategy.gradients.has_fault

    @has_fault.setter
    def has_fault(self, has_fault: bool | None) -> None:
        self._strategy.gradients.has_fault = has_fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy.gradients, name)
