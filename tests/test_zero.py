"""ZeRO against one process: weights, losses, bytes and memory. Mutants are planted where their algorithm is."""

import functools
from unittest.mock import patch

import pytest
import torch
from ranks import on_ranks
from zero_cases import ROWS, Net, adamw, batch, options_of, sgd, train, trained, weights_of

from cos598d.parallel import parallelize
from cos598d.zero import collectives, zero1

SHARDED = ("zero1", "zero2", "zero3", "sparse_zero1", "shared_weights")
# name -> the optimizer and how it is trained
WAYS = {
    "sgd": (sgd, {}),
    "micro-batches, clip": (sgd, {"micro": 3, "clip": 0.3}),
    "adamw, clip": (adamw, {"clip": 0.3}),
    "adamw, micro-batches, a layer left out": (adamw, {"micro": 2, "skips": True}),
}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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


def _to_neighbour(right):
    return lambda tensor, to, *rest: right(tensor.flip(0), to, *rest)


def _dropping(right):
    def make_room(self, parameter):
        right(self, parameter)
        parameter.grad = None

    return make_room


# A fault of the algorithm, and what it is planted in. Each has to change the weights.
MUTANTS = {
    "the sum is not divided": (zero1, "average_of", lambda right: lambda parts: right(parts) * len(parts)),
    "it is divided by one rank less": (
        zero1, "average_of", lambda right: lambda parts: right(parts) * len(parts) / max(1, len(parts) - 1),
    ),
    "a part is not sent": (zero1, "start_reduce_scatter", _without_last_part),
    "the weights are not gathered": (zero1, "start_all_gather", lambda right: lambda *_: lambda: None),
    "the first rank's part is everyone's": (zero1, "start_reduce_scatter", _first_part_to_all),
    "a part lands in its neighbour's place": (collectives.dist, "isend", _to_neighbour),
    "the norm is only this rank's": (zero1.Zero1, "sum_over_ranks", lambda right: lambda self, squares: squares),
    "what was added in no_sync is lost": (zero1.Zero1, "make_room", _dropping),
}  # fmt: skip
CLIP = {"the norm is only this rank's": 0.3}  # elsewhere a clip would hide a wrong divisor


def one_process(make, **how):
    net = Net()
    losses = train(net, make(net.parameters()), 0, 1, range(4), **how)
    return losses, weights_of(net)


def matrix(rank, ranks):
    """Every sync in every way, on so many ranks."""
    found = {}
    for sync in SHARDED:
        for way, (make, how) in WAYS.items():
            found[f"{sync}, {way}"] = trained(rank, ranks, sync, make, {}, **how)
    for sync in ("zero1", "sparse_zero1"):
        found[f"{sync}, gather_in_forward"] = trained(rank, ranks, sync, sgd, {"gather_in_forward": True})
    if ranks == 2:
        for name, precision in HALVES.items():
            for sync in SHARDED:
                found[f"{sync}, {name}"] = trained(rank, ranks, sync, sgd, {}, precision=precision)
    if ranks == 3:
        for name, (where, word, change) in MUTANTS.items():
            with patch.object(where, word, change(getattr(where, word))):
                found[name] = trained(rank, ranks, "zero1", sgd, {}, micro=2, clip=CLIP.get(name, 0.0))
    found["held"] = {sync: held(rank, sync) for sync in ("bucketed", *SHARDED)}
    return found


def held(rank, sync):
    """Bytes just before a step: of weights, gradients and the optimizer's state; every piece of memory once."""
    net, found = Net(rank), {}
    model, optimizer = parallelize(net, adamw, sync, **options_of(sync))

    def count():
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in stepped if p.grad is not None]
        state = [value for of in optimizer.state.values() for value in of.values()]
        for name, tensors in ("weights", [*net.parameters(), *stepped]), ("gradients", gradients), ("state", state):
            pieces = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
            found[name] = sum(pieces.values())

    train(model, optimizer, rank, torch.distributed.get_world_size(), range(2), each=count)
    model.detach()
    return found


@functools.cache
def found_on(ranks):
    return on_ranks(ranks, matrix)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("sync", SHARDED)
