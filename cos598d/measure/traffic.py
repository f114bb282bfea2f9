"""Predicted beside counted bytes: an iteration's, an epoch's, and the means of a run.

*Predicted* is what the ledger's formulas say this rank moved in an iteration, all of it: gradients, what the ranks
agree on, the loss. (`bytes_sent_per_iteration` in the summary is the gradients alone.) *Counted* is what the kernel's
counters say its interface moved meanwhile, with the headers of every packet. Neither has the evaluation. The average
of weights with which a sync may settle an epoch is added to the epoch's last iteration, after that one's row.

Where k ranks share an interface its counters are the sum of all k: set them beside the sum of the k predictions. The
two are to be compared where every rank has a host of its own, or all share one: else neighbours also send each
other what never reaches the interface between the hosts. What a GPU's own links carry is not there either.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from cos598d.measure.wire import Counters, Interface

WAYS = ("sent", "received")


class Traffic:
    """One rank's predicted and counted traffic, by iteration."""

    def __init__(self) -> None:
        self._epochs: list[int] = []
        self._predicted: list[tuple[int, int]] = []
        self._counted: list[Counters | None] = []

    def add(self, epoch: int, predicted: tuple[int, int], counted: Counters | None) -> dict[str, int | None]:
        """Add one iteration (bytes sent and received); return its figures for the iteration's row."""
        self._epochs.append(epoch)
        self._predicted.append(predicted)
        self._counted.append(counted)
        return _side_by_side(predicted, counted and counted[:2])

    def add_to_last(self, predicted: tuple[int, int], counted: Counters | None) -> None:
        """Add to the last iteration what travelled after its end, before the evaluation."""
        if not self._epochs:
            return
        self._predicted[-1] = tuple(map(sum, zip(self._predicted[-1], predicted, strict=True)))
        before = self._counted[-1]
        self._counted[-1] = before and counted and before.plus(counted)

    def share(self, interface: Interface | None) -> dict[str, Any]:
        """What rank 0 needs of this rank: by epoch the sums, and of the iterations after the first the means."""
        first = 1 if len(self._predicted) > 1 else 0
        counted = [counters for counters in self._counted[first:] if counters is not None]
        predicted = self._predicted[first:]
        wire = None
        if interface and counted:
            wire = {"interface": interface.name, "ranks": interface.ranks}
            wire |= {name: statistics.fmean(row) for name, row in zip(Counters._fields, zip(*counted))}
            for way, values in zip(WAYS, zip(*predicted), strict=True):
                wire[f"predicted_bytes_{way}"] = statistics.fmean(values)
        return {"wire": wire, "epochs": {str(epoch): self._epoch(epoch) for epoch in dict.fromkeys(self._epochs)}}

    def _epoch(self, epoch: int) -> dict[str, int | None]:
        places = [place for place, other in enumerate(self._epochs) if other == epoch]
        predicted = [sum(way) for way in zip(*(self._predicted[place] for place in places))]
        counted = [self._counted[place] for place in places]
        known = None if None in counted else [sum(row[way] for row in counted) for way in range(len(WAYS))]
        return _side_by_side(predicted, known)


def epoch_traffic(shares: Sequence[dict[str, Any]], epoch: int) -> dict[str, list[int | None]]:
    """An epoch's bytes by rank, of all its iterations, from every rank's share (which came as JSON)."""
    rows = [share["epochs"].get(str(epoch)) for share in shares]
    return {name: [row[name] for row in rows] for name in rows[0]} if all(rows) else {}


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
