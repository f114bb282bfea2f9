"""Gradients that travel in fewer bits arrive to the last one, whatever they are, and their sums are the same."""

import contextlib

import pytest
import torch
from states import digest
from worlds import run_ranks

from cos598d.comm import exchange
from cos598d.comm.exchange import ReduceScatters
from cos598d.comm.ledger import Ledger
from cos598d.errors import UsageError
from cos598d.records.conventions import GRADIENTS
from cos598d.strategies.parts import packed_sums, row_gradients
from cos598d.strategies.parts.packed_sums import (
    FAR,
    LEAST_ROOM,
    PackedReduceScatters,
    has_no_room,
    pack,
    row_bytes,
    sent_bytes,
    travelling_bytes,
    unpack,
)
from cos598d.strategies.sparse_zero1 import SparseZero1, SparseZero1Options
from cos598d.tools.check.toy import local_batch, toy_model

SIZES = (0, 1, 63, 64, 200, 257, 5000, 135_168)


def drawn(elements, seed=0):
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def scattered(numbers, *strange):
    """Numbers among which strange ones are."""
    numbers = numbers.clone()
    for place, number in enumerate(strange):
        numbers[place :: 7 * len(strange)] = number
    return numbers


def of_bits(elements):
    """Any bits whatever: numbers that are none, and of all sizes."""
    return (
        torch.randint(-(2**31), 2**31, (elements,), generator=torch.Generator().manual_seed(1))
        .int()
        .view(torch.float32)
    )


