"""Rare cases in a user's script: nested contexts, retained graphs, unused parameters, odd tensors."""

import traceback

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import run_ranks

from cos598d.comm.ledger import Ledger
from cos598d.records.conventions import GRADIENTS
from cos598d.sync import get_sync
from cos598d.sync.codecs.int8 import BLOCK, SCALE_BYTES

RANKS, WORDS, WIDTH = 2, 5000, 64  # words of 1.2 MiB: sparse_rows sends rows of them


def attached(comm, name, model, **options):
    """An attached sync and its module, with an empty ledger."""
    sync = get_sync(name)(comm, options=get_sync(name).options_kind(**options))
    module = sync.attach(model)
    comm.ledger = Ledger()
    return sync, module


def payload(comm):
    return sum(row.payload_bytes for row in comm.ledger.rows if row.purpose == GRADIENTS)


def nested(comm, name):
    model = nn.Linear(4, 4)
    sync, module = attached(comm, name, model)
    calls = []
    with sync.no_sync():
        with sync.no_sync():
            module(torch.ones(1, 4)).sum().backward()
        module(torch.ones(1, 4)).sum().backward()
        calls.append(len(comm.ledger.rows) + len(sync._calls))  # finished and pending calls
    module(torch.full((1, 4), 1.0 + 2 * comm.rank)).sum().backward()
    sync.finish()
    found = [calls, model.weight.grad.unique().tolist()]
    sync.detach()
    return found


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, ids, by_keyword=False):
        return self.layer(self.embedding(input=ids) if by_keyword else self.embedding(ids)).sum()


class Scans(TorchDispatchMode):
    """Counts the comparisons of whole embeddings."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.ne.Scalar and args[0].numel() == WORDS * WIDTH
        return func(*args, **(kwargs or {}))


def scan(comm):
    """The scans of six steps in two parts, and of a seventh whose gradients are added to the sixth's."""
    model = Words()
    sync, module = attached(comm, "sparse_rows", model)
    counts = []
    for step in range(7):
        with Scans() as scans:
            if step < 6:
                model.zero_grad(set_to_none=True)
                with sync.no_sync():
                    module(torch.arange(step, step + 3)).backward()
            module(torch.arange(20, 24) + comm.rank).backward()
            sync.finish()
        counts.append(scans.count)
    rows = model.embedding.weight.grad.any(dim=1).nonzero().flatten().tolist()
    sync.detach()
    return [counts, rows]


def look_up(comm, how):
    """The rows with a gradient, their size in units of one lookup's, and the payload of one more step."""
    model = Words()
    sync, module = attached(comm, "sparse_rows", model)
    first, second = torch.arange(1, 4) + 10 * comm.rank, torch.arange(7, 9) + 10 * comm.rank
    losses = [module(first, how == "keyword")]
    if how == "both forwards first":
        losses.append(module(second))
    losses[0].backward(retain_graph=how == "again")
    sync.finish()
    if how == "again":
        model.zero_grad()
        losses[0].backward()
        sync.finish()
    if how == "both forwards first":
        losses[1].backward()
        sync.finish()
    gradient = model.embedding.weight.grad
    rows = gradient.any(dim=1).nonzero().flatten()
    sizes = (gradient[rows] / (model.layer.weight.sum(dim=0) / RANKS)).round(decimals=3).unique().tolist()
    model.zero_grad()
    module(first)  # its graph is dropped
    losses.append(module(second))  # while the old losses and their graphs are still held
    losses[-1].backward()
    sync.finish()
    model.zero_grad()
    comm.ledger = Ledger()
    module(second).backward()
    sync.finish()
    sync.detach()
    return [rows.tolist(), sizes, payload(comm)]


class Sometimes(nn.Module):
    """A parameter that is always used, and one that is not."""

    def __init__(self, shape):
        super().__init__()
        self.always, self.sometimes = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(shape))

    def forward(self, factors):
        return self.always.sum() * 0 + (0 if factors is None else (self.sometimes * factors).sum())


def hold_back(comm, name, word, factors):
    """What is missing of `factors` after steps, some of which do not use the parameter or are dropped."""
    model = Sometimes(factors.shape)
    sync, module = attached(comm, name, model, compress=word)
    total, nothing = torch.zeros_like(factors), torch.zeros_like(factors)
    for step, given in enumerate([factors, None, None, nothing, None, nothing, nothing, nothing]):
        model.zero_grad()
        sync.loss_scale = 2.0**step
        (module(given) * sync.loss_scale).backward()
        sync.finish()
        assert (model.sometimes.grad is None) == (given is None)
        if step == 2:
            sync.forget_step()
        elif given is not None:
            total += model.sometimes.grad / sync.loss_scale
    sync.detach()
    return (total - factors).abs().max().item()


