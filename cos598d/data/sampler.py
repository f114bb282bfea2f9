"""Which examples each rank computes in each step, so that n ranks see the same global batches as one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# The cost of one more pass through the model, in tokens: every weight's gradient is written once more. On a CPU it is
# about 45 ms, compared with 0.75 ms per token, for MiniLM, and in the same proportion for BERT-base. On a GPU short
# passes leave it idle, so there a batch stays whole.
EXTRA_PASS_TOKENS = 128


@dataclass(frozen=True)
class MicroBatch:
    """Examples that go through the model together, and their weight in the step.

    `weight` x this micro-batch's mean loss, summed over all ranks' micro-batches, is the global batch's mean loss.
    """

    indices: np.ndarray
    weight: float


def global_batches(examples: int, batch_size: int, seed: int, epoch: int) -> Iterator[np.ndarray]:
    """The epoch's global batches: one permutation of all examples, drawn from (seed, epoch), cut in order.

    They are the same on every rank for every world size. Each example comes once. The last batch may be smaller.
    """
    permutation = np.random.default_rng((seed, epoch)).permutation(examples)
    for start in range(0, examples, batch_size):
        yield permutation[start : start + batch_size]


def share_of(batch: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """This rank's slice of a global batch. Sizes differ by at most one; some are empty if the batch is small."""
    return np.array_split(batch, world_size)[rank]


def micro_batches(
    batch: np.ndarray,
    lengths: np.ndarray,
    rank: int,
    world_size: int,
    accumulation_steps: int = 1,
    group_by_length: bool = True,
    equal_passes: bool = False,
) -> list[MicroBatch]:
    """This rank's part of a global batch as micro-batches, at least one.

    With `accumulation_steps` the batch is taken in that many parts. With `group_by_length` each share is split into
    groups of similar `lengths` (tokens per example of the whole data set). These need less padding than the whole
    share; the gradient of the sum is the same. A rank without an example computes another rank's with weight 0. With
    `equal_passes` every rank has the same number of micro-batches: shares are not split, and an empty share is replaced
    in the same way.
    """
    parts = np.array_split(batch, accumulation_steps)
    shares = [share_of(part, rank, world_size) for part in parts]
    if equal_passes:
        return [
            MicroBatch(share, len(share) / len(batch)) if len(share) else MicroBatch(part[:1], 0.0)
            for part, share in zip(parts, shares, strict=True)
            if len(part)
        ]
    groups = []
    for share in shares:
        if len(share):
            groups += length_groups(share, lengths) if group_by_length else [share]
    if not groups:
        return [MicroBatch(batch[:1], 0.0)]
    return [MicroBatch(group, len(group) / len(batch)) for group in groups]


def length_groups(indices: np.ndarray, lengths: np.ndarray, pass_cost: int = EXTRA_PASS_TOKENS) -> list[np.ndarray]:
    """Split examples, sorted by length, into the cheapest groups: padded tokens + `pass_cost` per group.

    Shortest first, so that the longest backward comes last and hides the most communication. The solution is exact, by
    dynamic programming over the cuts, in O(len(indices)^2).
    """
    ordered = indices[np.argsort(lengths[indices], kind="stable")]
    sorted_lengths = lengths[ordered].astype(np.int64)
    count = len(ordered)
    best, cut = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        sizes = end - np.arange(end)
        costs = best[:end] + sizes * sorted_lengths[end - 1] + pass_cost
        cut[end] = costs.argmin()
        best[end] = costs[cut[end]]
    groups, end = [], count
    while end:
        groups.append(ordered[cut[end] : end])
        end = cut[end]
    return groups[::-1]


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """The number of global batches in an epoch."""
    return -(-examples // batch_size)


def evaluation_batches(lengths: Sequence[int] | np.ndarray, batch_size: int) -> list[np.ndarray]:
    """All examples once, in batches of similar length."""
    order = np.argsort(lengths, kind="stable")
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
