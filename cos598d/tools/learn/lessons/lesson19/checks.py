"""Lesson 19, batch and learning rate: rates, a warm-up, unbiased estimates of the noise scale, and a training."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cos598d.terminal.words import number_of
from cos598d.tools.check.claims.base import Claim, World
from cos598d.tools.check.evidence import seed_of
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.lessons.lesson19.training import BASE_BATCH, BASE_RATE, DrawnTraining

RULES = {"linear": 1.0, "sqrt": 0.5}  # the power of the batch's growth
NEAR, ELEMENTS, TRIALS = 1e-5, 50, 6  # squares may be added up in float32
POPULATION = 3  # examples, from which every rank draws one
SHARE, STEPS = 32, 60  # of the training: examples of a rank in a step
LOSS_WITHIN = 0.01  # rounding grows over the steps

Pair = tuple[float, float]


def number(value: Any) -> Any:
    """What a student's function returned: a number, None, or else its text."""
    value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None if value is None else repr(value)[:100]


def pair(value: Any) -> list[Any]:
    """Two numbers that a student's function returned; whatever else it is, as one."""
    return [number(each) for each in value] if isinstance(value, list | tuple) else [number(value)]


def wrong_number(found: Any, right: float, size: float, known: Mapping[str, float]) -> str:
    """What is wrong with a number that may be off by rounding of `size`, in words; "" if nothing is."""
    if type(found) not in (int, float):
        return f"got {found}, expected the number {right:.6g}"
    if abs(found - right) <= NEAR * size:
        return ""
    why = next((words for words, value in known.items() if abs(found - value) <= NEAR * size), "")
    return f"got {found:.6g}, expected {right:.6g}" + (f": {why}" if why else "")


def batches(nonce: int) -> list[tuple[float, int, int]]:
    """Rates, their batches, and other batches, larger and smaller."""
    draw = random.Random(nonce)
    return [(draw.uniform(0.01, 1.0), draw.randint(8, 64), draw.randint(2, 2048)) for _ in range(TRIALS)]


@Claim
def scales_rates(on: OnLesson) -> None:
    """scaled_rate multiplies by the growth of the batch, or by its square root, for larger and smaller batches."""
    found = {rule: [number(on.student.scaled_rate(*each, rule)) for each in batches(on.nonce)] for rule in RULES}
    on.report("rates", found)


