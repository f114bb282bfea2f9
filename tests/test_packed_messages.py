"""Weights and gradients that are packed into fewer bits arrive bit for bit."""

import pytest
import torch
from compared import step_by
from states import digest
from torch import nn
from worlds import run_ranks

from cos598d.comm import exchange
from cos598d.comm.exchange import ReduceScatters
from cos598d.comm.ledger import Ledger
from cos598d.errors import UsageError
from cos598d.records.conventions import GRADIENTS, PARAMETERS
from cos598d.strategies.parts import packed_sums, row_gradients
from cos598d.strategies.parts.low_bytes import WHOLE, LowBytes, changed_in_forward, is_packed, packed_bytes
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
from cos598d.strategies.parts.units import Unit
from cos598d.strategies.sparse_zero1 import SparseZero1, SparseZero1Options
from cos598d.tools.exam.models import local_batch, toy_model

# How far each step moves the weights, relative to their size. NaN is a training that has diverged.
STEPS = (1e-3, 0.0, 3.0, 3.0, 1e-3, 1e-3, 0.1, 0.1, 1e-3, 1e-3, float("nan"), 1e-3)
LENGTHS = [6001, 6000, 6000]


def drawn(elements, seed=0):
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def gathered(gather, comm, flat, right):
    """Gather every rank's part of `right` into `flat`: the bytes sent."""
    comm.ledger = Ledger()
    gather.look()
    own = [len(part) for part in gather._parts]
    mine = slice(sum(own[: comm.rank]), sum(own[: comm.rank + 1]))
    flat[mine] = right[mine]
    gather.start()
    gather.wait()
    gather.wait()
    (row,) = comm.ledger.rows
    assert row.purpose == PARAMETERS
    assert torch.equal(flat.view(torch.int32), right.view(torch.int32))
    return row.bytes_sent


def gather_steps(comm):
    """On a rank, by step: the bytes sent, and the next form of each part."""
    flat = drawn(sum(LENGTHS))
    right, gather, found = flat.clone(), LowBytes(comm, "weights", flat, LENGTHS, tag=1), []
    for number, size in enumerate(STEPS):
        for rank, part in enumerate(right.split(LENGTHS)):
            part *= 1 + (0.0 if size > 0.01 and rank == 2 else size) * drawn(
                len(part), 10 * number + rank
            )  # only rank 2 takes short steps
        found.append([gathered(gather, comm, flat, right), gather.forms])
    return found


