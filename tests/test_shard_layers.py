"""Layers of the ZeRO strategies: their buckets, what zero3 gathers again, and ranks that call different layers."""

import re

import pytest
import torch
from compared import ONE_EACH, SMALL_BUCKETS, Compared, sgd, step_by
from test_shard import STAGES
from torch import nn
from torch.nn import functional
from worlds import run_ranks

from cos598d.comm.ledger import Ledger
from cos598d.errors import UserError
from cos598d.records.conventions import PARAMETERS
from cos598d.strategies.parts import units
from cos598d.strategies.parts.units import looked_up, read_in_backward
from cos598d.strategies.zero3 import Zero3
from cos598d.sync.buckets import plan_buckets
from cos598d.sync.options import DEFAULTS
from cos598d.tools.check.spawn import LATE, run_world

WORDS, WIDTH, LAYERS, STEPS = 31, 8, 12, 2
KIB = 1 / 1024  # of a MiB


def test_only_small_buckets_continue_in_the_next_layer():
    parameters = [(f"{layer}.{number}", torch.zeros(256)) for layer in "abc" for number in range(3)]
    parameters[3:3] = [("tiny", torch.zeros(1))]
    layer = {id(tensor): name.split(".")[0] for name, tensor in parameters}

    def plan(bucket_mb, first_bucket_mb, **options):
        groups = plan_buckets(parameters, bucket_mb, first_bucket_mb, **options)
        return [[name for name, _ in group] for group in groups]

    cut = plan(8 * KIB, 2 * KIB, layer_of=lambda tensor: layer[id(tensor)])
    assert cut == [["c.2", "c.1"], ["c.0", "b.2", "b.1", "b.0"], ["tiny", "a.2", "a.1", "a.0"]]
    assert plan(8 * KIB, 2 * KIB) == [["c.2", "c.1"], ["c.0", "b.2", "b.1", "b.0", "tiny", "a.2", "a.1", "a.0"]]


class Reading(nn.Module):
    """Embeddings. With `reads`, the weight of the first is also used directly."""

    def __init__(self):
        super().__init__()
        self.embedding, self.other = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.reads = True

    def forward(self, ids):
        state = self.norm(self.embedding(ids).mean(1) + self.other(ids[:, 0]))
        weight = self.embedding.weight if self.reads else torch.ones(WORDS, WIDTH)
        return functional.linear(torch.tanh(state), weight).logsumexp(1).mean()


def test_lookups_are_not_read_in_backward_and_large_graphs_are_not_searched(monkeypatch):
    model, ids = Reading(), torch.arange(6).view(2, 3)
    weights = looked_up(model)
    assert weights == {model.embedding.weight, model.other.weight}
    assert read_in_backward([model(ids)], weights) == {model.embedding.weight}
    model.reads = False
    assert read_in_backward([model(ids)], weights) == set()
    monkeypatch.setattr(units, "MOST_NODES", 5)
    assert read_in_backward([model(ids)], weights) == weights


def train_reading(comm):
    """On a rank, with and without a read of the weight: the distance from one process, and bytes gathered per step."""

    def loss_of(module, rank, step, micro):
        return module(torch.randint(0, WORDS, (3, 4), generator=torch.Generator().manual_seed(10 * step + rank)))

    found = []
    for reads in (True, False):
        torch.manual_seed(0)
        layer = Reading()
        layer.reads = reads
        both = Compared(comm, Zero3(comm, True, SMALL_BUCKETS), nn.Sequential(layer), sgd, loss_of)
        ledger = comm.ledger = Ledger()
        for step in range(2):
            both.step(step)
        gathered = sum(row.payload_bytes for row in ledger.rows if row.purpose == PARAMETERS) // 2
        found.append([both.end(), gathered])
    return found


