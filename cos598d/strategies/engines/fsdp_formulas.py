"""What a rank holds and sends under torch's FSDP2, by formula: its rows of every parameter, and gathered layers."""

from collections.abc import Iterable, Sequence

from torch import nn

from cos598d.comm.exchange import IN_FLIGHT, SEGMENT_BYTES
from cos598d.comm.gloo import all_reduce_bytes
from cos598d.comm.ledger import size_in_bytes
from cos598d.strategies.formula import (
    MemoryBytes,
    MemoryEstimate,
    TrafficEstimate,
    TrainingSpec,
    agreement,
    largest,
    settled,
)


def held_by_fsdp(job: TrainingSpec, layers: Sequence[nn.Module], reshard: bool, ours: bool) -> MemoryEstimate:
    """A rank's rows of all parameters, frozen ones too. Within a step, also gathered ones and their gradients.

    1. The root's parameters are gathered from forward to the end of backward. A layer's are gathered while it computes;
       without `reshard`, from its forward to the end of its backward. All are padded to a multiple of n rows.
    2. A gradient is whole until the backward of its layer, or of the root, is over. After that the rank holds its rows.
    3. Gradients of all passes except the last stay whole until then.
    4. With our reduce-scatter (`ours`), its scratch stays: up to `IN_FLIGHT` segments of every other rank.
    FSDP2's own copies before and after its collectives are not included.
    """
    units = [list(layer.parameters()) for layer in layers]
    number_of = {p: number for number, unit in enumerate(units) for p in unit}
    root = len(units)
    units.append([p for p in job.model.parameters() if p not in number_of])
    number_of |= dict.fromkeys(units[root], root)
    kept = _padded(job.model.parameters(), job.ranks)
    own = sum(_rows_of(p, job) * _row_bytes(p) for _, p in job.trainable)
    longest = longest_part(job.model, layers, job.ranks)
    pieces = min(IN_FLIGHT, -(-longest // SEGMENT_BYTES)) if ours else 0
    scratch = pieces * (job.ranks - 1) * min(SEGMENT_BYTES, longest)
    rest = {"optimizer": job.state(own, len(job.trainable)), "buckets": scratch}

    def held(gathered: Iterable[int], gradients: int = 0) -> MemoryBytes:
        whole = sum(job.ranks * _padded(units[number], job.ranks) for number in gathered)
        return rest | {"parameters": kept + whole, "gradients": gradients}

    stay = {root} if reshard else set(range(len(units)))  # after forward
    moments = [held({root, number} if reshard else {root, *range(number + 1)}) for number in range(root)]
    whole, cut = dict.fromkeys(range(len(units)), 0), 0  # bytes of gradients
    passes = min(job.passes, 3)  # the first, one that adds to existing gradients, and the last
    for number_of_pass in range(passes):
        gathered, before = set(stay), root
        for _, p in reversed(job.trainable):
            number = number_of[p]
            if before not in (number, root):
                gathered.discard(before)
                if number_of_pass == passes - 1:
                    whole[before] = 0
                    cut += _padded((q for q in units[before] if q.requires_grad), job.ranks)
            gathered.add(number)
            moments.append(held(gathered, sum(whole.values()) + cut + size_in_bytes(p)))
            whole[number] += 0 if number_of_pass else size_in_bytes(p)
            before = number
    return MemoryEstimate(held(()), largest(moments))


def sent_by_fsdp(
    job: TrainingSpec, layers: Sequence[nn.Module], reshard: bool, halves: bool, may_be_unused: bool
) -> TrafficEstimate:
    """All-gather: this rank's rows to every other rank, for the root's parameters once per micro-batch, for a layer's
    once more for backward with `reshard`. Gradients: only in the step's last micro-batch, by a reduce-scatter, or by a
    ring of the whole unless it `halves` that. Before an evaluation, all rows once more."""
    if job.ranks == 1:
        return TrafficEstimate()
    in_layers = _padded((p for layer in layers for p in layer.parameters()), job.ranks)
    whole = _padded(job.model.parameters(), job.ranks)
    of_a_pass = whole + in_layers * reshard
    gradients = _padded((p for _, p in job.trainable), job.ranks) * (1 if halves else 2)
    agreed = (agreement(job) if may_be_unused else 0) + all_reduce_bytes(4, job.ranks) * job.clips
    others, calls = job.ranks - 1, job.passes * ((1 + reshard) * len(layers) + 1) + len(layers) + 1
    return TrafficEstimate(others * (job.passes * of_a_pass + gradients), agreed, others * whole + settled(job), calls)


def longest_part(model: nn.Module, layers: Iterable[nn.Module], ranks: int) -> int:
    """The most bytes of a rank's rows among the gradients that are reduced together: a layer's, or the rest."""
    in_layers = [list(layer.parameters()) for layer in layers]
    rest = set(model.parameters()).difference(*in_layers)
    return max(_padded((p for p in unit if p.requires_grad), ranks) for unit in (*in_layers, rest))


def _padded(parameters: Iterable[nn.Parameter], ranks: int) -> int:
    """The bytes of a rank's rows of these, padded so that all ranks have equally many."""
    return sum(-(-p.shape[0] // ranks) * _row_bytes(p) for p in parameters)


def _rows_of(p: nn.Parameter, job: TrainingSpec) -> int:
    """How many rows of the parameter the rank has, without padding."""
    most = -(-p.shape[0] // job.ranks)
    return max(0, min(most, p.shape[0] - job.rank * most))


def _row_bytes(p: nn.Parameter) -> int:
    return size_in_bytes(p) // p.shape[0]
