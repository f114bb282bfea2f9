"""Lesson 1: one order on all ranks, shares that make up the batch, and weights that make up its mean."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, islice, pairwise
from typing import Any

import numpy as np
import torch

from cos598d.terminal.printable import printable
from cos598d.tools.check.claims.base import Claim, NotAsAgreed, World
from cos598d.tools.check.evidence import BadEvidence
from cos598d.tools.learn.checking import Check, Checks, OnLesson

EXAMPLES = 53
BATCHES = (12, 11, 7, 5, 2)  # of the last one, on 3 and 4 ranks, some have nothing
EPOCHS = 3
MOST_ALIKE = 13  # of the 52 pairs of neighbours; in a random order it is one or two


@Claim
def one_order(on: OnLesson) -> None:
    """order() shuffles all examples: the same on every rank and when called again, and another order in each epoch."""
    for number in range(2):
        # As in real programs: what each rank's own generators gave before differs.
        for generator in (random.seed, np.random.seed, torch.manual_seed):
            generator(1000 * number + on.rank)
        for seed in _seeds(on.nonce):
            for epoch in range(EPOCHS):
                drawn = _numbers("order", on.student.order(EXAMPLES, seed, epoch), EXAMPLES)
                on.report(f"{seed} {epoch} {number}", drawn)


@one_order.judgement
def _(world: World) -> None:
    seeds = _seeds(world.nonce)
    first: dict[tuple[int, int], list[int]] = {}
    for number in range(2):
        for seed in seeds:
            for epoch in range(EPOCHS):
                by_rank = [_list(each, EXAMPLES) for each in world.reported(f"{seed} {epoch} {number}", list)]
                _judge_ranks(world, by_rank, first.setdefault((seed, epoch), by_rank[0]))
    if world.findings:
        return
    drawn = first[seeds[0], 0]
    world.require(drawn != sorted(drawn), "order does not shuffle: it gives 0, 1, 2, ...; expected a random order")
    steps = Counter((after - before) % EXAMPLES for before, after in pairwise(drawn))
    (step, alike), *_ = steps.most_common(1)
    hardly = f"order hardly shuffles: {alike} of its {EXAMPLES - 1} steps from one number to the next are {step}"
    world.require(alike <= MOST_ALIKE, f"{hardly} (modulo {EXAMPLES}); expected a random order")
    if not world.findings:
        _judge_draws(world, seeds, first)


def _judge_ranks(world: World, by_rank: list[list[int]], before: list[int]) -> None:
    """That each rank's order is whole, and the same as rank 0's `before`."""
    for rank, each in enumerate(by_rank):
        twice = [example for example, count in Counter(each).items() if count > 1]
        lost = sorted(set(range(EXAMPLES)) - set(each))
        off = f"example {twice[0]} twice" if twice else f"example {lost[0]} not at all" if lost else ""
        off = off or (f"{len(each)} numbers" if len(each) != EXAMPLES else "")
        whole = f"order({EXAMPLES}, ...) has {off} on rank {rank}, expected every number from 0 to {EXAMPLES - 1} once"
        world.require(not off, whole, rank)
        if each != by_rank[0] and not off:
            told = f"expected {by_rank[0][:5]}..., as rank 0, got {each[:5]}... on rank {rank}"
            world.find(rank, _alike("order differs from rank to rank"), told)
    if by_rank[0] != before:
        told = f"expected {before[:5]}... as before, got {by_rank[0][:5]}..."
        world.find(0, _alike("order gives another result when it is called again"), told)


def _judge_draws(world: World, seeds: Sequence[int], drawn: Mapping[tuple[int, int], list[int]]) -> None:
    """That each epoch has an order of its own, and each seed."""
    same = [pair for pair in combinations(range(EPOCHS), 2) if _resemble(*(drawn[seeds[0], epoch] for epoch in pair))]
    which = "every epoch has" if len(same) == EPOCHS else f"epochs {same[0][0]} and {same[0][1]} have" if same else ""
    world.require(not same, f"{which} the same order: expected another one for each epoch")
    alike = next((epoch for epoch in range(EPOCHS) if _resemble(*(drawn[seed, epoch] for seed in seeds))), None)
    words = f"the seeds {seeds[0]} and {seeds[1]} give the same order in epoch {alike}"
    world.require(alike is None, f"{words}: expected an order that depends on both the seed and the epoch")


def _resemble(order: list[int], other: list[int]) -> bool:
    """Whether many neighbours in the one are neighbours in the other: then it is the same, or the same turned round."""
    return len(set(pairwise(order)) & set(pairwise(other))) > MOST_ALIKE


def _seeds(nonce: int) -> tuple[int, int]:
    return nonce % 1000, nonce % 1000 + 17


def _alike(what: str) -> str:
    return (
        f"{what}: the ranks then train on each other's examples; draw it from a generator that depends only on seed "
        "and epoch, without hash() of a text, which differs from process to process"
    )


@Claim
def shares_make_the_batch(on: OnLesson) -> None:
    """The shares together are the batch, without doubles, and their sizes differ by at most one."""
    for size in BATCHES:
        taken = on.student.share(_batch(on.nonce, size), on.rank, on.world_size)
        on.report(str(size), _numbers("share", taken, size))


@shares_make_the_batch.judgement
def _(world: World) -> None:
    for size in BATCHES:
        _judge_shares(world, size, [_list(each, size) for each in world.reported(str(size), list)])


def _judge_shares(world: World, size: int, shares: list[list[int]]) -> None:
    """That the shares of a batch of that size are the batch, without doubles, and differ by one at most."""
    batch = _batch(world.nonce, size)
    taken = Counter(example for each in shares for example in each)
    sizes = [len(each) for each in shares]
    told = f"expected {size} examples in shares of {size // world.size} to {-(-size // world.size)}, got {sizes}"
    lost = [example for example in batch if not taken[example]]
    double = [example for example in batch if taken[example] > 1]
    strange = _strange(batch, shares)
    if strange:
        world.find(0, strange, told)
    elif double:
        owners = [rank for rank, each in enumerate(shares) if double[0] in each]
        words = f"an example of a batch of {size} is in the shares of ranks {owners[0]} and {owners[-1]}"
        world.find(owners[-1], f"{words}: each belongs to one rank", told)
    elif lost:
        words = f"{len(lost)} of {size} examples are in no rank's share on {world.size} ranks"
        world.find(0, f"{words}: share out the remainder too", told)
    elif max(sizes) - min(sizes) > 1:
        words = f"the shares of {size} examples on {world.size} ranks have sizes {sizes}"
        world.find(0, f"{words}: they may differ by one at most, since all wait for the largest", told)


@Claim
def gradient_of_the_global_mean(on: OnLesson) -> None:
    """With these weights the average over ranks is the gradient of the mean over the whole batch."""
    for size in BATCHES:
        batch = _batch(on.nonce, size)
        taken = on.student.share(batch, on.rank, on.world_size)
        factor = on.student.weight(taken, batch, on.world_size)
        if isinstance(factor, (bool, str)) or not hasattr(factor, "__float__"):
            raise NotAsAgreed(f"weight returned {printable(repr(factor), 60)}, expected a number")
        on.report(f"share {size}", _numbers("share", taken, size))
        on.report(f"weight {size}", float(factor))


@gradient_of_the_global_mean.judgement
def _(world: World) -> None:
    n = world.size
    for size in BATCHES:
        batch = _batch(world.nonce, size)
        shares = [_list(each, size) for each in world.reported(f"share {size}", list)]
        weights = world.reported(f"weight {size}", float)
        strange = _strange(batch, shares)
        if strange:
            world.find(0, strange)
            continue
        right = _gradient(world.nonce, batch)
        found = sum((w * _gradient(world.nonce, s) for w, s in zip(weights, shares)), torch.zeros_like(right)) / n
        if (found - right).abs().max() <= 1e-6 * right.abs().max():
            continue
        wanted = [n * len(each) / size for each in shares]
        if all(abs(w - right_one) < 1e-9 for w, right_one in zip(weights, wanted, strict=True)):
            _judge_shares(world, size, shares)  # right weights of shares that are not the batch
            continue
        rank = max(range(n), key=lambda r: abs(weights[r] - wanted[r]))
        told = f"a share of {len(shares[rank])} of {size} examples on {n} ranks: expected {wanted[rank]:.6g}, got "
        world.find(
            rank, f"rank {rank}'s weight is wrong: {_why(weights, shares, size, n)}", f"{told}{weights[rank]:.6g}"
        )


def _why(weights: list[float], shares: list[list[int]], size: int, n: int) -> str:
    def are(rule: Any) -> bool:
        return all(abs(w - rule(len(s))) < 1e-9 for w, s in zip(weights, shares, strict=True))

    if are(lambda k: 1):
        return "every rank counts the same, even one with fewer examples, or none"
    if are(lambda k: k / size):
        return "right if the ranks' gradients were added up, but they are averaged, which divides by n once more"
    if are(lambda k: k):
        return "the mean loss times its number of examples is a sum over examples; expected their mean over the batch"
    if all(w == 0 or not s for w, s in zip(weights, shares, strict=True)):
        return "it is 0 where there are examples"
    if are(lambda k: n * k / size if k else 1):
        return "a rank without examples weighs 0"
    return "an example of one rank counts more than one of another"


def _strange(batch: list[int], shares: list[list[int]]) -> str:
    """Which number of a share is no example of the batch, in words; "" if none is."""
    strange = next((each for share in shares for each in share if each not in batch), None)
    words = f"share gives {printable(strange, 40)}, which is not in the batch: return examples, not their indices"
    return "" if strange is None else words


def _batch(nonce: int, size: int) -> list[int]:
    """Numbers of examples, none of which is its place in the batch."""
    return random.Random(nonce + size).sample(range(100, 1000), size)


def _gradient(nonce: int, examples: list[int]) -> torch.Tensor:
    """The gradient of a linear model's mean loss over the examples, (4,); zeros where there are none."""
    weights = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    if examples:
        torch.stack([_loss(weights, nonce, example) for example in examples]).mean().backward()
    return torch.zeros(4, dtype=torch.float64) if weights.grad is None else weights.grad


def _loss(weights: torch.Tensor, nonce: int, example: int) -> torch.Tensor:
    inputs = torch.rand(4, generator=torch.Generator().manual_seed(nonce + example), dtype=torch.float64)
    return (weights @ inputs - 1).square()


def _numbers(function: str, value: Any, most: int) -> list[int]:
    """A list, an array or a tensor of at most so many whole numbers as a list."""
    try:
        numbers = [int(each) for each in islice(value, most + 1)]
    except (TypeError, ValueError):
        shown = printable(repr(value), 60)
        raise NotAsAgreed(f"{function} returned {shown}, expected a list of whole numbers") from None
    if len(numbers) > most:
        raise NotAsAgreed(f"{function} returned more than {most} numbers, and there are only {most} examples")
    return numbers


def _list(value: Any, most: int) -> list[int]:
    if len(value) > most or not all(type(each) is int for each in value):
        raise BadEvidence("a rank did not report whole numbers")
    return value


CHECKS = Checks(
    (
        Check(one_order, (2,), about="order"),
        Check(shares_make_the_batch, (2, 3, 4), about="share"),
        Check(gradient_of_the_global_mean, (2, 3, 4), about="weight"),
    )
)
