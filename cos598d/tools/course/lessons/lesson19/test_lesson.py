"""Lesson 19, batch and learning rate: rates, a warm-up, and unbiased estimates of the noise scale."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cos598d.tools.course.formulas import as_json, is_number, is_right, shown
from cos598d.tools.course.lessons.lesson19 import right

NEAR, ELEMENTS, TRIALS = 1e-5, 50, 6  # squares may be added up in float32
POPULATION = 3  # examples, from which every rank draws one
CUT = "do not cut it off at 0"
Pair = tuple[float, float]


def settings(function: str, seed: int) -> list[tuple[Any, ...]]:
    """The arguments of the calls of a function: batches larger and smaller; warm-ups of some steps, of one and of none;
    steps of which |G|^2 is negative in some, and at last on the mean."""
    draw = random.Random(seed)
    if function == "scaled_rate":
        drawn = [(draw.uniform(0.01, 1.0), draw.randint(8, 64), draw.randint(2, 2048)) for _ in range(TRIALS)]
        return [(*each, rule) for rule in ("linear", "sqrt") for each in drawn]
    if function == "warm_up":
        ways = [(steps, draw.uniform(0.01, 0.1), draw.uniform(0.2, 2.0)) for steps in (draw.randint(3, 9), 1, 0)]
        return [(step, steps, *rates) for steps, *rates in ways for step in range(steps + 3)]
    found = [[(draw.gauss(1.0, 1.5), draw.uniform(20, 60)) for _ in range(draw.randint(20, 40))] for _ in range(TRIALS)]
    found = [[*steps, (2.0 * len(steps), 40.0)] for steps in found]
    return [(steps,) for steps in (*found, [(-1.0 - draw.random(), 30.0), (0.5, 20.0)])]


@pytest.mark.parametrize("n", [2])
def test_scales_rates(ranks, seed, n):
    """scaled_rate multiplies by the growth of the batch, or by its square root, for larger and smaller batches."""
    is_right(ranks, n, right, "scaled_rate", settings("scaled_rate", seed), NEAR)


@pytest.mark.parametrize("n", [2])
def test_warms_up(ranks, seed, n):
    """warm_up begins with start, adds the same amount in every step, and has peak from step `steps` on."""
    is_right(ranks, n, right, "warm_up", settings("warm_up", seed), NEAR)


def pair(value: Any) -> list[Any]:
    """Two numbers that a student's function returned; whatever else it is, as one."""
    found = as_json(value)
    return found if isinstance(found, list) else [found]


def are_pairs(found: Sequence[Any]) -> bool:
    """Whether each is two numbers."""
    return all(len(each) == 2 and all(map(is_number, each)) for each in found)


def solved(small: float, large: float, b: float, whole: float) -> Pair:
    """|G|^2 and tr(S), if batches of b examples have squared norms of `small`, and those of all of `large`."""
    return (whole * large - b * small) / (whole - b), (small - large) / (1 / b - 1 / whole)


def gradients(seed: int, size: int) -> list[tuple[int, torch.Tensor]]:
    """Batches of a rank, and all ranks' gradients of them, (size, ELEMENTS): a common part and noise of their own."""
    draw, found = torch.Generator().manual_seed(seed + 2), []
    for trial in range(TRIALS):
        batch = int(torch.randint(1, 40, (), generator=draw))
        # In half of them there is no common part: then |G|^2 is negative about every other time.
        common, noise = torch.randn(ELEMENTS, generator=draw), torch.randn(size, ELEMENTS, generator=draw)
        found.append((batch, common * (trial % 2) + 2 * noise / batch**0.5))
    return found


def estimate(comm: Any, module: Any, seed: int) -> list[dict[str, Any]]:
    """On a rank: the file's estimates of drawn gradients, the bytes of its calls, and whether it changed nothing."""
    found = []
    for batch, own in gradients(seed, comm.world_size):
        local, mean, begun = own[comm.rank].clone(), own.mean(dim=0), len(comm.rows)
        told = pair(module.estimates(comm, local, mean, batch))
        is_kept = torch.equal(local, own[comm.rank]) and torch.equal(mean, own.mean(dim=0))
        found.append({"told": told, "is kept": is_kept, "sent": [row.bytes_sent for row in comm.rows[begun:]]})
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_estimates_from_two_batches(ranks, seed, n):
    """estimates has |G|^2 and tr(S) of drawn gradients, the same on every rank, by one all-reduce of one number."""
    world, most = ranks(n, estimate, seed, only=("all_reduce",)), 2 * 8 * 2 * (n - 1) / n
    for rank, value in enumerate(world.values):
        for sent in (each["sent"] for each in value):
            words = f"estimates makes {len(sent)} calls on rank {rank} of {n}, expected 1: an all-reduce of |local|^2"
            world.require(len(sent) == 1, words, rank, about="estimates")
            words = f"estimates sends {sum(sent)} bytes on rank {rank} of {n}, expected at most {most:.0f}"
            words += ": send |local|^2, and not the gradient"
            world.require(sum(sent) <= most, words, rank, about="estimates")
        words = f"estimates changes local or mean on rank {rank}: work on a copy"
        world.require(all(each["is kept"] for each in value), words, rank, about="estimates")
    for rank, value in enumerate(world.values):
        for told, (batch, own) in zip((each["told"] for each in value), gradients(seed, n), strict=True):
            words = wrong_pair(told, own.double(), rank, batch)
            world.require(not words, f"estimates on rank {rank} of {n}, with batch {batch}: {words}", rank, "estimates")


