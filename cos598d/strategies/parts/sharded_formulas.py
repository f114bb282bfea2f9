"""What a rank holds and sends of sharded state, by formula: one n-th of it, and what a step is sending."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from cos598d.comm.exchange import IN_FLIGHT, SEGMENT_BYTES, segment_count
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
from cos598d.strategies.parts.low_bytes import LONGEST, changed_in_forward, is_packed, packed_bytes
from cos598d.strategies.parts.packed_sums import is_packable, row_bytes, sent_bytes
from cos598d.strategies.parts.units import ReplicatedUnit, Unit, by_layer, longest_parts

FREED = 4  # bytes of the number that replaces a freed parameter
NORM_BYTES = 8  # a rank's sum of squares, for the gradient's norm
HALF = 2  # bytes of a number in half precision


def held_by_shards(
    job: TrainingSpec,
    units: Sequence[Unit],
    keeps: bool = False,
    packs: bool = False,
    gathers: bool = False,
    embeddings: Collection[nn.Parameter] = (),
) -> MemoryEstimate:
    """The state of a rank's parts; their gradients from backward to the step; scratch, and the flat tensors in use.

    keeps    gradients stay whole from step to step (ZeRO 1). In a unit of one parameter, the gradient is freed when it
             is reduced, and the rank's part of it after the step.
    packs    scratch is for packed gradients
    gathers  weights are sharded too (ZeRO 3), and units have layers, the last one first. Two layers at a time are
             gathered, and the units of no layer from forward until their gradients are ready. Units that have only
             `embeddings` are not gathered for backward. Otherwise every rank holds all weights.
    """
    *layers, shared = _layers(units) if gathers else [[]]
    parameters = job.frozen + (_own(job, units) + FREED * len(job.trainable) if gathers else job.weights)
    state = _state(job, units)
    flats, scratch = _Flats(units, job.rank, keeps), _scratch(job, units, packs)
    kept = sum(unit.bytes for unit in units if flats.stays(unit))

    def held(gathered: Iterable[Unit] = (), gradient: int = 0) -> MemoryBytes:
        return {
            "parameters": parameters + sum(unit.bytes for unit in gathered),
            "gradients": kept + flats.gradients + gradient,
            "optimizer": state,
            "buckets": scratch + sum(flats.pool),
        }

    between, moments = held(), []
    again = [_read_in_backward(layer, embeddings) for layer in layers]
    place_of = {unit: number for number, layer in enumerate([*layers, shared]) for unit in layer}
    passes = min(job.passes, 3 if keeps else 2)  # the first, one that adds to existing gradients, and the last
    for number in range(passes):
        for layer, following in zip([(), *layers[::-1]], [*layers[::-1], ()], strict=True):  # forward
            moments.append(held([*layer, *following, *shared]))
        done: set[Unit] = set()
        for unit, place, gradient in flats.backward(accumulates=keeps and number < passes - 1):
            first = place_of.get(unit, 0)
            needed = [each for layer in again[first : first + 2] for each in layer] + shared
            moments.append(held((each for each in needed if each not in done), gradient))
            if place == len(unit.parameters) - 1:
                done.add(unit)
        moments.append(held())
    return MemoryEstimate(between, largest(moments))


def held_by_sparse_zero1(job: TrainingSpec, units: Sequence[Unit], packs: bool) -> MemoryEstimate:
    """For sharded units, as under `zero1`. For replicated ones also the gradient (zeros except in some rows), the
    complete state, and a mark per row. In addition, all ranks' weights' lower bits in the longest form, and this rank's
    old ones. The peak excludes the rows being sent: their number depends on the batch."""
    replicas, dense, packed = _kinds(job, units)
    expected = held_by_shards(job, dense, keeps=True, packs=packs)
    size = sum(unit.bytes for unit in replicas)
    bits = sum(packed_bytes(length, LONGEST) for unit in packed for length in unit.lengths)
    rows = sum(len(p) for unit in replicas for _, p in unit.parameters)
    more = {
        "parameters": bits + _own(job, packed),
        "gradients": size,
        "optimizer": job.state(size, len(replicas)),
        "buckets": -(-rows // 8) * 8,
    }

    def with_more(held: MemoryBytes | None) -> MemoryBytes:
        return {category: number + more[category] for category, number in (held or {}).items()}

    return MemoryEstimate(with_more(expected.between_steps), with_more(expected.peak))


def held_by_shared_weights(
    job: TrainingSpec, units: Sequence[Unit], embeddings: Collection[nn.Parameter], halves: Collection[nn.Parameter]
) -> MemoryEstimate:
    """Of shared memory: this rank's parts of the weights, and its segment with all gradients, a mark per row of the
    `embeddings`, and a number. Of its own: the state of its parts and, at the peak, the largest dense gradient. A
    sparse one's rows depend on the batch. Units with some of `halves` are stored in half precision, too, and the
    gradients of these parameters are computed in it."""
    copies = sum(HALF * unit.lengths[job.rank] for unit in units if any(p in halves for _, p in unit.parameters))
    held = {
        "parameters": _own(job, units) + copies + job.frozen,
        "gradients": sum(unit.bytes for unit in units),
        "optimizer": _state(job, units),
        "buckets": sum(map(len, embeddings)) + NORM_BYTES,
    }
    dense = [p for unit in units for _, p in unit.parameters if p not in embeddings]
    most = max((HALF * p.numel() if p in halves else size_in_bytes(p) for p in dense), default=0)
    return MemoryEstimate(held, held | {"gradients": held["gradients"] + most})


def sent_by_shards(job: TrainingSpec, units: Sequence[Unit], may_be_unused: bool, reductions: int) -> TrafficEstimate:
    """Gradients reduced `reductions` times per step, and weights gathered once."""
    gathered = _gathered(job, units)
    sent = _sent(job, reductions * _reduced(job, units) + gathered, (reductions + 1) * len(units), may_be_unused)
    return replace(sent, gathered=gathered)


def sent_by_layers(
    job: TrainingSpec, units: Sequence[Unit], may_be_unused: bool, embeddings: Collection[nn.Parameter]
) -> TrafficEstimate:
    """Per micro-batch: all weights gathered for forward, layers' weights again for backward (except units with only
    `embeddings`), and gradients reduced. Before an evaluation: all weights gathered. Each layer is called once."""
    *layers, _ = _layers(units)
    again = [unit for layer in layers for unit in _read_in_backward(layer, embeddings)]
    gathered = _gathered(job, units)
    of_a_pass = gathered + _gathered(job, again) + _reduced(job, units)
    calls = job.passes * (2 * len(units) + len(again))
    return _sent(job, job.passes * of_a_pass, calls, may_be_unused, before_evaluation=gathered)


def sent_by_sparse_zero1(job: TrainingSpec, units: Sequence[Unit], may_be_unused: bool, packs: bool) -> TrafficEstimate:
    """As by `zero1`, but weights are sent by their lower bits, in the shortest form, which short steps allow: the least
    that is sent (`more`). Every rank also sends its part of the norm to every other. Replicated units depend on the
    step; with `job.touched`, the rows are computed as if all ranks looked up equally many. `packs`: gradients are sent
    packed, and all fit."""
    if job.ranks == 1:
        return TrafficEstimate()
    replicas, dense, packed = _kinds(job, units)
    if replicas and job.touched is None:
        return TrafficEstimate(unsaid="it depends on how many embedding rows the batch uses")
    gathered = _gathered(job, [unit for unit in dense if unit not in packed])
    gathered += (job.ranks - 1) * sum(packed_bytes(unit.lengths[job.rank]) for unit in packed)
    own = 1 - (1 - (job.touched or 0.0)) ** (1 / job.ranks)  # the share that one rank looks up
    rows = round((job.ranks - 1) * own * sum(unit.bytes for unit in replicas))
    reduced = _reduced_packed(job, dense) if packs else _reduced(job, dense)
    sent = _sent(job, reduced + gathered + rows, 2 * len(dense) + len(replicas), may_be_unused)
    norm = (job.ranks - 1) * NORM_BYTES - all_reduce_bytes(NORM_BYTES, job.ranks) if job.clips else 0
    more = ["a step that moves weights far sends more of their bits"] if packed else []
    more += ["gradients of very different sizes are sent unpacked"] if packs else []
    return replace(sent, others=sent.others + norm, gathered=gathered, more=", and ".join(more))


def sent_by_shared_weights(job: TrainingSpec, units: Sequence[Unit], may_be_unused: bool) -> TrafficEstimate:
    """Only what the ranks agree on; and for each sum a call without bytes, whose seconds the ledger has. Copied are 2 S
    for the gradients, and S + S/n to add them up."""
    if job.ranks == 1:
        return TrafficEstimate()
    copied = (3 * job.ranks + 1) * job.weights // job.ranks
    return TrafficEstimate(0, agreement(job) if may_be_unused else 0, settled(job), len(units), copied=copied)


class _Flats:
    """The flat tensors of a step, in bytes, taken and freed as in `ShardedGradients` if every gradient comes when it is
    expected. Those `alive` hold gradients, those in the `pool` wait for reuse, and `shards` are the rank's parts of
    what has been reduced in this step.

    With `keeps`, the tensors that stay are not included. After some steps the pool has as many as are ever needed.
    """

    def __init__(self, units: Sequence[Unit], rank: int, keeps: bool = False):
        self._units, self._rank, self._keeps = units, rank, keeps
        self.pool: list[int] = []
        self.alive: dict[Unit, int] = {}
        self.shards: dict[Unit, int] = {}
        self._segments: deque[Unit | None] = deque()  # being sent; the unit, in its last segment
        for _ in range(3):
            for _ in self.backward():
                """Another step."""
            self._end_all()
        self.shards.clear()

    @property
    def gradients(self) -> int:
        """The bytes that hold gradients now."""
        return sum(self.alive.values()) + sum(self.shards.values())

    def stays(self, unit: Unit) -> bool:
        """Whether the unit's flat tensor stays from step to step."""
        return self._keeps and len(unit.parameters) > 1

    def backward(self, accumulates: bool = False) -> Iterator[tuple[Unit, int, int]]:
        """Yield the unit, the place in it and the bytes of each gradient, when it is ready but not yet moved to its
        place. With `accumulates`, nothing is reduced."""
        for unit in self._units:
            for place, (_, p) in enumerate(unit.parameters):
                yield unit, place, size_in_bytes(p)
                if unit is self._units[0] and place == 0:
                    self._end_all()  # of an earlier backward
                if unit not in self.alive and not self.stays(unit):
                    fits = [size for size in self.pool if size >= unit.bytes and len(unit.parameters) > 1]
                    self.alive[unit] = min(fits, default=unit.bytes)  # one parameter's gradient is its own flat tensor
                    if fits:
                        self.pool.remove(self.alive[unit])
            if not accumulates:
                self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        if not self.stays(unit):
            self.shards[unit] = unit.lengths[self._rank] * unit.dtype.itemsize
        for ends in [None] * (_segments(unit) - 1) + [unit]:
            if len(self._segments) == IN_FLIGHT:
                self._end_first()
            self._segments.append(ends)

    def _end_first(self) -> None:
        unit = self._segments.popleft()
        size = self.alive.pop(unit, 0) if unit is not None else 0
        if unit is not None and size and len(unit.parameters) > 1:
            self.pool.append(size)

    def _end_all(self) -> None:
        while self._segments:
            self._end_first()


