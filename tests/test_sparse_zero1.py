"""ZeRO-1 with replicated embeddings sends only the rows of the batch, and all ranks step all rows alike."""

import os
import warnings

import pytest
import torch
from compared import SMALL_BUCKETS, Compared, adamw, step_by, sum_by
from states import Case, Training, digest
from test_rows import with_rows
from test_shard import compare
from test_sparse_rows import NoWords
from torch import nn
from torch.utils.checkpoint import checkpoint
from worlds import run_each, run_ranks

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import Ledger
from cos598d.records.conventions import AGREEMENT, GRADIENTS, PARAMETERS
from cos598d.strategies import get_strategy
from cos598d.strategies.formula import TrainingSpec
from cos598d.strategies.parts.units import ReplicatedUnit
from cos598d.strategies.sparse_zero1 import SparseZero1
from cos598d.strategies.zero1 import Zero1
from cos598d.sync.options import DEFAULTS, SyncOptions
from cos598d.tools.check.proof.cases import CASES
from cos598d.tools.check.proof.observe import observe
from cos598d.tools.check.proof.prove import prove
from cos598d.tools.check.verdict import KEPT

NAME = "sparse_zero1"


class Words(nn.Module):
    """Embedded words and two layers. `use`: the words' weight is also read "as it is", or looked up "again"."""

    def __init__(self, rows=1000, width=20, use=None):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(rows, width, padding_idx=0)
            self.places = nn.Embedding(50, width)
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.use = use

    def forward(self, ids):
        state = checkpoint(self.look_up, ids, use_reentrant=False) if self.use == "again" else self.look_up(ids)
        for layer in self.layers:
            state = torch.tanh(layer(state))
        if self.use == "as it is":
            return (state @ self.words.weight.T).square().mean()
        return state.square().sum()

    def look_up(self, ids):
        return self.words(ids).mean(dim=1) + self.places(torch.arange(ids.shape[1])).mean(dim=0)


def ids_of(rank, step):
    """Words of all ranks, words of one rank, padding. In step 1, rank 1 has only one example."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(1, 40, (1 if (step, rank) == (1, 1) else 3, 7), generator=generator)
    ids[:, 5] = 100 + 10 * rank + step
    ids[:, 6] = 0
    return ids


def loss_of(module, rank, step, micro):
    return module(ids_of(rank, step))


def make_sgd(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9, weight_decay=0.1)


def count_bytes(comm, steps):
    """On a rank, by step: the bytes sent by purpose, what the formula gives for the same ids, and the same of calls."""
    with_rows()
    model, found = Words(), []
    strategy = SparseZero1(comm, True, SMALL_BUCKETS)
    module = strategy.attach(model, make_sgd)
    units = strategy._gradients.units
    dense = [unit for unit in units if not isinstance(unit, ReplicatedUnit)]
    for step in range(steps):
        ledger = comm.ledger = Ledger()
        step_by(strategy, module, comm, step, loss_of, max_norm=1.0)
        strategy.settle()
        strategy._wait(list(strategy._under_way))
        sent = {
            purpose: sum(row.bytes_sent for row in ledger.rows if row.purpose == purpose)
            for purpose in (GRADIENTS, PARAMETERS, AGREEMENT)
        }
        others, row, rows = comm.world_size - 1, 4 * 20, len(ids_of(comm.rank, step).unique()) + 7
        own = sum(unit.lengths[comm.rank] for unit in dense) * 4
        all_of_it = sum(unit.elements for unit in dense) * 4
        used = 2 * others / comm.world_size * 4 * len(strategy._gradients.parameters)
        expected = {
            GRADIENTS: all_of_it - own + others * row * (rows + 2),
            PARAMETERS: others * own,
            AGREEMENT: round(used) + others * (8 + -(-1050 // 8)),
        }
        calls = len([row for row in ledger.rows if row.purpose in (GRADIENTS, PARAMETERS)])
        found.append([sent, expected, calls, 2 * len(dense) + 2])
    strategy.detach()
    return found


def test_a_step_sends_looked_up_rows_and_no_embedding_weights():
    for found in run_ranks(3, count_bytes, 3):
        for sent, expected, calls, calls_expected in found:
            assert sent == expected
            assert calls == calls_expected


def train_words(comm, make, use, steps):
    """On a rank: the distance from one process, digests of what must be alike on all ranks, warnings, bytes of rows."""
    with_rows()
    model = Words(use=use)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        both, sent = Compared(comm, SparseZero1(comm, True, SMALL_BUCKETS), model, make, loss_of), []
        for step in range(steps):
            comm.ledger = Ledger()
            both.step(step, max_norm=0.5)
            sent.append(sum(row.bytes_sent for row in comm.ledger.rows if row.tensor == "words.weight"))
    remembered = both.strategy.optimizer.state[both.strategy._tables["words.weight"]]
    alike = [digest(value) for value in remembered.values()]
    both.strategy.settle()
    alike += [digest(p.data) for p in model.parameters()]
    return both.end(), alike, [str(each.message) for each in said], sent, model.words.sparse


@pytest.mark.parametrize("make", [make_sgd, adamw])
def test_weights_equal_one_process_and_all_ranks_have_the_same_bits(make):
    found = run_ranks(3, train_words, make, None, 6)
    for apart, alike, said, sent, is_sparse in found:
        assert apart < 1e-5
        assert alike == found[0][1]
        assert said == []
        assert max(sent) < 2 * 4 * 20 * 40, "whole, it would be 1,000 rows"
        assert not is_sparse, "it was not before"


def test_an_embedding_used_elsewhere_is_sent_whole_with_a_warning_of_rank_0():
    found = run_ranks(3, train_words, make_sgd, "as it is", 4)
    whole = round(4 / 3 * 4 * 20 * 1000)
    for rank, (apart, alike, said, sent, _) in enumerate(found):
        assert apart < 1e-5
        assert alike == found[0][1]
        assert sent[0] > whole
        assert sent[1:] == [whole] * 3
        why = "words.weight is also used outside its embedding's forward, so any row may have a gradient."
        assert said == ([f"{why} All rows are sent."] if rank == 0 else [])


def test_checkpointed_lookups_send_only_their_rows():
    for apart, _, said, sent, _ in run_ranks(2, train_words, make_sgd, "again", 3):
        assert apart < 1e-5
        assert said == []
        assert max(sent) < 2 * 4 * 20 * 40


def train_without_tags(comm):
    """On a rank: the distance from one process with messages that have no tags, as nccl's."""
    with_rows()
    comm.backend = "nccl"
    return compare(comm, NAME, adamw, 2)[0]