def wrong_pair(told: Sequence[Any], own: torch.Tensor, rank: int, b: int) -> str:
    """What is wrong with |G|^2 and tr(S) of the ranks' gradients of b examples, in words; "" if nothing is."""
    if not are_pairs([told]):
        return f"got {shown(list(told))}, expected two numbers, |G|^2 and tr(S)"
    squares, large, whole = own.square().sum(dim=1), own.mean(dim=0).square().sum().item(), len(own) * b
    small, mine, mean_norm = squares.mean().item(), squares[rank].item(), squares.sqrt().mean().item()
    good, size = solved(small, large, b, whole), (small + large) * max(1, whole / (whole - b), b * whole / (whole - b))
    are_right = [abs(one - other) <= NEAR * size for one, other in zip(told, good, strict=True)]
    if all(are_right):
        return ""
    variance = good[1] * (1 - b / whole)
    slips = {
        "the two are exchanged: return |G|^2 first, and then tr(S)": good[::-1],
        "that is |mean|^2, which the noise makes larger than |G|^2": (large, good[1]),
        CUT: (max(0.0, good[0]), good[1]),
        "the variance over n ranks is divided by n - 1, and not by n": (large - variance / whole, variance),
        "small is this rank's own |local|^2: average it over the ranks": solved(mine, large, b, whole),
        "small is the sum over the ranks: divide by their number": solved(small * whole / b, large, b, whole),
        "small and large are exchanged": solved(large, small, b, whole),
        "batch is one rank's: the mean has n times as many examples": (large, (small - large) * b),
        "norms have to be squared": solved(small**0.5, large**0.5, b, whole),
        "average the squares over the ranks, and do not square an average": solved(mean_norm**2, large, b, whole),
        "the norms of the ranks were averaged without their squares": solved(mean_norm, large**0.5, b, whole),
        "squares are added up over the elements, and not averaged": solved(
            small / ELEMENTS, large / ELEMENTS, b, whole
        ),
        "batch is that of one rank, and not that of all": solved(small, large, b * b / whole, b),
        "batch is that of one rank: do not multiply it": solved(small, large, whole, whole * whole / b),
        "the batches are taken for 1 and n": solved(small, large, 1, whole / b),
    }
    place = are_right.index(False)
    # A slip that explains both numbers comes first: some give one of them alike.
    off = {words: [abs(one - other) for one, other in zip(told, made, strict=True)] for words, made in slips.items()}
    named = [words for words, each in off.items() if max(each) <= NEAR * size]
    named += [words for words, each in off.items() if each[place] <= NEAR * size]
    what = f"{('|G|^2', 'tr(S)')[place]}: got {told[place]:.6g}, expected {good[place]:.6g}"
    return f"{what}: {named[0]}" if named else what


def population(seed: int) -> torch.Tensor:
    """Every gradient that an example can have, (POPULATION, ELEMENTS)."""
    return torch.randn(POPULATION, ELEMENTS, generator=torch.Generator().manual_seed(seed + 3))


def estimate_all(comm: Any, module: Any, seed: int) -> list[list[Any]]:
    """On a rank: the file's estimates, of one example each, over all ways in which the ranks can draw them."""
    examples, found = population(seed), []
    for drawn in itertools.product(range(POPULATION), repeat=comm.world_size):
        rows = examples[list(drawn)]
        found.append(pair(module.estimates(comm, rows[comm.rank].clone(), rows.mean(dim=0), 1)))
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_estimates_are_unbiased(ranks, seed, n):
    """Over all ways in which the ranks can draw one of three examples each, the means are the true |G|^2 and tr(S)."""
    world, examples = ranks(n, estimate_all, seed, only=("all_reduce",)), population(seed).double()
    mean = examples.mean(dim=0)
    true = mean.square().sum().item(), (examples - mean).square().sum().item() / POPULATION
    rows = torch.stack([examples[list(each)] for each in itertools.product(range(POPULATION), repeat=n)])
    squares = n * rows.mean(dim=1).square().sum(dim=1) - rows.square().sum(dim=2).mean(dim=1)
    cut = (squares / (n - 1)).clamp(min=0).mean().item()
    for rank, found in enumerate(world.values):
        words = f"estimates on rank {rank} does not return two numbers for every step"
        world.require(are_pairs(found), words, rank, about="estimates")
        for place, name in enumerate(("|G|^2", "tr(S)")):
            told = sum(each[place] for each in found) / len(found)
            words = f"the mean of {name} over all {len(found)} ways to draw is {told:.6g} on rank {rank} of {n}"
            words += f", and the true one is {true[place]:.6g}: the estimate is biased"
            words += f"; {CUT}" if place == 0 and abs(told - cut) <= NEAR * sum(true) else ""
            world.require(abs(told - true[place]) <= NEAR * sum(true), words, rank, about="estimates")


@pytest.mark.parametrize("n", [2])
def test_takes_the_ratio_of_means(ranks, seed, n):
    """noise_scale is the ratio of the means over the steps, and None if the mean of |G|^2 is not positive."""
    is_right(ranks, n, right, "noise_scale", settings("noise_scale", seed), NEAR)
