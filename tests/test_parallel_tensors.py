"""`data_parallel` ends with DDP's weights for any gradients, tensors and buffers, or with one error on every rank."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from test_parallel import EXACT, TOLERANCE
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import run_ranks

import cos598d
from cos598d.comm import group as groups
from cos598d.errors import UsageError, UserError
from cos598d.sync import get_sync

OURS = [name for name in EXACT if name != "ddp"]  # whose errors are torch's
WITH_BUCKETS = [name for name in EXACT if "copies_gradients" in get_sync(name).uses]
TAKE_SPARSE = ["all_reduce", "overlap", "ddp"]


def inputs_of(rank, step, *shape):
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(100 * step + rank))


class Layers(nn.Module):
    """Two layers, of which one is small."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.output = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, inputs):
        return self.output(torch.tanh(self.layer(inputs)))

    shape = (6,)


class Odd(nn.Module):
    """Tensors of every layout and size, which differ on the ranks until they start."""

    shape = (3, 5, 5)

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.strided = nn.Parameter(torch.randn(8)[::2])
        self.turned = nn.Parameter(torch.randn(3, 4).T)
        self.scalar = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(6)[::3], requires_grad=False)
        self.register_buffer("scale", torch.rand(8)[::2])
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("counts", torch.randint(0, 3, (8,))[::2])
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("viewed", self.turned.detach()[0])

    def forward(self, images):
        state = self.conv(images).mean(dim=(2, 3)) * (self.strided + self.scale) + self.mask + self.counts
        return (state @ self.turned + self.viewed) * self.scalar + self.frozen.sum()


class Remembers(nn.Module):
    """A running mean that training reads, under a batch norm."""

    shape = (6,)

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.norm, self.output = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.register_buffer("mean", torch.randn(6)[::2].repeat(2))

    def forward(self, inputs):
        if self.training:
            self.mean.lerp_(inputs.detach().mean(dim=0), 0.5)
        return self.output(self.norm(self.layer(inputs - self.mean)))


class Complex(nn.Module):
    """Weights of complex numbers between real ones."""

    shape = (6,)

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(6, 5)
        self.turn = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, inputs):
        return (self.layer(inputs) * self.turn).abs()


def loss_of(module, model, rank, step):
    return (module(inputs_of(rank, step, *model.shape) + 0.1 * rank) - 1).square().mean()


def plain(module, model, rank, step):
    module.zero_grad()
    loss_of(module, model, rank, step).backward()


def keeps(module, model, rank, step):
    """Two tasks, whose gradients the script combines."""
    plain(module, model, rank, step)
    kept = [p.grad for p in model.parameters()]
    plain(module, model, rank, step + 50)
    for p, first in zip(model.parameters(), kept, strict=True):
        p.grad = p.grad + 3 * first


def adds(module, model, rank, step):
    plain(module, model, rank, step)
    held = [p.grad for p in model.parameters()]
    loss_of(module, model, rank, step + 50).backward()
    assert all(p.grad is one for p, one in zip(model.parameters(), held, strict=True))


def in_parts(module, model, rank, step):
    """A part under `no_sync`, two forwards before their backward, and an evaluation between two steps."""
    module.zero_grad()
    with module.no_sync():
        loss_of(module, model, rank, step).backward()
    first = loss_of(module, model, rank, step + 50)
    (first + loss_of(module, model, rank, step + 70)).backward()
    if step == 1:
        module.eval()
        with torch.no_grad():
            module(inputs_of(0, 99, *model.shape))
        module.train()


STEPS = {
    "kept": (Layers, keeps, {}),
    "added": (Layers, adds, {}),
    "odd tensors": (Odd, plain, {}),
    "odd tensors, added": (Odd, in_parts, {}),
    "buffers": (Remembers, plain, {}),
    "buffers, in parts": (Remembers, in_parts, {}),
    "buffers of each rank": (Remembers, plain, {"broadcast_buffers": False}),
    "complex": (Complex, plain, {}),
}


def train(module, model, rank, take, metrics):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(3):
        take(module, model, rank, step)
        optimizer.step()
    module.eval()
    with torch.no_grad():
        metrics.append(module(inputs_of(0, 99, *model.shape)))  # without settle()


