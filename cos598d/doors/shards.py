"""Gradients and an optimizer that are cut over the ranks, in torch's terms: what a script sees of them is whole."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from cos598d.doors.optimizer_shards import OptimizerOfShards, options_of, result_of
from cos598d.errors import UsageError, UserError
from cos598d.records.conventions import AGREEMENT
from cos598d.strategies.parts.units import ReplicatedUnit
from cos598d.strategies.sharded import Sharded
from cos598d.strategies.state import BUFFERS, WEIGHTS, FullTensor, OptimizerState, ShardSlice

ELEMENTWISE = ("mul_", "div_", "clamp_", "nan_to_num_", "zero_")  # what a script may do to a gradient, by numbers
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # what torch's GradScaler does to all gradients


class ShardedGradient(torch.Tensor):
    """Stands in a parameter's .grad for the average gradient, of which each rank has a part. It has no memory.

    Its L2 norm is the whole gradient's; every rank asks for it. What multiplies, divides or clamps it by numbers in
    place does so to this rank's part, and so does GradScaler. So torch's own clipping works. All else raises UserError.
    """

    _step: "ShardedStep"
    _parameter: nn.Parameter
    _name: str

    @staticmethod
    def __new__(cls, step: "ShardedStep", name: str, parameter: nn.Parameter) -> "ShardedGradient":
        made = torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        made._step, made._parameter, made._name = step, parameter, name
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedGradient({self._name}, {tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, inputs: Any = (), keywords: Any = None
    ) -> Any:
        keywords, operation = keywords or {}, function.overloadpacket.__name__
        if operation == UNSCALE:
            gradients, found, factor = inputs
            gradients[0]._step.unscale([each._parameter for each in gradients], found, factor)
            return None
        first, *others = inputs
        if isinstance(first, ShardedGradient):
            step, p = first._step, first._parameter
            if operation == "detach":
                return first
            if operation in ELEMENTWISE and not any(isinstance(each, torch.Tensor) and each.dim() for each in others):
                step.change([p], lambda part: function(part, *others, **keywords))
                return first
            if operation == "linalg_vector_norm" and others in ([], [2]) and not keywords:
                return step.norms()[p]
        name = next((each._name for each in inputs if isinstance(each, ShardedGradient)), "a parameter")
        raise UserError(
            f"{operation} needs the complete gradient of {name}, but each rank has only its own shard. "
            "Call model.clip_grad_norm_() to clip, or choose a strategy without shards, such as bucketed."
        )


class ShardedStep:
    """The gradients of one step of a strategy of shards, as the script makes it.

    is_summed: the ranks have their parts of the sum of all backwards so far. has_gradients: there was a backward.
    is_over: the model was detached, and nobody has the shards any more.
    """

    is_over = False

    def __init__(self, strategy: Sharded):
        """`strategy` is attached."""
        self.strategy, self._comm = strategy, strategy.comm
        self.cut()

    def cut(self) -> None:
        """The strategy has cut the model's parameters, maybe others than before; there are no gradients."""
        self.parameters = dict(self.strategy.gradients.parameters)
        self._stand_ins = {p: ShardedGradient(self, name, p) for name, p in self.parameters.items()}
        self.is_summed = self.has_gradients = self._is_mean = False
        self._norms: dict[nn.Parameter, torch.Tensor] = {}

    def receive(self) -> None:
        """The strategy has ended the sums of a backward."""
        self.is_summed, self._is_mean = True, False
        self._norms = {}
        for p, stand_in in self._stand_ins.items():
            p.grad = stand_in if self.strategy.gradients.is_used[p] else None

    def add(self) -> None:
        """Another backward begins: keep what is summed, except what the script has dropped from .grad."""
        if self.is_summed and all(p.grad is None for p in self.parameters.values()):
            self.drop()
        self.has_gradients = True
        if not self.is_summed:
            return
        for _, part, parameter, _, _ in self.strategy.pieces:
            if parameter.grad is None and part.grad is not None:
                part.grad.zero_()
        for p in self.parameters.values():
            p.grad = None
        if self._is_mean:
            self.strategy.gradients.scale(self._comm.world_size)
        self.strategy.gradients.set_aside()
        self.is_summed = False

    def drop(self) -> None:
        """Drop all gradients of this step."""
        if self.has_gradients:
            self.strategy.forget_step()
            self.strategy.wait_for_weights()
        self.begin()

    def begin(self) -> None:
        """There are no gradients."""
        self.is_summed = self.has_gradients = False
        for p in self.parameters.values():
            p.grad = None

    def step(self) -> None:
        """Step the weights and drop the gradients; nothing if there are none.

        Raises UserError where no backward of this step was outside `no_sync`: there is no sum to step by. Raises
        UsageError after the model's `detach`.
        """
        if self.is_over:
            raise UsageError(
                "this optimizer steps the shards of a model that was detached. Make a new optimizer of the model's "
                "parameters."
            )
        if not self.is_summed:
            if self.has_gradients:
                raise UserError(
                    "every backward of this step was inside no_sync(), so no gradient was averaged: leave no_sync() "
                    "for the last forward before optimizer.step()."
                )
            return
        self._divide()
        for _, part, parameter, _, _ in self.strategy.pieces:
            if parameter.grad is None:  # the script has dropped it
                part.grad = None
        self.strategy.step()
        self.begin()

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to this L2 norm at most; the norm that they had."""
        if not self.is_summed:
            return torch.zeros((), device=self._comm.device)
        self._divide()
        self._norms = {}
        norm = self.strategy.clip(max_norm)
        assert norm is not None
        return norm.float()

    def change(self, parameters: Iterable[nn.Parameter], function: Callable[[torch.Tensor], Any]) -> None:
        """Call a function that changes a tensor in place with this rank's parts of the gradients of these.

        Rows of an embedding that nobody looked up stay zeros, whatever they would be multiplied by.
        """
        self._divide()
        self._norms = {}
        chosen = set(parameters)
        for _, part, p, unit, _ in self.strategy.pieces:
            if p in chosen and part.grad is not None:
                rows = self.strategy.gradients.rows(unit)
                if rows is None:
                    function(part.grad)
                else:
                    table = part.grad.view(len(rows), -1)
                    looked_up = table[rows]
                    function(looked_up)
                    table[rows] = looked_up

    def norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """The L2 norm of each parameter's whole gradient. All ranks ask after the same changes."""
        self._divide()
        if not self._norms:
            places = {p: place for place, p in enumerate(self._stand_ins)}
            squares = torch.zeros(len(places), dtype=torch.float64, device=self._comm.device)
            for _, part, p, unit, _ in self.strategy.pieces:
                if part.grad is not None and (self._comm.rank == 0 or not isinstance(unit, ReplicatedUnit)):
                    squares[places[p]] += torch.linalg.vector_norm(part.grad).double().square()
            self._comm.all_reduce(squares, "squares of the gradients", purpose=AGREEMENT)
            self._norms = {p: square.sqrt().to(p.dtype) for p, square in zip(places, squares, strict=True)}
        return self._norms

    def unscale(self, parameters: Iterable[nn.Parameter], found: torch.Tensor, factor: torch.Tensor) -> None:
        """As GradScaler does: multiply, and set `found` to 1 where some rank has a part that is not finite."""
        are_finite = []

        def multiply(part: torch.Tensor) -> None:
            are_finite.append(bool(part.isfinite().all()))
            part.mul_(factor)

        self.change(parameters, multiply)
        if not self.strategy.gradients.all_finite(all(are_finite)):
            found.fill_(1.0)

    def _divide(self) -> None:
        """Sums over the ranks become averages."""
        if not self._is_mean:
            self.strategy.gradients.scale(1 / self._comm.world_size)
            self._is_mean = True