def _kinds(job: TrainingSpec, units: Sequence[Unit]) -> tuple[Sequence[Unit], Sequence[Unit], Sequence[Unit]]:
    """The replicated units, the sharded ones, and those of the sharded ones whose weights are sent by lower bits."""
    replicas = [unit for unit in units if isinstance(unit, ReplicatedUnit)]
    dense = [unit for unit in units if not isinstance(unit, ReplicatedUnit)]
    changing = changed_in_forward(job.model)
    return replicas, dense, [unit for unit in dense if is_packed(unit, changing)]


def _layers(units: Sequence[Unit]) -> list[list[Unit]]:
    """The units of each layer, the last layer first, and finally those of no layer."""
    found = by_layer(units)
    return [*(found[layer] for layer in found if layer is not None), found[None]]


def _read_in_backward(layer: Sequence[Unit], embeddings: Collection[nn.Parameter]) -> list[Unit]:
    return [unit for unit in layer if not all(p in embeddings for _, p in unit.parameters)]


def _segments(unit: Unit) -> int:
    return segment_count(unit.lengths[0], unit.dtype.itemsize)


def _own(job: TrainingSpec, units: Iterable[Unit]) -> int:
    """The bytes of a rank's parts of all units."""
    return sum(unit.lengths[job.rank] * unit.dtype.itemsize for unit in units)


