"""The calls of a script: what each collective carried, its line, how often, its bytes, and which ones still wait."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cos598d.comm.dispatcher import DispatchedCall
from cos598d.tools.audit.book import (
    ALL_GATHER,
    BUFFER,
    GRADIENT,
    MOST_ENTRIES,
    MOST_ROWS,
    NOTHING,
    OTHER,
    RECEIVE,
    REDUCE_SCATTER,
    SCALAR,
    SEND,
    WEIGHT,
)
from cos598d.tools.audit.watch.places import ScriptLine, called_from, here
from cos598d.tools.audit.watch.shards import Shards, gradient_of, local

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


class CallLog:
    """This rank's calls: the first ones row by row, and all of them summed up by kind and line.

    `known` gives the model's tensors: (name, tensor) of weights and of buffers. `shards` are those that are cut.
    """

    def __init__(self, known: Callable[[], Mapping[str, list[tuple[str, torch.Tensor]]]], shards: Shards):
        self._known, self._shards = known, shards
        self.rows: list[dict[str, Any]] = []
        self.entries: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.totals: dict[str, list[float]] = {}  # of the iteration by kind: calls, payload, sent, received, seconds
        self.groups: set[tuple[int, ...]] = set()  # in which gradients travelled
        self.backend = ""
        self.is_new = False  # whether the last call was the first of its kind, size and line
        self._pending: dict[int, tuple[Any, dict[str, Any], dict[str, Any], list[float]]] = {}
        self._late: dict[int, tuple[Any, dict[str, Any], dict[str, Any], list[float]]] = {}
        self._places: dict[int, tuple[str, str, torch.Tensor]] = {}
        self._are_fresh = False
        self._early: list[tuple[list[int], dict[str, Any], dict[str, Any]]] = []
        self._runs: tuple[int, set[int]] = (-1, set())

    def enter(
        self,
        call: DispatchedCall,
        iteration: int,
        in_backward: bool,
        is_between: bool,
        place: ScriptLine,
        arrived: list[torch.Tensor],
    ) -> dict[str, Any]:
        """Note a call, and return its row.

        is_between: whether it is after a backward pass and before the step. `arrived` are leaves whose gradients are
        computed and not sent yet. Those that this call sends are removed from it.
        """
        kind, names = self._what(call, in_backward, is_between, arrived)
        payload, (sent, received) = call.payload_bytes, call.moved()
        self.backend = self.backend or call.group.name()
        if kind == GRADIENT:
            self.groups.add(call.ranks)
        where = here(place)
        dtype = str(call.tensors[0].dtype).removeprefix("torch.") if call.tensors else ""
        facts: dict[str, Any] = {
            "op": call.op,
            "kind": kind,
            "names": names[:_NAMES],
            "tensors": max(len(names), len(call.tensors)),
        }
        facts |= {"elements": sum(each.numel() for each in call.tensors), "dtype": dtype, "ranks": len(call.ranks)}
        facts |= {"where": [*where], "in_backward": in_backward}
        key: tuple[Any, ...] = (call.op, kind, tuple(facts["names"]), facts["elements"], where, in_backward, dtype)
        if key not in self.entries and len(self.entries) >= MOST_ENTRIES:
            key = (call.op, kind, dtype)
            facts |= {"names": [], "where": ["", 0, ""]}
        sums = {"calls": 0, "payload_bytes": 0, "bytes_sent": 0, "bytes_received": 0, "seconds": 0.0}
        self.is_new = key not in self.entries
        entry = self.entries.setdefault(key, facts | sums | {"first_iteration": iteration})
        added = {"calls": 1, "payload_bytes": payload, "bytes_sent": sent, "bytes_received": received}
        for name, value in added.items():
            entry[name] += value
        entry["seconds"] += call.seconds
        row = facts | added | {"iteration": iteration, "seconds": call.seconds}
        if len(self.rows) < MOST_ROWS:
            self.rows.append(row)
        total: list[float] = self.totals.setdefault(kind, [0, 0, 0, 0, 0.0])
        for number, amount in enumerate((*added.values(), call.seconds)):
            total[number] += amount
        if kind == OTHER and not iteration and len(self._early) < MOST_ROWS:
            places = [_place(each) for each in call.tensors]
            self._early.append((places, row, entry))
        if call.work is not None and not in_backward and call.function:  # else C++ waits for it
            self._pending[id(call.work)] = (call.work, row, entry, total)
        return row

    def waited(self, work: Any, seconds: float) -> None:
        """A call was waited for, for so many seconds."""
        found = self._pending.pop(id(work), None) or self._late.pop(id(work), None)
        if found is not None:
            _, row, entry, total = found
            row["seconds"] += seconds
            entry["seconds"] += seconds
            total[4] += seconds

    def gradients_changed(self) -> None:
        """A backward pass has put gradients into new memory."""
        self._are_fresh = False

    def model_is_known(self) -> None:
        """The model is known now: label its tensors that were sent before."""
        self._places = self._by_place()
        for places, row, entry in self._early:
            known = [self._places[place] for place in places if place in self._places]
            if known:
                found = {"kind": known[0][0], "names": [name for _, name, _ in known][:_NAMES]}
                row.update(found)
                entry.update(found)
        self._early.clear()

    def take_totals(self) -> dict[str, list[float]]:
        """The sums since the last call of this method. Of the calls that nobody has waited for a few are kept."""
        found, self.totals = self.totals, {}
        late = [each for each in self._pending.items() if each[1][1]["kind"] == GRADIENT]
        self._late.update(late[: _MOST_LATE - len(self._late)])
        self._pending.clear()
        return found

    def never_waited(self) -> list[dict[str, Any]]:
        """Calls that carried gradients, and that nobody has waited for since their iteration ended."""
        return [{name: row[name] for name in ("op", "where", "iteration")} for _, row, _, _ in self._late.values()]

    def _what(
        self, call: DispatchedCall, in_backward: bool, is_between: bool, arrived: list[torch.Tensor]
    ) -> tuple[str, list[str]]:
        """What a call carries, and the names of the model's tensors in it, if they can be known."""
        if not call.tensors:
            return NOTHING, []
        kind = _BY_FUNCTION.get(called_from(_FUNCTIONS), "")
        if in_backward and kind in ("", GRADIENT):
            return GRADIENT, self._bucket(call, arrived)
        if not self._are_fresh:
            self._places = self._by_place()
            self._are_fresh = True
        places = [_place(each) for each in call.tensors]
        if not all(self._is_still(place) for place in places):
            self._places = self._by_place()
        known = [self._places[place] for place in places if place in self._places]
        if known and not kind:
            return known[0][0], [name for _, name, _ in known]
        if kind:
            return kind, [name for _, name, _ in known]
        if all(each.numel() <= 1 for each in call.tensors):
            return SCALAR, []
        is_float = all(each.is_floating_point() for each in call.tensors)
        elements = sum(each.numel() for each in call.tensors)
        # What is cut over the ranks is filled up to equal parts.
        filled = len(call.ranks) if call.op in (REDUCE_SCATTER, ALL_GATHER) else 1
        elements *= len(call.ranks) if call.op == ALL_GATHER else 1
        return self._by_size(elements, filled, is_float, is_between)

    def _by_size(self, elements: int, filled: int, is_float: bool, is_between: bool) -> tuple[str, list[str]]:
        """The kind of a buffer that shares no memory with the model's tensors, by its size.

        It may hold all gradients or all weights, and fewer than `filled` more elements.
        """
        if not is_float:
            return OTHER, []
        weights = [tensor for _, tensor in self._known()["weight"]]
        sizes = (
            sum(each.numel() for each in weights),
            sum(each.numel() for each in weights if each.grad is not None),
        )
        are_all = any(0 <= elements - size < filled for size in sizes)
        if is_between and (are_all or elements in self._runs_of(weights)):
            return GRADIENT, []
        return (WEIGHT if are_all and weights else OTHER), []

    def _runs_of(self, weights: list[torch.Tensor]) -> set[int]:
        """The possible numbers of elements of consecutive tensors, which a script may put into one bucket."""
        if self._runs[0] != len(weights):
            ends = [0]
            for each in weights[:_MOST_RUNS]:
                ends.append(ends[-1] + each.numel())
            self._runs = (len(weights), {end - begin for place, end in enumerate(ends) for begin in ends[:place]})
        return self._runs[1]

    def _bucket(self, call: DispatchedCall, arrived: list[torch.Tensor]) -> list[str]:
        """The tensors in a bucket of DDP, or in a unit of FSDP: the first ones of `arrived` that have its size.

        Tensors that will be cut are filled up to equal parts.
        """
        elements = sum(each.numel() for each in call.tensors)
        names = {id(tensor): name for name, tensor in self._known()["weight"]}
        equal_parts = len(call.ranks) if call.op == REDUCE_SCATTER else 1
        size = 0
        for count, each in enumerate(arrived, 1):
            rows = each.shape[0] if each.dim() else 1
            size += each.numel() // max(rows, 1) * -(-rows // equal_parts) * equal_parts
            if size == elements:
                taken = arrived[:count]
                del arrived[:count]
                return [names.get(id(self._shards.home(tensor)), "") for tensor in taken]
        return []

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
