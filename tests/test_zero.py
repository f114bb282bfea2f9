"""ZeRO against one process: AdamW, 16 bits, bytes and memory. Mutants are planted where their algorithm is."""

import functools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import world
from sync_cases import SHARDED, SINGLE, adamw, make_model, options_of, sgd, train, weights_of

from cos598d.comm.ledger import Ledger
from cos598d.memory import held
from cos598d.parallel import parallelize
from cos598d.zero import collectives, unit, zero1

# Beside those of test_parity.py: how it is trained, and within what the weights are those of one process.
WAYS = {
    "adamw": ({"micro_batches": 2, "clip": 0.05}, 1e-6),
    "bf16": ({"precision": torch.bfloat16}, 5e-3),
    "fp16": ({"precision": torch.float16}, 5e-3),
}
# Each way on one number of ranks; on the others it is long.
EACH_RUN = [("adamw", 4), ("bf16", 3), ("fp16", 2)]
EACH_RUN += [
    pytest.param(way, ranks, marks=pytest.mark.long)
    for way in WAYS
    for ranks in (2, 3, 4)
    if (way, ranks) not in EACH_RUN
]
LATE = ("zero1", "sparse_zero1")  # with gather_in_forward


def _without_last_part(right):
    def start(sync, unit):
        unit.gradients.view(sync.ranks, -1)[-1] = 0
        return right(sync, unit)

    return start


def _first_part_to_all(right):
    def start(sync, unit):
        parts = unit.gradients.view(sync.ranks, -1)
        parts.copy_(parts[0].clone().expand_as(parts))
        return right(sync, unit)

    return start


def _times(factor):
    def average_part(right):
        return lambda sync, unit: right(sync, unit) * factor(sync.ranks)

    return average_part


def _of_this_rank(right):
    def clip(sync, max_norm):
        with patch.object(zero1.dist, "all_reduce", lambda *_, **__: None):
            return right(sync, max_norm)

    return clip


def _to_neighbour(right):
    return lambda tensor, to, *rest: right(tensor.flip(0), to, *rest)


def _dropping(right):
    def make_room(self, parameter):
        right(self, parameter)
        parameter.grad = None

    return make_room


# A fault of the algorithm, and what it is planted in. Each has to change the weights.
MUTANTS = {
    "the sum is not divided": (zero1.Zero1, "average_part", _times(lambda ranks: ranks)),
    "it is divided by one rank less": (zero1.Zero1, "average_part", _times(lambda ranks: ranks / (ranks - 1))),
    "a part is not sent": (zero1.Zero1, "start_parts", _without_last_part),
    "the weights are not gathered": (zero1, "start_all_gather", lambda right: lambda *_: lambda: None),
    "the first rank's part is everyone's": (zero1.Zero1, "start_parts", _first_part_to_all),
    "a part lands in its neighbour's place": (collectives.dist, "isend", _to_neighbour),
    "the norm is only this rank's": (zero1.Zero1, "clip", _of_this_rank),
    "what was added in no_sync is lost": (unit.Piece, "make_room", _dropping),
}  # fmt: skip
CLIP = {"the norm is only this rank's": 0.05}  # elsewhere a clip would hide a wrong divisor


def one_process(make=sgd, **how):
    model = make_model(SINGLE)
    train(model, make(model.parameters()), range(4), **how)
    return weights_of(model)


def trained(sync, make=sgd, options=None, **how):
    """The weights after four steps, and the bytes of gradients and weights that this rank sent in the last one."""
    ledger = Ledger()
    with ledger:
        model, optimizer = parallelize(
            make_model(SINGLE, seed=dist.get_rank()), make, sync, ledger=ledger, **options_of(sync, **options or {})
        )
        train(model, optimizer, range(3), **how)
        ledger.begin(1)
        train(model, optimizer, range(3, 4), **how)
        ledger.begin(2)
        model.settle()
        rows = [row for row in ledger.rows if row.iteration == 1 and row.purpose in ("gradients", "parameters")]
        found = {"weights": weights_of(model), "sent": sum(row.bytes_sent for row in rows)}
        model.detach()
    return found


def in_micro_batches():
    return {sync: trained(sync, micro_batches=3) for sync in SHARDED}


def gathered_in_forward():
    return {sync: trained(sync, options={"gather_in_forward": True}, micro_batches=3) for sync in LATE}


def in_way(way):
    how, make = WAYS[way][0], adamw if way == "adamw" else sgd
    return {sync: trained(sync, make, **how) for sync in SHARDED}


