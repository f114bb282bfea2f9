"""The weights of all ranks in one memory, with bf16 copies that are cast once per step."""

import gc
import time

import pytest
import torch
from compared import SMALL_BUCKETS, Compared, adamw, batch, layered, layered_loss, sgd, step_by, train_sharded
from held import Uneven
from test_rows import with_rows
from test_shared_memory import MEMORY, shared_memory_of
from torch import nn
from worlds import run_each, run_ranks

from cos598d.comm import hosts
from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import Ledger
from cos598d.errors import UserError
from cos598d.records.conventions import GRADIENTS
from cos598d.strategies.formula import TrainingSpec, without_values
from cos598d.strategies.memory import Peak
from cos598d.strategies.parts.cast_weights import linear_layers
from cos598d.strategies.shared_weights import SharedWeights


def noting(found):
    """The layered model's loss. `found` gets each one, and the dtype of its logits."""

    def loss_of(module, rank, step, micro):
        loss, logits = module(**batch(step, micro, rank))
        found.append([loss.item(), str(logits.dtype)])
        return loss

    return loss_of


def rows_of(comm):
    """On a rank: whether the positions' gradient has the expected rows at each step, and `sparse` is reset."""
    with_rows()
    model, found = layered(), []
    strategy = SharedWeights(comm, True, SMALL_BUCKETS)
    module = strategy.attach(model, sgd)
    assert model.positions.sparse
    assert not model.embedding.sparse, "it is also the output's weight"
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


def test_only_looked_up_rows_are_computed_added_and_cleared():
    assert run_ranks(3, rows_of) == [[True] * 4] * 3


def overflow_then_go_on(comm):
    """On a rank: whether training is the same after a step whose clipped gradients are NaN."""
    with_rows()
    found = []
    for spoils in (False, True):
        model = layered()
        strategy = SharedWeights(comm, True, SMALL_BUCKETS, "fp16")
        strategy.scale.value = 4.0
        module = strategy.attach(model, adamw)
        if spoils:
            no_number = lambda *where: layered_loss(*where) * float("nan")  # noqa: E731
            _, counts = step_by(strategy, module, comm, 7, no_number, max_norm=0.3)
            assert not counts
            strategy.scale.value = 4.0
        train_sharded(strategy, module, comm, 2, 1, 0.3)
        strategy.detach()
        found.append([p.tolist() for p in model.parameters()])
    return found[0] == found[1]


def test_rows_clipped_to_nan_are_zeroed_for_the_next_step():
    assert run_ranks(2, overflow_then_go_on) == [True, True]


class Dense(nn.Module):
    """An embedding whose weight is also used directly, so that its gradient is dense, and a second embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.others = nn.Embedding(31, 5), nn.Embedding(17, 5, scale_grad_by_freq=True)

    def forward(self, ids):
        return (self.words(ids).sum(1) @ self.words.weight.t() + self.others(ids % 17).sum()).square().mean()


def dense_gradients(comm):
    """On a rank: the distance from one process."""

    def loss_of(module, rank, step, micro):
        return module(torch.tensor([[step, rank, 3, 3]]))

    with_rows()
    both = Compared(
        comm, SharedWeights(comm), Dense(), lambda named: torch.optim.SGD([p for _, p in named], 1e-3), loss_of
    )
    for step in range(3):
        both.step(step)
    return both.end()


def test_an_embedding_may_have_a_dense_gradient():
    assert max(run_ranks(2, dense_gradients)) < 1e-5


class Slow(SharedWeights):
    """Rank 1 is late to add, to step and to write weights."""

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
    """On a rank: whether the losses are those without a late rank. Both micro-batches of a step are synchronized."""
    with_rows()
    found = []
    for kind in (SharedWeights, Slow):
        model, losses = layered(), []
        strategy = kind(comm, True, SMALL_BUCKETS)
        module = strategy.attach(model, adamw)
        for step in range(4):
            step_by(strategy, module, comm, step, noting(losses), micros=2, max_norm=0.3, unsynced=0)
        strategy.detach()
        found.append(losses)
    return found[0] == found[1]


def test_no_rank_reads_weights_that_a_late_rank_is_writing():
    assert all(run_ranks(3, be_late))


def refusals(comm):
    """On a rank: the errors for ranks on two hosts, and for an embedding with max_norm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "host_groups", lambda comm: [[0], [1]])
        with pytest.raises(UserError) as several:
            SharedWeights(comm).attach(layered(), sgd)
    with pytest.raises(UserError) as changing:
        SharedWeights(comm).attach(nn.Sequential(nn.Embedding(9, 2, max_norm=1.0)), sgd)
    return [str(several.value), str(changing.value)]


