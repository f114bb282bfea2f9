"""Every codec under every sync that sends buckets: what it averages, what it sends, and what it keeps for later."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from worlds import run_ranks

from cos598d.comm import hosts
from cos598d.comm.ledger import Ledger
from cos598d.config import RunConfig
from cos598d.errors import UsageError
from cos598d.records.conventions import GRADIENTS
from cos598d.strategies.formula import TrainingSpec, sent_in_call
from cos598d.strategies.replicas import digest
from cos598d.sync import SYNCS, get_sync
from cos598d.sync.cost import Step
from cos598d.sync.options import DEFAULTS, SyncOptions
from cos598d.sync.parts import embeddings
from cos598d.sync.parts.with_codec import WithCodec
from cos598d.tools.check import claims as conformance
from cos598d.tools.check import ranks as on_ranks
from cos598d.tools.check.claims.base import MakeSync
from cos598d.tools.check.judge import judge_claims
from cos598d.tools.check.spawn import run_world
from cos598d.tools.check.trace import trace_direct_calls
from cos598d.tools.check.verdict import PASSED

TAKERS = [name for name in SYNCS if issubclass(get_sync(name), WithCodec)]
WHOLE = ("topk:1", "powersgd:1000")  # forms in which nothing is left out
TO_THE_LAST_BIT = (
    *(conformance.averages_any_tensors, conformance.averages_many_steps),
    *(conformance.passes_overflow_on, conformance.goes_on_from_its_state, conformance.keeps_models_apart),
)
# Of long trainings, which are made with one sync: what a codec keeps from step to step is the same code under all.
LONG = ("averages_many_steps", "trains_like_one_process")
NONCE = 17
# The ranks of each host, by their number: for the sync that tells hosts apart.
HOSTS = {1: [[0]], 2: [[0], [1]], 3: [[0, 2], [1]], 4: [[0, 1], [2, 3]]}
WORDS, WIDTH = 5000, 64  # 1.2 MiB: sparse_rows sends rows of it
SMALL = {"bucket_mb": 0.01, "first_bucket_mb": 0.01}


def on_hosts(comm):
    hosts.host_groups = lambda _: HOSTS[comm.world_size]


def combined(name: str, word: str) -> MakeSync:
    """The sync with the codec, as a class that the claims can make."""
    sync = get_sync(name)

    class Combined(sync):
        def __init__(self, comm, find_unused_parameters=True, options=DEFAULTS):
            super().__init__(comm, find_unused_parameters, replace(options, compress=word))

    return Combined


def keep_claims(comm, name, word, claims):
    """On a rank: what `ranks.observe_by_name` does, for a combination; the toy's embedding counts as a large one."""
    on_hosts(comm)
    embeddings.LEAST_BYTES = 1
    direct = []
    trace_direct_calls(direct.append)
    on_ranks.observe(comm, combined(name, word), claims, NONCE, direct)


# Without a codec each sync keeps them (test_conformance); on other numbers of ranks it averages right with each below.
@pytest.mark.long(one_in=8)
@pytest.mark.parametrize(("name", "word"), [*((name, "powersgd:1000") for name in TAKERS), ("bucketed", "topk:1")])
def test_a_codec_that_leaves_nothing_out_keeps_every_claim_on_3_ranks(name, word):
    # It compares the bytes of two models, and of an embedding that is not tied only the rows travel that were used.
    left_out = ("leaves_frozen_weights_alone",) if name == "sparse_rows" else ()
    if word == "topk:1":  # sends float64 as float32, and these hold it to its last bits
        left_out = tuple(claim.name for claim in TO_THE_LAST_BIT)
    elif name != "bucketed":
        left_out = (*left_out, *LONG)
    tried = [claim for claim in conformance.CLAIMS if claim.name not in left_out]
    claims = [claim.name for claim in tried]
    ends = run_world(3, keep_claims, name, word, claims, seconds=120)
    found = zip(claims, judge_claims(tried, ends, NONCE, "", 120), strict=True)
    assert {each: (one.status, list(one.reports)) for each, one in found} == dict.fromkeys(claims, (PASSED, []))


