"""Lesson 10, send less: of an embedding the rows that were looked up, of other gradients the largest elements."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cos598d.tools.course.common import furthest, near
from cos598d.tools.course.lessons.lesson10.top_k import MISTAKES, RIGHT, Simulation, TopKVariant, count_of

ROWS, WIDTH = 1200, 8
LOOKED_UP = ("some rows on all ranks", "nothing on the last rank", "the same rows everywhere")
ELEMENTS, SHARE = 254, 1 / 8  # 31 elements and three quarters
ODD_SIZES = (5, 40_001)  # of the one less than an element would travel; the other has more places than 16 bits tell
NAMES = ("embedding", "output")
WITH_GRADIENTS, STEPS = 2, 10  # in the other steps gradients are zero, until all that was held back has come
Tensors = Sequence[torch.Tensor]


def drawing(seed: int, rank: int, step: int) -> torch.Generator:
    """A generator of a rank's own numbers in a step."""
    return torch.Generator().manual_seed(seed + 1_000_003 * (rank + 1) + step)


def lookups(seed: int, moment: int, rank: int, size: int) -> torch.Tensor:
    """The words that this rank's batch looks up, (any number,), with repeats: frequent ones and some of its own."""
    same = LOOKED_UP[moment] == "the same rows everywhere"
    if LOOKED_UP[moment] == "nothing on the last rank" and rank == size - 1:
        return torch.zeros(0, dtype=torch.long)
    generator = drawing(seed, 0 if same else rank, 1000 * moment)
    frequent = torch.randint(0, 40, (24,), generator=generator)
    return torch.cat([frequent, torch.randint(40, ROWS, (8 + (0 if same else rank),), generator=generator)])


def row_gradient(seed: int, moment: int, rank: int, ids: torch.Tensor) -> torch.Tensor:
    """The embedding's gradient for these lookups, (ROWS, WIDTH)."""
    values = torch.randn(len(ids), WIDTH, generator=drawing(seed, rank, 1000 * moment + 500))
    return torch.zeros(ROWS, WIDTH).index_add_(0, ids, values)


def average_rows(comm: Any, module: Any, seed: int) -> list[dict[str, Any]]:
    """On a rank: the gradient after the file's average_rows, and the bytes sent, for each kind of lookups."""
    found = []
    for moment in range(len(LOOKED_UP)):
        ids = lookups(seed, moment, comm.rank, comm.world_size)
        gradient, begun = row_gradient(seed, moment, comm.rank, ids), len(comm.rows)
        module.average_rows(comm, gradient, ids)
        found.append({"gradient": gradient, "sent": sum(row.bytes_sent for row in comm.rows[begun:])})
    return found


@pytest.mark.parametrize("n", [3, 2])
def test_averages_rows(ranks, seed, n):
    """After average_rows the gradient is the average over the ranks, on every rank, whichever rows each looked up."""
    world = ranks(n, average_rows, seed)
    for moment, when in enumerate(LOOKED_UP):
        ids = [lookups(seed, moment, rank, n) for rank in range(n)]
        own = [row_gradient(seed, moment, rank, each) for rank, each in enumerate(ids)]
        for rank, value in enumerate(world.values):
            words = wrong_rows(value[moment]["gradient"], own, ids, rank)
            world.require(not words, f"{words} (looked up: {when})", rank, about="average_rows")


def wrong_rows(found: torch.Tensor, own: Tensors, ids: Tensors, rank: int) -> str:
    """What is wrong with a rank's gradient after `average_rows`, in words; "" if nothing is."""
    size, total = len(own), torch.stack([*own]).sum(dim=0)
    right = total / size
    if near(found, right):
        return ""
    if near(found, own[rank]):
        return f"rank {rank}'s gradient is still its own: change `gradient` itself, in place"
    if near(found, total):
        return f"the gradient is the sum over {size} ranks and should be their average: divide by {size}"
    is_near = (found - right).abs().amax(dim=1) <= 1e-5 * right.abs().max()
    row = int((~is_near).nonzero()[0])  # NaN is not near anything
    users = [str(each) for each, words in enumerate(ids) if row in words]
    if not users:
        return f"row {row} is not zero on rank {rank}, and no rank has looked it up"
    kinds = {"zero": torch.zeros(WIDTH), "the rank's own, undivided": own[rank][row], "the sum": total[row]}
    kind = next((words for words, value in kinds.items() if near(found[row], value)), "")
    is_what = kind or f"{found[row][0]:.4g} in its first element"
    expected = f"the average over {size}" if kind else f"{right[row][0]:.4g} in its first element"
    who = f"only rank {users[0]}" if len(users) == 1 else f"ranks {', '.join(users)}"
    told = f"row {row}, which {who} looked up, is {is_what} on rank {rank} and should be {expected}"
    return f"{told}: send the rows that any rank has looked up, and let every rank put back all of them"


@pytest.mark.parametrize("n", [3, 2])
def test_sends_rows_looked_up(ranks, seed, n):
    """A rank sends at most 2(n-1)/n (4 U width + R) bytes: U rows that some rank looked up, of R."""
    world, share = ranks(n, average_rows, seed), 2 * (n - 1) / n
    for moment in range(len(LOOKED_UP)):
        used = len(torch.cat([lookups(seed, moment, rank, n) for rank in range(n)]).unique())
        most, dense = round(share * (4 * used * WIDTH + ROWS)) + 2, round(share * 4 * ROWS * WIDTH)
        for rank, value in enumerate(world.values):
            sent, why = value[moment]["sent"], f"{used} of {ROWS} words were looked up"
            world.require(sent > 0, f"rank {rank} sent nothing through comm", rank)
            if sent >= dense:
                why += "; all rows are sent"
            elif sent > most and sent - most <= share * 7 * ROWS + 2:
                over = 1 + round((sent - most) / (share * ROWS))
                why += f"; to agree on a word takes {over} bytes, and one is enough: uint8"
            words = f"rank {rank} sent {sent:,} bytes and should send at most {most:,}: {why}"
            world.require(sent <= most, words, rank)


