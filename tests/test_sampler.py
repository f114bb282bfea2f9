"""Each example of an epoch is in one batch, counts the same on any ranks, and is loaded in order."""

import threading

import numpy as np
import pytest
import torch
from programs import wait_until

from cos598d.data.examples import Examples
from cos598d.data.loader import AHEAD, load_batches
from cos598d.data.sampler import MicroBatch, global_batches, length_groups, micro_batches, share_of
from toy_features import ToyFeatures

LENGTHS = np.random.default_rng(5).permutation(100).astype(np.int32) * 5 + 5  # a share is cut into groups


def test_every_example_is_in_exactly_one_global_batch_of_an_epoch():
    batches = list(global_batches(83, 16, seed=1, epoch=0))
    assert [len(batch) for batch in batches] == [16] * 5 + [3]
    assert sorted(np.concatenate(batches)) == list(range(83))


def test_each_epoch_and_seed_has_its_own_permutation():
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


@pytest.mark.parametrize("equal_passes", [False, True])
@pytest.mark.parametrize("accumulation_steps", [1, 3, 4])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("size", [64, 32, 7, 5, 3, 2, 1])
def test_each_example_of_a_global_batch_counts_the_same(size, world_size, accumulation_steps, equal_passes):
    batch = np.arange(100)[-size:]
    ranks = [
        micro_batches(batch, LENGTHS, rank, world_size, accumulation_steps, equal_passes=equal_passes)
        for rank in range(world_size)
    ]
    counted = [part for parts in ranks for part in parts if part.weight]
    assert sorted(np.concatenate([part.indices for part in counted])) == batch.tolist()
    assert all(part.weight == pytest.approx(len(part.indices) / size) for part in counted)
    assert all(len(part.indices) for parts in ranks for part in parts), "a pass needs an example"
    assert len({len(parts) for parts in ranks}) == 1 or not equal_passes


def test_a_rank_without_examples_computes_one_with_weight_zero():
    (part,) = micro_batches(np.array([7, 9]), LENGTHS, 3, 4)
    assert len(part.indices) == 1
    assert part.weight == 0.0


def test_length_groups_have_the_lowest_cost_of_all_cuts():
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


def test_a_thread_loads_the_next_batches_in_order():
    features = Slow(12)
    found = []
    for place, (epoch, batch, wait_for) in enumerate(load_batches(features, batches(6), halves, 42)):
        ready = wait_for()
        ahead = min(6, place + 1 + AHEAD)
        wait_until(lambda count=2 * ahead: len(features.made) >= count)
        assert len(features.made) == 2 * ahead
        inputs = [ready.inputs(one)["index"].tolist() for one in ready.micro_batches]
        found.append((epoch, batch.tolist(), inputs))
    assert found == [(epoch, [a, b], [[a], [b]]) for epoch, (a, b) in batches(6)]
    assert {draw for _, draw, _ in features.made} == {(42, 1), (42, 2), (42, 3)}
    assert all(name.startswith("batches") for _, _, name in features.made)


def test_a_micro_batch_is_the_same_when_asked_for_twice():
    for _, _, wait_for in load_batches(Slow(4), batches(1), halves, 1):
        ready = wait_for()
        first, again = (ready.inputs(ready.micro_batches[0])["index"].tolist() for _ in range(2))
        assert first == again


def test_an_error_of_the_thread_is_raised_in_wait_for():
    waits = load_batches(Slow(20), batches(9), halves, 1)
    for _ in range(6):
        next(waits)[2]()
    _, batch, wait_for = next(waits)
    assert batch.tolist() == [12, 13]
    with pytest.raises(OSError, match="example 13"):
        wait_for()
    waits.close()


def test_the_thread_ends_when_a_loop_stops_early():
    before = threading.active_count()
    for _, _, wait_for in load_batches(Slow(12), batches(6), halves, 1):
        wait_for()
        break
    assert threading.active_count() == before


def test_texts_are_collated_on_request_without_a_thread():
    features = ToyFeatures(12)
    before = threading.active_count()
    for _, batch, wait_for in load_batches(features, batches(6), halves, 1):
        ready = wait_for()
        assert threading.active_count() == before
        found = ready.inputs(ready.micro_batches[1])
        assert all(torch.equal(found[name], tensor) for name, tensor in features.collate(batch[1:]).items())
