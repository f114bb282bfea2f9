"""The collective calls of a step: of a measured sync on any number of hosts, and of a planned step."""

from collections.abc import Sequence
from dataclasses import fields, replace

from cos598d.cost.benches import BenchSeconds, Rung
from cos598d.cost.model import ModelledCall
from cos598d.strategies.base import Strategy
from cos598d.strategies.formula import TrafficEstimate, TrainingSpec
from cos598d.strategies.replicated import Replicated
from cos598d.sync import SYNCS, get_sync
from cos598d.sync.base import GradientSync
from cos598d.sync.codecs import CODECS, in_code
from cos598d.sync.cost import CollectiveCall, Step
from cos598d.sync.estimate import Tensor


def reason_left_out(rung: Rung) -> str | None:
    """Why the model cannot predict `rung`; None if it can."""
    if rung.sync not in SYNCS:
        return "the calls of this sync are unknown"
    codec = rung.options.get("compress")
    if codec and codec.partition(":")[0] not in CODECS:
        return "the calls of this compression are unknown"
    return get_sync(rung.sync).not_modelled


def overlaps(rung: Rung) -> bool:
    """Whether its calls start during backward."""
    return get_sync(rung.sync).overlaps


def plan_calls(rung: Rung, record: BenchSeconds, n: int, batch: int) -> list[ModelledCall]:
    """The calls of an iteration of `rung` on `n` hosts, in order. `record` is the one that measured it.

    `batch`: examples on each host, which determine how many embedding rows are used.
    """
    travels = _travels(rung, record, n, n * batch / (record.ranks * record.batch)) if n > 1 else []
    calls = agreements(travels, n) + [
        call for travel in travels for call in calls_of(travel, rung.options.get("compress"), n)
    ]
    # Only gloo sends segments.
    return calls if record.work["backend"] == "gloo" else [replace(call, segments=0) for call in calls]


def agreements(travels: Sequence[CollectiveCall], n: int) -> list[ModelledCall]:
    """The calls by which all `n` ranks agree on what they send of the `travels`: they start with the first gradient.

    That is the first tensor of the first call.
    """
    return [
        ModelledCall(**vars(travel.collective.load(travel.agreed, n)), tensors=(travels[0].tensors[0].name,))
        for travel in travels
        if travel.agreed
    ]


def calls_of(travel: CollectiveCall, word: str | None, n: int) -> list[ModelledCall]:
    """The call for some gradients among `n` ranks, or the calls that the codec `word` makes of it."""
    if n == 1:
        return []
    loads = [travel.collective.load(travel.gradient_bytes, n)]
    if word is not None:
        loads = [each.collective.load(each.bytes, n) for each in in_code(travel, word, n)]
    names = tuple(tensor.name for tensor in travel.tensors)
    return [ModelledCall(**vars(load), tensors=names) for load in loads]


def _travels(rung: Rung, record: BenchSeconds, n: int, lookups: float) -> list[CollectiveCall]:
    """The calls of the sync for a step of the record's model, on `n` hosts of one rank each.

    `lookups`: how many times as many tokens as in the record look up rows; most look up the same ones again.
    """
    sync = get_sync(rung.sync)
    kind = sync.options_kind
    options = kind(**{field.name: rung.options[field.name] for field in fields(kind) if field.name in rung.options})
    # Of tensors that arrive together, the later one in the model comes first.
    backward = record.tensors[::-1]
    arrival = sorted(backward, key=lambda tensor: record.compute.arrivals[tensor.name])
    step = Step(record.tensors, options, [[host] for host in range(n)], arrival)
    return sync.calls(replace(step, touched=_touched(sync, step, rung, record.ranks, lookups))) or []


def _touched(sync: type[GradientSync], step: Step, rung: Rung, ranks: int, lookups: float) -> float:
    """The share of rows that some rank looks up, from the payload that was measured with `ranks` ranks.

    If random lookups use a share f of the rows, k times as many use 1 - (1-f)^k.
    """
    word = rung.options.get("compress")

    def payload(share: float) -> float:
        travels = sync.calls(replace(step, touched=share)) or []
        if word is None or ranks == 1:
            return sum(travel.gradient_bytes for travel in travels)
        return sum(each.bytes for travel in travels for each in in_code(travel, word, ranks))

    none, every = payload(0.0), payload(1.0)
    if none == every:
        return 1.0  # no rows at all: every gradient is sent completely
    measured = (rung.payload_bytes - none) / (every - none)
    return 1 - (1 - min(1.0, max(0.0, measured))) ** lookups


def planned_calls(
    strategy: Strategy,
    job: TrainingSpec,
    sent: TrafficEstimate,
    arrival: Sequence[Tensor] | None = None,
    touched: float | None = None,
) -> tuple[list[ModelledCall], bool]:
    """A step's calls, and whether they start during backward.

    For other strategies than gradient syncs, only the number and the bytes of calls are known. They are assumed to be
    equal, and spread over backward. arrival: the tensors in the order in which backward reaches them (None: the reverse
    of the model's order). touched: the share of a large embedding's rows that some rank looks up; without it
    `sparse_rows` has no prediction.
    """
    # It is ready when the last backward begins.
    loss = ModelledCall(2 * (job.ranks - 1), 0.0, 0.0, 0.0, 2, tensors=(job.tensors[-1].name,))
    if isinstance(strategy, Replicated):
        sync = strategy.sync
        hosts = job.hosts or [range(job.ranks)]
        travels = sync.calls(Step(job.tensors, sync.options, hosts, arrival or job.tensors[::-1], touched)) or []
        calls = [call for travel in travels for call in _of_travel(travel, sync.options.compress, job.ranks)]
        return [loss, *agreements(travels, job.ranks), *calls], sync.overlaps
    count = max(1, sent.calls)
    names = [tensor.name for tensor in job.tensors[::-1]]
    each, copied = sent.synchronizing / count, sent.copied / count
    steps = int(sent.synchronizing > 0)
    return [
        loss,
        *(
            ModelledCall(
                steps, each, 2 * each, 2 * each, copied_bytes=copied, tensors=(names[place * len(names) // count],)
            )
            for place in range(count)
        ),
    ], True


def _of_travel(travel: CollectiveCall, word: str | None, ranks: int) -> list[ModelledCall]:
    calls = calls_of(travel, word, ranks if travel.members is None else len(travel.members))
    names = tuple(tensor.name for tensor in travel.tensors)
    return (
        [*calls, ModelledCall(0, 0.0, 0.0, 0.0, copied_bytes=travel.copied, tensors=names)] if travel.copied else calls
    )
