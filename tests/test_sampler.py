"""Shares, global batches and length groups: nothing lost, nothing twice, the same for every world size."""

import numpy as np
import pytest

from cos598d.data.sampler import global_batches, length_groups, micro_batches, share_of

LENGTHS = np.random.default_rng(5).integers(5, 129, 83).astype(np.int32)


def test_every_example_is_in_exactly_one_global_batch_of_an_epoch():
    batches = list(global_batches(83, 16, seed=1, epoch=0))
    assert [len(batch) for batch in batches] == [16] * 5 + [3]
    assert sorted(np.concatenate(batches)) == list(range(83))


def test_epochs_and_seeds_have_permutations_of_their_own():
    first = [batch.tolist() for batch in global_batches(83, 16, seed=1, epoch=0)]
    assert first == [batch.tolist() for batch in global_batches(83, 16, seed=1, epoch=0)]
    assert first != [batch.tolist() for batch in global_batches(83, 16, seed=1, epoch=1)]
    assert first != [batch.tolist() for batch in global_batches(83, 16, seed=2, epoch=0)]


@pytest.mark.parametrize("size", [16, 7, 3, 1])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_shares_are_disjoint_complete_and_even(size, world_size):
    batch = np.arange(100, 100 + size)
    shares = [share_of(batch, rank, world_size) for rank in range(world_size)]
    assert np.concatenate(shares).tolist() == batch.tolist()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("size", [32, 5, 2])
def test_weights_of_all_micro_batches_add_up_to_one_and_each_example_counts_the_same(
    size, world_size, accumulation_steps
):
    batch = np.arange(size)
    parts = [
        part
        for rank in range(world_size)
        for part in micro_batches(batch, LENGTHS, rank, world_size, accumulation_steps)
        if part.weight
    ]
    assert sorted(np.concatenate([part.indices for part in parts])) == list(range(size))
    for part in parts:
        assert part.weight / len(part.indices) == pytest.approx(1 / size)


def test_a_rank_without_examples_still_computes_one_that_weighs_nothing():
    (part,) = micro_batches(np.array([7, 9]), LENGTHS, 3, 4)
    assert len(part.indices) == 1
    assert part.weight == 0.0


def test_length_groups_cost_no_more_than_any_cut_into_contiguous_groups():
    indices = np.arange(8)
    lengths = np.array([3, 40, 4, 41, 100, 5, 42, 6])

    def cost(groups):
        return sum(len(group) * max(lengths[group]) + 10 for group in groups)

    ordered = indices[np.argsort(lengths)]
    cheapest = min(
        cost([group for group in np.split(ordered, [i for i in range(1, 8) if cuts >> i & 1]) if len(group)])
        for cuts in range(0, 256, 2)
    )
    found = length_groups(indices, lengths, pass_cost=10)
    assert cost(found) == cheapest
    assert [max(lengths[group]) for group in found] == sorted(max(lengths[group]) for group in found)
    assert sorted(np.concatenate(found)) == indices.tolist()


@pytest.mark.parametrize("examples", [1, 3, 7, 64])
@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_with_equal_passes_every_rank_has_as_many_micro_batches_and_each_example_counts_the_same(
    examples, accumulation_steps
):
    lengths = np.arange(1, 101) * 5  # of which a share would be cut
    batch = np.arange(100)[-examples:]
    ranks = [micro_batches(batch, lengths, rank, 4, accumulation_steps, equal_passes=True) for rank in range(4)]
    assert len({len(parts) for parts in ranks}) == 1
    counted = [part for parts in ranks for part in parts if part.weight]
    assert sorted(np.concatenate([part.indices for part in counted]).tolist()) == batch.tolist()
    assert all(part.weight == pytest.approx(len(part.indices) / examples) for part in counted)
    assert all(len(part.indices) for parts in ranks for part in parts), "a pass needs an example"
