"""The calls of a script: what each collective carried, its line, how often, and which ones still wait."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from cos598d.comm.dispatcher import DispatchedCall
from cos598d.tools.audit.book import BUFFER, GRADIENT, MOST_ENTRIES, NOTHING, OTHER, RECEIVE, SCALAR, SEND, WEIGHT
from cos598d.tools.audit.watch.places import ScriptLine, called_from, here
from cos598d.tools.audit.watch.replica import gradient_of, local

# Functions of torch's that make calls of one kind.
_BY_FUNCTION = {
    "_sync_module_states": WEIGHT,
    "_sync_buffers": BUFFER,
    "_sync_module_buffers": BUFFER,
    "_verify_param_shape_across_processes": OTHER,
    "average_parameters": WEIGHT,
    "_sync_params_and_buffers": WEIGHT,
    "foreach_all_gather": WEIGHT,  # of FSDP in its second form, and in its first
    "_all_gather_flat_param": WEIGHT,
    "foreach_reduce": GRADIENT,
    "_reduce_grad": GRADIENT,
    "_reduce_grad_no_shard": GRADIENT,
}
_FUNCTIONS = frozenset(_BY_FUNCTION)
_MOST_RUNS = 400  # tensors that are looked at for buckets by hand
_NAMES = 4  # of a call that are noted
_MOST = 64  # calls that are remembered, for ranks that are some calls ahead
_MOST_LATE = 8  # calls that are kept, with their tensors, until somebody waits for them


class Carried(NamedTuple):
    """What a call carries: one of the kinds of `book`, and the names of the model's tensors in it that are known."""

    kind: str
    names: tuple[str, ...] = ()


class CallLog:
    """This rank's calls, summed up by kind and line.

    `known` gives the model's tensors: (name, tensor) of weights and of buffers.
    """

    def __init__(self, known: Callable[[], Mapping[str, list[tuple[str, torch.Tensor]]]]):
        self._known = known
        self.entries: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.groups: set[tuple[int, ...]] = set()  # in which gradients travelled
        self._pending: dict[int, tuple[Any, dict[str, Any], int]] = {}  # work, entry and iteration
        self._late: dict[int, tuple[Any, dict[str, Any], int]] = {}
        self._places: dict[int, tuple[str, str, torch.Tensor]] = {}
        self._are_fresh = False
        self._runs: tuple[int, set[int]] = (-1, set())

    def enter(
        self, call: DispatchedCall, iteration: int, in_backward: bool, is_between: bool, place: ScriptLine
    ) -> dict[str, Any]:
        """Note a call, and return the facts about it.

        is_between: whether it is after a backward pass and before the step. `place` is where a call without a line of
        the script's own was made.
        """
        carried = self._what(call, in_backward, is_between)
        if carried.kind == GRADIENT:
            self.groups.add(call.ranks)
        facts: dict[str, Any] = {
            "op": call.op,
            "kind": carried.kind,
            "elements": sum(each.numel() for each in call.tensors),
            "dtype": str(call.tensors[0].dtype).removeprefix("torch.") if call.tensors else "",
            "where": here(place),
            "in_backward": in_backward,
        }
        key = tuple(facts.values())
        if key not in self.entries and len(self.entries) >= MOST_ENTRIES:
            facts["where"] = ("", 0, "")
            key = (call.op, carried.kind, facts["dtype"])
        about = {"calls": 0, "ranks": len(call.ranks), "first_iteration": iteration}
        entry = self.entries.setdefault(key, facts | about)
        entry["calls"] += 1
        if call.work is not None and not in_backward and call.function:  # else C++ waits for it
            self._pending[id(call.work)] = (call.work, entry, iteration)
        return facts | {"names": carried.names[:_NAMES]}

    def waited(self, work: Any) -> None:
        """A call is waited for."""
        if self._pending.pop(id(work), None) is None:
            self._late.pop(id(work), None)

    def gradients_changed(self) -> None:
        """A backward pass has put gradients into new memory."""
        self._are_fresh = False

    def iteration_ended(self) -> None:
        """Keep a few of the calls with gradients that nobody has waited for until now."""
        late = [each for each in self._pending.items() if each[1][1]["kind"] == GRADIENT]
        self._late.update(late[: _MOST_LATE - len(self._late)])
        self._pending.clear()

    def never_waited(self) -> list[dict[str, Any]]:
        """Calls that carried gradients, and that nobody has waited for since their iteration ended."""
        return [
            {"op": entry["op"], "where": entry["where"], "iteration": iteration}
            for _, entry, iteration in self._late.values()
        ]

    def _what(self, call: DispatchedCall, in_backward: bool, is_between: bool) -> Carried:
        if not call.tensors:
            return Carried(NOTHING)
        kind = _BY_FUNCTION.get(called_from(_FUNCTIONS), "")
        elements = sum(each.numel() for each in call.tensors)
        if not self._are_fresh:
            self._places, self._are_fresh = self._by_place(), True
        places = [_place(each) for each in call.tensors]
        if not all(self._is_still(place) for place in places):
            self._places = self._by_place()
        known = [self._places[place] for place in places if place in self._places]
        names = tuple(name for _, name, _ in known)
        if in_backward and kind in ("", GRADIENT):
            # DDP asks in a scalar which parameters were used.
            return Carried(SCALAR if len(call.tensors) == 1 and elements <= 1 else GRADIENT, names)
        if kind or known:
            return Carried(kind or known[0][0], names)
        if all(each.numel() <= 1 for each in call.tensors):
            return Carried(SCALAR)
        is_float = all(each.is_floating_point() for each in call.tensors)
        return Carried(self._by_size(elements, is_between) if is_float else OTHER)

    def _by_size(self, elements: int, is_between: bool) -> str:
        """The kind of a buffer that shares no memory with the model's tensors: it may hold all gradients or weights."""
        weights = [tensor for _, tensor in self._known()["weight"]]
        sizes = (
            sum(each.numel() for each in weights),
            sum(each.numel() for each in weights if each.grad is not None),
        )
        if is_between and (elements in sizes or elements in self._runs_of(weights)):
            return GRADIENT
        return WEIGHT if weights and elements in sizes else OTHER

    def _runs_of(self, weights: list[torch.Tensor]) -> set[int]:
        """The possible numbers of elements of consecutive tensors, which a script may put into one bucket."""
        if self._runs[0] != len(weights):
            ends = [0]
            for each in weights[:_MOST_RUNS]:
                ends.append(ends[-1] + each.numel())
            self._runs = (len(weights), {end - begin for place, end in enumerate(ends) for begin in ends[:place]})
        return self._runs[1]

    def _is_still(self, place: int) -> bool:
        """Whether the gradient that was at this address is still there. The script may have freed it, and put another
        tensor there."""
        known = self._places.get(place)
        if known is None or known[0] != GRADIENT:
            return True
        gradient = gradient_of(known[2])
        return gradient is not None and _place(gradient) == place

    def _by_place(self) -> dict[int, tuple[str, str, torch.Tensor]]:
        found: dict[int, tuple[str, str, torch.Tensor]] = {}
        known = self._known()
        for name, tensor in known["buffer"]:
            found[_place(tensor)] = (BUFFER, name, tensor)
        for name, tensor in known["weight"]:
            for kind, each in ((WEIGHT, local(tensor)), (GRADIENT, gradient_of(tensor))):
                if each is not None:
                    found[_place(each)] = (kind, name, tensor)
        found.pop(0, None)
        return found