def test_zero3_gathers_embeddings_only_once():
    embedding, rest = 4 * WORDS * WIDTH, 4 * 2 * WIDTH  # there are two embeddings
    for (apart, read), (also, unread) in run_ranks(2, train_reading):
        assert max(apart, also) < 1e-5
        assert read == 3 * embedding + 2 * rest
        assert unread == 2 * embedding + 2 * rest


class Halves(nn.Module):
    """A layer of two halves, of which the second is optional."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, state, is_whole):
        new = torch.tanh(self.always(state))
        return state + new + (self.sometimes(new) if is_whole else 0)


class Stack(nn.Module):
    """Layers that `forward` calls in the order of `calls`: pairs of a layer and whether all of it is used."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(Halves() for _ in range(count))

    def forward(self, state, calls):
        for place, is_whole in calls:
            state = self.layers[place](state, is_whole)
        return state.square().mean()


class Peeking(nn.Module):
    """A model that reads a weight outside its layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, state):
        return nn.functional.linear(self.layers[0](state), self.layers[1].weight).square().mean()


def halves_of_some_ranks(step, rank):
    """Rank 0 uses all halves. The others skip one of the last two layers, and of every third."""
    places = [*range(LAYERS), step]  # one layer twice
    return [(place, rank == 0 or not (place >= LAYERS - 2 or place % 3 == 1)) for place in places]


def layers_of_some_ranks(step, rank):
    """Only rank 0 calls the last layer."""
    return [(place, True) for place in range(3 if rank == 0 else 2)]


def train(comm, name, count, calls, options=DEFAULTS):
    """On a rank: the distance from one process after two steps, the bytes of weights received, and those expected."""

    def loss_of(module, rank, step, micro):
        state = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        return module(state, calls(step, rank))

    torch.manual_seed(0)
    both = Compared(comm, STAGES[name](comm, True, options), Stack(count), sgd, loss_of)
    ledger = comm.ledger = Ledger()
    for step in range(STEPS):
        both.step(step)
    both.strategy.settle()
    received = sum(row.bytes_received for row in ledger.rows if row.purpose == PARAMETERS)
    others = sum(sum(unit.lengths) - unit.lengths[comm.rank] for unit in both.strategy._gradients.units)
    return both.end(), received, STEPS * 4 * others


def peek(comm):
    """On a rank: the error of a weight that is read outside its layer before it has arrived."""
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


def test_ranks_may_use_different_weights_and_every_message_is_in_the_ledger():
    for found in run_ranks(2, all_cases):
        said = found.pop("peek")
        apart, received, expected = found.pop("zero1's layer")
        assert max(found.values()) < 1e-5, found
        assert apart < 1e-5
        assert received == expected, "weights that no layer asked for are received too"
        assert said.startswith("layers.1.weight was read before its layer's forward")


def call_other_layers(comm):
    return train(comm, "zero3", 3, lambda step, rank: [(0, True), (1 + rank, True)])


def call_in_another_order(comm):
    return train(comm, "zero3", 3, lambda step, rank: [(0, True), (1 + rank, True), (2 - rank, True)])


def call_once_more(comm):
    return train(comm, "zero3", 3, lambda step, rank: [(0, True), *[(1, True)] * (1 + rank), (2, True)])


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("calls", [call_other_layers, call_in_another_order, call_once_more])
def test_ranks_that_call_zero3_s_layers_differently_name_the_layers_they_wait_for(calls):
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
    """On a rank: the distance and the error with messages that have no tags, as nccl's."""
    comm.backend = "nccl"
    found = {"alike": train(comm, "zero3", 3, lambda step, rank: [(0, True), (2, True), (1, True)])[0]}
    try:
        call_in_another_order(comm)
    except UserError as error:
        found["in another order"] = str(error)
    return found


def test_without_tags_weights_sent_to_the_wrong_layer_end_the_step():
    for found in run_ranks(2, call_without_tags):
        assert found["alike"] < 1e-5
        assert "the ranks did not call the same layers in the same order" in found["in another order"]