def freeze(comm):
    """The payload, in elements, of each of three steps before and after one layer of three is frozen."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    sync, found = get_sync("ddp")(comm), []
    for trainable in (3, 2):
        model[0].requires_grad_(trainable == 3)
        module = sync.attach(model)
        for _ in range(3):
            comm.ledger = Ledger()
            module(torch.ones(1, 8)).sum().backward()
            sync.finish()
            found.append(payload(comm) / 4)
        sync.detach()
    return found


def leave(comm):
    """The gradient of a backward after detach, while the old module is still held."""
    model = nn.Linear(4, 4)
    sync, module = attached(comm, "ddp", model)
    module(torch.ones(1, 4)).sum().backward()
    sync.finish()
    sync.detach()
    model.zero_grad()
    with torch.no_grad():
        module(torch.ones(1, 4))  # asks nothing of the sync
    model(torch.full((1, 4), 1.0 + comm.rank)).sum().backward()
    return model.weight.grad.unique().tolist()


def odd(comm, word, dtype):
    """The error of a step with a matrix of rank 1, tensors without elements, and one of another dtype."""
    model = nn.ParameterDict({
        "matrix": torch.zeros(32, 32, dtype=dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "alone": torch.zeros(0, 3, 2, dtype=torch.float64),
    })  # fmt: skip
    sync, _ = attached(comm, "bucketed", model, compress=word)
    factors = torch.outer(torch.arange(1.0, 33), torch.arange(1.0, 33)).to(dtype) / 1024
    ((model["matrix"] * factors).sum() + model["empty"].sum() + model["alone"].sum()).backward()
    sync.finish()
    found = [(model["matrix"].grad - factors).abs().max().item(), payload(comm)]
    sync.detach()
    return found


VECTOR = torch.tensor([4.0, 3.0, 2.0, 1.0])
MATRIX = torch.outer(torch.ones(8), torch.arange(8.0)) + torch.outer(torch.arange(8.0), torch.ones(8))
CASES = {
    "nested, bucketed": (nested, "bucketed"),
    "nested, overlap": (nested, "overlap"),
    "scan": (scan,),
    "keyword": (look_up, "keyword"),
    "both forwards first": (look_up, "both forwards first"),
    "again": (look_up, "again"),
    "topk, bucketed": (hold_back, "bucketed", "topk:0.2", VECTOR),
    "topk, ring": (hold_back, "ring", "topk:0.2", VECTOR),
    "powersgd, bucketed": (hold_back, "bucketed", "powersgd:1", MATRIX),
    "freeze": (freeze,),
    "leave": (leave,),
    **{f"odd, {word}": (odd, word, torch.float32) for word in ("bf16", "int8", "topk:1", "powersgd:1")},
    "odd, powersgd:1 of bfloat16": (odd, "powersgd:1", torch.bfloat16),
}


def go_round(comm):
    """On a rank: the result of each case, or its traceback. Each raises on all ranks or on none."""
    found = {}
    for name, (case, *arguments) in CASES.items():
        try:
            found[name] = case(comm, *arguments)
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def found():
    """By case, the results of the ranks."""
    ranks = run_ranks(RANKS, go_round)
    return {name: [each[name] for each in ranks] for name in CASES}


@pytest.mark.parametrize("name", ["bucketed", "overlap"])
def test_an_inner_no_sync_does_not_end_the_outer_one(found, name):
    assert found[f"nested, {name}"] == [[[0], [4.0]]] * RANKS  # 1 + 1 + (1 + 3) / 2


def test_only_a_leftover_gradient_is_scanned_for_its_rows(found):
    assert found["scan"] == [[[0] * 6 + [1], [5, 6, 7, 20, 21, 22, 23, 24]]] * RANKS


ONE = [1, 2, 3, 11, 12, 13]
# Two rows of `second` per rank, and the layer.
ROWS_PAYLOAD = 4 * (2 * RANKS * WIDTH + 2 * WIDTH + 2)


@pytest.mark.parametrize(
    ("how", "rows"), [("keyword", ONE), ("again", ONE), ("both forwards first", sorted([*ONE, 7, 8, 17, 18]))]
)
def test_sent_rows_are_those_of_forwards_with_a_backward(found, how, rows):
    assert found[how] == [[rows, [1.0], ROWS_PAYLOAD]] * RANKS


@pytest.mark.parametrize("name", ["topk, bucketed", "topk, ring", "powersgd, bucketed"])
def test_error_feedback_outlasts_steps_without_the_parameter(found, name):
    assert max(found[name]) < 1e-4


def test_ddp_has_new_buckets_after_another_attach_and_none_after_detach(found):
    assert found["freeze"] == [[3 * 72] * 3 + [2 * 72] * 3] * RANKS
    assert found["leave"] == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("word", "bound"),
    [("bf16", 2**-7), ("int8", 2 / 127), ("topk:1", 0), ("powersgd:1", 1e-5), ("powersgd:1 of bfloat16", 0.05)],
)
def test_codecs_accept_empty_tensors_and_powersgd_accepts_bfloat16(found, word, bound):
    for error, size in found[f"odd, {word}"]:
        assert error <= bound
        # The ledger has the encoded bytes. Per rank: one block for 1,024 elements, and one for the empty bucket.
        assert word != "int8" or size == 2 * RANKS * (BLOCK + SCALE_BYTES)
