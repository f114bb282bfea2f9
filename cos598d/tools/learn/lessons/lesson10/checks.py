"""Lesson 10, send less: of an embedding the rows that were looked up, of other gradients the largest elements.

Here are the checks of the rows; `top_k.py` has those of the elements.
"""

from collections.abc import Sequence

import torch

from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.check.evidence import seed_of
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.lessons.lesson10.top_k import (
    NAMES,
    SHARE,
    allowed,
    feeds_back,
    near,
    sends_the_largest,
    step_gradient,
    takes_any_size,
    trains,
)

WORDS, WIDTH = 1200, 8
LOOKED_UP = ("some rows on all ranks", "nothing on the last rank", "the same rows everywhere")


@Claim
def averages_rows(on: OnLesson) -> None:
    """After average_rows the gradient is the average over the ranks, on every rank, whichever rows each looked up."""
    for moment, when in enumerate(LOOKED_UP):
        ids = lookups(on.nonce, moment, on.rank, on.world_size)
        gradient = gradient_of(on.nonce, moment, on.rank, ids)
        on.student.average_rows(on.comm, gradient, ids)
        on.hand_in(when, {"gradient": gradient})


@averages_rows.judgement
def _(world: World) -> None:
    for moment, when in enumerate(LOOKED_UP):
        ids = [lookups(world.nonce, moment, rank, world.size) for rank in range(world.size)]
        own = [gradient_of(world.nonce, moment, rank, each) for rank, each in enumerate(ids)]
        for rank, found in enumerate(world.handed_in(when, {"gradient": own[0]})):
            words = wrong_rows(found["gradient"], own, ids, rank)
            world.require(not words, f"{words} (looked up: {when})", rank)


def wrong_rows(found: torch.Tensor | None, own: Sequence[torch.Tensor], ids: Sequence[torch.Tensor], rank: int) -> str:
    """What is wrong with a rank's gradient after `average_rows`, in words; "" if nothing is."""
    size = len(own)
    total = torch.stack(list(own)).sum(dim=0)
    right = total / size
    if found is None:
        return f"rank {rank}'s gradient is missing"
    if near(found, right):
        return ""
    if not found.isfinite().all():
        return f"rank {rank}'s gradient is not finite"
    if near(found, own[rank]):
        return f"rank {rank}'s gradient is still its own: change `gradient` itself, in place"
    if near(found, total):
        return f"the gradient is the sum over {size} ranks and should be their average: divide by {size}"
    off = (found - right).abs().amax(dim=1) > allowed(right)
    row = int(off.nonzero()[0])
    users = [str(each) for each, words in enumerate(ids) if row in words]
    if not users:
        return f"row {row} is not zero on rank {rank}, and no rank has looked it up"
    kinds = {"zero": torch.zeros(WIDTH), "rank's own": own[rank][row], "sum over the ranks": total[row]}
    kind = next((words for words, value in kinds.items() if near(found[row], value)), "")
    what = {"zero": "zero", "rank's own": "the rank's own, undivided", "sum over the ranks": "the sum"}.get(
        kind, f"{found[row][0]:.4g} in its first element"
    )
    expected = f"{total[row][0] / size:.4g} in its first element" if not kind else f"the average over {size}"
    who = f"only rank {users[0]}" if len(users) == 1 else f"ranks {', '.join(users)}"
    return (
        f"row {row}, which {who} looked up, is {what} on rank {rank} and should be {expected}: send the rows that "
        "any rank has looked up, and let every rank put back all of them"
    )


@Claim
def sends_rows_looked_up(on: OnLesson) -> None:
    """A rank sends at most 2(n-1)/n (4 U width + R) bytes: U rows that some rank looked up, of R."""
    for moment, when in enumerate(LOOKED_UP):
        ids = lookups(on.nonce, moment, on.rank, on.world_size)
        gradient = gradient_of(on.nonce, moment, on.rank, ids)
        ledger = on.fresh_ledger()
        on.student.average_rows(on.comm, gradient, ids)
        on.report(f"sent, {when}", sum(row.bytes_sent for row in ledger.rows))


@sends_rows_looked_up.judgement
def _(world: World) -> None:
    for moment, when in enumerate(LOOKED_UP):
        ids = [lookups(world.nonce, moment, rank, world.size) for rank in range(world.size)]
        used = len(torch.cat(ids).unique())
        share = 2 * (world.size - 1) / world.size
        most = round(share * (4 * used * WIDTH + WORDS)) + 2
        dense = round(share * 4 * WORDS * WIDTH)
        for rank, sent in enumerate(world.reported(f"sent, {when}", int)):
            world.require(sent > 0 or world.size == 1, f"rank {rank} sent nothing through comm", rank)
            why = f"{used} of {WORDS} words were looked up"
            if sent >= dense:
                why += "; all rows are sent"
            elif sent > most and sent - most <= share * 7 * WORDS + 2:
                over = 1 + round((sent - most) / (share * WORDS))
                why += f"; to agree on a word takes {over} bytes, and one is enough: uint8"
            world.require(
                sent <= most, f"rank {rank} sent {sent:,} bytes and should send at most {most:,}: {why}", rank
            )


def lookups(nonce: int, moment: int, rank: int, size: int) -> torch.Tensor:
    """The words that this rank's batch looks up, (any number,), with repeats: frequent ones and some of its own."""
    same = LOOKED_UP[moment] == "the same rows everywhere"
    generator = torch.Generator().manual_seed((nonce if same else seed_of(nonce, rank)) + 1000 * moment)
    if LOOKED_UP[moment] == "nothing on the last rank" and rank == size - 1 and rank:
        return torch.zeros(0, dtype=torch.long)
    frequent = torch.randint(0, 40, (24,), generator=generator)
    rare = torch.randint(40, WORDS, (8 + (0 if same else rank),), generator=generator)
    return torch.cat([frequent, rare])


def gradient_of(nonce: int, moment: int, rank: int, ids: torch.Tensor) -> torch.Tensor:
    """The embedding's gradient for these lookups, (WORDS, WIDTH)."""
    generator = torch.Generator().manual_seed(seed_of(nonce, rank) + 1000 * moment + 500)
    values = torch.randn(len(ids), WIDTH, generator=generator)
    return torch.zeros(WORDS, WIDTH).index_add_(0, ids, values)


@Claim
def record(on: OnLesson) -> None:
    """An embedding's gradient, then two others, after a first time."""
    codec = on.student.TopK(on.comm, SHARE)
    for step in range(2):
        ids = lookups(on.nonce, 0, on.rank, on.world_size)
        rows = gradient_of(on.nonce, 0, on.rank, ids)
        gradients = [step_gradient(on.nonce, step, name, on.rank) for name in NAMES]
        on.comm.exchange(step)
        on.comm.begin_record()
        on.student.average_rows(on.comm, rows, ids)
        for name, gradient in zip(NAMES, gradients, strict=True):
            codec.average(name, gradient)
    on.report_events()


CHECKS = Checks(
    (
        Check(averages_rows, (3, 2)),
        Check(sends_rows_looked_up, (3, 2)),
        Check(feeds_back, (3, 2), about="TopK"),
        Check(takes_any_size, (3, 2), about="TopK"),
        Check(sends_the_largest, (3, 2), about="TopK"),
        Check(trains, (3,), about="TopK"),
    ),
    record=record,
)
