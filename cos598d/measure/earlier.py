"""Where a record goes on: the positions that the ranks of earlier worlds have left, for those of this one."""

from collections.abc import Mapping, Sequence
from typing import Any

from cos598d.measure.totals import EpochTraffic

Position = dict[str, Any]


class Earlier:
    """What a rank needs of the positions that all ranks of a checkpoint's world gave, in order of rank; none: a record
    that begins.

    `own` is this rank's, {} where it has never been there; `iterations` is how many were done. Of ranks that this world
    has no more, rank 0 keeps the positions, for a world that has them again: `departed`, by rank in their order.
    """

    def __init__(self, positions: Sequence[Position] | None, rank: int, world_size: int):
        by_rank = dict(enumerate(positions or []))
        if positions:
            by_rank = {int(other): one for other, one in positions[0]["departed"].items()} | by_rank
        self.own: Position = by_rank.get(rank, {})
        self.departed = {other: by_rank[other] for other in sorted(by_rank) if other >= world_size and rank == 0}
        self.iterations = max((one["iteration"] for one in by_rank.values()), default=0)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of this rank's files of rows, by name."""
        return self.own.get("files", {})

    def departed_traffic(self) -> list[dict[str, Any]]:
        """What they moved, as the traffic in a rank's share."""
        found = []
        for one in self.departed.values():
            traffic = EpochTraffic()
            traffic.resume(one["tally"]["traffic"])
            found.append(traffic.share(None))
        return found