def _state(job: TrainingSpec, units: Sequence[Unit]) -> int:
    return job.state(_own(job, units), sum(1 for unit in units for _ in unit.pieces(job.rank)))


def _scratch(job: TrainingSpec, units: Sequence[Unit], packs: bool) -> int:
    """As many pieces as there are ever segments being sent, each for one segment of every other rank. Packed, a piece
    also has room for what is sent, and one segment is unpacked at a time."""
    held = 0
    for dtype, elements in longest_parts(units).items():
        count = min(IN_FLIGHT, sum(_segments(unit) for unit in units if unit.dtype == dtype))
        segment = min(SEGMENT_BYTES // dtype.itemsize, elements)
        if packs and is_packable(dtype):
            held += (job.ranks - 1) * (2 * count * row_bytes(segment) + segment * dtype.itemsize)
        else:
            held += (job.ranks - 1) * count * segment * dtype.itemsize
    return held


def _sent(
    job: TrainingSpec, synchronizing: int, calls: int, may_be_unused: bool, before_evaluation: int = 0
) -> TrafficEstimate:
    if job.ranks == 1:
        return TrafficEstimate()
    norm = all_reduce_bytes(NORM_BYTES, job.ranks) if job.clips else 0
    agreed = agreement(job) if may_be_unused else 0
    return TrafficEstimate(synchronizing, norm + agreed, before_evaluation + settled(job), calls)


def _reduced(job: TrainingSpec, units: Iterable[Unit]) -> int:
    """Bytes sent by reduce-scatters: every other rank's part."""
    return sum((unit.elements - unit.lengths[job.rank]) * unit.dtype.itemsize for unit in units)


def _reduced_packed(job: TrainingSpec, units: Sequence[Unit]) -> int:
    """The same with `PackedReduceScatters`."""
    packed = [unit for unit in units if is_packable(unit.dtype)]
    others = [rank for rank in range(job.ranks) if rank != job.rank]
    short = sum(sent_bytes(unit.lengths[rank], unit.lengths[0]) for unit in packed for rank in others)
    return short + _reduced(job, [unit for unit in units if unit not in packed])


def _gathered(job: TrainingSpec, units: Iterable[Unit]) -> int:
    """Bytes sent by all-gathers: this rank's part, to every other rank."""
    return (job.ranks - 1) * _own(job, units)
