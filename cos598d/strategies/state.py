"""The state of a training in pieces, under the model's plain names, which any strategy can write and read."""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import dtype_name
from cos598d.errors import UserError, first_line

WEIGHTS, BUFFERS = "weights", "buffers"
STEP = "step"  # torch's name for how often an optimizer has stepped a parameter: always one number


@dataclass(frozen=True)
class ShardSlice:
    """Some consecutive elements of one named tensor, held by this rank.

    kind: WEIGHTS, BUFFERS, or the optimizer's own name, such as "exp_avg", "momentum_buffer" and STEP. name: the
    model's plain name of the parameter or buffer; the first name of a tied one. shape: the whole tensor's. begin: the
    index of the first element in the flattened whole tensor. values: contiguous, (elements,) or of the whole's shape.
    They may be live memory: copy them before you ask for the next piece.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    begin: int
    values: torch.Tensor

    @classmethod
    def of_whole(cls, kind: str, name: str, tensor: torch.Tensor) -> "ShardSlice":
        """All of a tensor."""
        return cls(kind, name, tuple(tensor.shape), 0, tensor.detach().contiguous())


@dataclass(frozen=True)
class FullTensor:
    """A complete tensor of the state, on the CPU; `kind` and `name` as in a piece. `source`: the file it came from."""

    kind: str
    name: str
    tensor: torch.Tensor
    source: str = "the saved state"


@dataclass(frozen=True)
class Stepped:
    """The part of one parameter that this rank's optimizer steps: from element `begin` of the whole, of `shape`.

    `parameter` holds them, and is their key in the optimizer's state.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    parameter: torch.Tensor

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of a whole tensor, in the shape in which this rank holds them."""
        mine = local(self.parameter)
        return whole.reshape(-1)[self.begin : self.begin + mine.numel()].view(mine.shape)


def stepped_whole(named: Iterable[tuple[str, nn.Parameter]]) -> list[Stepped]:
    """The trainable ones of named parameters, which this rank's optimizer steps whole."""
    return [Stepped(name, tuple(p.shape), 0, p) for name, p in named if p.requires_grad]


