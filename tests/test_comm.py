"""What each collective does, and the bytes that the ledger enters for it."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from worlds import run_ranks

from cos598d.comm.gloo import broadcast_bytes
from cos598d.comm.ledger import Ledger, Row, Totals
from cos598d.comm.watched import watched
from cos598d.records.conventions import GRADIENTS, PARAMETERS
from cos598d.records.figures import summarize_seconds


@pytest.mark.parametrize("ranks", range(2, 10))
def test_a_broadcast_tree_sends_each_rank_one_copy(ranks):
    moved = [broadcast_bytes(1, ranks, distance) for distance in range(ranks)]
    assert sum(sent for sent, _ in moved) == sum(received for _, received in moved) == ranks - 1
    assert moved[0][0] == (ranks - 1).bit_length()


def use_all(comm):
    """On each of three ranks: whether one call of each collective is right, and the ledger's rows."""
    mine = torch.full((3, 5), float(comm.rank + 1))
    comm.all_reduce(mine, "sum")
    right = [bool((mine == 1 + 2 + 3).all())]
    tensor = torch.full((4,), float(comm.rank))
    comm.broadcast(tensor, "root's", root=1)
    right.append(bool((tensor == 1).all()))
    parts = comm.gather(torch.full((2,), float(comm.rank)), "parts")
    right.append((parts and [part[0].item() for part in parts]) == (None if comm.rank else [0.0, 1.0, 2.0]))
    landing = torch.zeros(2)
    comm.scatter(landing, [torch.full((2,), 10.0 + r) for r in range(comm.world_size)] if comm.rank == 0 else None, "s")
    right.append(bool((landing == 10 + comm.rank).all()))
    call = comm.all_reduce(torch.ones(1), "later", async_op=True)
    before = len(comm.ledger.rows)
    call.wait()
    call.wait()
    right.append(len(comm.ledger.rows) == before + 1)
    rows = [[r.op, r.tensor, list(r.shape), r.payload_bytes, r.bytes_sent, r.bytes_received] for r in comm.ledger.rows]
    return [all(right), rows]


def test_collectives_are_right_and_each_call_is_one_row_of_its_bytes():
    answers = run_ranks(3, use_all)
    assert [right for right, _ in answers] == [True] * 3
    assert answers[0][1] == [
        ["all_reduce", "sum", [3, 5], 60, 80, 80],
        ["broadcast", "root's", [4], 16, 0, 16],
        ["gather", "parts", [2], 8, 0, 16],
        ["scatter", "s", [2], 8, 16, 0],
        ["all_reduce", "later", [1], 4, 5, 5],
    ]
    assert answers[1][1][1:4] == [
        ["broadcast", "root's", [4], 16, 32, 0],
        ["gather", "parts", [2], 8, 8, 0],
        ["scatter", "s", [2], 8, 0, 8],
    ]


def watch(comm):
    """On a rank: the rows of calls by the communicator and by torch itself, inside and outside of watchers."""
    comm.ledger = Ledger()
    parts = [torch.zeros(5) for _ in range(comm.world_size)]
    with watched(comm):
        comm.all_reduce(torch.ones(2), "ours")
        dist.all_reduce(torch.ones(3))
        dist.all_gather(parts, torch.ones(5))
        with watched(comm, "state"):
            dist.broadcast(torch.ones(7), 1)
        dist.all_gather_object([None] * comm.world_size, comm.rank)
        dist.barrier()
    dist.all_reduce(torch.ones(9))
    return [[r.op, r.purpose, r.tensor, r.payload_bytes, r.bytes_sent] for r in comm.ledger.rows]


def test_a_watcher_enters_only_the_calls_that_torch_makes_within_it():
    rows = run_ranks(3, watch)[1]
    assert rows[:4] == [
        ["all_reduce", GRADIENTS, "ours", 8, 11],
        ["all_reduce", GRADIENTS, "all_reduce 1", 12, 16],
        ["all_gather", "parameters", "all_gather 2", 20, 40],
        ["broadcast", "state", "broadcast 3", 28, 56],
    ]
    assert {row[0] for row in rows[4:]} == {"all_gather"}, "torch makes a gather of objects of several"
    assert len(rows) == 6


def test_totals_sum_gradient_calls_by_iteration_and_count_a_tensor_once(tmp_path):
    def row(iteration, tensor, purpose=GRADIENTS, op="all_reduce"):
        return Row(iteration, purpose, op, tensor, (1,), "float32", 4, 6, 5, 0.1)

    with (tmp_path / "ledger").open("w+") as output:
        ledger = Ledger(output)
        for entry in (row(1, "a"), row(1, "b"), row(1, "a", op="scatter"), row(1, "loss", "loss")):
            ledger.enter(entry)
        ledger.flush()
        assert output.tell() > 0
        ledger.enter(row(2, "a"))
        assert ledger.totals_by_iteration() == {1: Totals(3, 2, 8, 18, 15), 2: Totals(1, 1, 4, 6, 5)}


class Lines(list):
    def writelines(self, lines):
        self.extend(lines)


def test_a_late_call_is_added_to_the_totals_of_its_iteration():
    """The weights of the last step arrive when the model is evaluated."""
    ledger = Ledger(Lines())
    ledger.begin(1, 0.0)
    row = Row(1, GRADIENTS, "reduce_scatter", "bucket 0", (4,), "float32", 16, 12, 12, 0.1, 3)
    ledger.enter(row)
    ledger.flush()
    ledger.enter(replace(row, purpose=PARAMETERS, op="all_gather"))
    for _ in range(2):
        assert ledger.totals_by_iteration()[1].bytes_sent == 24
        assert ledger.totals_by_iteration()[1].calls == 2
        ledger.flush()


def test_mean_seconds_exclude_the_two_warm_up_iterations():
    summary = summarize_seconds([9.0, 8.0, 1.0, 2.0, 3.0])
    assert (summary["first"], summary["counted"], summary["mean"], summary["median"]) == (9.0, 3, 2.0, 2.0)
    low, high = summary["interval_95"]
    # Student's t for 2 degrees of freedom is 4.303; the standard error is 1 / sqrt(3).
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3)
    assert summarize_seconds([9.0, 8.0])["mean"] is None
    assert summarize_seconds([9.0, 8.0, 1.0])["interval_95"] is None
