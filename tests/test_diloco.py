"""Streaming DiLoCo: it makes the steps that it states, sends what it says, and goes on from what it has saved."""

import pytest
import torch
from torch import nn
from worlds import run_ranks

from cos598d.comm.ledger import Ledger
from cos598d.records.conventions import GRADIENTS
from cos598d.strategies.formula import TrainingSpec, sent_by_replicas
from cos598d.strategies.replicas import digest
from cos598d.sync.diloco import DiLoCo, DiLoCoOptions
from cos598d.sync.parts.fragments import cut_in_rows, rows_of

RATE = 0.05


def model_of_rank_0():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))


def loss_of(module, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return module(torch.randn(5, 7, generator=generator)).square().mean()


def train(comm, options, steps, sync=None, first=0):
    """On a rank: the sync, attached, after so many steps of SGD, and the model."""
    model = model_of_rank_0()
    sync = sync or DiLoCo(comm, False, DiLoCoOptions(**options))
    module = sync.attach(model)
    go_on(comm, sync, module, model, range(first, first + steps))
    return sync, module, model


def go_on(comm, sync, module, model, steps):
    for step in steps:
        model.zero_grad(set_to_none=True)
        loss_of(module, comm.rank, step).backward()
        sync.finish()
        with torch.no_grad():
            for p in model.parameters():
                p -= RATE * p.grad
        sync.after_step()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(ranks, options, steps):
    """What each rank holds after so many steps, by a program that has all ranks' weights at hand."""
    models = [model_of_rank_0() for _ in range(ranks)]
    parameters = list(models[0].parameters())
    fragments = cut_in_rows(parameters, [rows_of(p.shape) for p in parameters], options["fragments"])
    starts = [sum(p.numel() for p in parameters[:place]) for place in range(len(parameters))]
    places = [
        torch.cat(
            [
                starts[cut.place]
                + torch.arange(parameters[cut.place].numel())
                .view(rows_of(parameters[cut.place].shape), -1)[cut.first : cut.end]
                .flatten()
                for cut in cuts
            ]
        )
        for cuts in fragments
    ]
    agreed, momentum, away = flat(models[0]), torch.zeros(len(flat(models[0]))), None
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, rank, step - 1).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= RATE * p.grad
        if step % options["sync_every"]:
            continue
        weights = [flat(model) for model in models]
        if away is not None:
            where, before = away
            average = (agreed[where] - torch.stack(before)).mean(dim=0)
            momentum[where] = options["outer_momentum"] * momentum[where] + average
            nesterov = average + options["outer_momentum"] * momentum[where]
            agreed[where] = agreed[where] - options["outer_learning_rate"] * nesterov
            for rank in range(ranks):
                weights[rank][where] += agreed[where] - before[rank]
        where = places[step // options["sync_every"] % options["fragments"]]
        away = where, [each[where] for each in weights]
        for model, each in zip(models, weights, strict=True):
            nn.utils.vector_to_parameters(each, model.parameters())
    return [flat(model) for model in models]


GENERAL = {"fragments": 3, "sync_every": 2, "outer_learning_rate": 0.7, "outer_momentum": 0.9}
CASES = [
    GENERAL,
    GENERAL | {"fragments": 5, "sync_every": 1, "outer_momentum": 0.0},
    GENERAL | {"fragments": 1, "sync_every": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0},
]


def distances(comm, steps):
    found = []
    for options in CASES:
        sync, _, model = train(comm, options, steps)
        found.append((flat(model) - by_hand(comm.world_size, options, steps)[comm.rank]).abs().max().item())
        sync.detach()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_makes_the_steps_that_it_states(ranks):
    for rank in run_ranks(ranks, distances, 13):
        assert max(rank) < 1e-6


def without_an_outer_step(comm):
    """The last case of CASES: the average of the weights a step before, and the rank's own last step."""
    models = [train(comm, CASES[2], steps)[2] for steps in (4, 5)]
    every = torch.tensor(comm.exchange(flat(models[0]).tolist()))
    return [flat(models[0]).tolist(), flat(models[1]).tolist(), every.std(dim=0).max().item()]


def test_ranks_stay_within_a_step_or_two_of_each_other():
    answers = run_ranks(2, without_an_outer_step)
    (first, _, apart), (other, _, _) = answers
    assert first != other, "each has learnt from its own examples since"
    assert 0 < apart < 0.05


def test_rows_are_cut_into_fragments_of_about_one_size_each_row_once():
    shapes = [(7, 100), (3,), (0, 5), (), (1000, 2), (1, 600)]
    tensors = [torch.zeros(shape) for shape in shapes]
    for count in (1, 2, 5, 9, 4000):
        fragments = cut_in_rows(tensors, [rows_of(shape) for shape in shapes], count)
        assert len(fragments) <= count
        for place, tensor in enumerate(tensors):
            rows = [
                row for cuts in fragments for cut in cuts if cut.place == place for row in range(cut.first, cut.end)
            ]
            assert rows == list(range(rows_of(tensor.shape) if tensor.numel() else 0))
        sizes = [
            sum(tensors[cut.place].numel() // rows_of(shapes[cut.place]) * cut.rows for cut in cuts)
            for cuts in fragments
        ]
        assert sum(sizes) == sum(tensor.numel() for tensor in tensors)
        assert max(sizes) <= sum(sizes) / count + 600  # and a row of the widest


def bytes_of_rounds(comm, options):
    """On a rank: bytes sent in two rounds of all fragments, as counted and as stated, and of settling."""
    sync, module, model = train(comm, options, 0)
    comm.ledger = Ledger()
    rounds = 2 * options["fragments"] * options.get("sync_every", 1)
    go_on(comm, sync, module, model, range(rounds))
    sync.own_state()  # waits for what is under way
    stated = sent_by_replicas(TrainingSpec(model, comm.world_size, comm.rank, 0), sync)
    rows = [row for row in comm.ledger.rows if row.purpose == GRADIENTS]
    calls = len({row.tensor for row in rows})
    comm.ledger = Ledger()
    sync.settle()
    settled = sum(row.bytes_sent for row in comm.ledger.rows)
    sync.detach()
    return [sum(row.bytes_sent for row in rows) / rounds, stated.synchronizing, calls, settled, stated.settling]


@pytest.mark.parametrize("word", [None, "bf16", "int8", "topk:0.5", "powersgd:1"])
def test_it_sends_what_its_formula_says_in_the_mean_of_a_round(word):
    options = {"fragments": 4, "sync_every": 2, "compress": word}
    for sent, stated, calls, settled, settling in run_ranks(3, bytes_of_rounds, options):
        assert sent == pytest.approx(stated, abs=1), "rounded to a byte"
        assert calls >= 4
        assert settled == settling > 0


def leave_and_go_on(comm, options):
    """On a rank: the weights of a training that was left with a fragment under way and went on in another sync, and of
    one that nobody asked."""
    sync, module, model = train(comm, options, 9)
    facts, tensors = sync.own_state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    weights = flat(model)
    sync.detach()
    other = DiLoCo(comm, False, DiLoCoOptions(**options))
    module = other.attach(model)
    nn.utils.vector_to_parameters(weights, model.parameters())
    other.load_own_state(facts, tensors)
    go_on(comm, other, module, model, range(9, 17))
    return [digest(flat(model)), digest(flat(train(comm, options, 17)[2]))]


@pytest.mark.parametrize("word", [None, "int8", "topk:0.3", "powersgd:1"])
def test_it_goes_on_to_the_last_bit_with_what_was_under_way(word):
    for found, alone in run_ranks(2, leave_and_go_on, {"fragments": 3, "sync_every": 2, "compress": word}):
        assert found == alone


def settle(comm):
    sync, module, model = train(comm, GENERAL, 7)
    before = flat(model)
    sync.settle()
    every = comm.exchange([before.tolist(), flat(model).tolist()])
    mean = torch.tensor([one for one, _ in every]).mean(dim=0)
    alike = all(after == every[0][1] for _, after in every)
    agreed = torch.cat([fragment.agreed for fragment in sync._every()])
    go_on(comm, sync, module, model, range(7, 20))
    return [
        (torch.tensor(every[0][1]) - mean).abs().max().item(),
        alike,
        sync.replicas_equal,
        agreed.norm().item() - mean.norm().item(),
    ]


def test_settled_ranks_hold_their_average_and_agree_on_it():
    for off, alike, is_equal, apart in run_ranks(2, settle):
        assert off < 1e-6
        assert alike
        assert not is_equal, "other steps have followed"
        assert abs(apart) < 1e-5
