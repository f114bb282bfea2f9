"""Compression, hosts, and what syncs keep from step to step."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import world
from sync_cases import options_of
from torch import nn

from cos598d.comm.ledger import Ledger
from cos598d.errors import UsageError
from cos598d.parallel import data_parallel, parallelize
from cos598d.sync import shared_memory
from cos598d.sync.codecs import get_codec

CODECS = ("bf16", "fp16", "int8", "topk:0.1", "powersgd:2")
# Of 3 ranks: the bytes that a codec sends, as a share of an all-reduce's. topk sends 8 bytes of every tenth element to
# both others, where an all-reduce sends 4/3 of 4 bytes. powersgd's is that of the model below.
SHARES = {"bf16": 0.5, "fp16": 0.5, "int8": 0.25, "topk:0.1": 0.3, "powersgd:2": 0.031}
# The largest error of a gradient's element, as a share of the largest element; None: it comes in later steps.
ERRORS = {"bf16": 3 * 2**-8, "fp16": 3 * 2**-11, "int8": 2 / 127, "topk:0.1": None, "powersgd:2": None}


@pytest.fixture(scope="module")
def ranks():
    with world(4) as started:
        yield started


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 5))


def batch(step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(8, 200, generator=generator)


def _flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _gradients(sync, compress=None, steps=1, **options):
    """The averaged gradient of each of some steps with the same batch, and the bytes that were sent for it."""
    model, ledger = net(), Ledger()
    options |= {"compress": compress} if compress else {}
    wrapped = data_parallel(model, sync, ledger=ledger, **options)
    found = []
    with ledger:
        for step in range(steps):
            ledger.begin(step)
            model.zero_grad()
            wrapped(batch(0)).square().mean().backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return [
        torch.stack(found),
        sum(row.bytes_sent for row in ledger.rows if row.iteration == steps - 1 and row.purpose == "gradients"),
    ]


def _with_and_without(sync, compress, steps=1):
    return [_gradients(sync), _gradients(sync, compress, steps)]


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_and_errors(ranks, codec):
    found = ranks.run(_with_and_without, "bucketed", codec, 40, count=3)
    (right, whole), (coded, sent) = found[0]
    assert all(torch.equal(coded, other[1][0]) for other in found), "the ranks differ"
    assert sent / whole == pytest.approx(SHARES[codec], rel=0.05)
    if ERRORS[codec] is not None:
        assert (coded[0] - right[0]).abs().max() <= ERRORS[codec] * right.abs().max()
    # What one step leaves out comes in later ones: the mean over steps is right, or nearly so.
    mean_error = (coded.mean(dim=0) - right[0]).norm() / right[0].norm()
    assert mean_error < (0.01 if ERRORS[codec] is not None else 0.2)
    assert mean_error < 0.5 * (coded[0] - right[0]).norm() / right[0].norm() or codec in ("bf16", "fp16")


def _products():
    """A gradient of rank 1 on each rank: their sum has as many ranks as there are."""
    model = nn.Linear(40, 30, bias=False)
    wrapped = data_parallel(model, compress="powersgd:4")
    generator = torch.Generator().manual_seed(dist.get_rank())
    wrapped(torch.randn(1, 40, generator=generator)).mul(torch.randn(1, 30, generator=generator)).sum().backward()
    own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    terms = [(torch.randn(1, 40, generator=g), torch.randn(1, 30, generator=g)) for g in own]
    return [model.weight.grad, sum(outer.T @ inner for inner, outer in terms) / 3]


def test_powersgd_is_exact_for_a_sum_of_low_rank(ranks):
    for found, right in ranks.run(_products, count=3):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def _overflow(sync, compress):
    """Whether gradients are finite in a step, in one where a rank has an infinite one, and in the next."""
    model, found = net(), []
    wrapped = data_parallel(model, sync, compress=compress)
    for step in range(3):
        model.zero_grad()
        factor = torch.inf if step == dist.get_rank() == 1 else 1.0
        (wrapped(batch(step)).square().mean() * factor).backward()
        found.append(all(bool(p.grad.isfinite().all()) for p in model.parameters()))
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_an_overflow_is_seen_by_all_and_leaves_no_trace(ranks, codec):
    assert ranks.run(_overflow, "bucketed", codec, count=3) == [[True, False, True]] * 3


@pytest.mark.parametrize("word", ["zip", "bf16:2", "bf16:", "topk:2", "topk:0", "powersgd:1.5", "powersgd:x", ":4"])
def test_codecs_that_do_not_exist(word):
    with pytest.raises(UsageError, match=f"--compress {word}: unknown compression. Choose bf16, fp16, int8, topk:S"):
        get_codec(word)


# Hosts


def _on_hosts(hosts):
    """Gradients and bytes of this rank, where `hosts[r]` is rank r's host."""
    with patch.object(shared_memory, "network_identity", lambda _: hosts[dist.get_rank()]):
        found = _gradients("hierarchical", bucket_mb=0.1)
        try:
            data_parallel(net(), "shared_memory")
        except Exception as error:
            return [*found, str(error)]
    return [*found, ""]