def test_weights_arrive_bit_for_bit_in_the_shortest_form_for_the_last_step():
    by_rank = run_ranks(3, gather_steps)
    for rank, found in enumerate(by_rank):
        first, short, middle = (packed_bytes(LENGTHS[rank], form) for form in (20, 320, 324))
        whole = 4 * LENGTHS[rank]
        # Two leaps, of which the second is sent whole; two long steps, of which the second has a longer form; NaN.
        leaps = [first, short, short + whole, 8 + whole, 8 + whole, short]
        longer = [short + whole, middle, middle, short]
        steady = [first] + [short] * 9
        ends = [short + whole, 8 + whole]
        assert [sent for sent, _ in found] == [2 * each for each in (steady if rank == 2 else leaps + longer) + ends]
        assert [forms for *_, forms in found] == [forms for *_, forms in by_rank[0]], "all ranks use the same forms"
        assert found[2][1] == [WHOLE, WHOLE, 320]
        assert found[6][1] == [324, 324, 320]
        assert found[4][1] == found[8][1] == [320] * 3
    assert packed_bytes(6400, 20) == 8 + 5 * 6400 // 2 + 6 * 6400 // 32
    assert packed_bytes(6401, 24) == 8 + 3 * 6401 + 6 * (6401 // 32)
    assert packed_bytes(6401) == 8 + -(-5 * 6401 // 2) + 6 * (6401 // 512)


ROOMY = 51_200  # elements of a part, with room for 1600, 800, 400 or 100
# How many move too far in each step, and the form of the next.
COUNTS = [(0, 320), (50, 320), (51, 220), (250, 120), (801, 20), (1600, 20), (100, 220), (401, 20)]
COUNTS += [(1601, 324), (801, 324), (800, 20)]


def fill_the_room(comm):
    """On a rank, by step: the bytes sent, and the next form of each part."""
    flat = drawn(2 * ROOMY).abs() + 1
    right, gather, found = flat.clone(), LowBytes(comm, "weights", flat, [ROOMY, ROOMY], tag=1), []
    for step, (count, _) in enumerate(COUNTS):
        for rank, part in enumerate(right.split(ROOMY)):
            far = torch.randperm(ROOMY, generator=torch.Generator().manual_seed(10 * step + rank))[:count]
            part[far] *= [1.25, 0.8][step % 2]  # so that 24 bits do
        found.append([gathered(gather, comm, flat, right), *gather.forms])
    return found


def test_the_next_form_has_room_for_twice_as_many_outliers():
    forms = [20, *(following for _, following in COUNTS)]
    for found in run_ranks(2, fill_the_room):
        assert [each[1:] for each in found] == [[form, form] for form in forms[1:]]
        for (sent, *_), (count, _), form in zip(found, COUNTS, forms, strict=False):
            room = ROOMY // (32, 64, 128, 512)[form // 100]
            is_too_far = count > room and form % 100 == 20
            assert sent == packed_bytes(ROOMY, form) + (4 * ROOMY if is_too_far else 0)


def move_to_the_edges(comm):
    """On a rank: gathers after integers move as far as a form allows, and by one more."""
    flat = drawn(10_001)
    flat[::7], flat[1::7] = 0.0, -0.0
    gather = LowBytes(comm, "weights", flat, [5001, 5000], tag=1)
    for form in (20, 24, 20, 120, 324):
        gather.forms = [form, form]
        right, half = flat.clone(), 1 << (form % 100 - 1)
        numbers = right.view(torch.int32)
        numbers[:5000:9] -= half
        numbers[4:5000:13] += half - 1
        numbers[5001:5008] += torch.tensor([-half, half - 1, -half - 1, half, 1 << 30, 0, -1], dtype=torch.int32)
        gathered(gather, comm, flat, right)


def test_weights_at_the_limits_of_a_form_arrive_bit_for_bit():
    run_ranks(2, move_to_the_edges)


class Renorming(nn.Module):
    """An embedding whose forward changes its weights, and a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layer = nn.Embedding(300, 64, max_norm=0.5), nn.Linear(64, 64)

    def forward(self, ids):
        return self.layer(self.words(ids).mean(dim=1)).square().mean()


def test_small_parts_other_dtypes_and_weights_that_forward_changes_are_not_packed():
    model = Renorming()
    changing = changed_in_forward(model)
    assert changing == {model.words.weight}

    def packs(tensor, ranks, parameters=()):
        return is_packed(Unit("unit", [("weight", nn.Parameter(tensor)), *parameters], ranks), changing)

    assert packs(torch.zeros(8192), 2)
    assert not packs(torch.zeros(8191), 2)
    assert not packs(torch.zeros(8192, dtype=torch.float64), 2)
    assert not packs(torch.zeros(8192), 1)
    assert not packs(torch.zeros(8192), 2, [("words", model.words.weight)])


class Alone:
    rank, world_size = 0, 2


def test_saved_forms_of_other_parts_are_refused():
    packed = LowBytes(Alone(), "weights", torch.zeros(20_000), [10_000, 10_000], tag=1)
    for wrong in ([20], [20, 21], [20, 420], [20, "24"]):
        with pytest.raises(ValueError, match="zip|not in tuple"):
            packed.forms = wrong


SIZES = (0, 1, 63, 64, 200, 257, 5000, 135_168)


def scattered(numbers, *strange):
    """Numbers with `strange` ones among them."""
    numbers = numbers.clone()
    for place, number in enumerate(strange):
        numbers[place :: 7 * len(strange)] = number
    return numbers


def of_bits(elements):
    """Random bits: NaN, and numbers of all sizes."""
    return (
        torch.randint(-(2**31), 2**31, (elements,), generator=torch.Generator().manual_seed(1))
        .int()
        .view(torch.float32)
    )


KINDS = {
    "a layer's": lambda n: 1e-4 * drawn(n),
    "of several sizes": lambda n: drawn(n) * 10.0 ** torch.arange(n).div(64).sin(),
    "zeros of both signs and denormal numbers": lambda n: scattered(drawn(n), 0.0, -0.0, 1e-44, -1e-40),
    "only zeros": torch.zeros,
    "an overflow": lambda n: scattered(drawn(n) * 1e38, float("inf"), float("-inf"), float("nan")),
    "of one size": lambda n: -torch.ones(n),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("elements", SIZES)
def test_unpacking_restores_every_bit(kind, elements):
    numbers = KINDS[kind](elements)
    room = torch.full((row_bytes(elements) + 8,), 255, dtype=torch.uint8)
    packed = pack(numbers, room)
    assert len(packed) == travelling_bytes(elements) <= 4 * elements
    assert not has_no_room(packed, elements)
    found = torch.full((elements,), 7.0)
    unpack(packed, found)
    assert torch.equal(found.view(torch.int32), numbers.view(torch.int32))
    assert bool((room[len(packed) :] == 255).all())


@pytest.mark.parametrize("elements", [200, 5000])
def test_only_so_many_outliers_fit(elements):
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


def test_packing_saves_an_eighth_and_random_bits_do_not_fit():
    assert travelling_bytes(135_168) / (4 * 135_168) < 0.885
    assert has_no_room(pack(of_bits(5000), torch.empty(row_bytes(5000), dtype=torch.uint8)), 5000)


def tensors_of(rank, lengths):
    """A layer's tensor, one too wide to pack on rank 1 for rank 0, one too wide on all ranks, and doubles."""
    whole = [drawn(sum(lengths), 10 * number + rank) for number in range(4)]
    if rank == 1:
        whole[1][: lengths[0]] = torch.nan_to_num(of_bits(lengths[0]), 0.0, 1.0, 1.0) * 1e-30
    whole[2] *= 10.0 ** (30 * drawn(sum(lengths), rank).sin())
    whole[3] = whole[3].double()
    return whole


def sum_both_ways(comm, lengths):
    """On a rank: whether both ways give the same bits, each tensor's bytes unpacked and packed, and the formula."""
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
def test_packed_sums_are_the_same_bits_and_parts_that_do_not_fit_are_sent_again_unpacked(lengths):
    for rank, (are_alike, whole, packed, short) in enumerate(run_ranks(3, sum_both_ways, lengths)):
        assert are_alike
        others = [each for other, each in enumerate(lengths) if other != rank]
        late = 4 * lengths[0] if rank == 1 and lengths[0] > 1 else 0
        assert whole == [4 * sum(others)] * 3 + [8 * sum(others)]
        assert packed[0] == short
        assert packed[1] == short + late
        assert packed[3] == whole[3], "doubles are not packed"
        if lengths[0] > 1:
            assert short < 0.9 * whole[0]
            assert packed[2] > whole[2]


def toy_loss(module, rank, step, micro):
    return module(**local_batch(rank, 2 * step + micro))[0]


def train_both_ways(comm, precision):
    """On a rank, without and with packing: digests of the weights after four steps, and the bytes of gradients."""
    row_gradients.LEAST_BYTES = 100
    found = []
    for packs in (False, True):
        comm.ledger, model = Ledger(), toy_model(0)
        options = SparseZero1Options(bucket_mb=0.01, first_bucket_mb=0.01, pack_gradients=packs)
        strategy = SparseZero1(comm, True, options, precision)
        module = strategy.attach(model, lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3))
        for step in range(4):
            step_by(strategy, module, comm, step, toy_loss, micros=2, max_norm=0.5, unsynced=0 if step == 2 else 1)
        strategy.settle()
        sent = sum(row.bytes_sent for row in comm.ledger.rows if row.purpose == GRADIENTS)
        found.append([[digest(p.data) for p in model.parameters()], sent])
        strategy.detach()
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_training_with_packed_gradients_gives_the_same_bits(precision):
    for (plain, whole), (packed, short) in run_ranks(3, train_both_ways, precision):
        assert packed == plain
        assert short < whole


def test_packing_without_tagged_messages_is_refused():
    with pytest.raises(UsageError, match="--pack_gradients needs messages with tags, which the backend nccl"):
        SparseZero1.check_options(SparseZero1Options(pack_gradients=True), "nccl")