KINDS = {
    "a layer's": lambda n: 1e-4 * drawn(n),
    "of several sizes": lambda n: drawn(n) * 10.0 ** torch.arange(n).div(64).sin(),
    "zeros, of both signs, and what is hardly more": lambda n: scattered(drawn(n), 0.0, -0.0, 1e-44, -1e-40),
    "nothing but zeros": torch.zeros,
    "an overflow": lambda n: scattered(drawn(n) * 1e38, float("inf"), float("-inf"), float("nan")),
    "of one size": lambda n: -torch.ones(n),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("elements", SIZES)
def test_what_is_packed_has_the_same_bits_when_it_is_unpacked(kind, elements):
    numbers = KINDS[kind](elements)
    room = torch.full((row_bytes(elements) + 8,), 255, dtype=torch.uint8)
    packed = pack(numbers, room)
    assert len(packed) == travelling_bytes(elements) <= 4 * elements
    assert not has_no_room(packed, elements)
    found = torch.full((elements,), 7.0)
    unpack(packed, found)
    assert torch.equal(found.view(torch.int32), numbers.view(torch.int32))
    assert bool((room[len(packed) :] == 255).all())


def test_an_eighth_of_the_bits_is_left_out():
    assert travelling_bytes(135_168) / (4 * 135_168) < 0.885


@pytest.mark.parametrize("elements", [200, 5000])
def test_as_many_as_there_is_room_for_may_be_far_below_their_neighbours_and_no_more(elements):
    room = LEAST_ROOM + elements // FAR
    for far in (room, room + 1):
        numbers = drawn(elements).abs() + 1
        numbers[torch.randperm(elements, generator=torch.Generator().manual_seed(3))[:far]] *= 2.0**-40
        packed = pack(numbers, torch.empty(row_bytes(elements), dtype=torch.uint8))
        assert has_no_room(packed, elements) == (far > room)
        if far <= room:
            found = torch.empty(elements)
            unpack(packed, found)
            assert torch.equal(found, numbers)


def test_numbers_of_any_bits_have_no_room():
    assert has_no_room(pack(of_bits(5000), torch.empty(row_bytes(5000), dtype=torch.uint8)), 5000)


def tensors_of(rank, lengths):
    """A rank's tensors: a layer's, one whose part for rank 0 has no room on rank 1, one with none on any, doubles."""
    whole = [drawn(sum(lengths), 10 * number + rank) for number in range(4)]
    if rank == 1:
        whole[1][: lengths[0]] = torch.nan_to_num(of_bits(lengths[0]), 0.0, 1.0, 1.0) * 1e-30
    whole[2] *= 10.0 ** (30 * drawn(sum(lengths), rank).sin())
    whole[3] = whole[3].double()
    return whole


def sum_both_ways(comm, lengths):
    """On a rank: whether both ways give the same bits; of each tensor what it sent as it is, and packed; by formula."""
    exchange.SEGMENT_BYTES = packed_sums.SEGMENT_BYTES = 4096  # several segments
    longest = {torch.float32: lengths[0], torch.float64: lengths[0]}
    found, sent = [], []
    for kind in (ReduceScatters, PackedReduceScatters):
        comm.ledger = Ledger()
        sums, into = kind(comm, longest), []
        tensors = tensors_of(comm.rank, lengths)
        for _ in range(2):
            sums.expect((tensor[:0], lengths, 100 + number) for number, tensor in enumerate(tensors))
            for number, tensor in enumerate(tensors):
                into.append(tensor.new_zeros(lengths[comm.rank]))
                sums.start(str(number), tensor, lengths, into[-1], tag=100 + number)
            sums.drain()
        found.append([digest(each) for each in into])
        sent.append([row.bytes_sent for row in comm.ledger.rows if row.purpose == GRADIENTS][:4])
    short = sum(sent_bytes(lengths[other], lengths[0]) for other in comm.others)
    return [found[0] == found[1], *sent, short]


@pytest.mark.parametrize("lengths", [[3001, 3001, 3000], [1, 1, 0]])
def test_sums_are_the_same_to_the_last_bit_and_what_has_no_room_follows_as_it_is(lengths):
    for rank, (are_alike, whole, packed, short) in enumerate(run_ranks(3, sum_both_ways, lengths)):
        assert are_alike
        others = [each for other, each in enumerate(lengths) if other != rank]
        late = 4 * lengths[0] if rank == 1 and lengths[0] > 1 else 0
        assert whole == [4 * sum(others)] * 3 + [8 * sum(others)]
        assert packed[0] == short
        assert packed[1] == short + late
        assert packed[3] == whole[3], "doubles travel as they are"
        if lengths[0] > 1:
            assert short < 0.9 * whole[0]
            assert packed[2] > whole[2]


def train_both_ways(comm, precision):
    """On a rank: the weights' bits after four steps of two parts each, and the bytes of gradients, both ways."""
    row_gradients.LEAST_BYTES = 100
    found = []
    for packs in (False, True):
        comm.ledger, model = Ledger(), toy_model(0)
        options = SparseZero1Options(bucket_mb=0.01, first_bucket_mb=0.01, pack_gradients=packs)
        strategy = SparseZero1(comm, True, options, precision)
        module = strategy.attach(model, lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3))
        for step in range(4):
            for part in range(2):
                inputs = local_batch(comm.rank, 2 * step + part)
                with strategy.no_sync() if part == 0 and step != 2 else contextlib.nullcontext():
                    strategy.backward(module(**inputs)[0] / comm.world_size)
            strategy.finish()
            strategy.clip(0.5)
            strategy.step()
        strategy.settle()
        sent = sum(row.bytes_sent for row in comm.ledger.rows if row.purpose == GRADIENTS)
        found.append([[digest(p.data) for p in model.parameters()], sent])
        strategy.detach()
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_training_with_packed_gradients_is_to_the_last_bit_the_one_without(precision):
    for (plain, whole), (packed, short) in run_ranks(3, train_both_ways, precision):
        assert packed == plain
        assert short < whole


def test_messages_without_tags_are_refused():
    with pytest.raises(UsageError, match="--pack_gradients needs messages with tags, which the backend nccl"):
        SparseZero1.check_options(SparseZero1Options(pack_gradients=True), "nccl")
