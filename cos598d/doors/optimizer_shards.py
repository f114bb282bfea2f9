"""An optimizer whose state is cut over the ranks: what all such have in common, and which optimizers can be cut."""

import hashlib
import inspect
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import dtype_name
from cos598d.errors import UsageError, UserError, first_line
from cos598d.records.conventions import STATE
from cos598d.strategies.base import MakeOptimizer
from cos598d.strategies.state import FullTensor, OptimizerState, ShardSlice


class OptimizerOfShards(torch.optim.Optimizer):
    """What a script sees is whole: `param_groups`, and the states that it saves and loads.

    On each rank an optimizer of its own steps the parts of the parameters that this rank has, and remembers their
    state. `state` is empty between calls.
    """

    _comm: Communicator
    _kind: str  # the class of optimizer that steps the parts
    # No values here: a library that wraps an optimizer makes the wrapper a subclass, and finds these by __getattr__.
    _kept: tuple[int, dict[str, Any]] | None  # for this rank, the whole state until the next step
    _parameters: dict[str, nn.Parameter]  # by name, all whose state may be saved

    @abstractmethod
    def _own_state(self) -> Iterable[ShardSlice]:
        """What this rank's optimizer remembers."""

    @abstractmethod
    def _memory(self) -> OptimizerState:
        """The same, as it lies in memory."""

    @abstractmethod
    def _load_own(self, wholes: Iterable[FullTensor]) -> None:
        """This rank's optimizer remembers its parts of these, and nothing else."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state for rank `to`, where `state_dict` gives it until the next step. Every rank calls it.

        Without it, `state_dict` gathers for all ranks, which all call it.
        """
        self._kept = None
        state = self.state_dict()
        self._kept = to, state if self._comm.rank == to else {}

    def state_dict(self) -> dict[str, Any]:
        """What one optimizer of all parameters would give, whole, on every rank.

        Every rank calls it, or rank `to` after `consolidate_state_dict(to)`.
        """
        if self._kept is None:
            self.gather_state()
            try:
                return super().state_dict()
            finally:
                self.state.clear()
        to, state = self._kept
        if self._comm.rank != to:
            raise UserError(
                f"consolidate_state_dict gathered the state for rank {to}, and this is rank {self._comm.rank}. Call "
                f"state_dict() on rank {to}, or give consolidate_state_dict another rank."
            )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave, of any strategy or of one optimizer. Every rank calls it with the same."""
        self._kept = None
        super().load_state_dict(state_dict)
        self._load_own(())
        self.cut_state()

    def shard_state_dict(self) -> dict[str, Any]:
        """What this rank's optimizer remembers alone, and the groups. No rank waits for another.

        `torch.save` writes it, and `torch.load` reads it with weights_only. Tensors are live memory, as torch's.
        """
        return self._cut_facts() | {
            "param_groups": super().state_dict()["param_groups"],
            "state": self._memory().shards(),
        }

    def load_shard_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take copies of what this rank's `shard_state_dict` gave. Every rank calls it.

        Raises UserError, the same on every rank, if a state is another rank's, of another number of ranks, or of
        another model, optimizer, strategy or size of buckets.
        """
        facts, problem = self._cut_facts(), ""
        if not facts.keys() <= state_dict.keys():
            problem = "the state is not one of shard_state_dict(). Give a whole state to load_state_dict()"
        elif state_dict["ranks"] != facts["ranks"]:
            problem = (
                f"the state is of {state_dict['ranks']} ranks, and there are {facts['ranks']}. Load it on as many, or "
                "save by state_dict(), which any number of ranks loads"
            )
        elif state_dict["rank"] != facts["rank"]:
            problem = (
                f"the state is rank {state_dict['rank']}'s, and this is rank {facts['rank']}. Give each rank its own"
            )
        elif other := next((word for word in facts if state_dict[word] != facts[word]), None):
            problem = (
                f"the state has another {other} than this rank's optimizer. Load it with the model, groups, optimizer, "
                "strategy and bucket_mb that it was saved with"
            )
        problem = next(filter(None, self._comm.exchange(problem)), "")
        if problem:
            raise UserError(f"{problem}.")
        self._kept = None
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._memory().put_shards(state_dict["state"])

    def _cut_facts(self) -> dict[str, Any]:
        """What has to be the same where a shard of the state is loaded."""
        return {
            "rank": self._comm.rank,
            "ranks": self._comm.world_size,
            "optimizer": self._kind,
            "groups": [len(group["params"]) for group in self.param_groups],
            "cut": self._memory().cut,
        }

    def gather_state(self) -> None:
        """`state` has what all ranks' optimizers remember, whole. Every rank calls it."""
        for (kind, name), tensor in _gathered_state(self._comm, list(self._own_state())).items():
            self.state[self._parameters[name]][kind] = tensor

    def cut_state(self) -> None:
        """This rank's optimizer remembers its parts of `state`, if there is any, which is left empty."""
        if not self.state:
            return
        names: dict[torch.Tensor, str] = {p: name for name, p in self._parameters.items()}
        self._load_own(
            FullTensor(kind, names[p], torch.as_tensor(value))
            for p, values in self.state.items()
            for kind, value in values.items()
            if value is not None and p in names
        )
        self.state.clear()


