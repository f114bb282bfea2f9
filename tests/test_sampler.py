"""Shares, global batches and length groups: nothing lost, nothing twice, the same for every world size."""

import threading

import numpy as np
import pytest
import torch
from programs import wait_until

from cos598d.data.examples import Examples
from cos598d.data.loader import AHEAD, load_batches
from cos598d.data.sampler import MicroBatch, global_batches, length_groups, micro_batches, share_of
from cos598d.tools.check.toy import ToyFeatures

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


# The loader


class Slow(Examples):
    """Notes which thread made which batch; example 13 cannot be read."""

    is_slow = True

    def __init__(self, count: int):
        self.lengths, self.targets = np.ones(count, dtype=np.int32), {}
        self.made: list[tuple[list[int], tuple[int, ...], str]] = []

    def collate(self, indices, draw=None):
        if 13 in indices:
            raise OSError("example 13 cannot be read")
        self.made.append((list(indices), draw, threading.current_thread().name))
        return {"index": torch.as_tensor(indices)}

    def digest(self):
        return ""


def halves(batch: np.ndarray) -> list[MicroBatch]:
    return [MicroBatch(half, 0.5) for half in np.array_split(batch, 2)]


def batches(count: int):
    return [(1 + number // 2, np.arange(2 * number, 2 * number + 2)) for number in range(count)]


def test_a_thread_makes_the_next_batches_ready_and_all_come_in_order():
    features = Slow(12)
    found = []
    for place, (epoch, batch, wait_for) in enumerate(load_batches(features, batches(6), halves, 42)):
        ready = wait_for()
        ahead = min(6, place + 1 + AHEAD)
        wait_until(lambda count=2 * ahead: len(features.made) >= count)
        assert len(features.made) == 2 * ahead
        inputs = [ready.inputs(one)["index"].tolist() for one in ready.micro_batches]
        found.append((epoch, batch.tolist(), inputs))
    assert found == [(epoch, batch.tolist(), [[batch[0]], [batch[1]]]) for epoch, batch in batches(6)]
    assert {draw for _, draw, _ in features.made} == {(42, 1), (42, 2), (42, 3)}
    assert all(name.startswith("batches") for _, _, name in features.made)


def test_a_micro_batch_that_is_asked_for_twice_is_the_same_twice():
    features = Slow(4)
    for _, _, wait_for in load_batches(features, batches(1), halves, 1):
        ready = wait_for()
        first, again = (ready.inputs(ready.micro_batches[0])["index"].tolist() for _ in range(2))
        assert first == again


def test_what_a_thread_cannot_read_is_raised_where_it_is_waited_for():
    waits = load_batches(Slow(20), batches(9), halves, 1)
    for _ in range(6):
        next(waits)[2]()
    _, batch, wait_for = next(waits)
    assert batch.tolist() == [12, 13]
    with pytest.raises(OSError, match="example 13"):
        wait_for()
    waits.close()


def test_whoever_stops_early_leaves_no_thread_behind():
    before = threading.active_count()
    for _, _, wait_for in load_batches(Slow(12), batches(6), halves, 1):
        wait_for()
        break
    assert threading.active_count() == before


def test_texts_are_collated_when_they_are_asked_for_and_by_no_thread():
    features = ToyFeatures(12)
    before = threading.active_count()
    for _, batch, wait_for in load_batches(features, batches(6), halves, 1):
        ready = wait_for()
        assert threading.active_count() == before
        found = ready.inputs(ready.micro_batches[1])
        assert all(torch.equal(found[name], tensor) for name, tensor in features.collate(batch[1:]).items())
