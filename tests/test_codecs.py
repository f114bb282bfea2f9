"""Codecs: the error of their sums over ranks, the bytes that they send, and what error feedback recovers."""

import pytest
import torch
from worlds import run_each, run_ranks

from cos598d.comm.ledger import Ledger
from cos598d.errors import UsageError
from cos598d.sync import get_sync
from cos598d.sync.buckets import Bucket
from cos598d.sync.codecs import CODECS, get_codec, make_codec
from cos598d.sync.codecs.int8 import decode, encode
from cos598d.sync.options import SyncOptions
from cos598d.tools.exam.models import local_batch, toy_model

RANKS, ROWS, COLUMNS, REST = 3, 60, 40, 100
ELEMENTS = ROWS * COLUMNS + REST
STEPS = 30


def gradients(rank, step=0):
    """A matrix of rank 2, other for every rank, and a vector."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    matrix = torch.randn(ROWS, 2, generator=generator) @ torch.randn(2, COLUMNS, generator=generator)
    return torch.cat([matrix.flatten(), torch.randn(REST, generator=generator)])


def make_bucket():
    parameters = [("matrix", torch.nn.Parameter(torch.zeros(ROWS, COLUMNS)))]
    return Bucket("bucket 0", [*parameters, ("vector", torch.nn.Parameter(torch.zeros(REST)))])


def send(comm, codec, bucket, step=0):
    bucket.buffer.copy_(gradients(comm.rank, step))
    codec.finish(bucket, codec.start(bucket))
    return bucket.buffer.clone()


def use_codecs(comm):
    """On a rank, by codec: the error of a sum and of the mean of many, the bytes, and whether all ranks agree."""
    answers = {}
    for word in [*CODECS, "topk:1", "powersgd:6"]:
        codec = make_codec(word, comm, lambda tensor, name: comm.all_reduce(tensor, name, async_op=True))
        bucket = make_bucket()
        wanted = sum(gradients(rank) for rank in range(RANKS))
        comm.ledger = Ledger()
        found = send(comm, codec, bucket)
        sent = sum(row.bytes_sent for row in comm.ledger.rows)
        received = sum(row.bytes_received for row in comm.ledger.rows)
        same = len(set(comm.exchange(found.double().sum().item()))) == 1
        # The same gradients each step: what a codec holds back must arrive in later steps.
        total = torch.zeros_like(found)
        codec = make_codec(word, comm, lambda tensor, name: comm.all_reduce(tensor, name, async_op=True))
        for _ in range(STEPS):
            total += send(comm, codec, bucket)
        error, drift = (((value - wanted).norm() / wanted.norm()).item() for value in (found, total / STEPS))
        answers[word] = {"error": error, "drift": drift, "sent": [sent, received], "same": same}
    return answers


@pytest.fixture(scope="module")
def answers():
    return run_ranks(RANKS, use_codecs)


def test_all_ranks_have_the_same_bits(answers):
    assert all(answer[word]["same"] for answer in answers for word in answer)


# Rounded at random a number errs by sqrt(1/6) of a level, where to the nearest it would be sqrt(1/12): 0.02 times that.
INT8_BOUND = 0.02 * 2**0.5


@pytest.mark.parametrize(
    ("word", "bound"), [("bf16", 2**-8 * RANKS), ("fp16", 2**-11 * RANKS), ("int8", INT8_BOUND), ("topk:1", 1e-6)]
)
def test_a_codec_s_error_is_within_its_bound(answers, word, bound):
    assert 0 <= answers[0][word]["error"] < bound
    assert word == "topk:1" or answers[0][word]["error"] > bound / 1000  # it was sent in a smaller form


def test_powersgd_keeps_matrices_of_its_rank(answers):
    # Three matrices of rank 2 sum up to rank 6; the first steps, from random columns, lose something.
    assert answers[0]["powersgd:6"]["drift"] < 0.05
    assert answers[0]["powersgd"]["error"] > 0.1


# int8 has none: each step is rounded at random, which makes the mean of 30 nearer by sqrt(30).
@pytest.mark.parametrize(("word", "share"), [("topk", 0.75), ("powersgd", 0.75), ("int8", 0.25)])
def test_the_mean_of_many_steps_is_nearer_than_one_step(answers, word, share):
    answer = answers[0][word]
    assert answer["drift"] < share * answer["error"]
    assert word != "int8" or answer["drift"] < 0.005


def test_the_ledger_counts_the_bytes_of_each_form(answers):
    ring = 2 * (RANKS - 1) / RANKS
    part = -(-ELEMENTS // (1024 * RANKS)) * (1024 + 4)
    wanted = {
        "bf16": ring * ELEMENTS * 2,
        "fp16": ring * ELEMENTS * 2,
        "int8": 2 * (RANKS - 1) * part,
        "topk": (RANKS - 1) * 8 * round(0.01 * ELEMENTS),
        "powersgd": ring * 4 * (4 * (ROWS + COLUMNS) + REST),
    }
    for answer in answers:
        for word, sent in wanted.items():
            assert answer[word]["sent"] == [pytest.approx(sent, abs=2), pytest.approx(sent, abs=2)], word


def train_steps(comm, word, sync):
    """On a rank: whether the unused layer keeps None, and how many different sums the ranks have after two steps."""
    model = toy_model(seed=0)
    sync = get_sync(sync)(comm, options=SyncOptions(compress=word, bucket_mb=0.5))
    module = sync.attach(model)
    for step in range(2):
        with sync.no_sync():
            module(**local_batch(comm.rank, step))[0].backward()
        module(**local_batch(comm.rank, step + 2))[0].backward()
        sync.finish()
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        digests = set(comm.exchange(found.double().sum().item()))
        assert torch.isfinite(found).all()
        model.zero_grad(set_to_none=False)
    sync.detach()
    return [model.never.weight.grad is None, len(digests)]


@pytest.mark.parametrize("sync", ["bucketed", "sparse_rows", "ring", "flat", "tree"])
def test_codecs_work_with_unused_parameters_and_accumulation(sync):
    found = dict(zip(CODECS, run_each(2, train_steps, CODECS, sync), strict=True))
    assert found == dict.fromkeys(CODECS, ([True, 1], [True, 1]))


def test_int8_errs_by_less_than_a_level_and_keeps_zeros_and_maxima():
    part = torch.cat([torch.randn(1024) * 1e3, torch.zeros(1024), torch.randn(1024) * 1e-30, torch.ones(1024)])
    back = decode(encode(part, torch.Generator().manual_seed(0)))
    for block, copy in zip(part.view(4, -1), back.view(4, -1), strict=True):
        assert (copy - block).abs().max() <= block.abs().max() / 127 * 1.001
        assert copy.abs().max() == pytest.approx(block.abs().max().item())
    assert not back[1024:2048].any()


def drift_of_int8(comm, steps):
    """On a rank: the mean of many sums of small values next to a large one, and whether two codecs give the same."""
    parameter = torch.nn.Parameter(torch.zeros(40 * 1024))  # several blocks that share random numbers
    bucket = Bucket("bucket 0", [("vector", parameter)])
    value = torch.full((40 * 1024,), 0.003)
    value[::1024] = 1.0
    value[1::1024] = -1e-4
    totals = []
    for _ in range(2):
        codec, total = make_codec("int8", comm, None), torch.zeros(40 * 1024)
        for _ in range(steps):
            bucket.buffer.copy_(value)
            codec.finish(bucket, codec.start(bucket))
            total += bucket.buffer
        totals.append(total / steps)
    every = totals[0].view(40, 1024)
    means = [every[:, 0].mean().item(), every[:, 1].mean().item(), every[:, 2:].mean().item()]
    return [means, every[:, 2:].std().item(), torch.equal(*totals), totals[0].sum().item()]


@pytest.mark.long
def test_int8_rounds_without_bias_and_reproducibly():
    """Rounded to the nearest, 0.003 next to a 1 is 0 in every step."""
    answers = run_ranks(2, drift_of_int8, 300)
    for (large, smallest, small), spread, same, total in answers:
        assert large == pytest.approx(2, abs=1e-3)
        # A sum is rounded to a multiple of 2 / 127 = 0.016: its mean over 300 steps strays by 0.0004.
        assert small == pytest.approx(0.006, abs=1e-4)
        assert smallest == pytest.approx(-2e-4, abs=1e-4)
        assert spread < 1e-3
        assert same
        assert total == answers[0][-1]


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("zip", "--compress zip: unknown compression. Choose from bf16, fp16, int8, topk, powersgd"),
        ("bf16:2", "--compress bf16:2: bf16 takes no number"),
        ("topk:2", "--compress topk:2: .* Give the share of elements"),
        ("powersgd:x", "--compress powersgd:x: .* Give the rank, a whole number from 1"),
    ],
)
def test_unknown_codecs_and_numbers_are_refused(word, sentence):
    with pytest.raises(UsageError, match=sentence):
        get_codec(word)