def test_ranks_on_two_hosts_max_norm_and_other_devices_are_refused_on_every_rank():
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
    """On a rank: whether the memory is mapped during and after training, the bytes, and its weights after a change."""
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


def test_no_gradients_are_sent_and_detach_gives_each_rank_its_own_weights():
    assert run_ranks(2, live_and_let_go) == [[[True, False], 0, [float(rank)]] for rank in range(2)]


class UnderAutocast(SharedWeights):
    """Without copies in half precision: autocast casts the weights in every forward."""

    def make_gradients(self):
        gradients = super().make_gradients()
        gradients.cast_to = None
        return gradients


def losses_and_weights(comm, kind, make, precision):
    """On a rank: losses, weights and dtypes of three steps, and of one whose two backwards both synchronize."""
    model, found = layered(), []
    strategy = kind(comm, True, SMALL_BUCKETS, precision)
    module = strategy.attach(model, make)
    found.append(train_sharded(strategy, module, comm, 3, 2, 0.3))
    step_by(strategy, module, comm, 9, noting(found), micros=2, max_norm=0.3, unsynced=0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found.append(model(**batch(10, 0, 0))[1].tolist())
    wholes = {name: p.tolist() for name, p in model.named_parameters()}
    layers = [name for name, p in model.named_parameters() if p.dtype != torch.float32]
    strategy.detach()
    with torch.autocast("cpu", torch.bfloat16):
        model.blocks[0].linear(torch.ones(1, 8)).sum().backward()
    return found, wholes, layers, model.blocks[0].linear.weight.grad is not None


def with_and_without_copies(comm, case):
    mine, autocast_s = (losses_and_weights(comm, kind, *case) for kind in (SharedWeights, UnderAutocast))
    return [mine[:2] == autocast_s[:2], *mine[2:], *autocast_s[2:]]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cached_casts_give_the_bits_of_autocast(ranks):
    cases = [(sgd, "bf16"), (adamw, "bf16"), (sgd, "fp32")]
    expected = ([True, [], True, [], True],) * ranks
    assert run_each(ranks, with_and_without_copies, cases) == [expected] * len(cases)


def bytes_cast(comm):
    """On a rank: the bytes held between two steps and at a step's peak, counted and by the formula."""
    model = Uneven()
    job = TrainingSpec(without_values(model), comm.world_size, comm.rank, 2, 4)
    strategy = SharedWeights(comm, False, SMALL_BUCKETS, "bf16")
    module, peak = strategy.attach(model, adamw), Peak(strategy.memory)
    inputs = {"input_ids": torch.arange(12).view(3, 4)}
    for _ in range(3):
        with peak.watching():
            strategy.backward(module(**inputs)[0].float())
        strategy.finish()
        strategy.clip(1.0)
        strategy.step()
    between, expected = strategy.memory(), strategy.expected_memory(job)
    grads = {p.grad for p in model.parameters()}
    strategy.detach()
    return between, dict(expected.between_steps), peak.held["gradients"], expected.peak["gradients"], grads == {None}


@pytest.mark.parametrize("ranks", [1, 2])
def test_half_precision_memory_equals_the_formula(ranks):
    for between, expected, peak, expected_peak, has_none in run_ranks(ranks, bytes_cast):
        assert between == expected
        assert peak == expected_peak
        assert has_none


def test_only_unshared_weights_of_plain_linear_layers_are_cast():
    model = Uneven()
    names = {name for name, p in model.named_parameters() if p in linear_layers(model)}
    assert {"twice.weight", "twice.bias", "output.bias", "layers.0.0.weight"} <= names
    assert not names & {"words.weight", "frozen.weight", "frozen.bias"}
    assert linear_layers(model.double()) == {}

    class Own(nn.Linear):
        def forward(self, input):
            return input @ self.weight.t()

    assert linear_layers(Own(3, 2)) == {}