@pytest.mark.parametrize("hosts", ["aabb", "abab", "abbb", "abcd", "aaaa"])
def test_hosts_sum_inside_and_send_once(ranks, hosts):
    right = ranks.run(_gradients, "all_reduce")[0][0]
    size, count = right.numel() * 4, len(set(hosts))
    between = 2 * (count - 1) / count * size
    for rank, (gradient, sent, sentence) in enumerate(ranks.run(_on_hosts, hosts)):
        torch.testing.assert_close(gradient, right)
        is_first, m = hosts.index(hosts[rank]) == rank, hosts.count(hosts[rank])
        inside = size * ((m - 1) / m + (m - 1).bit_length()) if is_first else None
        assert not is_first or sent == pytest.approx(between + inside, rel=1e-3)
        assert ("needs all ranks on one host" in sentence) == (count > 1)


# What is kept


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def _steps(parallel, optimizer, first, last):
    for step in range(first, last):
        parallel(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _resumed(sync, options, loses_own):
    """The weights after 6 steps with a save after the third: of the same training, and of one that starts there."""
    options = options_of(sync) | options
    parallel, optimizer = parallelize(net(), adam, sync, **options)
    _steps(parallel, optimizer, 0, 3)
    saved = {name: tensor.clone() for name, tensor in parallel.state()}
    own = {name: tensor.clone() for name, tensor in parallel.sync.own_state().items()}
    _steps(parallel, optimizer, 3, 6)
    parallel.settle()
    again, optimizer = parallelize(nn.Sequential(*(layer for layer in net())), adam, sync, **options)
    for p in again.parameters():
        nn.init.zeros_(p)
    again.load_state(saved)
    if not loses_own:
        again.sync.load_own_state(own)
    _steps(again, optimizer, 3, 6)
    again.settle()
    return [_flat(parallel.module), _flat(again.module)]


KEEPING = [
    *(("bucketed", {"compress": codec}) for codec in ("int8", "topk:0.1", "powersgd:2")),
    *(("local_sgd", {"sync_every": 2}), ("diloco", {}), ("diloco", {"sync_every": 2})),
]


@pytest.mark.parametrize(("sync", "options"), KEEPING, ids=str)
def test_what_is_kept_counts(ranks, sync, options):
    for loses_own in (False, True):
        for straight, resumed in ranks.run(_resumed, sync, options, loses_own, count=3):
            assert torch.equal(straight, resumed) != loses_own


def _local(sync, options):
    """The weights after steps of plain SGD, and whether the replicas were equal after each."""
    parallel, optimizer = parallelize(net(), lambda ps: torch.optim.SGD(ps, lr=0.1), sync, **options)
    equal = []
    for step in range(4):
        _steps(parallel, optimizer, step, step + 1)
        equal.append(parallel.sync.replicas_equal)
    parallel.settle()
    return [_flat(parallel.module), equal]


def test_local_sgd_averages_every_h_th_step(ranks):
    every, second = (
        ranks.run(_local, "local_sgd", {}, count=3),
        ranks.run(_local, "local_sgd", {"sync_every": 2}, count=3),
    )
    right = ranks.run(_local, "all_reduce", {}, count=3)[0][0]
    for weights, equal in every:
        torch.testing.assert_close(weights, right, rtol=0, atol=1e-6)
        assert equal == [True] * 4
    for weights, equal in second:
        assert torch.equal(weights, second[0][0])
        assert equal == [False, True, False, True]


def test_diloco_steps_along_the_averaged_movement(ranks):
    plain = {"sync_every": 4, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    right, same, stepped = (
        ranks.run(_local, sync, options, count=3)
        for sync, options in (("local_sgd", {"sync_every": 4}), ("diloco", plain), ("diloco", {"sync_every": 4}))
    )
    start = _flat(net())
    for (weights, _), (local, _) in zip(same, right, strict=True):
        torch.testing.assert_close(weights, local, rtol=0, atol=1e-6)
    for weights, _ in stepped:  # Nesterov's first step, of rate 0.7 and momentum 0.9
        torch.testing.assert_close(weights, start - 0.7 * 1.9 * (start - right[0][0]), rtol=0, atol=1e-6)
        assert torch.equal(weights, stepped[0][0])


def _loaded():
    """How far weights move in steps with a rate of 0, after they were loaded into a new diloco."""
    parallel, optimizer = parallelize(net(), lambda ps: torch.optim.SGD(ps, lr=0.0), "diloco")
    state = {key: tensor + 1 for key, tensor in parallel.state()}
    parallel.load_state(state)
    _steps(parallel, optimizer, 0, 3)
    parallel.settle()
    return max((tensor - state[key]).abs().max().item() for key, tensor in parallel.state())


def test_diloco_goes_on_from_loaded_weights(ranks):
    assert max(ranks.run(_loaded, count=2)) < 1e-6