def trains_as_ddp(comm, names):
    for case, (make, take, options) in STEPS.items():
        expected = make(comm.rank)
        wrapped = DistributedDataParallel(expected, find_unused_parameters=True, **options)
        theirs = []
        train(wrapped, expected, comm.rank, take, theirs)
        for name in names:
            model, mine = make(comm.rank), []
            module = cos598d.data_parallel(model, name, **options)
            train(module, model, comm.rank, take, mine)
            for key, tensor in expected.state_dict().items():
                off = (model.state_dict()[key] * 1.0 - tensor * 1.0).abs()
                assert not off.numel() or off.max() < TOLERANCE, f"{case}, {name}: {key} is off by {off.max():.1e}"
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=f"{case}, {name}: {mine} {theirs}")
            module.detach()


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_odd_tensors_and_buffers_train_as_with_torchs_ddp(world_size):
    run_ranks(world_size, trains_as_ddp, EXACT)


class Looks(nn.Module):
    """An embedding large enough to travel by rows; `reads` its weight without the module."""

    def __init__(self, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9001, 31, sparse=sparse)
        self.output = nn.Linear(31, 2)

    def forward(self, rank, step, looks=True, reads=False):
        ids = torch.arange(5) + 1000 * rank + step
        if reads:
            return self.output(nn.functional.embedding(ids, self.embedding.weight)).square().mean()
        return self.output(self.embedding(ids) if looks else self.output.weight).square().mean()