class Model(nn.Module):
    """A large embedding, layers, one of which nothing uses, and one number for a batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, 3))
        self.never = nn.Linear(5, 5)

    def forward(self, ids):
        return self.layers(self.embedding(ids).mean(dim=1)).square().mean()


def ids_of(rank, part):
    generator = torch.Generator().manual_seed(10 * rank + part)
    return torch.randint(0, 40 * (rank + 1), (6, 7), generator=generator)


def loss_of(module, ids):
    with torch.autocast("cpu", torch.bfloat16):
        return module(ids) / 2


def flat(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def exact(world_size):
    model = Model()
    for rank in range(world_size):
        for part in range(2):
            (loss_of(model, ids_of(rank, part)) / world_size).backward()
    return flat(model)


def touched(world_size):
    every = torch.cat([ids_of(rank, part).flatten() for rank in range(world_size) for part in range(2)])
    return len(every.unique()) / WORDS


STEPS = 12


def average(comm, name, word):
    """On a rank: steps of two parts on the same examples again and again, without a change to the weights."""
    model, options = Model(), SyncOptions(compress=word, **(SMALL if "bucket_mb" in get_sync(name).uses else {}))
    sync = get_sync(name)(comm, options=options)
    module, wanted = sync.attach(model), exact(comm.world_size)
    total = torch.zeros_like(wanted)
    for step in range(STEPS):
        comm.ledger = Ledger()
        with sync.no_sync():
            loss_of(module, ids_of(comm.rank, 0)).backward()
        loss_of(module, ids_of(comm.rank, 1)).backward()
        sync.finish()
        sync.after_step()
        assert model.never.weight.grad is None
        found = flat(model)
        total += found
        if step == 0:
            error = (found - wanted).norm() / wanted.norm()
        model.zero_grad(set_to_none=step % 2 == 0)
    sent = [row.bytes_sent for row in comm.ledger.rows if row.purpose == GRADIENTS]
    job = TrainingSpec(model, comm.world_size, comm.rank, 2, hosts=HOSTS[comm.world_size])
    step = Step(job.tensors, options, job.hosts, job.tensors[::-1], touched(comm.world_size))
    stated = [one for travel in sync.calls(step) for one in sent_in_call(travel, job, word)]
    sync.detach()
    drift = (total / STEPS - wanted).norm() / wanted.norm()
    return [digest(found), error.item(), drift.item(), sorted(sent), sorted(stated)]


def average_each(comm, kinds):
    on_hosts(comm)
    return [average(comm, *kind) for kind in kinds]


# Of the norm of the average: in the first step, and of the mean of all.
BOUNDS = {
    "bf16": (0.02, 0.02),
    "fp16": (0.003, 0.003),
    "int8": (0.1, 0.04),
    "topk:0.3": (0.8, 0.12),
    "powersgd:2": (1, 0.35),
}
KINDS = [(name, word) for name in TAKERS for word in BOUNDS]


@pytest.mark.long
@pytest.mark.parametrize("world_size", HOSTS)
def test_every_combination_averages_within_its_codec_s_bound_and_sends_what_its_formula_states(world_size):
    """Under bf16's autocast, in steps of two parts, with a layer that nothing uses."""
    answers = run_ranks(world_size, average_each, KINDS, seconds=200)
    for place, kind in enumerate(KINDS):
        assert len({rank[place][0] for rank in answers}) == 1, kind
        most, most_drift = BOUNDS[kind[1]] if world_size > 1 else (1e-6, 1e-6)
        _, error, drift, *_ = answers[0][place]
        assert error <= most, kind
        assert drift <= most_drift, kind
        if world_size > 1:
            assert [rank[place][3] for rank in answers] == [rank[place][4] for rank in answers], kind
    if world_size < 4:
        return
    sent = {kind: [sum(rank[place][3]) for rank in answers] for place, kind in enumerate(KINDS)}
    rows = sent["sparse_rows", "bf16"][0] / sent["bucketed", "bf16"][0]
    assert rows == pytest.approx(touched(4), abs=0.05)
    # 2(h-1)/h of the two hosts' first ranks, in 16 bits; of a layer that nothing uses too, until the ranks know.
    whole = 2 * sum(p.numel() for p in Model().parameters())
    assert sent["hierarchical", "bf16"] == [pytest.approx(whole, rel=1e-3), 0] * 2


class Table(nn.Module):
    """An embedding of which a step's gradient is what it is given."""

    def __init__(self):
        super().__init__()
        self.embedding, self.bias = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(1))

    def forward(self, ids, factors):
        return (self.embedding(ids) * factors).sum() + self.bias.sum()


def factors_of(number, rank=0):
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(number, WIDTH, generator=generator)


def hold_back(comm, word, moved=None):
    """On a rank: the error of four rows' gradient after steps that look up other rows or overflow.

    With `moved`, another sync resumes from the first one's state after two steps.
    """
    model = Table()
    sync = get_sync("sparse_rows")(comm, options=SyncOptions(compress=word))
    module = sync.attach(model)
    total, given = torch.zeros(4, WIDTH), factors_of(4)
    nothing, few = torch.zeros(4, WIDTH), torch.arange(4) * 7
    bad = torch.full((4, WIDTH), torch.inf if comm.rank == 1 else 1.0)
    plan = [(few, given), (few + 1, nothing), (few, bad), (few, nothing), (few + 3, nothing), *[(few, nothing)] * 14]
    for place, (ids, factors) in enumerate(plan):
        if place == 2 and moved:
            facts, tensors = sync.own_state()
            sync.detach()
            sync = get_sync("sparse_rows")(comm, options=SyncOptions(compress=word))
            module = sync.attach(model)
            sync.load_own_state(facts, {name: tensor.clone() for name, tensor in tensors.items()})
        model.zero_grad()
        sync.loss_scale = 2.0**place
        (module(ids, factors) * sync.loss_scale).backward()
        sync.finish()
        gradient = model.embedding.weight.grad / sync.loss_scale
        if not gradient.isfinite().all():
            assert factors is bad
            if word.startswith("topk"):  # the other is not told, as by a loop of somebody's own
                sync.forget_step()
            continue
        total += gradient[few]
    sync.detach()
    return (total - given).norm().item() / given.norm().item()


@pytest.mark.parametrize("moved", [False, True], ids=["in one go", "resumed"])
@pytest.mark.parametrize("word", ["topk:0.1", "powersgd:2"])
def test_the_error_of_a_row_waits_for_that_row_and_bad_steps_leave_none(word, moved):
    for left in run_ranks(2, hold_back, word, moved):
        assert left < 0.01


@pytest.mark.parametrize(
    "sync", ["all_reduce", "overlap", "shared_memory", "gather_scatter", "zero3", "shared_weights"]
)
def test_a_sync_that_sends_no_buckets_refuses_a_codec_and_names_syncs_that_take_one(sync):
    with pytest.raises(UsageError, match=f"--compress has no effect with --sync {sync}") as error:
        RunConfig(sync=sync, compress="bf16", do_train=True).check(world_size=4)
    assert all(name in str(error.value) for name in TAKERS)
