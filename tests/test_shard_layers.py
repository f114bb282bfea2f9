"""Where ZeRO by hand cuts at a layer's end, and which weights zero3 does not gather again for backward."""

import torch
from beside import SMALL_BUCKETS, Beside, sgd
from torch import nn
from torch.nn import functional
from worlds import run_ranks

from cos598d.comm.ledger import Ledger
from cos598d.records.conventions import PARAMETERS
from cos598d.strategies.parts import units
from cos598d.strategies.parts.units import looked_up, read_in_backward
from cos598d.strategies.zero3 import Zero3
from cos598d.sync.buckets import plan_buckets

WORDS, WIDTH = 31, 8
KIB = 1 / 1024  # of a MiB


def names(groups):
    return [[name for name, _ in group] for group in groups]


def test_a_bucket_that_is_not_small_ends_with_its_layer_and_a_small_one_goes_on():
    parameters = [(f"{layer}.{number}", torch.zeros(256)) for layer in "abc" for number in range(3)]
    parameters[3:3] = [("tiny", torch.zeros(1))]
    layer = {id(tensor): name.split(".")[0] for name, tensor in parameters}

    def plan(bucket_mb, first_bucket_mb, **options):
        return names(plan_buckets(parameters, bucket_mb, first_bucket_mb, **options))

    cut = plan(8 * KIB, 2 * KIB, layer_of=lambda tensor: layer[id(tensor)])
    assert cut == [["c.2", "c.1"], ["c.0", "b.2", "b.1", "b.0"], ["tiny", "a.2", "a.1", "a.0"]]
    assert plan(8 * KIB, 2 * KIB) == [["c.2", "c.1"], ["c.0", "b.2", "b.1", "b.0", "tiny", "a.2", "a.1", "a.0"]]


class Reading(nn.Module):
    """An embedding whose weight is also read by itself, where `reads` says so."""

    def __init__(self):
        super().__init__()
        self.embedding, self.other = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.reads = True

    def forward(self, ids):
        state = self.norm(self.embedding(ids).mean(1) + self.other(ids[:, 0]))
        weight = self.embedding.weight if self.reads else torch.ones(WORDS, WIDTH)
        return functional.linear(torch.tanh(state), weight).logsumexp(1).mean()


def test_what_is_only_looked_up_is_not_read_in_backward_and_a_large_graph_is_not_looked_through(monkeypatch):
    model, ids = Reading(), torch.arange(6).view(2, 3)
    weights = looked_up(model)
    assert weights == {model.embedding.weight, model.other.weight}
    assert read_in_backward([model(ids)], weights) == {model.embedding.weight}
    model.reads = False
    assert read_in_backward([model(ids)], weights) == set()
    monkeypatch.setattr(units, "MOST_NODES", 5)
    assert read_in_backward([model(ids)], weights) == weights


def train_reading(comm):
    """On a rank, for either way of using the weight: how far from one process, and what was gathered a step."""

    def loss_of(module, rank, step, micro):
        return module(torch.randint(0, WORDS, (3, 4), generator=torch.Generator().manual_seed(10 * step + rank)))

    found = []
    for reads in (True, False):
        torch.manual_seed(0)
        layer = Reading()
        layer.reads = reads
        both = Beside(comm, Zero3(comm, True, SMALL_BUCKETS), nn.Sequential(layer), sgd, loss_of)
        ledger = comm.ledger = Ledger()
        for step in range(2):
            both.step(step)
        gathered = sum(row.payload_bytes for row in ledger.rows if row.purpose == PARAMETERS) // 2
        found.append([both.end(), gathered])
    return found


def test_zero3_does_not_gather_again_what_is_only_looked_up():
    embedding, rest = 4 * WORDS * WIDTH, 4 * 2 * WIDTH  # there are two embeddings
    for (apart, read), (also, unread) in run_ranks(2, train_reading):
        assert max(apart, also) < 1e-5
        assert read == 3 * embedding + 2 * rest
        assert unread == 2 * embedding + 2 * rest
