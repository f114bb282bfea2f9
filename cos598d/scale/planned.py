"""The calls of a step that has not been made: as the sync states them, or as a strategy's bytes suggest."""

from collections.abc import Sequence

from cos598d.scale.rungs import ModelledCall, agreements, calls_of
from cos598d.strategies.base import Strategy
from cos598d.strategies.formula import TrafficEstimate, TrainingSpec
from cos598d.strategies.replicated import Replicated
from cos598d.sync.cost import CollectiveCall, Step, Tensor


def planned_calls(
    strategy: Strategy,
    job: TrainingSpec,
    sent: TrafficEstimate,
    arrival: Sequence[Tensor] | None = None,
    touched: float | None = None,
) -> tuple[list[ModelledCall], bool]:
    """A step's calls, and whether they begin beside backward.

    Of what is no gradient sync only their number and bytes are known: they are taken for equal ones, spread over
    backward. arrival: the tensors as backward comes to them (None: in the reverse of the model's order); touched: the
    share of a large embedding's rows that some rank looks up, without which `sparse_rows` states nothing.
    """
    # It is there when the last backward begins.
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
