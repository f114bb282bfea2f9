"""Gradients and an optimizer that are cut over the ranks, in torch's terms: what a script sees of them is whole."""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import dtype_name
from cos598d.errors import UsageError, UserError, first_line
from cos598d.records.conventions import AGREEMENT, STATE
from cos598d.strategies.base import MakeOptimizer
from cos598d.strategies.parts.units import ReplicatedUnit
from cos598d.strategies.sharded import Sharded
from cos598d.strategies.state import BUFFERS, WEIGHTS, FullTensor

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
    """

    def __init__(self, strategy: Sharded):
        """`strategy` is attached."""
        self.strategy, self._comm = strategy, strategy.comm
        self.parameters = dict(strategy.gradients.parameters)
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
        """Step the weights and drop the gradients; nothing if there are none."""
        if not self.is_summed:
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


class ParallelOptimizer(torch.optim.Optimizer):
    """The optimizer of a model in shards: groups of whole parameters, and whole states.

    In `step` this rank's own optimizer steps its parts, with the options that the groups have then.
    """

    def __init__(self, whole: torch.optim.Optimizer, step: ShardedStep):
        """`whole`: the script's own optimizer of the whole parameters, whose groups this one takes over."""
        self._step: ShardedStep | None = None
        super().__init__(whole.param_groups, whole.defaults)
        self._step = step
        if whole.state:  # made with the optimizer, as Adagrad's
            self.state.update(whole.state)
            self._cut_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch's; `closure` is called once. The gradients are dropped. Every rank calls it."""
        assert self._step is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, own in zip(self.param_groups, self._step.strategy.optimizer.param_groups, strict=True):
            own.update(_options(group))
        self._step.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those that were added up under no_sync too. Every rank calls it."""
        assert self._step is not None
        self._step.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError: shards are cut once."""
        if self._step is not None:
            raise UsageError(
                "an optimizer of shards takes no further parameters, because it cuts them when it is made. Give "
                "parallelize an optimizer that has all of them."
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """What one optimizer of all parameters would give, whole, on every rank. Every rank calls it."""
        assert self._step is not None
        for (kind, name), tensor in _gathered_state(self._step.strategy).items():
            self.state[self._step.parameters[name]][kind] = tensor
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave, of any strategy or of one optimizer. Every rank calls it with the same."""
        super().load_state_dict(state_dict)
        self._cut_state()

    def _cut_state(self) -> None:
        """This rank's optimizer remembers its parts of `state`, which is left empty."""
        assert self._step is not None
        names: dict[torch.Tensor, str] = {p: name for name, p in self._step.parameters.items()}
        self._step.strategy.load_optimizer(
            FullTensor(kind, names[p], torch.as_tensor(value))
            for p, values in self.state.items()
            for kind, value in values.items()
            if value is not None and p in names
        )
        self.state.clear()


def cut_optimizer(whole: torch.optim.Optimizer, model: nn.Module) -> MakeOptimizer:
    """What makes an optimizer of pieces of the model's parameters, in the same groups as `whole` has them.

    Raises UsageError if `whole` leaves out a parameter that trains, or has one that is not the model's.
    """
    names = {p: name for name, p in model.named_parameters()}
    group_of: dict[str, int] = {}
    for number, group in enumerate(whole.param_groups):
        for p in group["params"]:
            if p not in names:
                raise UsageError(
                    f"the optimizer has a parameter of the shape {tuple(p.shape)} that is not the model's. "
                    "Give it the parameters that parallelize hands over."
                )
            group_of[names[p]] = number
    left = next((name for p, name in names.items() if p.requires_grad and name not in group_of), None)
    if left is not None:
        raise UsageError(
            f"the optimizer leaves out {left}, which trains. Add it, or freeze it by requires_grad_(False)."
        )
    takes = inspect.signature(type(whole)).parameters
    defaults = {word: value for word, value in whole.defaults.items() if word in takes}

    def make(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": [], **_options(group)} for group in whole.param_groups]
        for name, part in named:
            groups[group_of.get(name, 0)]["params"].append(part)  # what has no such name is a probe
        return type(whole)(groups, **defaults)

    return make


def check_optimizers(comm: Communicator, whole: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise UsageError if the optimizer does not treat every element by itself, and UserError where the ranks'
    optimizers differ: the same on every rank, which all call it."""
    problem = ""
    try:
        _check_elementwise(type(whole).__name__, cut_optimizer(whole, model), comm.device)
    except UsageError as error:
        problem = str(error)
    names = {p: name for name, p in model.named_parameters()}
    groups = [[[names.get(p) for p in group["params"]], repr(_options(group))] for group in whole.param_groups]
    digest = hashlib.sha256(json.dumps([type(whole).__name__, groups]).encode()).hexdigest()
    problems, digests = zip(*comm.exchange([problem, digest]), strict=True)
    if any(problems):
        raise UsageError(next(filter(None, problems)))
    other = next((rank for rank, theirs in enumerate(digests) if theirs != digests[0]), None)
    if other is not None:
        raise UserError(
            f"the ranks' optimizers differ: rank {other} has another kind, other groups or other options than rank 0. "
            "Make them alike on every rank."
        )


def _check_elementwise(name: str, make: MakeOptimizer, device: torch.device) -> None:
    """Have a matrix stepped whole and in pieces. Raises UsageError if that is not the same."""
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(4, 6, 5, generator=generator).to(device)

    def stepped(cut: Callable[[torch.Tensor], Iterable[torch.Tensor]]) -> torch.Tensor:
        parts = [nn.Parameter(part.clone()) for part in cut(values)]
        optimizer = make([("", part) for part in parts])
        for group in optimizer.param_groups:
            group["lr"] = 0.1  # it may be 0 while it is warmed up
        for gradient in gradients:
            for part, own in zip(parts, cut(gradient), strict=True):
                part.grad = own.clone()
            optimizer.step()
        return torch.cat([part.detach().flatten() for part in parts])

    why = ""
    try:
        if not torch.allclose(stepped(lambda t: [t]), stepped(lambda t: t.flatten().split([7, 23])), 1e-3, 1e-5):
            why = "it does not step a matrix in pieces as it steps the whole"
    except Exception as error:  # of any optimizer, which may be anybody's
        why = first_line(error)
    if why:
        raise UsageError(
            f"{name} cannot step shards of parameters ({why}). Take an optimizer that treats every element by itself, "
            "as SGD and AdamW do, or a strategy without shards, such as bucketed."
        )


def _gathered_state(strategy: Sharded) -> dict[tuple[str, str], torch.Tensor]:
    """What all ranks' optimizers remember, whole, by kind and by the parameter's name, on every rank."""
    comm, kinds = strategy.comm, (WEIGHTS, BUFFERS)
    mine = [piece for piece in strategy.state() if piece.kind not in kinds]
    facts = [[p.kind, p.name, p.shape, p.begin, len(p.values.view(-1)), dtype_name(p.values.dtype)] for p in mine]
    found: dict[tuple[str, str], torch.Tensor] = {}
    for rank, pieces in enumerate(comm.exchange(facts)):
        for dtype in dict.fromkeys(piece[-1] for piece in pieces):
            chosen = [piece for piece in pieces if piece[-1] == dtype]
            kind = getattr(torch, dtype)
            flat = torch.empty(sum(piece[4] for piece in chosen), dtype=kind, device=comm.device)
            if rank == comm.rank:
                own = [piece.values.view(-1) for piece in mine if piece.values.dtype == kind]
                torch.cat([values.to(comm.device) for values in own], out=flat)
            comm.broadcast(flat, "the optimizer's state", root=rank, purpose=STATE)
            lengths = [piece[4] for piece in chosen]
            for (word, name, shape, begin, length, _), values in zip(chosen, flat.split(lengths), strict=True):
                if (word, name) not in found:
                    found[word, name] = flat.new_empty(shape)
                found[word, name].view(-1)[begin : begin + length] = values
    return found


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {word: value for word, value in group.items() if word not in ("params", "param_names")}
