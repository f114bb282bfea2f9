"""Weights of which a rank keeps its part; they are whole only while they are needed."""

import zlib
from collections.abc import Iterable, Iterator

import torch

from cos598d.comm.communicator import Communicator
from cos598d.comm.exchange import WeightGather
from cos598d.errors import UserError
from cos598d.records.conventions import AGREEMENT, PARAMETERS, STATE, WHOLE_WEIGHTS
from cos598d.strategies.parts.units import Unit


class ShardedWeights:
    """The weights of units: gathered into their places in the model, and freed again.

    `shards` has this rank's part of each. Freed weights read as NaN. Freeing a flat tensor resizes its storage to 0 but
    keeps the storage object. So what autograd has saved of it is valid again after it is gathered.
    """

    def __init__(self, comm: Communicator):
        self._comm = comm
        self.shards: dict[Unit, torch.Tensor] = {}
        self._flats: dict[Unit, torch.Tensor] = {}
        self._views: dict[Unit, list[torch.Tensor]] = {}
        self._absent: dict[Unit, list[torch.Tensor]] = {}  # replace the parameters' data while they are freed
        self._gathers: dict[Unit, WeightGather] = {}  # their flat tensors have memory
        self._order = 0  # a digest of all calls so far

    def take(self, unit: Unit) -> torch.Tensor:
        """Take the current weights of the unit's parameters, and free them. Return this rank's part."""
        self._lay(unit)
        for view, (_, p) in zip(self._views[unit], unit.parameters, strict=True):
            view.copy_(p.data)
        self.shards[unit] = unit.parts(self._flats[unit])[self._comm.rank].clone()
        self._absent[unit] = [
            torch.full((), torch.nan, dtype=p.dtype, device=p.device).expand(p.shape) for _, p in unit.parameters
        ]
        self._drop(unit)
        return self.shards[unit]

    def gather(self, units: Iterable[Unit], purpose: str = PARAMETERS) -> None:
        """Start to gather these units' weights, except those that are complete or being gathered."""
        for unit in units:
            if unit not in self._gathers:
                flat = self._flats[unit]
                flat.untyped_storage().resize_(flat.nbytes)
                unit.parts(flat)[self._comm.rank].copy_(self.shards[unit])
                self._order = zlib.crc32(unit.number.to_bytes(4, "little"), self._order)
                gather = WeightGather(self._comm, unit.name, flat, unit.lengths, unit.weights_tag, purpose)
                self._gathers[unit] = gather.start()

    def wait(self, units: Iterable[Unit]) -> None:
        """Block until these units' weights, being gathered, have arrived, and put them in their places."""
        for unit in units:
            self._gathers[unit].wait()
            for view, (_, p) in zip(self._views[unit], unit.parameters, strict=True):
                p.data = view

    def free(self, units: Iterable[Unit]) -> None:
        """Free these units' weights, if they are complete or being gathered."""
        for unit in units:
            gather = self._gathers.pop(unit, None)
            if gather is not None:
                gather.wait()
                self._drop(unit)

    def check_order(self) -> None:
        """Raise UserError, the same on every rank, if the ranks did not gather the same weights in the same order.

        Every rank calls it. Messages with tags do not need it: there, weights that no rank sends do not arrive.
        """
        order = torch.tensor([self._order], dtype=torch.int64, device=self._comm.device)
        orders, _ = self._comm.all_gather(order, "order of the layers", purpose=AGREEMENT)
        if len({int(each) for each in orders}) > 1:
            raise UserError(
                "the ranks did not call the same layers in the same order, so they mixed up weights of different "
                "layers. Call layers in the same order on all ranks, or choose --sync zero1."
            )

    def gather_all(self) -> None:
        """Put all weights in their places, for an evaluation."""
        self.gather(self.shards, WHOLE_WEIGHTS)
        self.wait(self.shards)

    def free_all(self) -> None:
        """Free all weights that are gathered."""
        self.free(list(self._gathers))

    def collect(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, complete weight) at rank 0, which receives the other ranks' parts; nothing elsewhere.

        Every rank calls it and iterates to the end. Units are received one at a time into the same memory, so a result
        is valid until the next is asked for. Weights stay gathered, or freed, as they were.
        """
        largest = max((unit.elements * shard.element_size() for unit, shard in self.shards.items()), default=0)
        device = self._comm.device
        room = torch.empty(largest if self._comm.rank == 0 else 0, dtype=torch.uint8, device=device)
        for unit, shard in self.shards.items():
            if self._comm.rank == 0:
                flat = room[: unit.elements * shard.element_size()].view(unit.dtype)
                self._receive(unit, shard, flat)
                yield from ((name, view) for (name, _), view in zip(unit.parameters, unit.views(flat), strict=True))
            else:
                self._receive(unit, shard, None)

    def _receive(self, unit: Unit, shard: torch.Tensor, flat: torch.Tensor | None) -> None:
        """Put every rank's shard into rank 0's `flat`; other ranks have none."""
        with self._comm.composed("gather", shard, unit.name, purpose=STATE) as call:
            if flat is not None:
                own, *others = unit.parts(flat)
                own.copy_(shard)
                call.swap(receives=[(part, rank) for rank, part in enumerate(others, start=1) if len(part)])
            elif len(shard):
                call.swap(sends=[(shard, 0)])

    def gathered_tensors(self) -> list[torch.Tensor]:
        """The tensors of weights that are gathered or being gathered."""
        return [self._flats[unit] for unit in self._gathers]

    def _drop(self, unit: Unit) -> None:
        for nothing, (_, p) in zip(self._absent[unit], unit.parameters, strict=True):
            p.data = nothing
        if not self._flats[unit].untyped_storage().resizable():  # such as a numpy array of it, which keeps its memory
            self._lay(unit)
        self._flats[unit].untyped_storage().resize_(0)

    def _lay(self, unit: Unit) -> None:
        self._flats[unit] = unit.empty(unit.elements)
        self._views[unit] = unit.views(self._flats[unit])
