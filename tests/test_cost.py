"""Each sync's cost is exact to the byte, and collectives made of messages sum buffers of every size."""

import pytest
import torch
from torch import nn
from worlds import run_ranks

from cos598d.comm.ledger import Ledger
from cos598d.records.conventions import GRADIENTS
from cos598d.sync import SYNCS, get_sync
from cos598d.sync.base import GradientSync
from cos598d.sync.cost import Step
from cos598d.sync.estimate import Tensor
from cos598d.sync.halving_doubling import halving_doubling_all_reduce
from cos598d.sync.options import SyncOptions
from cos598d.sync.parts.ring import ring_all_reduce
from cos598d.sync.parts.segmented import make_scratch
from cos598d.sync.tree import relatives, tree_all_reduce

MESSAGES = ["ring", "halving_doubling", "tree"]
# Two average weights now and then, the other sends what a step's examples touch.
UNKNOWN_BEFORE = ["diloco", "local_sgd", "sparse_rows"]
# Sizes that no number of ranks from 2 to 5 divides, and buckets so small that there are several.
SIZES = (7, 5, 3)
SMALL_BUCKETS = SyncOptions(bucket_mb=100 / 2**20, first_bucket_mb=30 / 2**20)


def one_step(comm, name, options):
    """On a rank: calls, bytes sent and bytes received of one step's gradients by the ledger, and as expected."""
    model = nn.Sequential(nn.Linear(SIZES[0], SIZES[1]), nn.Tanh(), nn.Linear(SIZES[1], SIZES[2]))
    sync = get_sync(name)(comm, find_unused_parameters=False, options=options)
    module = sync.attach(model)
    comm.ledger = Ledger()
    module(torch.randn(2, SIZES[0])).sum().backward()
    sync.finish()
    rows = [row for row in comm.ledger.rows if row.purpose == GRADIENTS]
    sync.detach()
    tensors = [(p.numel(), p.element_size()) for p in model.parameters()]
    cost = type(sync).expected(tensors, comm.world_size, comm.rank, options)
    found = [len(rows), sum(row.bytes_sent for row in rows), sum(row.bytes_received for row in rows)]
    expected = [cost.calls, cost.bytes_sent, cost.bytes_received]
    if cost.calls is None:
        found[0] = None
    return [found, expected]


def all_steps(comm, names):
    steps = {name: one_step(comm, name, SyncOptions()) for name in names}
    if "bucketed" in names:
        steps["bucketed, small"] = one_step(comm, "bucketed", SMALL_BUCKETS)
    return steps


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_a_step_costs_what_the_sync_states_on_every_rank(ranks):
    names = [name for name in SYNCS if name not in UNKNOWN_BEFORE] if ranks < 5 else MESSAGES
    for rank, steps in enumerate(run_ranks(ranks, all_steps, names)):
        wrong = {name: step for name, step in steps.items() if step[0] != step[1]}
        assert not wrong, f"rank {rank}: found and expected {wrong}"
        if ranks == 1:
            assert all(found[1:] == [0, 0] for found, _ in steps.values()), steps
        elif ranks < 5:
            assert steps["bucketed, small"][0][0] > steps["bucketed"][0][0] > 0, "the small buckets are several"


def test_a_cost_that_depends_on_the_step_is_not_stated():
    unknown = [name for name in SYNCS if get_sync(name).expected([(35, 4), (5, 4)], 2, 0) is None]
    assert sorted(unknown) == UNKNOWN_BEFORE
    assert GradientSync.expected([(35, 4)], 2, 0) is None, "a class that states no calls promises nothing"