class ParallelOptimizer(OptimizerOfShards):
    """The optimizer of a model whose gradients are in shards, which `parallelize` gives.

    In `step` this rank's own optimizer steps its parts, with the options that the groups have then.
    """

    def __init__(self, whole: torch.optim.Optimizer, step: ShardedStep, cut_again: Callable[[], None]):
        """As `take_over`. It has the same groups as `whole`."""
        self._step: ShardedStep | None = None
        super().__init__(whole.param_groups, whole.defaults)
        self.state.update(whole.state)  # made with the optimizer, as Adagrad's
        whole.state.clear()
        self.take_over(whole, step, cut_again)

    def take_over(self, whole: torch.optim.Optimizer, step: ShardedStep, cut_again: Callable[[], None]) -> None:
        """From now on the strategy's optimizer steps parts of what these groups have, and remembers those of `state`.

        whole: an optimizer of the script's kind with these groups. cut_again: cuts what of the groups trains now, and
        the state. Every rank calls it. Raises UserError, the same on every rank, if they cannot be cut; then nothing
        has changed.
        """
        self.whole, self._kind, self._cut_again = whole, type(whole).__name__, cut_again
        self._step, self._comm, self._kept = step, step.strategy.comm, None
        self.cut_state()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch's; `closure` is called once. The gradients are dropped. Every rank calls it."""
        return self.step_parts(closure)

    @torch.no_grad()
    def step_parts(self, closure: Callable[[], Any] | None = None) -> Any:
        """As `step`, without the script's hooks, which torch puts around that."""
        assert self._step is not None
        loss = result_of(closure)
        self._kept = None
        for group, own in zip(self.param_groups, self._step.strategy.optimizer.param_groups, strict=True):
            own.update(options_of(group))
        self._step.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those that were added up under no_sync too. Every rank calls it."""
        assert self._step is not None
        self._step.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, for parameters of the model that train from now on. Every rank calls it, between two steps.

        The shards are cut again: what a rank holds is sent whole to every other, as in `state_dict`. Raises UsageError
        between backward and step, and for parameters that are not the model's.
        """
        if self._step is None:
            super().add_param_group(param_group)
            return
        if self._step.has_gradients:
            raise UsageError(
                "add_param_group cuts the shards again, and the gradients of this step are in shards. Call it after "
                "optimizer.step() or zero_grad()."
            )
        super().add_param_group(param_group)
        try:
            self._cut_again()
        except UserError:
            self.param_groups.pop()
            raise

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:  # type: ignore[override]
        return dict(self._sharded.gradients.parameters)

    @property
    def _sharded(self) -> Sharded:  # a library's wrapper around optimizers has a _strategy of its own
        assert self._step is not None
        return self._step.strategy

    def _own_state(self) -> Iterable[ShardSlice]:
        return (piece for piece in self._sharded.state() if piece.kind not in (WEIGHTS, BUFFERS))

    def _load_own(self, wholes: Iterable[FullTensor]) -> None:
        self._sharded.load_optimizer(wholes)

    def load_shard_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_shard_state_dict(state_dict)
        self._sharded.state_has_changed()

    def _memory(self) -> OptimizerState:
        return self._sharded.optimizer_state()
