"""Lesson 2: the mean on every rank, and the bytes of a gather and a scatter of each gradient."""

from cos598d.tools.check.claims.base import World
from cos598d.tools.learn.checking import Check, Checks
from cos598d.tools.learn.lessons.common import averages, record, size_of, tensorwise, traffic_claim, trainable


def _judge(world: World, rank: int, found: dict[str, int]) -> None:
    size, n = size_of(trainable(world)), world.size
    right, formula = ((n - 1) * size, "(n-1) S") if rank == 0 else (size, "S")
    for way in ("sent", "received"):
        world.require(
            found[way] == right,
            f"rank {rank} {way} {found[way]} bytes for {size} bytes of gradients on {n} ranks, expected {formula} = "
            f"{right}: {_why(found[way], right, rank, way)}",
            rank,
        )


def _why(found: int, right: int, rank: int, way: str) -> str:
    if found == 0:
        return "nothing was sent"
    if rank == 0 and way == "sent" and found < right:
        return "every other rank gets the mean straight from rank 0, by a scatter; other calls take other paths"
    return "each gradient is gathered once and its mean scattered once" + (", not more" if found > right else "")


moves_through_rank_0 = traffic_claim(
    "moves_through_rank_0", "Rank 0 sends and receives (n-1) S bytes, every other rank S.", _judge
)

CHECKS = Checks(
    (
        Check(averages, (2, 3)),
        Check(moves_through_rank_0, (2, 4)),
    ),
    tensorwise,
    record,
)