def test_untagged_messages_arrive_in_order():
    assert max(run_ranks(2, train_without_tags)) < 1e-5


def evaluate_between(comm):
    """On a rank: whether a step after an evaluation of other rows sends the same bytes."""
    with_rows()
    model, sent = Words(), []
    strategy = SparseZero1(comm, True, SMALL_BUCKETS)
    module = strategy.attach(model, make_sgd)
    for _ in range(2):
        comm.ledger = Ledger()
        step_by(strategy, module, comm, 0, loss_of)
        sent.append(sum(row.bytes_sent for row in comm.ledger.rows if row.tensor == "words.weight"))
        strategy.settle()
        model.eval()
        with torch.no_grad():
            model(torch.arange(500, 550).view(1, -1))
        model.train()
    strategy.detach()
    return sent[0] == sent[1]


def test_rows_looked_up_in_evaluation_are_not_sent():
    assert run_ranks(2, evaluate_between) == [True, True]


def leave_out_a_step(comm):
    """On a rank: the distance from one process that never makes the steps that the strategy drops."""
    with_rows()
    both = Compared(comm, SparseZero1(comm, True, SMALL_BUCKETS), Words(rows=4000), make_sgd, loss_of)
    for step, counts in enumerate((True, False, True, False)):
        if counts:
            both.step(step, max_norm=0.5)
            continue
        sum_by(both.strategy, both.module, comm, step, loss_of, max_norm=0.5)
        if step == 1:
            both.strategy.forget_step()
    return both.end()


def test_a_dropped_step_changes_nothing_and_blocks_no_rank():
    assert max(run_ranks(3, leave_out_a_step)) < 1e-5


def train_side_by_side(comm):
    """On a rank: the distance from one process of two trainings whose steps interleave."""
    with_rows()
    options = SyncOptions(bucket_mb=0.05, first_bucket_mb=0.02)
    both = [
        Compared(comm, kind(comm, True, options), Words(width=150), make_sgd, loss_of) for kind in (SparseZero1, Zero1)
    ]
    for step in range(3):
        for each in both:
            if step:
                each.strategy.step()
                each.step_reference(step - 1, max_norm=0.5)
            sum_by(each.strategy, each.module, comm, step, loss_of, max_norm=0.5)
    for each in both:
        each.strategy.forget_step()
    return max(each.end() for each in both)


def test_two_trainings_in_one_process_keep_their_messages_apart():
    assert max(run_ranks(2, train_side_by_side)) < 1e-5


