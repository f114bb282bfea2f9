"""`sparse_rows` loses nothing and sends only what was touched; `local_sgd` keeps the parity that it states."""

import pytest
import torch
from torch import nn
from worlds import RankFailure, run_ranks

from cos598d.comm.ledger import Ledger
from cos598d.records.conventions import GRADIENTS
from cos598d.sync.local_sgd import LocalSGD
from cos598d.sync.options import SyncOptions
from cos598d.sync.sparse_rows import SparseRows

WORDS, WIDTH = 6000, 64  # 1.5 MB


class Words(nn.Module):
    """Embedded words, a layer, and one number an example."""

    def __init__(self, tied=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.tied = tied
        if tied == "module":
            self.output = nn.Linear(WIDTH, WORDS, bias=False)
            self.output.weight = self.embedding.weight

    def forward(self, ids):
        state = torch.tanh(self.layer(self.embedding(ids).mean(dim=1))) if len(ids) else self.layer.bias
        if self.tied:
            return (state @ self.embedding.weight.T).square().mean()
        return state.square().mean()


def ids_of(rank, step, part):
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + part)
    # Words that ranks share, and words of each rank's own; in step 2 rank 1 looks nothing up.
    return torch.randint(0, 50 * (rank + 1), (0 if (rank, step) == (1, 2) else 4, 7), generator=generator)


def average_words(comm, tied):
    """On a rank: the largest error of the gradients in three steps of two parts, and the bytes that each step sent."""
    model, alone = Words(tied), Words(tied)
    sync = SparseRows(comm)
    module = sync.attach(model)
    errors, sent, touched = [], [], []
    for step in range(3):
        comm.ledger = Ledger()
        with sync.no_sync():
            module(ids_of(comm.rank, step, 0)).backward()
        module(ids_of(comm.rank, step, 1)).backward()
        sync.finish()
        for rank in range(comm.world_size):
            for part in range(2):
                (alone(ids_of(rank, step, part)) / comm.world_size).backward()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        errors.append(max((p.grad - q.grad).abs().max().item() for p, q in pairs))
        sent.append(sum(row.bytes_sent for row in comm.ledger.rows if row.purpose == GRADIENTS))
        every = torch.cat([ids_of(r, step, part).flatten() for r in range(comm.world_size) for part in range(2)])
        touched.append(len(every.unique()))
        model.zero_grad(set_to_none=True)
        alone.zero_grad(set_to_none=True)
    return [max(errors), sent, touched]


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_are_averaged_exactly_and_no_other_row_is_sent(ranks):
    dense = 4 * (WIDTH * WIDTH + WIDTH)
    for error, sent, touched in run_ranks(ranks, average_words, None):
        assert error < 1e-7
        for step in range(3):
            wanted = 2 * (ranks - 1) / ranks * (dense + 4 * WIDTH * touched[step])
            assert sent[step] == pytest.approx(wanted, abs=4)


def test_an_embedding_that_is_also_an_output_layer_is_sent_dense():
    for error, sent, _ in run_ranks(2, average_words, "module"):
        assert error < 1e-7
        assert min(sent) > 4 * WORDS * WIDTH


def test_an_embedding_used_outside_its_module_is_an_error():
    with pytest.raises(RankFailure, match="outside the rows that its embedding looked up"):
        run_ranks(2, average_words, "function")


class NoWords(nn.Module):
    """Looks up nothing that it trains."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WORDS, WIDTH)
        self.fixed = nn.Embedding(WORDS, WIDTH).requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Words(), None),
        (NoWords(), "this model trains none"),
        (nn.Sequential(nn.Embedding(100, WIDTH)), "this model's largest has 0.024 MiB"),
        (Words("module"), "used elsewhere"),
    ],
    ids=["large", "none", "small", "tied"],
)
def test_a_remark_says_why_a_model_saves_nothing(model, words):
    said = SparseRows.remark(model)
    assert (said is None) == (words is None)
    if words:
        assert words in said
        assert said.startswith("sparse_rows sends what bucketed sends")


def step_locally(comm, every):
    """On a rank: four SGD steps of LocalSGD; the difference to averaged gradients, and whether replicas are equal."""
    sync = LocalSGD(comm, options=SyncOptions(sync_every=every))
    model, alone = Words(), Words()
    module = sync.attach(model)
    mine, reference = (torch.optim.SGD(each.parameters(), lr=10.0) for each in (model, alone))
    equal = []
    for step in range(4):
        module(ids_of(comm.rank, step, 0)).backward()
        sync.finish()
        mine.step()
        mine.zero_grad()
        sync.after_step()
        equal.append(len(set(comm.exchange(model.embedding.weight.double().sum().item()))) == 1)
        for rank in range(comm.world_size):
            (alone(ids_of(rank, step, 0)) / comm.world_size).backward()
        reference.step()
        reference.zero_grad()
    sync.settle()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    difference = max((p - q).abs().max().item() for p, q in pairs)
    settled = len(set(comm.exchange(model.embedding.weight.double().sum().item()))) == 1
    return [difference, equal, settled]


@pytest.mark.parametrize(("every", "equal_after"), [(1, [True] * 4), (3, [False, False, True, False])])
def test_averaging_weights_after_every_sgd_step_is_averaging_gradients(every, equal_after):
    """Averaging less often is not; settling makes the replicas equal."""
    for difference, equal, settled in run_ranks(2, step_locally, every):
        assert (difference < 1e-6) == (every == 1)
        assert equal == equal_after
        assert settled
