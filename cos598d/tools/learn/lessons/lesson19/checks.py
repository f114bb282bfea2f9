"""Lesson 19, batch and learning rate: rates, a warm-up, unbiased estimates of the noise scale, and a training."""

import itertools
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from cos598d.terminal.words import number_of
from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.check.evidence import seed_of
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.lessons.formulas import as_json, formula_check, is_near, is_number, right_of, shown
from cos598d.tools.learn.lessons.lesson19.training import BASE_BATCH, BASE_RATE, DrawnTraining

NEAR, ELEMENTS, TRIALS = 1e-5, 50, 6  # squares may be added up in float32
POPULATION = 3  # examples, from which every rank draws one
SHARE, STEPS = 32, 60  # of the training: examples of a rank in a step
LOSS_WITHIN = 0.01  # rounding grows over the steps

CUT = "do not cut it off at 0"

Pair = tuple[float, float]


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


def settings(function: str, nonce: int) -> list[tuple[Any, ...]]:
    """The arguments of the calls of a function: batches larger and smaller; warm-ups of some steps, of one and of none;
    steps of which |G|^2 is negative in some, and at last on the mean."""
    draw = random.Random(nonce)
    if function == "scaled_rate":
        drawn = [(draw.uniform(0.01, 1.0), draw.randint(8, 64), draw.randint(2, 2048)) for _ in range(TRIALS)]
        return [(*each, rule) for rule in ("linear", "sqrt") for each in drawn]
    if function == "warm_up":
        ways = [(steps, draw.uniform(0.01, 0.1), draw.uniform(0.2, 2.0)) for steps in (draw.randint(3, 9), 1, 0)]
        return [(step, steps, *rates) for steps, *rates in ways for step in range(steps + 3)]
    found = [[(draw.gauss(1.0, 1.5), draw.uniform(20, 60)) for _ in range(draw.randint(20, 40))] for _ in range(TRIALS)]
    found = [[*steps, (2.0 * len(steps), 40.0)] for steps in found]
    return [(steps,) for steps in (*found, [(-1.0 - draw.random(), 30.0), (0.5, 20.0)])]


def gradients(nonce: int, size: int) -> list[tuple[int, list[torch.Tensor]]]:
    """Batches of a rank, and all ranks' gradients of them: a common part and noise of their own."""
    draw = torch.Generator().manual_seed(nonce + 2)
    found = []
    for trial in range(TRIALS):
        batch = int(torch.randint(1, 40, (), generator=draw))
        # In half of them there is no common part: then |G|^2 is negative about every other time.
        common, noise = torch.randn(ELEMENTS, generator=draw), torch.randn(size, ELEMENTS, generator=draw)
        found.append((batch, list(common * (trial % 2) + 2 * noise / batch**0.5)))
    return found


@Claim
def estimates_from_two_batches(on: OnLesson) -> None:
    """estimates has |G|^2 and tr(S) of drawn gradients, the same on every rank, by one all-reduce of one number."""
    found, traffic, is_kept = [], [], True
    # Only rank 0 draws, so that no other rank knows gradients other than its own.
    drawn = gradients(seed_of(on.nonce, 0), on.world_size) if on.rank == 0 else None
    given = on.comm.exchange(None if drawn is None else [(batch, torch.stack(own).tolist()) for batch, own in drawn])[0]
    for batch, rows in given:
        everyone = torch.tensor(rows)
        local, mean = everyone[on.rank].clone(), everyone.mean(dim=0)
        before = local.clone(), mean.clone()
        del everyone
        ledger = on.fresh_ledger()
        found.append(pair(on.student.estimates(on.comm, local, mean, batch)))
        traffic.append([row.bytes_sent for row in ledger.rows])
        is_kept &= torch.equal(local, before[0]) and torch.equal(mean, before[1])
    on.report("found", found)
    on.report("traffic", traffic)
    on.report("is kept", is_kept)