def save_with_rows(comm, folder, cases):
    with_rows()
    for place, case in enumerate(cases):
        into = os.path.join(folder, str(place))
        os.makedirs(into, exist_ok=True)
        Training(comm, case).steps(0, 3).save(into)


def go_on_with_rows(comm, folder, cases):
    """On a rank: the distance of the weights after two more steps from each state by each strategy."""
    with_rows()
    found = []
    for state in range(len(cases)):
        for case in cases:
            training = Training(comm, case, seed=1).load(os.path.join(folder, str(state)), with_own=False).steps(3, 5)
            training.strategy.settle()
            found.append(torch.cat([p.flatten().double() for p in training.model.parameters()]))
            training.strategy.detach()
    return max((weights - found[0]).abs().max().item() for weights in found)


@pytest.mark.long
def test_a_saved_state_resumes_under_other_strategies_and_rank_counts(tmp_path):
    cases = [Case(name, {"bucket_mb": 0.3}, "bert", optimizer="momentum") for name in (NAME, "ddp", "zero3")]
    run_ranks(3, save_with_rows, str(tmp_path), cases)
    assert max(run_ranks(2, go_on_with_rows, str(tmp_path), cases)) < 2e-6


def test_models_without_sparse_rows_get_a_remark():
    strategy = SparseZero1(Communicator(None, "gloo", torch.device("cpu")))
    assert strategy.remark(nn.Sequential(nn.Embedding(4000, 64))) is None
    assert "has none to leave out: this model trains none" in str(strategy.remark(NoWords()))
    renorming = nn.Sequential(nn.Embedding(4000, 64, max_norm=1.0))
    assert "this model's has max_norm or scale_grad_by_freq" in str(strategy.remark(renorming))
    assert strategy.expected_sent(TrainingSpec(nn.Sequential(nn.Embedding(4000, 64)), 2, 0, 2)).unsaid


def observe_with_rows(comm, names, nonce, seconds):
    """On a rank: what the proof does for a strategy, where it sends rows of the small embedding."""
    with_rows()
    observe(comm, SparseZero1, DEFAULTS, names, nonce, seconds)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_strategy_passes_the_proof(ranks):
    found = prove(ranks, CASES, 598, 60, observe_with_rows)
    # The embedding is on every rank, so the ranks together hold it more than once.
    wrong = {case: verdict for case, verdict in found.items() if verdict.status != KEPT}
    assert set(wrong) <= {"memory"}, found


ROWS, WIDTH = 2400, 64  # an embedding of which rows travel


def eighths(shape, *seed):
    """Numbers of few bits, so that their sums are exact."""
    generator = torch.Generator().manual_seed(sum(part * 1000**place for place, part in enumerate(seed)))
    return torch.randint(-8, 9, shape, generator=generator) / 8


class Layer(nn.Module):
    """A part of the loss that is linear in its weights."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(128, 128)), nn.Parameter(torch.randn(128))

    def forward(self, *seed):
        return sum((p * eighths(p.shape, *seed)).sum() for p in self.parameters())


class Exact(nn.Module):
    """A loss whose gradients are eighths for any weights."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(ROWS, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, ids, step, rank):
        loss = (self.words(ids) * eighths((*ids.shape, 1), step, rank, 9)).sum()
        return (loss + sum(layer(step, rank, place) for place, layer in enumerate(self.layers)),)


def bits_of(comm, name, rate):
    """On a rank: digests of the weights after six steps of AdamW."""
    model = Exact()
    strategy = get_strategy(name)(comm, False, SyncOptions(bucket_mb=0.1, first_bucket_mb=0.1), "fp32")
    module = strategy.attach(model, lambda named: torch.optim.AdamW([p for _, p in named], lr=rate, fused=True))

    def loss_of(module, rank, step, micro):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(0, 300 * (step + 1), (4, 8), generator=generator)
        return module(ids=ids, step=step, rank=rank)[0]

    for step in range(6):
        step_by(strategy, module, comm, step, loss_of)
    strategy.settle()
    found = {name: digest(p.data) for name, p in model.named_parameters()}
    strategy.detach()
    return found


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rate", [1.0, 1e-3])
def test_with_exact_sums_weights_equal_ddp_bit_for_bit(ranks, rate):
    """With rounded sums they differ: AdamW steps by the learning rate even for a gradient of rounding errors."""
    ddp, zero1, sparse = run_each(ranks, bits_of, ("ddp", "zero1", NAME), rate)
    assert sparse == zero1 == ddp