def mutated():
    found = {}
    for name, (where, word, change) in MUTANTS.items():
        with patch.object(where, word, change(getattr(where, word))):
            found[name] = trained("zero1", micro_batches=2, clip=CLIP.get(name, 0.0))
    return found


def held_by():
    """Bytes just before a step, by sync and category."""
    found = {}
    for sync in ("bucketed", *SHARDED):
        model, optimizer = parallelize(make_model(SINGLE, seed=dist.get_rank()), adamw, sync, **options_of(sync))
        train(model, optimizer, range(2), each=lambda sync=sync, model=model: found.update({sync: held(model)}))
        model.detach()
    return found


@pytest.fixture(scope="module")
def found_on():
    """found_on(ranks, function, ...) -> what it returns on each of so many ranks, once."""
    with world(4) as started:
        yield functools.cache(lambda ranks, function, *words: started.run(function, *words, count=ranks))


@pytest.mark.parametrize(("way", "ranks"), EACH_RUN)
def test_n_ranks_compute_what_one_process_computes(found_on, way, ranks):
    """Every rank has the same bits."""
    how, within = WAYS[way]
    weights = one_process(adamw if way == "adamw" else sgd, **how)
    for sync in SHARDED:
        ours = [of_rank[sync]["weights"] for of_rank in found_on(ranks, in_way, way)]
        assert (ours[0] - weights).abs().max() < within, sync
        assert all(torch.equal(one, ours[0]) for one in ours), sync


def test_weights_that_travel_in_the_next_forward_are_the_same(found_on):
    for late, right in zip(found_on(3, gathered_in_forward), found_on(3, in_micro_batches), strict=True):
        assert all(torch.equal(late[sync]["weights"], right[sync]["weights"]) for sync in LATE)


def bytes_of(parameters):
    return sum(p.numel() * p.element_size() for p in parameters)


@pytest.mark.parametrize("ranks", [3, 4, pytest.param(2, marks=pytest.mark.long)])
def test_bytes_are_the_textbooks(found_on, ranks):
    """(n-1)/n S for each reduce-scatter and each all-gather, padding apart."""
    net = make_model(SINGLE)
    size = bytes_of(p for p in net.parameters() if p.requires_grad)
    table, tied = bytes_of(net.table.parameters()), bytes_of(net.tied.parameters())
    part, micro = (ranks - 1) / ranks, 3
    expected = {
        "zero1": 2 * part * size,
        "zero2": (micro + 1) * part * size,
        # Looked-up and tied weights are gathered once in a micro-batch, all others twice.
        "zero3": micro * part * (3 * size - table - tied - bytes_of([net.scale, *net.never.parameters()])),
        "shared_weights": 0,
    }
    for of_rank in found_on(ranks, in_micro_batches):
        for sync, sent in expected.items():
            assert of_rank[sync]["sent"] == pytest.approx(sent, rel=0.01), sync
        rows = of_rank["sparse_zero1"]["sent"] - 2 * part * (size - table)
        assert 0 < rows < 30 * (8 * 4 + 8) * (ranks - 1)  # at most the rows of its own batch, to every other rank


def test_memory_falls_as_the_stage_says(found_on):
    net, ranks = make_model(SINGLE), 4
    size = bytes_of(p for p in net.parameters() if p.requires_grad and p is not net.empty)
    fixed = bytes_of(net.frozen.parameters())
    for found in found_on(ranks, held_by):
        for sync in ("zero1", "zero2", "zero3", "shared_weights"):
            assert found[sync]["optimizer"] == pytest.approx(found["bucketed"]["optimizer"] / ranks, rel=0.05), sync
        assert found["zero1"]["gradients"] == pytest.approx(size, rel=0.05)
        assert found["zero2"]["gradients"] == pytest.approx(size / ranks, rel=0.05)
        assert found["zero2"]["parameters"] == pytest.approx(size + fixed, rel=0.05)
        assert found["zero3"]["parameters"] == pytest.approx(size / ranks + fixed, rel=0.05)
        assert found["zero3"]["gradients"] == pytest.approx(size / ranks, rel=0.05)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_zero_is_caught(found_on, mutant):
    """Each planted fault changes the weights by far more than the parity test accepts."""
    weights = one_process(micro_batches=2, clip=CLIP.get(mutant, 0.0))
    assert max((of_rank[mutant]["weights"] - weights).abs().max() for of_rank in found_on(3, mutated)) > 1e-4
