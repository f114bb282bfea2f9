"""Lesson 1: one order on all ranks, shares that make up the batch, and weights that make up its mean."""

import random
from collections import Counter
from itertools import combinations, islice, pairwise

import numpy as np
import pytest
import torch

from cos598d.tools.exam.notes import NotAsAgreed

EXAMPLES = 53
BATCHES = (12, 11, 7, 5, 2)  # of the last one, on 3 and 4 ranks, some have nothing
EPOCHS = 3
MOST_ALIKE = 13  # of the 52 pairs of neighbours; in a random order it is one or two


def numbers(function, value, most):
    """A list, an array or a tensor of at most so many whole numbers as a list."""
    try:
        found = [int(each) for each in islice(value, most + 1)]
    except (TypeError, ValueError):
        raise NotAsAgreed(f"{function} returned {value!r:.60}, expected a list of whole numbers") from None
    if len(found) > most:
        raise NotAsAgreed(f"{function} returned more than {most} numbers, and there are only {most} examples")
    return [each if abs(each) < 1 << 62 else str(each)[:40] for each in found]


def draw_orders(comm, module, seed):
    """Every order twice: by seed and epoch, both times."""
    found = []
    for time in range(2):
        for generator in (random.seed, np.random.seed, torch.manual_seed):
            generator(1000 * time + comm.rank)  # as in real programs, where ranks' own generators differ
        for one in seeds_of(seed):
            orders = [module.order(EXAMPLES, one, epoch) for epoch in range(EPOCHS)]
            found.append([numbers("order", each, EXAMPLES) for each in orders])
    return found


@pytest.mark.parametrize("n", [2])
def test_one_order(ranks, seed, n):
    """order() shuffles all examples: the same on every rank and when called again, and another order in each epoch."""
    world, seeds = ranks(n, draw_orders, seed), seeds_of(seed)

    def fail(words, rank=0, detail=""):
        world.fail(words, rank, detail, about="order")

    for place in range(2 * len(seeds)):
        for epoch in range(EPOCHS):
            by_rank = [value[place][epoch] for value in world.values]
            before = world.values[0][place % len(seeds)][epoch]
            for rank, each in enumerate(by_rank):
                off = what_is_off(each)
                if off:
                    fail(f"order({EXAMPLES}, ...) has {off} on rank {rank}, expected every number from 0 to 52 once")
                if each != by_rank[0]:
                    told = f"expected {by_rank[0][:5]}..., as rank 0, got {each[:5]}... on rank {rank}"
                    fail(alike("order differs from rank to rank"), rank, told)
            if by_rank[0] != before:
                told = f"expected {before[:5]}... as before, got {by_rank[0][:5]}..."
                fail(alike("order gives another result when it is called again"), 0, told)
    judge_draws(world.values[0][: len(seeds)], seeds, fail)


def what_is_off(order):
    """Which number is missing or comes twice; "" if the order is whole."""
    twice = [example for example, count in Counter(order).items() if count > 1]
    lost = sorted({*range(EXAMPLES)} - {*order})
    if twice:
        return f"example {twice[0]} twice"
    return f"example {lost[0]} not at all" if lost else f"{len(order)} numbers" if len(order) != EXAMPLES else ""


def judge_draws(drawn, seeds, fail):
    """Fail unless orders are random, and each seed and epoch has its own."""
    first = drawn[0][0]
    if first == sorted(first):
        fail("order does not shuffle: it gives 0, 1, 2, ...; expected a random order")
    steps = Counter((after - before) % EXAMPLES for before, after in pairwise(first))
    (step, same), *_ = steps.most_common(1)
    if same > MOST_ALIKE:
        hardly = f"order hardly shuffles: {same} of its {EXAMPLES - 1} steps from one number to the next are {step}"
        fail(f"{hardly} (modulo {EXAMPLES}); expected a random order")
    pairs = [pair for pair in combinations(range(EPOCHS), 2) if resemble(*(drawn[0][epoch] for epoch in pair))]
    if pairs:
        which = "every epoch has" if len(pairs) == EPOCHS else f"epochs {pairs[0][0]} and {pairs[0][1]} have"
        fail(f"{which} the same order: expected another one for each epoch")
    epoch = next((epoch for epoch in range(EPOCHS) if resemble(drawn[0][epoch], drawn[1][epoch])), None)
    if epoch is not None:
        words = f"the seeds {seeds[0]} and {seeds[1]} give the same order in epoch {epoch}"
        fail(f"{words}: expected an order that depends on both the seed and the epoch")


def resemble(order, other):
    """Whether many neighbours in the one are neighbours in the other: then it is the same, or the same turned round."""
    return len({*pairwise(order)} & {*pairwise(other)}) > MOST_ALIKE