class OptimizerState:
    """A torch optimizer's state, under the model's names. `stepped` are the parameters that it steps on this rank.

    It may have any number of values per element, and single numbers per parameter, such as STEP.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stepped: Iterable[Stepped]):
        self._optimizer = optimizer
        self._stepped = {each.name: each for each in stepped}
        self._groups = {p: group for group in optimizer.param_groups for p in group["params"]}

    def pieces(self) -> Iterator[ShardSlice]:
        """The pieces so far: none for a parameter that was never used. A number is in the first element's piece."""
        for each in self._stepped.values():
            for kind, value in self._optimizer.state.get(each.parameter, {}).items():
                if value is None:
                    continue
                if _is_number(kind, value, each):
                    if each.begin == 0:
                        yield ShardSlice.of_whole(kind, each.name, torch.as_tensor(value))
                else:
                    yield ShardSlice(kind, each.name, each.shape, each.begin, local(value).detach().contiguous())

    def put(self, whole: FullTensor) -> None:
        """Load the part of a whole tensor that this rank steps; nothing if it steps none of it."""
        each = self._stepped.get(whole.name)
        if each is None:
            return
        if _is_number(whole.kind, whole.tensor, each):
            self._remember(each, whole.kind, whole.tensor)
            return
        if tuple(whole.tensor.shape) != each.shape or whole.tensor.dtype != each.parameter.dtype:
            raise UserError(
                f"{whole.source} has {_called(whole.kind, whole.name)} as {dtype_name(whole.tensor.dtype)} in the "
                f"shape {tuple(whole.tensor.shape)}, which does not fit its weights. Resume from another checkpoint."
            )
        self._remember(each, whole.kind, each.part_of(whole.tensor))

    @property
    def cut(self) -> list[list[Any]]:
        """What this rank steps of each parameter: its name, the whole's shape, the first element, how many, the dtype.
        It fits into JSON."""
        held = self._stepped.values()
        return [[e.name, list(e.shape), e.begin, e.parameter.numel(), dtype_name(e.parameter.dtype)] for e in held]

    def shards(self) -> dict[str, dict[str, torch.Tensor]]:
        """What this rank alone remembers, by parameter and kind, in the shapes in which it is held; live memory."""
        states = {each.name: self._optimizer.state.get(each.parameter, {}) for each in self._stepped.values()}
        return {
            name: {kind: torch.as_tensor(value).detach() for kind, value in state.items() if value is not None}
            for name, state in states.items()
            if state
        }

    def put_shards(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Remember copies of what `shards` gave on the same rank, with the same `cut`, and nothing else."""
        self.forget()
        for name, values in shards.items():
            for kind, value in values.items():
                self._remember(self._stepped[name], kind, value)

    def _remember(self, each: Stepped, kind: str, value: torch.Tensor) -> None:
        state = self._optimizer.state[each.parameter]
        if _is_number(kind, value, each):
            # On the device where torch keeps it: kernels that step everything at once read it next to the weights.
            group = self._groups[each.parameter]
            beside = group.get("fused") or group.get("capturable")
            state[kind] = value.detach().clone().to(local(each.parameter).device if beside else "cpu")
            return
        state[kind] = torch.empty_like(each.parameter, requires_grad=False)
        local(state[kind]).copy_(value)

    def forget(self) -> None:
        """Reset the state to that before the first step."""
        self._optimizer.state.clear()


def _is_number(kind: str, value: object, each: Stepped) -> bool:
    return kind == STEP or not isinstance(value, torch.Tensor) or (value.dim() == 0 and each.shape != ())


class StateLayout:
    """What the state of a training must contain: the model's weights and buffers, and its optimizer's state.

    Create it before the model is sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    ):
        self._forms = {
            WEIGHTS: {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()},
            BUFFERS: {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in model.named_buffers()},
        }
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self.make_optimizer = make_optimizer

    def checked(self, wholes: Iterable[FullTensor]) -> Iterator[FullTensor]:
        """Yield the tensors, checked. Raises UserError if one is missing or extra, or has another shape or dtype.

        The optimizer's state may be absent for a parameter that was never used. Otherwise it must be complete.
        """
        kinds = self._kinds()
        found: dict[str, set[str]] = defaultdict(set)
        for whole in wholes:
            self._check(whole, kinds)
            if whole.name in found[whole.kind]:
                raise UserError(
                    f"{whole.source} has {_called(whole.kind, whole.name)} twice. Resume from another checkpoint."
                )
            found[whole.kind].add(whole.name)
            yield whole
        needed = [(kind, name) for kind in (WEIGHTS, BUFFERS) for name in self._forms[kind]]
        stepped = set(itertools.chain(*(found[kind] for kind in kinds)))
        needed += [(kind, name) for kind in kinds for name in self._trained if name in stepped]
        missing = [(kind, name) for kind, name in needed if name not in found[kind]]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise UserError(
                f"the saved state lacks {_called(*missing[0])}{more}. Resume with the model and the optimizer that it "
                "was saved with."
            )

    def _check(self, whole: FullTensor, kinds: Mapping[str, bool]) -> None:
        called, shape, dtype = _called(whole.kind, whole.name), tuple(whole.tensor.shape), whole.tensor.dtype
        is_of_optimizer = whole.kind not in self._forms
        if is_of_optimizer and whole.kind not in kinds:
            raise UserError(
                f"{whole.source} has {called}, and this run's optimizer keeps "
                f"{' and '.join(kinds) or 'nothing'}. Resume with the same --optimizer."
            )
        forms = self._forms[WEIGHTS if is_of_optimizer else whole.kind]
        if whole.name not in forms or (is_of_optimizer and whole.name not in self._trained):
            raise UserError(
                f"{whole.source} has {called}, which this model does not have. Resume with the model that it was "
                "saved from."
            )
        is_number = is_of_optimizer and kinds[whole.kind]
        wanted, expected = forms[whole.name]
        if shape != (() if is_number else wanted):
            raise UserError(
                f"{whole.source} has {called} in the shape {shape}, and this model has "
                f"{'one number' if is_number else wanted}. Resume with the model that it was saved from."
            )
        # A step count may have any numeric dtype; everything else must have the dtype that the kernels compute with.
        if dtype.is_complex or dtype == torch.bool if is_number else dtype != expected:
            raise UserError(
                f"{whole.source} has {called} as {dtype_name(dtype)}, and this model has "
                f"{'a number' if is_number else dtype_name(expected)}. Resume with the model that it was saved from."
            )

    def _kinds(self) -> dict[str, bool]:
        """The kinds of state that the optimizer keeps, found by one step of a weight; whether each is a number."""
        probe = nn.Parameter(torch.zeros(1))
        optimizer = self.make_optimizer([("probe", probe)])
        probe.grad = torch.zeros(1)
        optimizer.step()
        each = Stepped("probe", (1,), 0, probe)
        return {
            kind: _is_number(kind, value, each) for kind, value in optimizer.state[probe].items() if value is not None
        }


def _called(kind: str, name: str) -> str:
    return f"the {kind} of {name}"


def put_into_model(model: nn.Module, whole: FullTensor) -> bool:
    """Copy weights or a buffer into a model that is whole. Return False for other kinds of state.

    Raises UserError if the model has no such tensor, or one of another shape or dtype.
    """
    if whole.kind not in (WEIGHTS, BUFFERS):
        return False
    try:
        place = model.get_parameter(whole.name).data if whole.kind == WEIGHTS else model.get_buffer(whole.name)
    except AttributeError:
        place = None
    given = whole.tensor
    if place is None or place.shape != given.shape or place.is_floating_point() != given.is_floating_point():
        raise UserError(
            f"{whole.source} has {_called(whole.kind, whole.name)} as {dtype_name(given.dtype)} in the shape "
            f"{tuple(given.shape)}, which does not fit this model. Resume with the model that it was saved from."
        )
    with torch.no_grad():
        place.copy_(whole.tensor)
    return True


def own_buffers(comm: Communicator, model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's own values of a model's buffers, which depend on its examples. The shared state has rank 0's."""
    return {} if comm.rank == 0 else {f"{BUFFERS}/{name}": buffer for name, buffer in model.named_buffers()}


def load_own_buffers(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set the model's buffers to the values from `own_buffers`."""
    for name, buffer in model.named_buffers():
        if f"{BUFFERS}/{name}" in tensors:
            with torch.no_grad():
                buffer.copy_(tensors[f"{BUFFERS}/{name}"])


@contextlib.contextmanager
def own_state_of(rank: int) -> Iterator[None]:
    """A context in which a rank loads its own saved state. Raises UserError if it does not fit."""
    try:
        yield
    except UserError as error:
        raise UserError(f"the local state of rank {rank} does not fit this run: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"the local state of rank {rank} does not fit this run ({type(error).__name__}: "
            f"{first_line(error)}). Resume from another checkpoint."
        ) from error


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that torch has sharded (a DTensor), or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)
