"""One piece of memory for all ranks' weights: rows that were looked up travel alone, nobody reads what is written."""

import gc
import time

import pytest
import torch
from beside import SMALL_BUCKETS, Beside, adamw, batch, layered, sgd, train_sharded
from test_rows import with_rows
from test_shared_memory import MEMORY, shared_memory_of
from torch import nn
from worlds import run_ranks

from cos598d.comm import hosts
from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import Ledger
from cos598d.errors import UserError
from cos598d.records.conventions import GRADIENTS
from cos598d.strategies.shared_weights import SharedWeights


def rows_of(comm):
    """On a rank: of the positions' embedding the rows that its gradient has at each step, here and in all."""
    with_rows()
    model, found = layered(), []
    strategy = SharedWeights(comm, True, SMALL_BUCKETS)
    module = strategy.attach(model, sgd)
    assert model.positions.sparse
    assert not model.embedding.sparse, "it is the output's weight, too"
    (unit,) = strategy._gradients._rows
    for step in range(3):
        own = batch(step, 0, comm.rank)
        strategy.backward(module(**own)[0] / comm.world_size)
        strategy.finish()
        gradient = strategy._gradients.segments.own[unit.number].view(97, -1)
        first, end = sum(unit.lengths[: comm.rank]) // 8, sum(unit.lengths[: comm.rank + 1]) // 8
        looked_up = set(own["ids"][:, 0].tolist())
        summed = {row for rank in range(comm.world_size) for row in batch(step, 0, rank)["ids"][:, 0].tolist()}
        expected = looked_up | {row for row in summed if first <= row < end}
        found.append(set(gradient.any(dim=1).nonzero().flatten().tolist()) == expected)
        strategy.step()
    strategy.detach()
    return [*found, not model.positions.sparse]


def test_only_rows_that_were_looked_up_are_computed_added_and_cleared():
    assert run_ranks(3, rows_of) == [[True] * 4] * 3


def overflow_then_go_on(comm):
    """On a rank: whether a step whose gradients are no numbers, clipped, leaves the next one's as they are."""
    with_rows()
    found = []
    for spoils in (False, True):
        model = layered()
        strategy = SharedWeights(comm, True, SMALL_BUCKETS, "fp16")
        strategy.scale.value = 4.0
        module = strategy.attach(model, adamw)
        if spoils:
            loss = module(**batch(7, 0, comm.rank))[0] * float("nan")
            strategy.backward(loss)
            strategy.finish()
            strategy.clip(0.3)
            assert not strategy.step()
            strategy.scale.value = 4.0
        train_sharded(strategy, module, comm, 2, 1, 0.3)
        strategy.detach()
        found.append([p.tolist() for p in model.parameters()])
    return found[0] == found[1]


def test_rows_that_were_multiplied_by_no_number_are_zeros_again():
    assert run_ranks(2, overflow_then_go_on) == [True, True]


class Dense(nn.Module):
    """An embedding whose weight is also used as it is, so that its gradient is dense; and another one of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.others = nn.Embedding(31, 5), nn.Embedding(17, 5, scale_grad_by_freq=True)

    def forward(self, ids):
        return (self.words(ids).sum(1) @ self.words.weight.t() + self.others(ids % 17).sum()).square().mean()


def dense_gradients(comm):
    """On a rank: how far from one process."""

    def loss_of(module, rank, step, micro):
        return module(torch.tensor([[step, rank, 3, 3]]))

    with_rows()
    both = Beside(
        comm, SharedWeights(comm), Dense(), lambda named: torch.optim.SGD([p for _, p in named], 1e-3), loss_of
    )
    for step in range(3):
        both.step(step)
    return both.end()


def test_an_embedding_may_have_a_dense_gradient_too():
    assert max(run_ranks(2, dense_gradients)) < 1e-5


class Slow(SharedWeights):
    """Rank 1 is late wherever it could be: to add, to step, to write weights."""

    def hold(self, unit):
        self._late()
        return super().hold(unit)

    def put_weights(self, whole):
        self._late()
        super().put_weights(whole)

    def make_gradients(self):
        sums = super().make_gradients()
        end_sums = sums.end_sums

        def late():
            self._late()
            end_sums()

        sums.end_sums = late
        return sums

    def stepped(self):
        self._late()
        super().stepped()

    def _late(self):
        if self.comm.rank == 1:
            time.sleep(0.01)


def be_late(comm):
    """On a rank: the losses with ranks that are all in time, and with one that is not; a second backward too."""
    with_rows()
    found = []
    for kind in (SharedWeights, Slow):
        model, losses = layered(), []
        strategy = kind(comm, True, SMALL_BUCKETS)
        module = strategy.attach(model, adamw)
        for step in range(4):
            for micro in range(2):
                loss = module(**batch(step, micro, comm.rank))[0]
                losses.append(loss.item())
                strategy.backward(loss / comm.world_size)
            strategy.finish()
            strategy.clip(0.3)
            strategy.step()
        strategy.detach()
        found.append(losses)
    return found[0] == found[1]


def test_no_rank_reads_what_another_is_still_writing():
    assert all(run_ranks(3, be_late))


def refusals(comm):
    """On a rank: the sentences for what cannot work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "host_groups", lambda comm: [[0], [1]])
        with pytest.raises(UserError) as several:
            SharedWeights(comm).attach(layered(), sgd)
    with pytest.raises(UserError) as changing:
        SharedWeights(comm).attach(nn.Sequential(nn.Embedding(9, 2, max_norm=1.0)), sgd)
    return [str(several.value), str(changing.value)]


def test_what_cannot_share_weights_is_refused_in_one_sentence_on_every_rank():
    first, second = run_ranks(2, refusals)
    assert first == second
    assert first[0] == (
        "--sync shared_weights needs all ranks on one host, and rank 1 is on another host than rank 0. "
        "Choose --sync zero1."
    )
    assert first[1].startswith("0 has a max_norm")
    comm = Communicator(None, "gloo", torch.device("cpu"))
    with pytest.raises(UserError, match="weight is on meta. Choose --sync ddp"):
        SharedWeights(comm).attach(nn.Linear(2, 2, device="meta"), sgd)


def live_and_let_go(comm):
    """On a rank: whether the memory is mapped, and what became of the ranks' weights when one changes its own."""
    model = layered()
    strategy = SharedWeights(comm)
    module = strategy.attach(model, sgd)
    ledger = comm.ledger = Ledger()
    train_sharded(strategy, module, comm, 2, 1, 0.3)
    mapped = [MEMORY in shared_memory_of("self")]
    sent = sum(row.bytes_sent for row in ledger.rows if row.purpose == GRADIENTS)
    strategy.detach()
    del strategy
    gc.collect()
    mapped.append(MEMORY in shared_memory_of("self"))
    comm.exchange("all have left")
    with torch.no_grad():
        model.blocks[0].linear.weight.fill_(comm.rank)
    comm.exchange("all have written")
    return mapped, sent, model.blocks[0].linear.weight.unique().tolist()


def test_nothing_travels_and_afterwards_every_rank_has_weights_of_its_own():
    assert run_ranks(2, live_and_let_go) == [[[True, False], 0, [float(rank)]] for rank in range(2)]
