"""Batches come in order and whole, whether a thread makes them or not, and what goes wrong there is raised here."""

import threading

import numpy as np
import pytest
import torch
from programs import wait_until

from cos598d.data.examples import Examples
from cos598d.data.loader import AHEAD, load_batches
from cos598d.data.sampler import MicroBatch
from cos598d.tools.check.toy import ToyFeatures


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