@estimates_from_two_batches.judgement
def _(world: World) -> None:
    n, most = world.size, 2 * 8 * 2 * (world.size - 1) / world.size
    for rank, by_trial in enumerate(world.reported("traffic", list)):
        for calls in by_trial:
            words = f"estimates makes {number_of(len(calls), 'call')} on rank {rank} of {n}, expected 1"
            world.require(len(calls) == 1, f"{words}: an all-reduce of |local|^2", rank)
            words = f"estimates sends {sum(calls)} bytes on rank {rank} of {n}, expected at most {most:.0f}"
            world.require(sum(calls) <= most, f"{words}: send |local|^2, and not the gradient", rank)
    for rank, is_kept in enumerate(world.reported("is kept", bool)):
        world.require(is_kept, f"estimates changes local or mean on rank {rank}: work on a copy", rank)
    for rank, by_trial in enumerate(world.reported("found", list)):
        for told, (b, own) in zip(by_trial, gradients(seed_of(world.nonce, 0), n), strict=True):
            rows = torch.stack(own).double()
            squares, large = rows.square().sum(dim=1), torch.stack(own).mean(dim=0).double().square().sum().item()
            small, mine, whole = squares.mean().item(), squares[rank].item(), n * b
            words = wrong_pair(told, small, large, b, whole, mine, squares.sqrt().mean().item())
            if words:
                world.find(rank, f"estimates on rank {rank} of {n}, with batch {b}: {words}")
                return