def test_rows_that_a_step_uses_cost_their_share_and_a_byte_per_row_of_the_table():
    embedding = Tensor("embeddings.weight", (10_000, 384), "float32", 10_000 * 384 * 4)
    dense = Tensor("layer.weight", (384, 384), "float32", 384 * 384 * 4)
    step = Step([embedding, dense], SyncOptions(), [[0], [1], [2], [3]], [dense, embedding], touched=0.25)
    bucket, rows = get_sync("sparse_rows").calls(step)
    assert ([*bucket.tensors], bucket.payload) == ([dense], dense.bytes)
    assert ([*rows.tensors], rows.gradient_bytes, rows.agreed) == ([embedding], embedding.bytes / 4, 10_000)
    assert rows.moved(4, 0) == (embedding.bytes * 3 // 8, embedding.bytes * 3 // 8)


@pytest.mark.parametrize("ranks", range(2, 18))
@pytest.mark.parametrize("name", MESSAGES)
def test_all_ranks_together_send_what_they_receive_and_no_more_than_needed(name, ranks):
    for elements in (0, 1, ranks - 1, ranks, 1000, 1001):
        costs = [get_sync(name).expected([(elements, 4)], ranks, rank) for rank in range(ranks)]
        sent, received = sum(cost.bytes_sent for cost in costs), sum(cost.bytes_received for cost in costs)
        assert sent == received
        # A buffer must leave every rank but one, in some sum, and reach every rank but one again: no way is cheaper.
        assert sent == 2 * (ranks - 1) * elements * 4, "every one of them moves the least there is, in all"


@pytest.mark.parametrize("ranks", range(1, 18))
def test_the_tree_is_connected_and_of_least_height(ranks):
    parents = {}
    for rank in range(ranks):
        for child in relatives(rank, ranks)[1]:
            assert child not in parents
            parents[child] = rank
    assert parents == {rank: relatives(rank, ranks)[0] for rank in range(1, ranks)}
    assert len(relatives(0, ranks)[1]) == (ranks - 1).bit_length()


def sum_raw_buffers(comm):
    """On a rank: which of the algorithms were wrong, for buffers longer and shorter than the world and a segment."""
    n, me, wrong = comm.world_size, comm.rank, []
    algorithms = {
        "ring": lambda call, buffer, scratch: ring_all_reduce(call, buffer, range(n), me, scratch),
        "halving_doubling": lambda call, buffer, scratch: halving_doubling_all_reduce(call, buffer, n, me, scratch),
        "tree": lambda call, buffer, scratch: tree_all_reduce(call, buffer, n, me, scratch),
    }
    for elements in (0, 1, 3, 5, 211):
        expected = sum(torch.arange(elements, dtype=torch.float64) * 10 + rank for rank in range(n))
        for name, algorithm in algorithms.items():
            for segment_bytes, in_flight in ((24, 1), (24, 3), (1 << 20, 2)):  # 24 bytes: three elements
                buffer = torch.arange(elements, dtype=torch.float64) * 10 + me
                scratch = make_scratch(buffer, segment_bytes, in_flight)
                with comm.composed(name, buffer, name) as call:
                    algorithm(call, buffer, scratch)
                if not torch.equal(buffer, expected):
                    wrong.append([name, elements, segment_bytes, in_flight])
    return wrong


def test_messages_sum_buffers_of_any_size_on_five_ranks():
    assert run_ranks(5, sum_raw_buffers) == [[]] * 5


def sum_among_some(comm):
    members = [3, 0, 2]
    buffer = torch.full((100,), 10.0**comm.rank)
    with comm.composed("ring", buffer, "some") as call:
        if comm.rank in members:
            ring_all_reduce(call, buffer, members, comm.rank, make_scratch(buffer, 40, 2))
    return [buffer.unique().tolist(), call.bytes_sent]


def test_a_ring_of_some_ranks_does_not_touch_the_others():
    answers = run_ranks(4, sum_among_some)
    assert [values for values, _ in answers] == [[1101.0], [10.0], [1101.0], [1101.0]]
    # Members in the order 3, 0, 2 have parts of 34, 33 and 33 elements: twice 100 less the two next ones' parts.
    assert [sent for _, sent in answers] == [133 * 4, 0, 133 * 4, 134 * 4]


def test_a_file_of_your_own_may_import_the_estimate_s_classes_from_cost():
    from cos598d.sync import estimate
    from cos598d.sync.cost import Buffers, Cost, Load, Tensor

    assert (Buffers, Cost, Load, Tensor) == (estimate.Buffers, estimate.Cost, estimate.Load, estimate.Tensor)
    with pytest.raises(ImportError):
        from cos598d.sync.cost import Nothing  # noqa: F401
