"""ZeRO by hand where ranks use other weights than each other: right, or an error, and never one weight for another."""

import re

import pytest
import torch
from beside import ONE_EACH, Beside, sgd, step_by
from test_shard import STAGES
from torch import nn
from worlds import run_ranks

from cos598d.comm.ledger import Ledger
from cos598d.errors import UserError
from cos598d.records.conventions import PARAMETERS
from cos598d.sync.options import DEFAULTS
from cos598d.tools.check.spawn import LATE, run_world

WIDTH, LAYERS, STEPS = 8, 12, 2


class Halves(nn.Module):
    """A layer of two halves, of which the second may be left out."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, state, is_whole):
        new = torch.tanh(self.always(state))
        return state + new + (self.sometimes(new) if is_whole else 0)


class Stack(nn.Module):
    """Layers that are called as `calls` says: which, and whether all of it is used."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(Halves() for _ in range(count))

    def forward(self, state, calls):
        for place, is_whole in calls:
            state = self.layers[place](state, is_whole)
        return state.square().mean()


class Peeking(nn.Module):
    """A model that reads a layer's weight itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, state):
        return nn.functional.linear(self.layers[0](state), self.layers[1].weight).square().mean()


def halves_of_some_ranks(step, rank):
    """Rank 0 uses all; the others leave out a half of the last layers, and of every third."""
    places = [*range(LAYERS), step]  # one layer twice
    return [(place, rank == 0 or not (place >= LAYERS - 2 or place % 3 == 1)) for place in places]


def layers_of_some_ranks(step, rank):
    """Rank 0 alone calls the last layer."""
    return [(place, True) for place in range(3 if rank == 0 else 2)]


def train(comm, name, count, calls, options=DEFAULTS):
    """How far two steps' weights are from those of one process, and the bytes of weights that were received."""

    def loss_of(module, rank, step, micro):
        state = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        return module(state, calls(step, rank))

    torch.manual_seed(0)
    both = Beside(comm, STAGES[name](comm, True, options), Stack(count), sgd, loss_of)
    ledger = comm.ledger = Ledger()
    for step in range(STEPS):
        both.step(step)
    both.strategy.settle()
    received = sum(row.bytes_received for row in ledger.rows if row.purpose == PARAMETERS)
    others = sum(sum(unit.lengths) - unit.lengths[comm.rank] for unit in both.strategy._gradients.units)
    return both.end(), received, STEPS * 4 * others


def peek(comm):
    """What a rank is told when a weight is read outside its layer while it is on its way."""
    strategy = STAGES["zero1"](comm, True, ONE_EACH)
    model = Peeking()
    module = strategy.attach(model, sgd)
    for _ in range(2):
        try:
            step_by(strategy, module, comm, 0, lambda module, *_: module(torch.ones(3, WIDTH)))
        except UserError as error:
            return str(error)
    return None


def all_cases(comm):
    found = {name: train(comm, name, LAYERS, halves_of_some_ranks)[0] for name in STAGES}
    return found | {"zero1's layer": train(comm, "zero1", 3, layers_of_some_ranks, ONE_EACH), "peek": peek(comm)}


def test_ranks_that_use_other_weights_train_as_one_process_and_all_that_travels_is_in_the_ledger():
    for found in run_ranks(2, all_cases):
        said = found.pop("peek")
        apart, received, expected = found.pop("zero1's layer")
        assert max(found.values()) < 1e-5, found
        assert apart < 1e-5
        assert received == expected, "weights that no layer asked for have travelled too"
        assert said.startswith("layers.1.weight was read before its layer's forward")


def call_other_layers(comm):
    return train(comm, "zero3", 3, lambda step, rank: [(0, True), (1 + rank, True)])


def call_in_another_order(comm):
    return train(comm, "zero3", 3, lambda step, rank: [(0, True), (1 + rank, True), (2 - rank, True)])


def call_once_more(comm):
    return train(comm, "zero3", 3, lambda step, rank: [(0, True), *[(1, True)] * (1 + rank), (2, True)])


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("calls", [call_other_layers, call_in_another_order, call_once_more])
def test_ranks_that_do_not_call_zero3_s_layers_alike_all_say_for_which_they_wait(calls):
    ends = run_world(2, calls, seconds=90, timeout=20)
    for end in ends:
        assert end.how != LATE
        assert end.exit_code == 1
        assert re.search(
            r"rank 0 waits for the (parameters|gradients) of layers\.\d float32 and rank 1 for the "
            r"(parameters|gradients) of layers\.\d float32, forever. All ranks must call the same layers",
            end.output,
        ), end.output


def call_without_tags(comm):
    """On a rank: messages that have no tags, as nccl's."""
    comm.backend = "nccl"
    found = {"alike": train(comm, "zero3", 3, lambda step, rank: [(0, True), (2, True), (1, True)])[0]}
    try:
        call_in_another_order(comm)
    except UserError as error:
        found["in another order"] = str(error)
    return found


def test_without_tags_weights_that_went_to_another_layer_are_noticed_before_the_step():
    for found in run_ranks(2, call_without_tags):
        assert found["alike"] < 1e-5
        assert "the ranks did not call the same layers in the same order" in found["in another order"]