def wrong_pair(
    told: Sequence[Any], small: float, large: float, b: int, whole: int, mine: float, mean_norm: float
) -> str:
    """What is wrong with |G|^2 and tr(S), in words; "" if nothing is."""
    if not are_pairs([told]):
        return f"got {shown(list(told))}, expected two numbers, |G|^2 and tr(S)"

    right, size = solved(small, large, b, whole), (small + large) * max(1, whole / (whole - b), b * whole / (whole - b))
    are_right = [abs(one - other) <= NEAR * size for one, other in zip(told, right, strict=True)]
    if all(are_right):
        return ""
    variance = right[1] * (1 - b / whole)
    slips = {
        "the two are exchanged: return |G|^2 first, and then tr(S)": right[::-1],
        "that is |mean|^2, which the noise makes larger than |G|^2": (large, right[1]),
        CUT: (max(0.0, right[0]), right[1]),
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
    what = f"{('|G|^2', 'tr(S)')[place]}: got {told[place]:.6g}, expected {right[place]:.6g}"
    return f"{what}: {named[0]}" if named else what


def population(nonce: int) -> torch.Tensor:
    """Every gradient that an example can have, (POPULATION, ELEMENTS)."""
    return torch.randn(POPULATION, ELEMENTS, generator=torch.Generator().manual_seed(nonce + 3))


@Claim
def estimates_are_unbiased(on: OnLesson) -> None:
    """Over all ways in which the ranks can draw one of three examples each, the means are the true |G|^2 and tr(S)."""
    examples, found = population(on.nonce), []
    for drawn in itertools.product(range(POPULATION), repeat=on.world_size):
        rows = examples[list(drawn)]
        found.append(pair(on.student.estimates(on.comm, rows[on.rank].clone(), rows.mean(dim=0), 1)))
    on.report("found", found)


@estimates_are_unbiased.judgement
def _(world: World) -> None:
    examples = population(world.nonce).double()
    mean, n = examples.mean(dim=0), world.size
    right = mean.square().sum().item(), (examples - mean).square().sum().item() / POPULATION
    rows = torch.stack([examples[list(each)] for each in itertools.product(range(POPULATION), repeat=n)])
    squares = n * rows.mean(dim=1).square().sum(dim=1) - rows.square().sum(dim=2).mean(dim=1)
    cut = (squares / (n - 1)).clamp(min=0).mean().item()
    for rank, found in enumerate(world.reported("found", list)):
        if len(found) != len(rows) or not are_pairs(found):
            world.find(rank, f"estimates on rank {rank} does not return two numbers for every step")
            return
        for place, name in enumerate(("|G|^2", "tr(S)")):
            told = sum(each[place] for each in found) / len(found)
            words = f"the mean of {name} over all {len(found)} ways to draw is {told:.6g} on rank {rank} of {n}"
            words += f", and the true one is {right[place]:.6g}: the estimate is biased"
            words += f"; {CUT}" if place == 0 and abs(told - cut) <= NEAR * sum(right) else ""
            world.require(abs(told - right[place]) <= NEAR * sum(right), words, rank)


@Claim
def trains(on: OnLesson) -> None:
    """With your rates and a warm-up a training ends at the loss of the reference, and measures its noise scale."""
    batch, steps = SHARE * on.world_size, []
    training = DrawnTraining(on.nonce, STEPS, batch, on.world_size)
    peak = on.student.scaled_rate(BASE_RATE, BASE_BATCH, batch, "linear")
    for step in range(STEPS):
        local = training.gradient(step, on.rank)
        mean = local.clone()
        on.comm.all_reduce(mean, "gradient")
        mean /= on.world_size
        steps.append(on.student.estimates(on.comm, local, mean, SHARE))
        training.step(mean, on.student.warm_up(step, STEPS // 4, BASE_RATE, peak))
    on.report("peak", [as_json(peak)])
    on.report("pairs", [pair(each) for each in steps])
    on.report("loss", training.loss())
    on.report("noise scale", [as_json(on.student.noise_scale(steps))])


@trains.judgement
def _(world: World) -> None:
    batch, pairs, formulas = SHARE * world.size, [], right_of(19)
    best = formulas.scaled_rate(BASE_RATE, BASE_BATCH, batch, "linear")
    training = DrawnTraining(world.nonce, STEPS, batch, world.size)
    before = training.loss()
    for step in range(STEPS):
        own = torch.stack([training.gradient(step, share) for share in range(world.size)])
        small, large = own.double().square().sum(dim=1).mean(), own.mean(dim=0).double().square().sum()
        pairs.append(solved(small.item(), large.item(), SHARE, batch))
        training.step(own.mean(dim=0), formulas.warm_up(step, STEPS // 4, BASE_RATE, best))
    right, scale = training.loss(), formulas.noise_scale(pairs)
    for rank, loss in enumerate(world.reported("loss", float)):
        words = f"after {STEPS} steps of batch {batch} the loss on rank {rank} is {loss:.4f}, expected {right:.4f}"
        (peak,) = world.reported("peak", list)[rank]
        holds, at = abs(loss - right) <= LOSS_WITHIN * right, "warm_up" if is_near(peak, best, NEAR) else "scaled_rate"
        world.require(holds, f"{words}; it began at {before:.4f}", rank, at=at)
    for rank, (told,) in enumerate(world.reported("noise scale", list)):
        own_pairs = world.reported("pairs", list)[rank]
        # The right ratio of the file's own pairs: then they are what is wrong.
        ratio = formulas.noise_scale(own_pairs) if are_pairs(own_pairs) else None
        words = f"the noise scale of the training is {shown(told)}, expected {shown(scale)}"
        at = "estimates" if is_near(told, ratio, NEAR) else "noise_scale"
        world.require(is_near(told, scale, LOSS_WITHIN), words, rank, at=at)


_formula = partial(formula_check, 19, settings, within=NEAR, ranks=2)
CHECKS = Checks(
    (
        _formula(
            "scaled_rate",
            "scales_rates",
            "scaled_rate multiplies by the growth of the batch, or by its square root, for larger and smaller batches.",
        ),
        _formula(
            "warm_up",
            "warms_up",
            "warm_up begins with start, adds the same amount in every step, and has peak from step `steps` on.",
        ),
        Check(estimates_from_two_batches, (2, 3), about="estimates", only=("all_reduce",)),
        Check(estimates_are_unbiased, (2, 3), about="estimates", only=("all_reduce",)),
        _formula(
            "noise_scale",
            "takes_the_ratio_of_means",
            "noise_scale is the ratio of the means over the steps, and None if the mean of |G|^2 is not positive.",
        ),
        Check(trains, (2, 3)),
    )
)