def _place(tensor: torch.Tensor) -> int:
    """The address of its memory; 0 if it has none of its own, as a sparse one, or one that stands for a shard."""
    if tensor.layout is not torch.strided or hasattr(tensor, "placements"):
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


class RecentCalls:
    """This rank's last calls, and how many it has made in each group of ranks.

    Calls between two ranks are not counted, since only these two have an order of them.
    """

    def __init__(self) -> None:
        self.count = 0  # of all calls
        self._made: dict[tuple[int, ...], int] = {}
        self._recent: deque[tuple[Any, float, dict[str, Any]]] = deque(maxlen=_MOST)

    def began(self, call: DispatchedCall, row: dict[str, Any]) -> None:
        """A call has begun. `row` is its row in the log."""
        self.count += 1
        ranks = call.ranks
        is_between_two = call.op in (SEND, RECEIVE)
        number = 0 if is_between_two else self._made.get(ranks, 0) + 1
        if number:
            self._made[ranks] = number
        # What has ended is let go: its work keeps tensors alive.
        while self._recent and self._recent[0][0] is not None and self._recent[0][0].is_completed():
            _, began, fact = self._recent.popleft()
            self._recent.append((None, began, fact))
        fact = {"op": call.op, "ranks": [*ranks], "number": number, "elements": row["elements"], "where": row["where"]}
        self._recent.append((call.work, time.perf_counter(), fact | {"root": call.root}))

    def rows(self) -> list[dict[str, Any]]:
        """The last calls in order, with the seconds since they began, and whether they still wait."""
        now = time.perf_counter()
        found = []
        for work, began, fact in sorted(self._recent, key=lambda each: each[1]):
            waits = work is not None and not work.is_completed()
            found.append(fact | {"seconds": now - began, "waits": waits})
        return found

    def made(self) -> list[dict[str, Any]]:
        """The number of calls in each group."""
        return [{"ranks": [*ranks], "calls": calls} for ranks, calls in self._made.items()]
