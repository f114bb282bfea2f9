"""Streaming DiLoCo makes the steps of its formula, sends the bytes of its formula, and resumes from a saved state."""

import pytest
import torch
from torch import nn
from worlds import run_each, run_ranks

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
        descend(model)
        sync.after_step()


def descend(model):
    with torch.no_grad():
        for p in model.parameters():
            p -= RATE * p.grad


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(ranks, options, steps):
    """What each rank holds after so many steps, computed with all ranks' weights in one process."""
    models = [model_of_rank_0() for _ in range(ranks)]
    parameters = list(models[0].parameters())
    fragments = cut_in_rows(parameters, [rows_of(p.shape) for p in parameters], options["fragments"])
    numbers = torch.arange(len(flat(models[0]))).split([p.numel() for p in parameters])
    rows = [each.view(rows_of(p.shape), -1) for each, p in zip(numbers, parameters, strict=True)]
    places = [torch.cat([rows[cut.place][cut.first : cut.end].flatten() for cut in cuts]) for cuts in fragments]
    agreed, momentum, away = flat(models[0]), torch.zeros(len(flat(models[0]))), None
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, rank, step - 1).backward()
            descend(model)
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


def distance(comm, options, steps):
    sync, _, model = train(comm, options, steps)
    sync.detach()
    return (flat(model) - by_hand(comm.world_size, options, steps)[comm.rank]).abs().max().item()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_steps_equal_those_of_one_process(ranks):
    for case, by_rank in zip(CASES, run_each(ranks, distance, CASES, 13), strict=True):
        assert max(by_rank) < 1e-6, case


def test_fragments_have_each_row_once_and_about_one_size():
    shapes = [(7, 100), (3,), (0, 5), (), (1000, 2), (1, 600)]
    tensors = [torch.zeros(shape) for shape in shapes]
    for count in (1, 2, 5, 9, 4000):
        fragments = cut_in_rows(tensors, [rows_of(shape) for shape in shapes], count)
        assert len(fragments) <= count
        for place, tensor in enumerate(tensors):
            own = [cut for cuts in fragments for cut in cuts if cut.place == place]
            rows = [row for cut in own for row in range(cut.first, cut.end)]
            assert rows == list(range(rows_of(tensor.shape) if tensor.numel() else 0))
        widths = [tensor.numel() // max(1, rows_of(tensor.shape)) for tensor in tensors]
        sizes = [sum(widths[cut.place] * cut.rows for cut in cuts) for cuts in fragments]
        assert sum(sizes) == sum(tensor.numel() for tensor in tensors)
        assert max(sizes) <= sum(sizes) / count + 600  # and a row of the widest


def bytes_of_rounds(comm, options):
    """On a rank: the bytes per step of two rounds of all fragments, counted and stated, and the same of settling."""
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


def with_codecs(fragments, *words):
    return [{"fragments": fragments, "sync_every": 2, "compress": word} for word in words]


def test_a_round_sends_the_bytes_of_the_formula_on_average():
    cases = with_codecs(4, None, "bf16", "int8", "topk:0.5", "powersgd:1")
    for case, by_rank in zip(cases, run_each(3, bytes_of_rounds, cases), strict=True):
        for sent, stated, calls, settled, settling in by_rank:
            assert sent == pytest.approx(stated, abs=1), case  # rounded to a byte
            assert calls >= 4, case
            assert settled == settling > 0, case


def leave_and_go_on(comm, options):
    """On a rank: the weights of a training that another sync resumed while a fragment was being sent, and of one
    without a break."""
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


def test_a_saved_training_resumes_to_the_last_bit_with_a_fragment_under_way():
    cases = with_codecs(3, None, "int8", "topk:0.3", "powersgd:1")
    for case, by_rank in zip(cases, run_each(2, leave_and_go_on, cases), strict=True):
        assert all(resumed == whole for resumed, whole in by_rank), case


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


def test_settled_ranks_hold_their_average():
    for off, alike, is_equal, apart in run_ranks(2, settle):
        assert off < 1e-6
        assert alike
        assert not is_equal, "later steps keep them apart"
        assert abs(apart) < 1e-5