def cut_optimizer(whole: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> MakeOptimizer:
    """What makes an optimizer of pieces of the named parameters, in the same groups as `whole` has them.

    Raises UsageError where `whole` leaves out a parameter that trains, or has one that is not among them.
    """
    names = {p: name for name, p in named.items()}
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
        groups: list[dict[str, Any]] = [{"params": [], **options_of(group)} for group in whole.param_groups]
        for name, part in named:
            groups[group_of.get(name, 0)]["params"].append(part)  # what has no such name is a probe
        return type(whole)(groups, **defaults)

    return make


def check_optimizers(comm: Communicator, whole: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> None:
    """Raise UsageError if the optimizer does not treat every element by itself, and UserError where the ranks'
    optimizers differ: the same on every rank, which all call it."""
    problem = ""
    try:
        _check_elementwise(type(whole).__name__, cut_optimizer(whole, named), comm.device)
    except UsageError as error:
        problem = str(error)
    names = {p: name for name, p in named.items()}
    groups = [[[names.get(p) for p in group["params"]], repr(options_of(group))] for group in whole.param_groups]
    digest = hashlib.sha256(json.dumps([type(whole).__name__, groups]).encode()).hexdigest()
    problems, digests = zip(*comm.exchange([problem, digest]), strict=True)
    if any(problems):
        raise UsageError(next(filter(None, problems)))
    other = next((rank for rank, theirs in enumerate(digests) if theirs != digests[0]), None)
    if other is not None:
        raise UserError(
            f"the ranks' optimizers differ: rank {other} has another kind, other parameters, groups or options than "
            "rank 0. Make them alike on every rank."
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
            why = "in pieces it steps a matrix otherwise than as a whole"
    except Exception as error:  # of any optimizer, which may be anybody's
        why = first_line(error)
    if why:
        raise UsageError(
            f"{name} cannot step shards of parameters ({why}). Take one that treats every element by itself, as SGD "
            f"and AdamW do, or leave {name} whole, under a strategy without shards, such as bucketed."
        )


def _gathered_state(comm: Communicator, mine: Sequence[ShardSlice]) -> dict[tuple[str, str], torch.Tensor]:
    """What all ranks' optimizers remember, whole, by kind and by the parameter's name, on every rank."""
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


def result_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure gives, called with gradients; None without one."""
    with torch.enable_grad():
        return closure() if closure is not None else None


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """What a group has beside its parameters."""
    return {word: value for word, value in group.items() if word not in ("params", "param_names")}