def train_looks(module, ranks, **only_0):
    """Three steps on the mean of the losses of `ranks`; rank 0's second one has further words."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            words = only_0 if (rank, step) == (0, 1) else {}
            (module(rank, step, **words) / len(ranks)).backward()
        optimizer.step()


def trains_sparse_gradients(comm):
    expected = Looks()
    train_looks(expected, range(comm.world_size), looks=False)
    for name in EXACT:
        model = Looks(sparse=True)
        if name not in TAKE_SPARSE:
            with pytest.raises(UserError, match="embedding.weight has sparse gradients.*all_reduce, overlap or ddp"):
                cos598d.data_parallel(model, name)
        elif name != "ddp":  # torch's own has no zeros for a rank that looks nothing up
            module = cos598d.data_parallel(model, name)
            train_looks(module, [comm.rank], looks=False)
            for p, q in zip(model.parameters(), expected.parameters(), strict=True):
                assert (p - q).abs().max() < TOLERANCE, name


def tells_all_of_other_rows(comm):
    for options in ({}, {"find_unused_parameters": False}, {"compress": "topk:0.5"}):
        module = cos598d.data_parallel(Looks(), "sparse_rows", **options)
        for _ in range(2):
            with pytest.raises(UserError, match="embedding.weight .* rank 0 outside the rows"):
                module(comm.rank, 0, reads=comm.rank == 0).backward()
            assert all(p.grad is None for p in module.parameters())
        module(comm.rank, 0).backward()
        assert module.module.embedding.weight.grad.count_nonzero() <= comm.world_size * 5 * 31
        if not options:
            expected = Looks()
            sum(expected(rank, 0) / comm.world_size for rank in range(comm.world_size)).backward()
            assert (module.module.embedding.weight.grad - expected.embedding.weight.grad).abs().max() < TOLERANCE


def with_tensor(tensor, is_parameter=False):
    model = nn.Linear(2, 2)
    if is_parameter:
        model.odd = nn.Parameter(tensor)
    else:
        model.register_buffer("odd", tensor)
    return model


def refuses_what_it_cannot_send(comm):
    one, two = torch.randn(1).expand(64), torch.ones(4).as_strided((2, 2), (1, 1))
    fine = torch.ones(8).as_strided((2, 2), (3, 2))
    for model, words in (
        (with_tensor(one), "rank 0's odd has elements that share memory"),
        (with_tensor(two, is_parameter=True), "rank 0's odd has elements that share memory"),
        (with_tensor(one if comm.rank == 1 else one.clone()), "rank 1's odd has elements that share memory"),
        (with_tensor(torch.eye(2).to_sparse()), "rank 0's odd has the layout sparse_coo"),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), "rank 0's 1.weight has no shape yet"),
        (nn.Sequential(nn.Embedding(3, 2, sparse=comm.rank == 1)), "rank 1 has 0.weight .* sparse where"),
    ):
        with pytest.raises(UserError, match=words):
            cos598d.data_parallel(model)
    for dtype in (torch.int16, torch.complex64, torch.float64, torch.bool, torch.uint8):
        tensor = (fine + comm.rank).to(dtype)
        module = cos598d.data_parallel(with_tensor(tensor))
        assert torch.equal(module.module.odd, fine.to(dtype))
        module.module.odd.copy_(tensor)
        module.settle()
        assert torch.equal(module.module.odd, fine.to(dtype))
    with pytest.raises(UserError, match="turn has complex numbers.*bf16"):
        cos598d.data_parallel(Complex(0), compress="bf16")


def has_ddps_words(comm):
    module = cos598d.data_parallel(Layers(0), gradient_as_bucket_view=True)
    places = []
    for step in range(2):
        plain(module, module.module, comm.rank, step)
        places.append([p.grad.data_ptr() for p in module.parameters()])
    assert places[0] == places[1], "the gradients are no views of the buckets"
    for name in EXACT:
        if name not in (*WITH_BUCKETS, "ddp"):
            with pytest.raises(UsageError, match="gradient_as_bucket_view has no effect with"):
                cos598d.data_parallel(Layers(0), name, gradient_as_bucket_view=True)
    for word, words in (
        ("join", "same number of batches"),
        ("register_comm_hook", "compress="),
        ("_set_static_graph", "find_unused_parameters=False"),
    ):
        with pytest.raises(AttributeError, match=words):
            getattr(module, word)
    assert module.ledger.totals("buffers") == {}, "it sent buffers of a model without any"
    module = cos598d.data_parallel(Remembers(0))
    for step in range(3):
        plain(module, module.module, comm.rank, step)
        if comm.rank == 0:  # its evaluation sends what the others receive before their next step
            with torch.inference_mode():
                module(inputs_of(0, 99, 6))
    assert module.ledger.totals("buffers")["buffers"].calls == 3 + (comm.rank == 0)
    module.settle()
    plain(module, module.module, comm.rank, 3)


@pytest.mark.parametrize(
    "function",
    [trains_sparse_gradients, tells_all_of_other_rows, refuses_what_it_cannot_send, has_ddps_words],
    ids=lambda function: function.__name__,
)
def test_every_rank_trains_or_gets_the_same_error(function):
    run_ranks(2, function)


def end_early(comm):
    """On a rank: rank 1 detaches after two batches."""
    groups.LOOK_EVERY = timedelta(seconds=0.05)
    for name in OURS:
        group = dist.new_group()  # with calls of its own, of which one stays under way
        module = cos598d.data_parallel(Remembers(0), name, process_group=group)
        for step in range(2):
            plain(module, module.module, comm.rank, step)
        module.settle()
        if comm.rank == 1:
            module.detach()
        else:
            with pytest.raises(
                UserError, match=r"rank \d has called detach\(\) or.*Give every rank the same number of batches"
            ):
                plain(module, module.module, comm.rank, 2)


def leave_early(comm):
    """On a rank: rank 1 leaves the process group after a batch."""
    groups.LOOK_EVERY = timedelta(seconds=0.05)
    cases = [(name, True) for name in OURS] + [(name, False) for name in ("flat", "bucketed")]
    if comm.world_size == 2:  # else a rank further off hears of it when its neighbour's process ends
        cases += [(name, False) for name in ("ring", "tree", "halving_doubling")]
    modules = [cos598d.data_parallel(Layers(0), name, find_unused_parameters=finds) for name, finds in cases]
    for module in modules:
        plain(module, module.module, comm.rank, 0)
    if comm.rank == 1:
        dist.destroy_process_group()
        return
    for module in modules:
        with pytest.raises(
            UserError,
            match="another rank took no part in .*Give every|rank . has called detach.*the same number of batches",
        ):
            plain(module, module.module, comm.rank, 1)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("function", [end_early, leave_early], ids=lambda function: function.__name__)
def test_rank_with_fewer_batches_gives_the_others_an_error(function, world_size):
    run_ranks(world_size, function)
