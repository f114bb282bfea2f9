"""Predicted beside counted bytes: an iteration's, an epoch's, and the means of a run.

*Predicted* is what the ledger's formulas say this rank moved in an iteration and after it, up to the next one's begin.
It is all of that: gradients, what the ranks agree on, the loss, state that a checkpoint collects.
(`bytes_sent_per_iteration` in the summary is gradients and weights.) *Counted* is what the kernel counted meanwhile: on
the interface, with the headers of every packet, or of own sockets. Neither has an evaluation, nor what follows it up to
the next iteration. A sync settles an epoch's weights before its evaluation, and so in the epoch's last iteration.

Where k ranks share an interface its counters are the sum of all k: set them next to the sum of the k predictions. The
two are to be compared where every rank has a host of its own, or all share one: else neighbours also send each
other what never reaches the interface between the hosts. What a GPU's own links carry is not there either.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

from cos598d.measure.wire import Counters, Interface

WAYS = ("sent", "received")


@dataclass
class _EpochSums:
    """What some iterations moved in all. `known`: how many of them were counted, whose counters' sum is `counted`."""

    iterations: int = 0
    predicted: tuple[int, int] = (0, 0)
    known: int = 0
    counted: Counters = Counters()

    def add(self, predicted: tuple[int, int], counted: Counters | None) -> None:
        self.iterations += 1
        self.predicted = _added(self.predicted, predicted)
        if counted is not None:
            self.known += 1
            self.counted = self.counted.plus(counted)

    def plus(self, more: "_EpochSums") -> "_EpochSums":
        return _EpochSums(
            self.iterations + more.iterations,
            _added(self.predicted, more.predicted),
            self.known + more.known,
            self.counted.plus(more.counted),
        )

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "_EpochSums":
        """From what `asdict` gave, by way of JSON."""
        sent, received = saved["predicted"]
        return cls(saved["iterations"], (sent, received), saved["known"], Counters(*saved["counted"]))


class EpochTraffic:
    """One rank's predicted and counted traffic, summed by epoch; of single iterations only the last is kept."""

    def __init__(self) -> None:
        self._epochs: dict[int, _EpochSums] = {}
        self._last: tuple[int, tuple[int, int], Counters | None] | None = None

    def add(self, epoch: int, predicted: tuple[int, int], counted: Counters | None) -> dict[str, int | None]:
        """Add one iteration (bytes sent and received); return its figures for the iteration's row."""
        self._sum_up()
        self._last = (epoch, predicted, counted)
        return _side_by_side(predicted, counted and counted[:2])

    def add_to_last(self, predicted: tuple[int, int], counted: Counters | None) -> dict[str, int | None]:
        """Add to the last iteration what travelled after its end; return its figures as they are now."""
        if self._last is None:
            return {}
        epoch, so_far, before = self._last
        predicted, counted = _added(so_far, predicted), before and counted and before.plus(counted)
        self._last = (epoch, predicted, counted)
        return _side_by_side(predicted, counted and counted[:2])

    def share(self, interface: Interface | None) -> dict[str, Any]:
        """What rank 0 needs of this rank: the sums by epoch, and the means of all iterations."""
        self._sum_up()
        sums = reduce(_EpochSums.plus, self._epochs.values(), _EpochSums())
        wire: dict[str, Any] | None = None
        if interface and sums.known:
            wire = {"interface": interface.name, "ranks": interface.ranks}
            wire |= {name: float(total) / sums.known for name, total in sums.counted._asdict().items()}
            for way, total in zip(WAYS, sums.predicted, strict=True):
                wire[f"predicted_bytes_{way}"] = float(total) / sums.iterations
        return {"wire": wire, "epochs": {str(epoch): _of_epoch(sums) for epoch, sums in self._epochs.items()}}

    def position(self) -> dict[str, Any]:
        """The sums so far (JSON), for `resume`."""
        return {
            "epochs": {str(epoch): asdict(sums) for epoch, sums in self._epochs.items()},
            "last": self._last,
        }

    def resume(self, position: dict[str, Any]) -> None:
        """Go on from there."""
        self._epochs = {int(epoch): _EpochSums.of(sums) for epoch, sums in position["epochs"].items()}
        self._last = None
        if position["last"] is not None:
            epoch, (sent, received), counted = position["last"]
            self._last = (epoch, (sent, received), None if counted is None else Counters(*counted))

    def _sum_up(self) -> None:
        """Nothing will be added to the last iteration any more."""
        if self._last is None:
            return
        epoch, predicted, counted = self._last
        self._last = None
        self._epochs.setdefault(epoch, _EpochSums()).add(predicted, counted)


def _of_epoch(sums: _EpochSums) -> dict[str, int | None]:
    is_known = sums.known == sums.iterations
    return _side_by_side(sums.predicted, sums.counted[: len(WAYS)] if is_known else None)


def _added(sums: tuple[int, int], more: tuple[int, int]) -> tuple[int, int]:
    return sums[0] + more[0], sums[1] + more[1]


def epoch_traffic(shares: Sequence[dict[str, Any]], epoch: int) -> dict[str, list[int | None]]:
    """An epoch's bytes by rank, of all its iterations, from every rank's share (which came as JSON).

    A rank that had no part in an epoch, since the run went on with more ranks or with fewer, moved nothing in it.
    """
    rows = [share["epochs"].get(str(epoch)) for share in shares]
    known = next((row for row in rows if row), None)
    if known is None:
        return {}
    absent = {name: None if value is None else 0 for name, value in known.items()}
    return {name: [(row or absent)[name] for row in rows] for name in known}


def wire_summary(shares: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The summary's "wire", from every rank's share: means an iteration by rank, None for a rank that has not counted.

    `interface` and `shared_by_ranks` are those of the first rank that has; `ranks_by_interface` says for all who
    counts together: each list's counted bytes, which are alike, stand beside the sum of its predicted bytes.
    """
    wires = [share["wire"] for share in shares]
    known = [wire for wire in wires if wire]
    if not known:
        return None
    names = [f"{kind}_{way}" for kind in ("bytes", "packets", "predicted_bytes") for way in WAYS]
    return {
        "interface": known[0]["interface"],
        "shared_by_ranks": len(known[0]["ranks"]),
        "ranks_by_interface": sorted({tuple(wire["ranks"]) for wire in known}),
        **{f"{name}_per_iteration": [wire and wire[name] for wire in wires] for name in names},
    }


def _side_by_side(predicted: Sequence[int], counted: Sequence[int] | None) -> dict[str, int | None]:
    row = {f"predicted_bytes_{way}": value for way, value in zip(WAYS, predicted, strict=True)}
    return row | {f"counted_bytes_{way}": value for way, value in zip(WAYS, counted or (None, None), strict=True)}