@scales_rates.judgement
def _(world: World) -> None:
    found = world.reported("rates", dict)[0]
    for rule, power in RULES.items():
        for told, (rate, batch, large) in zip(found.get(rule, []), batches(world.nonce), strict=True):
            right, other = (rate * (large / batch) ** each for each in (power, 1.5 - power))
            known = {
                f"that is by the {'square root' if power == 1 else 'linear'} rule": other,
                "that is upside down: the rate grows with the batch": rate * (batch / large) ** power,
                "that is the rate itself": rate,
                "large is the batch, and not how many times larger it is": rate * large**power,
                "large / batch is no whole number: do not round it": rate * (large // batch) ** power,
            }
            words = wrong_number(told, right, right, known)
            world.require(not words, f"scaled_rate({rate:.4f}, {batch}, {large}, {rule!r}): {words}")


def warm_ups(nonce: int) -> list[tuple[int, float, float]]:
    """Numbers of steps, rates at the start, and at the peak."""
    draw = random.Random(nonce + 1)
    return [(steps, draw.uniform(0.01, 0.1), draw.uniform(0.2, 2.0)) for steps in (draw.randint(3, 9), 1, 0)]


@Claim
def warms_up(on: OnLesson) -> None:
    """warm_up begins with start, adds the same amount in every step, and has peak from step `steps` on."""
    found = [
        [number(on.student.warm_up(step, steps, start, peak)) for step in range(steps + 3)]
        for steps, start, peak in warm_ups(on.nonce)
    ]
    on.report("rates", found)


@warms_up.judgement
def _(world: World) -> None:
    for told, (steps, start, peak) in zip(world.reported("rates", list)[0], warm_ups(world.nonce), strict=True):
        for step, rate in enumerate(told):
            right = peak if step >= steps else start + (peak - start) * step / steps
            known = {
                "count from 0: step 0 has start": start + (peak - start) * (step + 1) / max(steps, 1),
                "it begins with start, and not with 0": peak * min(step / max(steps, 1), 1.0),
                "that is a step of a warm-up from 0": peak * (step + 1) / max(steps, 1),
                "peak comes in step `steps`, one later": start + (peak - start) * step / max(steps - 1, 1),
                "it goes on after the warm-up: it stays at peak": start + (peak - start) * step / max(steps, 1),
                "add the same amount in every step, and do not multiply": start
                * (peak / start) ** (step / max(steps, 1)),
            }
            words = wrong_number(rate, right, peak, known)
            if words:
                world.find(0, f"warm_up({step}, {steps}, {start:.4f}, {peak:.4f}): {words}")
                return


def gradients(nonce: int, size: int) -> list[tuple[int, list[torch.Tensor]]]:
    """Batches of a rank, and all ranks' gradients of them: a common part and noise of their own."""
    draw = torch.Generator().manual_seed(nonce + 2)
    found = []
    for _ in range(TRIALS):
        batch = int(torch.randint(1, 40, (), generator=draw))
        common, noise = torch.randn(ELEMENTS, generator=draw), torch.randn(size, ELEMENTS, generator=draw)
        found.append((batch, list(common + 2 * noise / batch**0.5)))
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
    if len(told) != 2:
        return f"got {told}, expected two numbers, |G|^2 and tr(S)"

    def both(small: float, large: float, b: float, whole: float) -> Pair:
        return (whole * large - b * small) / (whole - b), (small - large) / (1 / b - 1 / whole)

    right, size = both(small, large, b, whole), (small + large) * max(1, whole / (whole - b), b * whole / (whole - b))
    variance = right[1] * (1 - b / whole)
    slips = {
        "the variance over n ranks is divided by n - 1, and not by n": (large - variance / whole, variance),
        "small is this rank's own |local|^2: average it over the ranks": both(mine, large, b, whole),
        "small is the sum over the ranks: divide by their number": both(small * whole / b, large, b, whole),
        "small and large are exchanged": both(large, small, b, whole),
        "batch is one rank's: the mean has n times as many examples": (large, (small - large) * b),
        "norms have to be squared": both(small**0.5, large**0.5, b, whole),
        "average the squares over the ranks, and do not square an average": both(mean_norm**2, large, b, whole),
        "the norms of the ranks were averaged without their squares": both(mean_norm, large**0.5, b, whole),
        "squares are added up over the elements, and not averaged": both(small / ELEMENTS, large / ELEMENTS, b, whole),
        "batch is that of one rank, and not that of all": both(small, large, b * b / whole, b),
        "batch is that of one rank: do not multiply it": both(small, large, whole, whole * whole / b),
        "the batches are taken for 1 and n": both(small, large, 1, whole / b),
    }
    if all(wrong_number(each, value, size, {}) == "" for each, value in zip(told, right[::-1], strict=True)):
        return "the two are exchanged: return |G|^2 first, and then tr(S)"
    for name, place in (("|G|^2", 0), ("tr(S)", 1)):
        known = {"that is |mean|^2, which the noise makes larger than |G|^2": large if place == 0 else math.inf}
        known |= {"do not cut it off at 0": 0.0 if place == 0 and right[0] < 0 else math.inf}
        # A slip that explains both numbers comes first: some give one of them alike.
        are_both = {
            words: all(abs(each - value) <= NEAR * size for each, value in zip(told, both_of, strict=True))
            for words, both_of in slips.items()
            if all(type(each) in (int, float) for each in told)
        }
        ordered = sorted(slips, key=lambda words: not are_both.get(words))
        known |= {words: slips[words][place] for words in ordered}
        words = wrong_number(told[place], right[place], size, known)
        if words:
            return f"{name}: {words}"
    return ""


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
    mean = examples.mean(dim=0)
    right = mean.square().sum().item(), (examples - mean).square().sum().item() / POPULATION
    for rank, found in enumerate(world.reported("found", list)):
        are_pairs = len(found) == POPULATION**world.size and all(
            len(each) == 2 and all(type(value) in (int, float) for value in each) for each in found
        )
        if not are_pairs:
            world.find(rank, f"estimates on rank {rank} does not return two numbers for every step")
            return
        for place, name in enumerate(("|G|^2", "tr(S)")):
            told = sum(each[place] for each in found) / len(found)
            words = (
                f"the mean of {name} over all {len(found)} ways to draw is {told:.6g} on rank {rank} of {world.size}"
            )
            is_right = abs(told - right[place]) <= NEAR * sum(right)
            world.require(is_right, f"{words}, and the true one is {right[place]:.6g}: the estimate is biased", rank)


def pairs(nonce: int) -> list[list[Pair]]:
    """Steps' estimates: |G|^2 is negative in some steps, and at last so is its mean."""
    draw = random.Random(nonce + 4)
    found = [[(draw.gauss(1.0, 1.5), draw.uniform(20, 60)) for _ in range(draw.randint(20, 40))] for _ in range(TRIALS)]
    found = [[*steps, (2.0 * len(steps), 40.0)] for steps in found]
    return [*found, [(-1.0 - draw.random(), 30.0), (0.5, 20.0)]]


@Claim
def takes_the_ratio_of_means(on: OnLesson) -> None:
    """noise_scale is the ratio of the means over the steps, and None if the mean of |G|^2 is not positive."""
    on.report("found", [number(on.student.noise_scale(list(steps))) for steps in pairs(on.nonce)])


@takes_the_ratio_of_means.judgement
def _(world: World) -> None:
    for told, steps in zip(world.reported("found", list)[0], pairs(world.nonce), strict=True):
        signal, noise = ([each[place] for each in steps] for place in (0, 1))
        if sum(signal) <= 0:
            words = f"noise_scale of steps with a negative mean |G|^2: got {told}, expected None"
            world.require(told is None, words)
            continue
        right = sum(noise) / sum(signal)
        positive = [each for each in steps if each[0] > 0]
        known = {
            "that is the mean of the ratios": sum(s / g for g, s in steps) / len(steps),
            "that is upside down": 1 / right,
            "that is the last step's ratio": noise[-1] / signal[-1],
            "steps with a negative |G|^2 count too": sum(s for _, s in positive) / sum(g for g, _ in positive),
        }
        words = wrong_number(told, right, right, known)
        if words:
            world.find(0, f"noise_scale of {len(steps)} steps: {words}; take the ratio of the means of all steps")
            return


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
    on.report("peak", [number(peak)])
    on.report("ratio", [ratio_of([pair(each) for each in steps])])
    on.report("loss", training.loss())
    on.report("noise scale", [number(on.student.noise_scale(steps))])


def ratio_of(steps: Sequence[Sequence[Any]]) -> float | None:
    """The ratio of the means of these pairs; None where they are no pairs of numbers, or it is not positive."""
    if any(len(each) != 2 or not all(type(value) is float for value in each) for each in steps):
        return None
    signal, noise = (sum(each) for each in zip(*steps, strict=True))
    return noise / signal if signal > 0 else None


@trains.judgement
def _(world: World) -> None:
    batch, squares = SHARE * world.size, []
    training = DrawnTraining(world.nonce, STEPS, batch, world.size)
    before = training.loss()
    for step in range(STEPS):
        own = torch.stack([training.gradient(step, share) for share in range(world.size)])
        squares.append((own.double().square().sum(dim=1).mean().item(), own.mean(dim=0).double().square().sum().item()))
        ahead = min(step / (STEPS // 4), 1.0)
        training.step(own.mean(dim=0), BASE_RATE * (1 + ahead * (batch / BASE_BATCH - 1)))
    right = training.loss()
    small, large = (sum(each) for each in zip(*squares, strict=True))
    scale = (small - large) / (1 / SHARE - 1 / batch) / ((batch * large - SHARE * small) / (batch - SHARE))
    for rank, loss in enumerate(world.reported("loss", float)):
        words = f"after {STEPS} steps of batch {batch} the loss on rank {rank} is {loss:.4f}, expected {right:.4f}"
        (peak,) = world.reported("peak", list)[rank]
        at = "scaled_rate" if wrong_number(peak, BASE_RATE * batch / BASE_BATCH, 1.0, {}) else "warm_up"
        is_near = abs(loss - right) <= LOSS_WITHIN * right
        world.require(is_near, f"{words}; it began at {before:.4f}", rank, at=at)
    for rank, (told,) in enumerate(world.reported("noise scale", list)):
        is_near = isinstance(told, float) and abs(told - scale) <= LOSS_WITHIN * abs(scale)
        words = f"{told:.1f}" if isinstance(told, float) else f"{told}"
        (ratio,) = world.reported("ratio", list)[rank]
        is_of_pairs = ratio == told or (ratio and isinstance(told, float) and abs(told - ratio) <= NEAR * abs(ratio))
        at = "estimates" if is_of_pairs else "noise_scale"
        words = f"the noise scale of the training is {words}, expected {scale:.1f}"
        world.require(is_near, words, rank, at=at)


CHECKS = Checks(
    (
        Check(scales_rates, (2,), about="scaled_rate"),
        Check(warms_up, (2,), about="warm_up"),
        Check(estimates_from_two_batches, (2, 3), about="estimates", only=("all_reduce",)),
        Check(estimates_are_unbiased, (2, 3), about="estimates", only=("all_reduce",)),
        Check(takes_the_ratio_of_means, (2,), about="noise_scale"),
        Check(trains, (2, 3)),
    )
)
