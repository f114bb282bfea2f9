"""The calls of a measured rung on any number of hosts, as its sync states them: what travels when, and how."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from cos598d.scale.records import BenchSeconds, Rung
from cos598d.sync import SYNCS, get_sync
from cos598d.sync.base import GradientSync
from cos598d.sync.codecs import CODECS, in_code
from cos598d.sync.cost import CollectiveCall, Load, Step
from cos598d.sync.options import SyncOptions


@dataclass(frozen=True)
class ModelledCall(Load):
    """A collective call among ranks; it can begin when `tensors`, by their names, have their gradients."""

    tensors: tuple[str, ...] = ()


def reason_left_out(rung: Rung) -> str | None:
    """Why the model cannot say what `rung` costs; None where it can."""
    if rung.sync not in SYNCS:
        return "it is not a sync of ours, whose calls are known"
    codec = rung.options.get("compress")
    if codec and codec.partition(":")[0] not in CODECS:
        return "its codec is not one of ours, whose calls are known"
    return get_sync(rung.sync).not_modelled


def overlaps(rung: Rung) -> bool:
    """Whether its calls begin beside backward."""
    return get_sync(rung.sync).overlaps


def plan_calls(rung: Rung, record: BenchSeconds, n: int, batch: int) -> list[ModelledCall]:
    """The calls of an iteration of `rung` on `n` hosts, in order; `record` is the one that has measured it.

    `batch`: examples on each host, on which it depends how many rows of an embedding are used.
    """
    travels = _travels(rung, record, n, n * batch / (record.ranks * record.batch)) if n > 1 else []
    calls = agreements(travels, n) + [
        call for travel in travels for call in calls_of(travel, rung.options.get("compress"), n)
    ]
    # Segments are gloo's.
    return calls if record.work["backend"] == "gloo" else [replace(call, segments=0) for call in calls]


def agreements(travels: Sequence[CollectiveCall], n: int) -> list[ModelledCall]:
    """The calls, of all `n` ranks, by which they agree on what of the `travels` travels: begun with the first gradient.

    It is the first tensor's of the first call.
    """
    return [
        ModelledCall(**vars(travel.collective.load(travel.agreed, n)), tensors=(travels[0].tensors[0].name,))
        for travel in travels
        if travel.agreed
    ]


def calls_of(travel: CollectiveCall, word: str | None, n: int) -> list[ModelledCall]:
    """The call of some gradients among `n` ranks, or those that the codec which `word` names makes of it."""
    if n == 1:
        return []
    loads = [travel.collective.load(travel.gradient_bytes, n)]
    if word is not None:
        loads = [each.collective.load(each.bytes, n) for each in in_code(travel, word, n)]
    names = tuple(tensor.name for tensor in travel.tensors)
    return [ModelledCall(**vars(load), tensors=names) for load in loads]


def _travels(rung: Rung, record: BenchSeconds, n: int, lookups: float) -> list[CollectiveCall]:
    """What the rung's sync states of a step of the record's model on `n` hosts of one rank each.

    `lookups` times as many tokens as in the record look up rows, most of them the same ones again.
    """
    sync = get_sync(rung.sync)
    known = {field.name: rung.options[field.name] for field in fields(SyncOptions) if field.name in rung.options}
    # Of tensors that arrive together the later in the model comes first.
    backward = record.tensors[::-1]
    arrival = sorted(backward, key=lambda tensor: record.compute.arrivals[tensor.name])
    step = Step(record.tensors, SyncOptions(**known), [[host] for host in range(n)], arrival)
    return sync.calls(replace(step, touched=_touched(sync, step, rung, record.ranks, lookups))) or []


def _touched(sync: type[GradientSync], step: Step, rung: Rung, ranks: int, lookups: float) -> float:
    """The share of rows that some rank looks up, from the payload that was measured among so many ranks.

    If a share f of the rows is used after some lookups that fall anywhere, then 1 - (1-f)^k is after k times as many.
    """
    word = rung.options.get("compress")

    def payload(share: float) -> float:
        travels = sync.calls(replace(step, touched=share)) or []
        if word is None or ranks == 1:
            return sum(travel.gradient_bytes for travel in travels)
        return sum(each.bytes for travel in travels for each in in_code(travel, word, ranks))

    none, every = payload(0.0), payload(1.0)
    if none == every:
        return 1.0  # no rows of anything: all of every gradient travels
    measured = (rung.payload_bytes - none) / (every - none)
    return 1 - (1 - min(1.0, max(0.0, measured))) ** lookups
