"""Weights that travel by their lower bits arrive to the last bit, however far a step has moved them."""

import pytest
import torch
from torch import nn
from worlds import run_ranks

from cos598d.comm.ledger import Ledger
from cos598d.records.conventions import PARAMETERS
from cos598d.strategies.parts.low_bytes import WHOLE, LowBytes, changed_in_forward, is_packed, packed_bytes
from cos598d.strategies.parts.units import Unit

# How far each step moves the weights, of their own size; NaN is what a training that has diverged makes of them.
STEPS = (1e-3, 0.0, 3.0, 3.0, 1e-3, 1e-3, 0.1, 0.1, 1e-3, 1e-3, float("nan"), 1e-3)
LENGTHS = [6001, 6000, 6000]


def gathered(gather, comm, flat, right):
    """Gather every rank's part of `right` into `flat`, whose own part is stepped now; what was sent."""
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
    """On a rank: what it sent after each step, and in which forms all parts travel next."""
    flat = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(0))
    right, gather, found = flat.clone(), LowBytes(comm, "weights", flat, LENGTHS, tag=1), []
    for number, size in enumerate(STEPS):
        for rank, part in enumerate(right.split(LENGTHS)):
            moved = torch.randn(len(part), generator=torch.Generator().manual_seed(10 * number + rank))
            part *= 1 + (0.0 if size > 0.01 and rank == 2 else size) * moved  # rank 2 takes short steps alone
        found.append([gathered(gather, comm, flat, right), gather.forms])
    return found


def test_weights_arrive_to_the_last_bit_in_the_shortest_form_that_the_last_step_had_room_for():
    by_rank = run_ranks(3, gather_steps)
    for rank, found in enumerate(by_rank):
        first, short, middle = (packed_bytes(LENGTHS[rank], form) for form in (20, 320, 324))
        whole = 4 * LENGTHS[rank]
        # A leap, what follows as it is, and back; a long step, what follows in a longer form, and back; no numbers.
        leaps = [first, short, short + whole, 8 + whole, 8 + whole, short]
        longer = [short + whole, middle, middle, short]
        steady = [first] + [short] * 9
        ends = [short + whole, 8 + whole]
        assert [sent for sent, _ in found] == [2 * each for each in (steady if rank == 2 else leaps + longer) + ends]
        assert [forms for *_, forms in found] == [forms for *_, forms in by_rank[0]], "all have to know"
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
    """On a rank: what it sent after each step, and in which form its part follows."""
    flat = torch.randn(2 * ROOMY, generator=torch.Generator().manual_seed(0)).abs() + 1
    right, gather, found = flat.clone(), LowBytes(comm, "weights", flat, [ROOMY, ROOMY], tag=1), []
    for step, (count, _) in enumerate(COUNTS):
        for rank, part in enumerate(right.split(ROOMY)):
            far = torch.randperm(ROOMY, generator=torch.Generator().manual_seed(10 * step + rank))[:count]
            part[far] *= [1.25, 0.8][step % 2]  # so that 24 bits do
        found.append([gathered(gather, comm, flat, right), *gather.forms])
    return found


def test_there_is_room_for_twice_as_many_as_had_moved_too_far():
    forms = [20, *(following for _, following in COUNTS)]
    for found in run_ranks(2, fill_the_room):
        assert [each[1:] for each in found] == [[form, form] for form in forms[1:]]
        for (sent, *_), (count, _), form in zip(found, COUNTS, forms, strict=False):
            room = ROOMY // (32, 64, 128, 512)[form // 100]
            is_too_far = count > room and form % 100 == 20
            assert sent == packed_bytes(ROOMY, form) + (4 * ROOMY if is_too_far else 0)


def move_to_the_edges(comm):
    """On a rank: integers move as far as a form allows, and by one more."""
    flat = torch.randn(10_001, generator=torch.Generator().manual_seed(0))
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


def test_integers_may_move_as_far_as_half_of_what_the_bits_hold_and_further():
    run_ranks(2, move_to_the_edges)


class Renorming(nn.Module):
    """An embedding whose forward changes its weights, and a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layer = nn.Embedding(300, 64, max_norm=0.5), nn.Linear(64, 64)

    def forward(self, ids):
        return self.layer(self.words(ids).mean(dim=1)).square().mean()


def test_small_parts_other_dtypes_and_what_a_forward_changes_travel_as_they_are():
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


def test_what_was_remembered_of_other_parts_does_not_fit():
    packed = LowBytes(Alone(), "weights", torch.zeros(20_000), [10_000, 10_000], tag=1)
    for wrong in ([20], [20, 21], [20, 420], [20, "24"]):
        with pytest.raises(ValueError, match="zip|not in tuple"):
            packed.forms = wrong
