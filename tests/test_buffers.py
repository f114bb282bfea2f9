"""After a sync settles, every rank has rank 0's buffers, such as BatchNorm's running statistics."""

import pytest
import torch
from torch import nn
from worlds import run_each, run_ranks

import cos598d
from cos598d.comm import dispatcher
from cos598d.comm.ledger import Ledger
from cos598d.records.conventions import BUFFERS, GRADIENTS
from cos598d.sync import SYNCS, get_sync
from cos598d.sync.options import SyncOptions

STEPS = 3


class Normed(nn.Module):
    """A layer under batch norm; a buffer of another dtype and shape that nothing changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.register_buffer("places", torch.arange(6).view(2, 3).T)  # not contiguous

    def forward(self, inputs):
        return self.norm(self.layer(inputs)).square().mean()


def train_normed(comm, name):
    """On a rank: the statistics and calls for buffers of three SGD steps in two parts, before and after settling."""
    model = Normed()
    sync = get_sync(name)(comm, find_unused_parameters=False, options=SyncOptions(sync_every=2))
    module = sync.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    comm.ledger = Ledger()
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(STEPS):
        with sync.no_sync():
            module(torch.randn(4, 6, generator=generator) + comm.rank).backward()
        module(torch.randn(4, 6, generator=generator) + comm.rank).backward()
        sync.finish()
        optimizer.step()
        optimizer.zero_grad()
        sync.after_step()
    before = model.norm.running_mean.tolist()
    calls = [row for row in comm.ledger.rows if row.purpose == BUFFERS]
    rows = [[row.op, row.tensor, row.payload_bytes, row.bytes_sent] for row in calls]
    comm.ledger = Ledger()
    sync.settle()
    settled = [row.payload_bytes for row in comm.ledger.rows if row.purpose == BUFFERS]
    after = [model.norm.running_mean.tolist(), model.norm.running_var.tolist(), model.norm.num_batches_tracked.item()]
    sync.detach()
    return {"before": before, "after": after, "rows": rows, "settled": settled, "places": model.places.tolist()}


@pytest.fixture(scope="module")
def answers():
    """By sync, the results of the ranks."""
    return dict(zip(SYNCS, run_each(3, train_normed, SYNCS), strict=True))


@pytest.mark.parametrize("name", [name for name in SYNCS if name != "none"])
def test_settled_statistics_are_those_of_rank_0(answers, name):
    of_rank_0 = answers[name][0]
    assert len({tuple(answer["before"]) for answer in answers[name]}) == 3, "nothing to settle"
    for answer in answers[name]:
        assert answer["after"] == of_rank_0["after"]
        assert answer["after"][0] == of_rank_0["before"]
        assert answer["after"][2] == 2 * STEPS
        assert answer["places"] == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("name", [name for name in SYNCS if name not in ("none", "local_sgd", "diloco", "ddp")])
def test_settled_statistics_are_those_of_ddp(answers, name):
    for found, wanted in zip(answers[name][0]["after"], answers["ddp"][0]["after"], strict=True):
        assert found == pytest.approx(wanted, abs=1e-6)


def test_buffers_are_sent_in_one_call_only_when_a_sync_settles(answers):
    size = 4 * 5 + 4 * 5 + 8 + 8 * 6
    for name in SYNCS:
        for answer in answers[name]:
            assert answer["settled"] == ([] if name == "none" else [size])
            assert not answer["rows"] or name == "ddp"


def test_ddp_s_broadcasts_of_buffers_are_entered_once_per_step(answers):
    for rank, answer in enumerate(answers["ddp"]):
        sends = {0: 2, 1: 0, 2: 0}[rank]  # of a tree of three
        step = [["broadcast", "buffers of int64", 56, sends * 56], ["broadcast", "buffers of float32", 40, sends * 40]]
        assert answer["rows"] == step * STEPS


class ManyStatistics(nn.Module):
    """A model whose buffers torch's DDP sends in several calls, if its limit for one call is small."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        for place in range(5):
            self.register_buffer(f"of{place}", torch.zeros(10))

    def forward(self, inputs):
        return self.layer(inputs).sum()


def send_large_buffers(comm):
    sync = get_sync("ddp")(comm, find_unused_parameters=False)
    module = sync.attach(ManyStatistics())
    module.broadcast_bucket_size = 80  # in place of 250 MiB
    comm.ledger = Ledger()
    for _ in range(2):
        module(torch.ones(2, 3)).backward()
        sync.finish()
    sync.detach()
    return [row.payload_bytes for row in comm.ledger.rows if row.purpose == BUFFERS]


def evaluate_between_steps(comm):
    sync = get_sync("ddp")(comm, find_unused_parameters=False)
    module = sync.attach(Normed())
    listeners = []
    batch = torch.randn(4, 6)
    for _ in range(2):
        module(batch).backward()
        sync.finish()
        with torch.no_grad():
            module(batch)
        listeners.append(len(dispatcher._listeners))
    loss = module(batch)
    with torch.no_grad():
        module(batch)  # between a forward and its backward
    loss.backward()
    comm.ledger = Ledger()
    sync.finish()
    sync.detach()
    return [listeners, [row.purpose for row in comm.ledger.rows if row.purpose == GRADIENTS]]


PLAIN = """
class Plain:
    def __init__(self, comm, find_unused_parameters=True):
        self.link = comm
    def attach(self, model):
        for name, p in model.named_parameters():
            self.link.broadcast(p.data, name)
        self.settle()
        return model
    def finish(self): pass
    def no_sync(self): pass
    def detach(self): pass
"""


def attach_and_settle(comm, name):
    model = Normed()
    model.norm.running_mean += comm.rank
    get_sync(name)(comm).attach(model)
    return model.norm.running_mean.tolist()


def settle_in_a_script(comm):
    """On a rank: how many statistics the ranks have before they settle, and whether rank 0's are everyone's after."""
    model = Normed()
    module = cos598d.data_parallel(model, sync="bucketed", find_unused_parameters=False)
    module(torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))).backward()
    before = model.norm.running_mean.tolist()
    module.settle()
    of_ranks, settled = comm.exchange(before), model.norm.running_mean.tolist()
    return [len({tuple(each) for each in of_ranks}), settled == of_ranks[0]]


def settle_without_buffers(comm):
    sync = get_sync("all_reduce")(comm)
    sync.attach(nn.Linear(2, 2))
    comm.ledger = Ledger()
    sync.settle()
    return len(comm.ledger.rows)


def small_cases(comm, plain):
    """On a rank: what each of the cases above gives. `plain` names the class of PLAIN."""
    return {
        "evaluation": evaluate_between_steps(comm),
        "large": send_large_buffers(comm),
        "plain": attach_and_settle(comm, plain),
        "script": settle_in_a_script(comm),
        "none": settle_without_buffers(comm),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "plain.py"
    path.write_text(PLAIN)
    return run_ranks(2, small_cases, f"{path}:Plain")


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("evaluation", [[0, 0], [GRADIENTS]]),  # leaves no listener, and a step keeps its own
        ("large", [80, 80, 40] * 2),  # each broadcast of DDP's is entered
        ("plain", [0.0] * 5),  # a class without our base may settle while it attaches
        ("script", [2, True]),
        ("none", 0),  # nothing is sent for a model without buffers
    ],
)
def test_small_cases(found, case, wanted):
    assert [each[case] for each in found] == [wanted] * 2
