"""What a rank holds of what is sharded, by formula: its n-th of the states, and what a step has under way."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import nn

from cos598d.comm.exchange import IN_FLIGHT, SEGMENT_BYTES, segment_count
from cos598d.comm.ledger import size_in_bytes
from cos598d.strategies.formula import Held, MemoryEstimate, TrainingSpec, largest
from cos598d.strategies.parts.low_bytes import LONGEST, changed_in_forward, is_packed, packed_bytes
from cos598d.strategies.parts.packed_sums import row_bytes
from cos598d.strategies.parts.short_exponents import is_packable
from cos598d.strategies.parts.units import ReplicatedUnit, Unit, longest_parts

FREED = 4  # bytes of the number that stands in a freed parameter's place
NUMBER = 8  # bytes of a rank's squares of the gradient
HALF = 2  # bytes of a number in half precision


def held_by_zero1(job: TrainingSpec, units: Sequence[Unit], packs: bool = False) -> MemoryEstimate:
    """All weights, all gradients, the state of a rank's parts; scratch, for packed gradients if it `packs` them.

    Of a unit of one parameter the gradient goes when it is reduced, and the rank's part of it with the step.
    """
    rest = {"parameters": job.weights + job.frozen, "optimizer": _state(job, units)}
    rest["buckets"] = _scratch(job, units, packs)
    flats = _Flats(units, job.rank, keeps=True)
    kept = sum(unit.bytes for unit in units if flats.stays(unit))
    moments = []
    passes = min(job.passes, 3)  # one that finds no gradients, one that adds to them, and the last, which is reduced
    for number in range(passes):
        backward = flats.backward(accumulates=number < passes - 1)
        moments += [rest | {"gradients": kept + flats.gradients + gradient} for *_, gradient in backward]
        moments.append(rest | {"gradients": kept + flats.gradients})
    return MemoryEstimate(rest | {"gradients": kept}, largest(moments))


def held_by_zero2(job: TrainingSpec, units: Sequence[Unit]) -> MemoryEstimate:
    """All weights, and the state of a rank's parts; scratch, and the flat tensors under way. From backward to the step
    the gradients of its parts."""
    rest = {"parameters": job.weights + job.frozen, "optimizer": _state(job, units)}
    scratch, flats = _scratch(job, units), _Flats(units, job.rank)

    def held(gradients: int = 0) -> Held:
        return rest | {"gradients": gradients, "buckets": scratch + sum(flats.pool)}

    between, moments = held(), []
    for _ in range(min(job.passes, 2)):
        moments += [held(flats.gradients + gradient) for *_, gradient in flats.backward()]
        moments.append(held(flats.gradients))
    return MemoryEstimate(between, largest(moments))


def held_by_zero3(
    job: TrainingSpec, layers: Sequence[Sequence[Unit]], shared: Sequence[Unit], embeddings: Collection[nn.Parameter]
) -> MemoryEstimate:
    """The weights and state of a rank's parts, and from backward to the step their gradients; scratch, the flat tensors
    under way, and gathered weights: `shared` ones from forward until their gradients are there, and of `layers` (the
    last one's units first) two. Units of nothing but `embeddings` are not gathered for backward.
    """
    units = [*(unit for layer in layers for unit in layer), *shared]
    scratch, flats = _scratch(job, units), _Flats(units, job.rank)
    state, kept = _state(job, units), _own(job, units) + job.frozen + FREED * len(job.trainable)

    def held(gathered: Iterable[Unit] = (), gradient: int = 0) -> Held:
        return {
            "parameters": kept + sum(unit.bytes for unit in gathered),
            "gradients": flats.gradients + gradient,
            "optimizer": state,
            "buckets": scratch + sum(flats.pool),
        }

    between, moments = held(), []
    again = [[unit for unit in layer if not all(p in embeddings for _, p in unit.parameters)] for layer in layers]
    place_of = {unit: number for number, layer in enumerate([*layers, shared]) for unit in layer}
    for _ in range(min(job.passes, 2)):
        for layer, following in zip([(), *layers[::-1]], [*layers[::-1], ()], strict=True):  # forward
            moments.append(held([*layer, *following, *shared]))
        done: set[Unit] = set()
        for unit, place, gradient in flats.backward():
            two = [each for layer in again[place_of[unit] : place_of[unit] + 2] for each in layer]
            moments.append(held((each for each in (*two, *shared) if each not in done), gradient))
            if place == len(unit.parameters) - 1:
                done.add(unit)
        moments.append(held())
    return MemoryEstimate(between, largest(moments))


def held_by_shared_weights(
    job: TrainingSpec, units: Sequence[Unit], embeddings: Collection[nn.Parameter], halves: Collection[nn.Parameter]
) -> MemoryEstimate:
    """Of what the ranks share a rank's parts of the weights, and its segment: all gradients, a mark for each row of the
    `embeddings`, and a number. The state of its parts; at the peak the largest gradient that is not sparse: how many
    rows a sparse one has only a batch tells. Units that have some of `halves` lie in half precision, too, and these
    parameters' gradients are computed in it.
    """
    copies = sum(HALF * unit.lengths[job.rank] for unit in units if any(p in halves for _, p in unit.parameters))
    rest = {
        "parameters": _own(job, units) + copies + job.frozen,
        "optimizer": _state(job, units),
        "buckets": sum(map(len, embeddings)) + NUMBER,
    }
    kept = sum(unit.bytes for unit in units)
    dense = [
        HALF * p.numel() if p in halves else size_in_bytes(p)
        for unit in units
        for _, p in unit.parameters
        if p not in embeddings
    ]
    return MemoryEstimate(rest | {"gradients": kept}, rest | {"gradients": kept + max(dense, default=0)})


def held_by_sparse_zero1(job: TrainingSpec, units: Sequence[Unit], packs: bool = False) -> MemoryEstimate:
    """As `held_by_zero1` has it for what is cut; of every replica its gradient too, zeros but for some rows, its whole
    state, and a mark for each row; of all ranks' weights the lower bits in the longest form, and the rank's own as they
    were. At the peak without the rows under way: how many they are only a batch tells.
    """
    replicas = [unit for unit in units if isinstance(unit, ReplicatedUnit)]
    dense = [unit for unit in units if unit not in replicas]
    expected = held_by_zero1(job, dense, packs)
    changing = changed_in_forward(job.model)
    packed = [unit for unit in dense if is_packed(unit, changing)]
    bits = sum(packed_bytes(length, LONGEST) for unit in packed for length in unit.lengths)
    size = sum(unit.bytes for unit in replicas)
    rows = sum(len(p) for unit in replicas for _, p in unit.parameters)
    more = {
        "parameters": bits + _own(job, packed),
        "gradients": size,
        "optimizer": job.state(size, len(replicas)),
        "buckets": -(-rows // 8) * 8,
    }

    def with_more(held: Held | None) -> Held:
        return {category: number + more.get(category, 0) for category, number in (held or {}).items()}

    return MemoryEstimate(with_more(expected.between_steps), with_more(expected.peak))


class _Flats:
    """The flat tensors of a step, by their bytes, as `ShardedGradients` takes them and lets go of them, where every
    gradient comes when it is expected. `alive` hold gradients, those in the `pool` wait to be taken again, and `shards`
    are the rank's parts of what has been reduced in this step.

    With `keeps` those that stay are none of them. After some steps the pool has as many as are ever needed.
    """

    def __init__(self, units: Sequence[Unit], rank: int, keeps: bool = False):
        self._units, self._rank, self._keeps = units, rank, keeps
        self.pool: list[int] = []
        self.alive: dict[Unit, int] = {}
        self.shards: dict[Unit, int] = {}
        self._segments: deque[Unit | None] = deque()  # under way; the unit, for its last one
        for _ in range(3):
            for _ in self.backward():
                """Another step."""
            self._drain()
        self.shards.clear()

    @property
    def gradients(self) -> int:
        """The bytes that hold gradients now."""
        return sum(self.alive.values()) + sum(self.shards.values())

    def stays(self, unit: Unit) -> bool:
        """Whether the unit's flat tensor stays from step to step."""
        return self._keeps and len(unit.parameters) > 1

    def backward(self, accumulates: bool = False) -> Iterator[tuple[Unit, int, int]]:
        """The unit, the place in it and the bytes of each gradient, when that is there and has not been moved to its
        place. Nothing is reduced where it `accumulates`."""
        for unit in self._units:
            for place, (_, p) in enumerate(unit.parameters):
                yield unit, place, size_in_bytes(p)
                if unit is self._units[0] and place == 0:
                    self._drain()  # of an earlier backward
                if unit not in self.alive and not self.stays(unit):
                    self._lay(unit)
            if not accumulates:
                self._reduce(unit)

    def _lay(self, unit: Unit) -> None:
        fits = [size for size in self.pool if size >= unit.bytes] if len(unit.parameters) > 1 else []
        self.alive[unit] = min(fits, default=unit.bytes)  # one parameter's gradient is its own
        if fits:
            self.pool.remove(self.alive[unit])

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

    def _drain(self) -> None:
        while self._segments:
            self._end_first()


def _segments(unit: Unit) -> int:
    return segment_count(unit.lengths[0], unit.dtype.itemsize)


def _own(job: TrainingSpec, units: Sequence[Unit]) -> int:
    """The bytes of a rank's parts of all units."""
    return sum(unit.lengths[job.rank] * unit.dtype.itemsize for unit in units)


def _state(job: TrainingSpec, units: Sequence[Unit]) -> int:
    return job.state(_own(job, units), sum(1 for unit in units for _ in unit.pieces(job.rank)))


def _scratch(job: TrainingSpec, units: Sequence[Unit], packs: bool = False) -> int:
    """As many pieces as segments are ever under way, each for one segment of every other rank. Packed, a piece is for
    what is sent too, and one segment is unpacked at a time."""
    held = 0
    for dtype, elements in longest_parts(units).items():
        count = min(IN_FLIGHT, sum(_segments(unit) for unit in units if unit.dtype == dtype))
        segment = min(SEGMENT_BYTES // dtype.itemsize, elements)
        if packs and is_packable(dtype):
            held += (job.ranks - 1) * (2 * count * row_bytes(segment) + segment * dtype.itemsize)
        else:
            held += (job.ranks - 1) * count * segment * dtype.itemsize
    return held