def test_n_ranks_compute_what_one_process_computes(sync, ranks):
    """Losses and weights are those of one process on the global batch, and every rank has the same bits.

    When step() returns the weights are whole, except under zero3. Those that travel in the next forward are the same.
    """
    found = found_on(ranks)
    for way, (make, how) in WAYS.items():
        losses, weights = one_process(make, **how) if not how.get("skips") else _skipped(ranks, make, **how)
        ours = [of_rank[f"{sync}, {way}"] for of_rank in found]
        assert ours[0]["losses"] == pytest.approx(losses, rel=1e-6), way
        assert (ours[0]["weights"] - weights).abs().max() < 1e-6, way
        assert all(torch.equal(one["weights"], ours[0]["weights"]) for one in ours), way
        assert sync == "zero3" or all(torch.equal(one["after step"], one["weights"]) for one in ours), way
    late = f"{sync}, gather_in_forward"
    assert all(torch.equal(one[late]["weights"], one[f"{sync}, sgd"]["weights"]) for one in found if late in one)


@functools.cache
def _skipped(ranks, make, micro, skips):
    """One process, of whose global batch the rows of rank 1 go without the layer."""
    net = Net()
    optimizer = make(net.parameters())
    losses = []
    for step in range(4):
        total = 0.0
        for place in range(micro):
            for rank in range(ranks):
                ids, labels = (part.tensor_split(ranks)[rank] for part in batch(step, place))
                loss = net(ids, labels, rank) * len(ids) / ROWS / micro
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, weights_of(net)


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("sync", SHARDED)
def test_half_precision_is_autocast_of_one_process(sync, precision):
    losses, weights = one_process(sgd, precision=HALVES[precision])
    for of_rank in found_on(2):
        ours = of_rank[f"{sync}, {precision}"]
        assert ours["losses"] == pytest.approx(losses, rel=5e-3)
        assert (ours["weights"] - weights).abs().max() < 5e-3


def bytes_of(parameters):
    return sum(p.numel() * p.element_size() for p in parameters)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_are_the_textbooks(ranks):
    """(n-1)/n S for each reduce-scatter and each all-gather, padding apart."""
    net = Net()
    size = bytes_of(p for p in net.parameters() if p.requires_grad)
    table, tied = bytes_of(net.words.parameters()), bytes_of(net.tokens.parameters())
    part, micro = (ranks - 1) / ranks, 3
    expected = {
        "zero1": 2 * part * size,
        "zero2": (micro + 1) * part * size,
        # Looked-up and tied weights are gathered once in a micro-batch, all others twice.
        "zero3": micro * part * (3 * size - table - tied - bytes_of([net.scale, *net.unused.parameters()])),
        "shared_weights": 0,
    }
    for of_rank in found_on(ranks):
        for sync, sent in expected.items():
            assert of_rank[f"{sync}, micro-batches, clip"]["sent"] == pytest.approx(sent, rel=0.01), sync
        rows = of_rank["sparse_zero1, sgd"]["sent"] - 2 * part * (size - table)
        assert 0 < rows < 48 * (64 * 4 + 8) * (ranks - 1)  # at most the rows of its own batch, to every other rank


def test_memory_falls_as_the_stage_says():
    net, ranks = Net(), 4
    size = bytes_of(p for p in net.parameters() if p.requires_grad and p is not net.empty)
    fixed = bytes_of(net.frozen.parameters())
    for of_rank in found_on(ranks):
        held_by = of_rank["held"]
        for sync in ("zero1", "zero2", "zero3", "shared_weights"):
            assert held_by[sync]["state"] == pytest.approx(held_by["bucketed"]["state"] / ranks, rel=0.05), sync
        assert held_by["zero1"]["gradients"] == pytest.approx(size, rel=0.05)
        assert held_by["zero2"]["gradients"] == pytest.approx(size / ranks, rel=0.05)
        assert held_by["zero2"]["weights"] == pytest.approx(size + fixed, rel=0.05)
        assert held_by["zero3"]["weights"] == pytest.approx(size / ranks + fixed, rel=0.05)
        assert held_by["zero3"]["gradients"] == pytest.approx(size / ranks, rel=0.05)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_zero_is_caught(mutant):
    """Each planted fault changes the weights by far more than the parity test accepts."""
    _, weights = one_process(sgd, micro=2, clip=CLIP.get(mutant, 0.0))
    assert max((of_rank[mutant]["weights"] - weights).abs().max() for of_rank in found_on(3)) > 1e-4
