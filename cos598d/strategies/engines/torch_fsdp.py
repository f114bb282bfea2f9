"""torch's FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered layer by layer."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cos598d.comm.exchange import ReduceScatters
from cos598d.comm.ledger import dtype_name
from cos598d.comm.watched import watched
from cos598d.errors import UserError
from cos598d.records.conventions import AGREEMENT, STATE, WHOLE_WEIGHTS
from cos598d.strategies.base import MakeOptimizer, Module
from cos598d.strategies.engines.engine import Apart, Engine, need
from cos598d.strategies.engines.fsdp_formulas import held_by_fsdp, longest_part, sent_by_fsdp
from cos598d.strategies.formula import MemoryEstimate, TrafficEstimate, TrainingSpec
from cos598d.strategies.memory import count_memory, state_tensors
from cos598d.strategies.state import (
    FullTensor,
    OptimizerState,
    Stepped,
    local,
)
from cos598d.sync.options import SYNC_GROUP, SyncOptions
from cos598d.terminal.fields import flag


@dataclass(frozen=True)
class FSDPOptions(SyncOptions):
    """The options of torch's FSDP2.

    reshard: "yes" frees gathered parameters after their layer's forward and gathers them again for backward.
    reduce_scatter: the implementation that sums gradients by shards: "ours" (messages) or "torch" (the backend's).
    """

    reshard: str = flag(
        "yes",
        "free gathered weights after each layer's forward, for torch_fsdp and fabric: {choices}",
        group=SYNC_GROUP,
        choices=("yes", "no"),
    )
    reduce_scatter: str = flag(
        "ours",
        "implementation of reduce-scatter, for torch_fsdp: {choices}",
        group=SYNC_GROUP,
        choices=("ours", "torch"),
    )


class TorchFSDP(Engine):
    """`fully_shard` on every layer and on the whole (Zhao et al., "PyTorch FSDP", VLDB 2023, second version).

    1. Every parameter is split along its first dimension into n pieces, one per rank; the last ones are shorter, or
       empty. A layer is a member of a ModuleList. What is in no layer, such as the embeddings, belongs to the root.
    2. Before a layer's forward its parameters are gathered in one call. After it they are freed, and gathered again for
       backward. The root's stay in between. With `--reshard no` the layers' stay as well.
    3. After a layer's backward its gradients are summed by a reduce-scatter: each rank keeps the average of its pieces.
    4. Every rank steps its pieces. The norm for clipping is summed over the ranks.

    Cost for S bytes of weights, of which R are the root's: gathering sends (n-1)/n (2S - R), with `--reshard no`
    (n-1)/n S. The reduce-scatter sends (n-1)/n S by our messages (`--reduce_scatter ours`). gloo's own (`torch`) sends
    2(n-1)/n S, because it is the ring of its all-reduce. Two or three calls per layer. Padding to a multiple of n adds
    little. Memory: S/n of weights, with AdamW 2 S/n of state, all padded to a multiple of n rows. Within a step: R and
    the largest layer whole (all layers with `--reshard no`), their gradients whole, and S/n of the others' gradients
    (`held_by_fsdp`). Copies before and after the calls, one layer at a time, are not counted. Choose it if a model does
    not fit and you want torch to shard it. `zero3` is the same algorithm, written to be read.

    Known wrong: parameters of several dtypes in one layer, and parameters without dimensions, are refused. On gloo
    nothing overlaps: the calls block. If ranks use different parameters in a step, it hangs unless zeros are sent for
    unused ones. That is switched on if it can happen, and gradients that no rank has are dropped here.
    """

    options: FSDPOptions
    options_kind = FSDPOptions
    uses = ("reshard", "reduce_scatter")
    shards: tuple[str, ...] = ("optimizer", "gradients", "parameters")
    _sums: ReduceScatters | None = None  # of gradients, if they are summed by our reduce-scatter

    @classmethod
    def check_config(cls, config: Any, world_size: int) -> None:
        super().check_config(config, world_size)
        need("torch", "torch", "2.9", config.sync)

    @property
    def replicas_equal(self) -> bool:
        return self._apart.is_whole

    @property
    def takes_ours(self) -> bool:
        """Whether our reduce-scatter sums the gradients; only with several ranks."""
        return self.options.reduce_scatter == "ours"

    def wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        check_parameters(model, "torch_fsdp")
        self._apart = Apart(model)
        module = self.shard(self._apart.copy)
        self._apart.empty()
        self.optimizer = self.optimize(self._apart.copy, make_optimizer)
        return module

    def optimize(self, module: nn.Module, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        """The optimizer of the module, whose parameters are sharded."""
        return make_optimizer(module.named_parameters())

    def shard(self, module: nn.Module) -> nn.Module:
        """Shard the module's parameters in place."""
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self.comm.device.type, (self.comm.world_size,))
        longest = longest_part(module, layers(module), self.comm.world_size)
        self._units = fully_sharded(module, mesh, self.options.reshard == "yes")
        if self.takes_ours and self.comm.world_size > 1:
            from cos598d.strategies.engines.fsdp_sums import ReduceScatterByMessages

            dtype = next(module.parameters()).dtype
            self._sums = ReduceScatters(self.comm, {dtype: longest // dtype.itemsize})
            by_messages = ReduceScatterByMessages(self._sums, self.comm.world_size)
            for unit in self._units:
                unit.set_custom_reduce_scatter(by_messages)
        self.begin(module)
        return module

    def begin(self, module: nn.Module) -> None:
        """Prepare training with the sharded module."""
        cut: Any = module  # an FSDPModule too, which its type does not show
        self._module = cut
        self._shards = list(module.parameters())
        # the gathered parameters that were seen, although they are freed since
        self._gathered: dict[int, nn.Parameter] = {}
        self._used: set[str] = set()
        if self.find_unused_parameters:
            cut.set_reduce_scatter_unused_params(True)
            self._watch_use()

    def before_forward(self) -> None:
        self._apart.follow()
        if self._apart.is_whole:
            self._apart.empty()

    def no_sync(self) -> AbstractContextManager[None]:
        return self._accumulating()

    @contextlib.contextmanager
    def _accumulating(self) -> Iterator[None]:
        self._module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._module.set_requires_gradient_sync(True)

    def finish(self) -> None:
        if not self.find_unused_parameters:
            return
        trainable = [(name, p) for name, p in self._module.named_parameters() if p.requires_grad]
        has = torch.tensor([name in self._used for name, _ in trainable], dtype=torch.int32, device=self.comm.device)
        self.comm.all_reduce(has, "ranks that used each parameter", purpose=AGREEMENT)
        for (_, parameter), users in zip(trainable, has.tolist(), strict=True):
            if users == 0:
                parameter.grad = None
        self._used.clear()

    def clip(self, max_norm: float) -> torch.Tensor | None:
        if not max_norm and not self.scale.is_on:
            return None
        gradients = [local(p.grad) for p in self._module.parameters() if p.grad is not None]
        return clip_shards(self, gradients, max_norm)

    def whole(self) -> AbstractContextManager[None]:
        self._fill()
        return contextlib.nullcontext()

    def settle(self) -> None:
        super().settle()
        self._fill()

    def _fill(self) -> None:
        """Gather the model's parameters, one unit at a time."""
        if self._apart.is_whole:
            return
        with watched(self.comm, WHOLE_WEIGHTS):
            for unit in self._units:
                unit.unshard()
                for name, parameter in self._module.named_parameters():
                    if not hasattr(parameter, "to_local"):
                        self._apart.fill(name, parameter.detach().clone())
                unit.reshard()
        self._apart.is_whole = True

    def load_state(self, wholes: Iterable[FullTensor]) -> None:
        if self._apart.is_whole:
            self._apart.empty()
        self._rows = {piece.name: piece for piece in self._pieces()}
        super().load_state(wholes)

    def put_weights(self, whole: FullTensor) -> None:
        rows = self._rows[whole.name]
        local(rows.parameter).detach().copy_(rows.part_of(whole.tensor))

    def optimizer_state(self) -> OptimizerState:
        return OptimizerState(self.inner_optimizer(), [each for each in self._pieces() if each.parameter.requires_grad])

    def _pieces(self) -> list[Stepped]:
        """This rank's rows of every parameter, frozen ones too."""
        found = []
        for name, parameter in self._module.named_parameters():
            rows = -(-len(parameter) // self.comm.world_size)  # on every rank except the last ones
            first = min(self.comm.rank * rows, len(parameter))
            begin = first * (parameter.numel() // max(1, len(parameter)))
            found.append(Stepped(name, tuple(parameter.shape), begin, parameter))
        return found

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """At rank 0, one unit at a time."""
        for unit in self._units:
            with watched(self.comm, STATE):
                unit.unshard()
            try:
                if self.comm.rank == 0:
                    named = self._module.named_parameters()
                    yield from [(name, p) for name, p in named if not hasattr(p, "to_local")]
            finally:
                unit.reshard()

    def memory(self) -> dict[str, int]:
        """As in the interface. While a layer computes, the module has gathered parameters in place of its shards."""
        self._gathered |= {id(p): p for p in self._module.parameters() if not hasattr(p, "to_local")}
        parameters = [*self._shards, *self._gathered.values()]
        return count_memory(
            parameters=[local(p.data) for p in parameters],
            gradients=[local(p.grad) for p in parameters if p.grad is not None],
            optimizer=[local(state) for state in state_tensors(self.optimizer)],
            buckets=self._sums.tensors() if self._sums else (),
        )

    def expected_memory(self, job: TrainingSpec) -> MemoryEstimate:
        return held_by_fsdp(job, layers(job.model), self.options.reshard == "yes", self.takes_ours)

    def expected_sent(self, job: TrainingSpec) -> TrafficEstimate:
        halves = self.takes_ours or self.comm.bytes_are_assumed
        return sent_by_fsdp(job, layers(job.model), self.options.reshard == "yes", halves, self.find_unused_parameters)

    def detach(self) -> None:
        super().detach()
        self._shards, self._gathered = [], {}
        del self._module, self._units, self.optimizer

    def _watch_use(self) -> None:
        """Record in `_used` which gathered parameters a backward reaches; these objects stay the same."""
        with watched(self.comm):
            for unit in self._units:
                unit.unshard()
                for name, parameter in self._module.named_parameters():
                    if not hasattr(parameter, "to_local") and parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._used.add(name))
                unit.reshard()


def fully_sharded(module: nn.Module, mesh: Any, reshard: bool) -> list[Any]:
    """Shard every layer and then the whole with FSDP2, bottom-up. Return the FSDP modules, the root last."""
    from torch.distributed.fsdp import fully_shard

    units = [fully_shard(layer, mesh=mesh, reshard_after_forward=reshard) for layer in layers(module)]
    # Backward needs the root's first: if they were freed after forward, they would be gathered again at once.
    return [*units, fully_shard(module, mesh=mesh, reshard_after_forward=False)]


def layers(module: nn.Module) -> list[nn.Module]:
    """The members of the outermost ModuleLists that share no parameter with anything outside."""
    users = Counter(p for _, p in module.named_parameters(remove_duplicate=False))
    found: list[nn.Module] = []

    def walk(part: nn.Module) -> None:
        for child in part.children():
            if isinstance(part, nn.ModuleList):
                own = Counter(p for _, p in child.named_parameters(remove_duplicate=False))
                if own and all(users[p] == count for p, count in own.items()):
                    found.append(child)
            else:
                walk(child)

    walk(module)
    return found


def check_parameters(model: nn.Module, sync: str) -> None:
    """Raise UserError for parameters that FSDP2 does not support."""
    dtypes = {dtype_name(p.dtype) for p in model.parameters()}
    if len(dtypes) > 1:
        raise UserError(
            f"--sync {sync} needs parameters of one dtype, and this model has {' and '.join(sorted(dtypes))}. "
            "Choose another --sync."
        )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise UserError(
                f"--sync {sync} cuts parameters along their first dimension, and {name} has none. "
                "Choose another --sync."
            )


def clip_shards(engine: Engine, gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """`Strategy.clip`, for `gradients` that are this rank's disjoint parts of the whole."""
    if engine.scale.is_on:
        torch._foreach_mul_(list(gradients), 1 / engine.scale.value)
    squares = [torch.linalg.vector_norm(g).square() for g in gradients if g.numel()]
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=engine.comm.device)
    engine.comm.all_reduce(total, "norm of the gradient", purpose=AGREEMENT)
    norm = total.sqrt()
    if engine.scale.is_on:
        engine.is_finite = bool(torch.isfinite(norm))
    if max_norm:
        torch._foreach_mul_(list(gradients), (max_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch's clip_grad_norm_
    return norm
