"""Weights that travel by their lower bytes arrive to the last bit, however far a step has moved them."""

import pytest
import torch
from test_shard import adamw, distance
from torch import nn
from worlds import run_ranks

from cos598d.comm.ledger import PARAMETERS, Ledger
from cos598d.shard.low_bytes import CHANGE, LowBytes, changed_in_forward, is_packed, packed_bytes
from cos598d.shard.sparse_zero1 import SparseZero1
from cos598d.shard.units import Unit

# How far each step moves the weights, of their own size; NaN is what a training that has diverged makes of them.
STEPS = (1e-3, 0.0, 3.0, 3.0, 1e-3, 1e-3, float("nan"), 1e-3)
LENGTHS = [6001, 6000, 6000]


def gather_steps(comm):
    """On a rank: after each step whether it has every rank's bits, what it sent, and whose parts travel as they are."""
    flat = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(0))
    right = flat.clone()
    gather = LowBytes(comm, "weights", flat, LENGTHS, tag=1)
    found = []
    for number, size in enumerate(STEPS):
        comm.ledger = Ledger()
        gather.look()
        for rank, part in enumerate(right.split(LENGTHS)):
            moved = torch.randn(len(part), generator=torch.Generator().manual_seed(10 * number + rank))
            part *= 1 + (0.0 if size > 1 and rank == 2 else size) * moved  # rank 2 never leaps
        own = slice(sum(LENGTHS[: comm.rank]), sum(LENGTHS[: comm.rank + 1]))
        flat[own] = right[own]
        gather.start()
        gather.wait()
        gather.wait()
        (row,) = comm.ledger.rows
        assert row.purpose == PARAMETERS
        found.append([torch.equal(flat.view(torch.int32), right.view(torch.int32)), row.bytes_sent, gather.whole])
    return found


def test_weights_arrive_to_the_last_bit_and_what_leaps_travels_as_it_is_until_it_leaps_no_more():
    by_rank = run_ranks(3, gather_steps)
    for rank, found in enumerate(by_rank):
        packed, whole = packed_bytes(LENGTHS[rank]), 4 * LENGTHS[rank]
        leaps = [packed, packed, packed + whole, 4 + whole, 4 + whole, packed, packed + whole, 4 + whole]
        steady = [packed] * 6 + leaps[-2:]  # what is no number for all
        assert [is_equal for is_equal, *_ in found] == [True] * len(STEPS)
        assert [sent for _, sent, _ in found] == [2 * each for each in (steady if rank == 2 else leaps)]
        assert found[2][2] == [True, True, False]
        assert found[4][2] == [False] * 3
    assert packed_bytes(6400) == 4 + 3 * 6400 + 5 * 6400 // CHANGE


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


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(130, 130) for _ in range(3))

    def forward(self, state):
        for layer in self.layers:
            state = torch.tanh(layer(state)) + state
        return state.square().mean()


def train_wide(comm, rate):
    """On a rank: how far from one process after steps that are long at first, and how many parts travelled whole."""
    model, alone = Wide(), Wide()
    strategy = SparseZero1(comm, False)
    module = strategy.attach(model, adamw)
    optimizer, whole = adamw(alone.named_parameters()), []
    for step in range(6):
        for group in (*strategy.optimizer.param_groups, *optimizer.param_groups):
            group["lr"] = rate / 10 ** (2 * step)
        for rank in range(comm.world_size):
            state = torch.randn(4, 130, generator=torch.Generator().manual_seed(10 * step + rank))
            (alone(state) / comm.world_size).backward()
            if rank == comm.rank:
                strategy.backward(module(state) / comm.world_size)
        strategy.finish()
        strategy.clip(1.0)
        strategy.step()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        whole.append(sum(sum(are) for are in strategy.own_state()[0]["whole"].values()))
    strategy.settle()
    apart = distance(model, alone)
    strategy.detach()
    return apart, whole


def test_a_training_whose_steps_are_long_at_first_is_right():
    for apart, whole in run_ranks(2, train_wide, 0.1):
        assert apart < 1e-4
        assert whole[0] > 0
        assert whole[-1] == 0


class Alone:
    rank, world_size = 0, 2


def test_what_was_remembered_of_other_parts_does_not_fit():
    packed = LowBytes(Alone(), "weights", torch.zeros(20_000), [10_000, 10_000], tag=1)
    with pytest.raises(ValueError, match="zip"):
        packed.whole = [True]