def seeds_of(seed):
    return seed % 1000, seed % 1000 + 17


def alike(what):
    return (
        f"{what}: the ranks then train on each other's examples; draw it from a generator that depends only on seed "
        "and epoch, without hash() of a text, which differs from process to process"
    )


def shares_of(comm, module, seed):
    """This rank's share of each batch."""
    shares = [module.share(batch_of(seed, size), comm.rank, comm.world_size) for size in BATCHES]
    return [numbers("share", share, size) for share, size in zip(shares, BATCHES, strict=True)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_shares_make_the_batch(ranks, seed, n):
    """The shares together are the batch, without doubles, and their sizes differ by at most one."""
    world = ranks(n, shares_of, seed)
    for place, size in enumerate(BATCHES):
        judge_shares(world, batch_of(seed, size), [value[place] for value in world.values])


def judge_shares(world, batch, shares):
    """Fail unless the shares are the batch, without doubles, and differ by one at most."""
    size, n = len(batch), world.size
    taken, sizes = Counter(example for each in shares for example in each), [len(each) for each in shares]
    told = f"expected {size} examples in shares of {size // n} to {-(-size // n)}, got {sizes}"
    double = [example for example in batch if taken[example] > 1]
    lost = [example for example in batch if not taken[example]]
    odd = next((each for share in shares for each in share if each not in batch), None)
    words = ""
    if odd is not None:
        words = f"share gives {odd}, which is not in the batch: return examples, not their indices"
    elif double:
        owners = [rank for rank, each in enumerate(shares) if double[0] in each]
        words = f"an example of a batch of {size} is in the shares of ranks {owners[0]} and {owners[-1]}"
        words += ": each belongs to one rank"
    elif lost:
        words = f"{len(lost)} of {size} examples are in no rank's share on {n} ranks: share out the remainder too"
    elif max(sizes) - min(sizes) > 1:
        words = f"the shares of {size} examples on {n} ranks have sizes {sizes}: they may differ by one at most, since "
        words += "all wait for the largest"
    if words:
        world.fail(words, detail=told, about="share")


def weights_of(comm, module, seed):
    """This rank's share of each batch, and its weight."""
    found = []
    for size in BATCHES:
        batch = batch_of(seed, size)
        share = module.share(batch, comm.rank, comm.world_size)
        factor = module.weight(share, batch, comm.world_size)
        if isinstance(factor, bool | str) or not hasattr(factor, "__float__"):
            raise NotAsAgreed(f"weight returned {factor!r:.60}, expected a number")
        found.append([numbers("share", share, size), float(factor)])
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
def test_gradient_of_the_global_mean(ranks, seed, n):
    """With these weights the average over ranks is the gradient of the mean over the whole batch."""
    world = ranks(n, weights_of, seed)
    for place, size in enumerate(BATCHES):
        batch = batch_of(seed, size)
        shares, weights = zip(*(value[place] for value in world.values), strict=True)
        right = gradient_of(seed, batch)
        parts = [weight * gradient_of(seed, share) for weight, share in zip(weights, shares, strict=True)]
        if (torch.stack(parts).mean(dim=0) - right).abs().max() <= 1e-6 * right.abs().max():
            continue
        wanted = [n * len(share) / size for share in shares]
        rank = max(range(n), key=lambda each: abs(weights[each] - wanted[each]))
        told = f"a share of {len(shares[rank])} of {size} examples on {n} ranks: expected {wanted[rank]:.6g}, got "
        words = f"rank {rank}'s weight is wrong: {why(weights, shares, size, n)}"
        world.fail(words, rank, f"{told}{weights[rank]:.6g}", about="weight")


def why(weights, shares, size, n):
    """The rule behind wrong weights."""

    def are(rule):
        return all(abs(weight - rule(len(share))) < 1e-9 for weight, share in zip(weights, shares, strict=True))

    if are(lambda k: 1):
        return "every rank counts the same, even one with fewer examples, or none"
    if are(lambda k: k / size):
        return "right if the ranks' gradients were added up, but they are averaged, which divides by n once more"
    return "an example of one rank counts more than one of another"


def batch_of(seed, size):
    """Numbers of examples, none of which is its place in the batch."""
    return random.Random(seed + size).sample(range(100, 1000), size)


def gradient_of(seed, examples):
    """The gradient of a linear model's mean loss over the examples, (4,); zeros where there are none."""
    weights = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    losses = []
    for example in examples:
        inputs = torch.rand(4, generator=torch.Generator().manual_seed(seed + example), dtype=torch.float64)
        losses.append((weights @ inputs - 1).square())
    if losses:
        torch.stack(losses).mean().backward()
    return torch.zeros(4, dtype=torch.float64) if weights.grad is None else weights.grad