def step_gradient(seed: int, step: int, name: str, rank: int) -> torch.Tensor:
    """A rank's gradient in a step, (ELEMENTS,): zero after the first few."""
    if step >= WITH_GRADIENTS:
        return torch.zeros(ELEMENTS)
    return torch.randn(ELEMENTS, generator=drawing(seed, rank, 100 * step + 10 * NAMES.index(name)))


def odd_gradient(seed: int, elements: int, rank: int) -> torch.Tensor:
    """A rank's gradient of an odd size."""
    return torch.randn(elements, generator=drawing(seed, rank, elements))


def top_k_steps(comm: Any, module: Any, seed: int) -> list[list[dict[str, Any]]]:
    """On a rank: of each step and name, the gradient after TopK's average and the bytes sent."""
    codec = module.TopK(comm, SHARE)
    found: list[Any] = []
    for step in range(STEPS):
        found.append([])
        for name in NAMES:
            gradient, begun = step_gradient(seed, step, name, comm.rank), len(comm.rows)
            codec.average(name, gradient)
            sent = sum(row.bytes_sent for row in comm.rows[begun:])
            found[-1].append({"gradient": gradient, "sent": sent})
    return found


def odd_sizes(comm: Any, module: Any, seed: int) -> list[torch.Tensor]:
    """On a rank: gradients of odd sizes after an average each."""
    gradients = [odd_gradient(seed, elements, comm.rank) for elements in ODD_SIZES]
    for gradient in gradients:
        module.TopK(comm, SHARE).average("any", gradient)
    return gradients


def close(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether they are equal up to rounding; zeros may be off by as much."""
    return bool((found - right).abs().max() <= 1e-5 * max(right.abs().max().item(), 1e-3))


@pytest.mark.parametrize("n", [3, 2])
def test_feeds_back(ranks, seed, n):
    """Each step gives the average of every rank's largest elements; what is held back is sent later, and only once."""
    world = ranks(n, top_k_steps, seed)
    own = [[[step_gradient(seed, step, name, r) for r in range(n)] for name in NAMES] for step in range(STEPS)]
    moments = [(step, name) for step in range(STEPS) for name in range(len(NAMES))]

    def simulate(way: TopKVariant) -> list[list[list[torch.Tensor]]]:
        simulation = Simulation(SHARE, way)
        return [[simulation.average(*each) for each in zip(NAMES, step, strict=True)] for step in own]

    right = simulate(RIGHT)
    for rank, value in enumerate(world.values):
        wrong = [at for at in moments if not close(value[at[0]][at[1]]["gradient"], right[at[0]][at[1]][rank])]
        if not wrong:
            continue
        step, name = wrong[0]
        words = furthest(value[step][name]["gradient"], right[step][name][rank]).removeprefix(", ")
        for way in MISTAKES:
            made = simulate(way)
            if all(close(value[s][k]["gradient"], made[s][k][rank]) for s, k in moments):
                words = way.words
                break
        world.fail(f"step {step + 1} of {NAMES[name]} on rank {rank}: {words}", rank, about="TopK")


@pytest.mark.parametrize("n", [3, 2])
def test_takes_any_size(ranks, seed, n):
    """Of 5 elements one is sent; of 40,001 elements 5,000 are, whose places need more than 16 bits."""
    world = ranks(n, odd_sizes, seed)
    for number, elements in enumerate(ODD_SIZES):
        own = [odd_gradient(seed, elements, rank) for rank in range(n)]
        right = Simulation(SHARE).average("any", own)[0]
        for rank, value in enumerate(world.values):
            found, count = value[number], count_of(SHARE, elements)
            words = f"the average is wrong; send the {count:,} largest of each rank's elements"
            if elements > 1 << 15 and not found[1 << 15 :].any():
                words = (
                    "nothing arrives at places above 32,767: send a place as int32, since it does not fit into 16 bits"
                )
            if not close(found, right):
                known = (way for way in MISTAKES if close(found, Simulation(SHARE, way).average("any", own)[rank]))
                words = getattr(next(known, None), "words", words)
                world.fail(f"a tensor of {elements:,} elements on rank {rank}: {words}", rank, about="TopK")


@pytest.mark.parametrize("n", [3, 2])
def test_sends_the_largest(ranks, seed, n):
    """A rank sends at most (n-1) 8 k bytes for a tensor: a value and a place for each of its k largest elements."""
    world, count = ranks(n, top_k_steps, seed), count_of(SHARE, ELEMENTS)
    most = (n - 1) * 8 * count
    for rank, value in enumerate(world.values):
        for name, each in zip(NAMES, value[0], strict=True):
            sent, why = each["sent"], f"the {count} largest of {ELEMENTS} elements, 4 bytes each and 4 for each place"
            world.require(sent > 0, f"rank {rank} sent nothing of {name} through comm", rank)
            if sent == (n - 1) * 12 * count:
                why += "; a place as int64 takes 8, send it as int32"
            elif sent >= round(2 * (n - 1) / n * 4 * ELEMENTS):
                why += "; all elements are sent, zeros too"
            words = f"rank {rank} sent {sent:,} bytes of {name} and should send at most {most:,}: {why}"
            world.require(sent <= most, words, rank)
