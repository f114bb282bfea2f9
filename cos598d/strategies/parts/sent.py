"""What a rank sends in a step of what is sharded, by formula: of ZeRO's stages all but its n-th of the gradients, and
its n-th of the weights to each other rank."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from torch import nn

from cos598d.comm.gloo import all_reduce_bytes
from cos598d.strategies.formula import Sent, TrainingSpec
from cos598d.strategies.parts.low_bytes import changed_in_forward, is_packed, packed_bytes
from cos598d.strategies.parts.packed_sums import sent_bytes
from cos598d.strategies.parts.short_exponents import is_packable
from cos598d.strategies.parts.units import ReplicatedUnit, Unit
from cos598d.strategies.sent import agreement, settled

NORM_BYTES = 8  # the sum of squares by which a gradient's norm is known


def sent_by_zero1(job: TrainingSpec, units: Sequence[Unit], may_be_unused: bool) -> Sent:
    """Gradients reduced, and weights gathered, once a step."""
    gathered = _gathered(job, units)
    sent = _sent(job, _reduced(job, units) + gathered, 2 * len(units), may_be_unused)
    return replace(sent, gathered=gathered)


def sent_by_sparse_zero1(job: TrainingSpec, units: Sequence[Unit], may_be_unused: bool, packs: bool = False) -> Sent:
    """As by zero1, but weights by their lower bits, where steps are short enough for the shortest form; and every rank
    tells every other its part of the norm. Of replicas only the step tells: with `job.touched` the rows are what it
    comes to if all ranks look up equally many. `packs`: gradients travel packed, and all have room."""
    if job.ranks == 1:
        return Sent()
    replicas = [unit for unit in units if isinstance(unit, ReplicatedUnit)]
    if replicas and job.touched is None:
        return Sent(unsaid="how many rows travel only a batch tells")
    changing = changed_in_forward(job.model)
    cut = [unit for unit in units if unit not in replicas]
    packed = [unit for unit in cut if is_packed(unit, changing)]
    gathered = _gathered(job, [unit for unit in cut if unit not in packed])
    gathered += (job.ranks - 1) * sum(packed_bytes(unit.lengths[job.rank]) for unit in packed)
    own = 1 - (1 - (job.touched or 0.0)) ** (1 / job.ranks)  # the share that one rank looks up
    rows = round((job.ranks - 1) * own * sum(unit.elements * unit.dtype.itemsize for unit in replicas))
    calls = 2 * len(cut) + len(replicas)
    reduced = _reduced_packed(job, cut) if packs else _reduced(job, cut)
    sent = _sent(job, reduced + gathered + rows, calls, may_be_unused)
    norm = (job.ranks - 1) * NORM_BYTES - all_reduce_bytes(NORM_BYTES, job.ranks) if job.clips else 0
    return replace(sent, others=sent.others + norm, gathered=gathered)


def sent_by_zero2(job: TrainingSpec, units: Sequence[Unit], may_be_unused: bool) -> Sent:
    """Gradients reduced after every micro-batch, weights gathered once a step."""
    calls = (job.passes + 1) * len(units)
    gathered = _gathered(job, units)
    sent = _sent(job, job.passes * _reduced(job, units) + gathered, calls, may_be_unused)
    return replace(sent, gathered=gathered)


def sent_by_zero3(
    job: TrainingSpec,
    layers: Iterable[Sequence[Unit]],
    shared: Sequence[Unit],
    embeddings: Collection[nn.Parameter],
    may_be_unused: bool,
) -> Sent:
    """For every micro-batch weights gathered for forward, those of `layers` again for backward unless they are nothing
    but `embeddings`, and gradients reduced; before an evaluation all weights gathered. Each layer is called once."""
    own = [unit for layer in layers for unit in layer]
    again = [unit for unit in own if not all(p in embeddings for _, p in unit.parameters)]
    units = [*own, *shared]
    of_a_pass = _gathered(job, units) + _gathered(job, again) + _reduced(job, units)
    calls = job.passes * (2 * len(units) + len(again))
    return _sent(job, job.passes * of_a_pass, calls, may_be_unused, _gathered(job, units))


def sent_by_shared_weights(job: TrainingSpec, units: Sequence[Unit], may_be_unused: bool) -> Sent:
    """Nothing but what the ranks agree on; a call, of which the ledger has the seconds, for each sum. What is copied is
    S and S of the gradients, and S and S/n to add them up."""
    if job.ranks == 1:
        return Sent()
    copied = (3 * job.ranks + 1) * job.weights // job.ranks
    return Sent(0, agreement(job) if may_be_unused else 0, settled(job), len(units), copied=copied)


def _sent(job: TrainingSpec, synchronizing: int, calls: int, may_be_unused: bool, before_evaluation: int = 0) -> Sent:
    if job.ranks == 1:
        return Sent()
    norm = all_reduce_bytes(NORM_BYTES, job.ranks) if job.clips else 0
    agreed = agreement(job) if may_be_unused else 0
    return Sent(synchronizing, norm + agreed, before_evaluation + settled(job), calls)


def _reduced(job: TrainingSpec, units: Iterable[Unit]) -> int:
    """By reduce-scatters: every other rank's part."""
    return sum((unit.elements - unit.lengths[job.rank]) * unit.dtype.itemsize for unit in units)


def _reduced_packed(job: TrainingSpec, units: Iterable[Unit]) -> int:
    """The same in the form of `short_exponents`."""
    units = list(units)
    packed = [unit for unit in units if is_packable(unit.dtype)]
    others = [rank for rank in range(job.ranks) if rank != job.rank]
    short = sum(sent_bytes(unit.lengths[rank], unit.lengths[0]) for unit in packed for rank in others)
    return short + _reduced(job, [unit for unit in units if unit not in packed])


def _gathered(job: TrainingSpec, units: Iterable[Unit]) -> int:
    """By all-gathers: the own part, to every other rank."""
    return (job.ranks - 1) * sum(unit.lengths[job.rank] * unit.dtype.itemsize for unit in units)
