"""What a script's own loop may do under `cos598d.data_parallel`, under every gradient sync, compared with DDP."""

import copy
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
from test_overflow import Times
from test_parallel import EXACT, Model, Trip, batch, ddp
from torch import nn
from worlds import run_ranks

import cos598d
from cos598d.errors import UserError
from cos598d.sync import get_sync

CODED = [name for name in EXACT if "compress" in get_sync(name).uses and name != "ddp"]
# After a step that was cut short sparse_rows sends its rows once more, and a codec makes something else of more rows.
DENSE = [name for name in CODED if name != "sparse_rows"]
TOLERANCE = 1e-6
STEPS = 4


def model_of(rank):
    """The large model of the other tests; its two embeddings' output and its head can trip backward."""
    model = Model(rank)
    model.tripping = None
    model.embedding.register_forward_hook(lambda _, __, out: Trip.apply(out) if model.tripping == "last" else out)
    model.hidden.register_forward_hook(lambda _, __, out: Trip.apply(out) if model.tripping == "middle" else out)
    model.output.register_forward_hook(lambda _, __, out: Trip.apply(out) if model.tripping == "first" else out)
    return model


def loss_of(module, rank, step, scale=1.0):
    return scale * module(batch(rank, step), use=True)["logits"].square().mean()


def plain_step(module, comm, step):
    loss_of(module, comm.rank, step).backward()


def stepped(module, *, rate=0.5):
    with torch.no_grad():
        for p in module.parameters():
            if p.grad is not None:
                p -= rate * p.grad
    module.zero_grad()


def pair(comm, name, make=model_of, **options):
    """A model of this rank under the sync, and one under DDP."""
    return cos598d.data_parallel(make(comm.rank), name, **options), ddp(make(comm.rank))


def assert_alike(comm, mine, theirs, what):
    """The weights are those of the other model, and of the other ranks; and `mine` is detached."""
    theirs = theirs.module if hasattr(theirs, "module") else theirs
    for (name, p), other in zip(mine.module.named_parameters(), theirs.parameters(), strict=True):
        worst = (p - other).abs().max().item()
        assert worst < TOLERANCE, f"{what}: {name} is off by {worst:.1e}"
    digests = comm.exchange([p.double().abs().sum().item() for p in mine.parameters()])
    assert all(each == digests[0] for each in digests), f"{what}: weights differ between ranks"
    mine.detach()


def sentences(comm, module, steps, loss_of_step):
    """The error of each step, or None. Every rank has the same, and no gradients after one."""
    said = []
    for step in range(steps):
        try:
            loss_of_step(step).backward()
            said.append(None)
        except UserError as error:
            said.append(str(error))
            assert all(p.grad is None for p in module.parameters())
        module.zero_grad()
    assert all(each == said for each in comm.exchange(said))
    return said


def left_out(comm, name, **options):
    """Exceptions in backward on some ranks at some steps, which the script catches; DDP makes the other steps alone."""
    tripping = {  # by step, by rank
        1: {1: "last"},
        2: {0: "first"},
        3: {0: "middle", comm.world_size - 1: "last"},
        5: {0: "last", 1: "last", 2: "last", 3: "last"},
        7: {1: "first"},
    }
    mine, theirs = pair(comm, name, **options)
    if "compress" in options:
        theirs = cos598d.data_parallel(model_of(comm.rank), name, **options)
    for step in range(8):
        mine.module.tripping = tripping.get(step, {}).get(comm.rank)
        accumulates = step in (1, 4)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if accumulates:
                with mine.no_sync():
                    mine.module.tripping, kept = None, mine.module.tripping
                    plain_step(mine, comm, 50)
                    mine.module.tripping = kept
            try:
                plain_step(mine, comm, step)
                raised = ""
            except RuntimeError as error:
                raised = str(error)
        # A collective of the script's own: all calls of the step are over on every rank.
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [comm.world_size] * 3
        assert raised == ("tripped" if comm.rank in tripping.get(step, {}) else "")
        if step in tripping:
            assert all(p.grad is None for p in mine.parameters()), f"step {step}"
            ranks = [str(rank) for rank in sorted(tripping[step]) if rank < comm.world_size]
            (said,) = [str(each.message) for each in seen]
            assert said.startswith(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} left backward by"), said
            continue
        if accumulates:
            with theirs.no_sync():
                plain_step(theirs, comm, 50)
        plain_step(theirs, comm, step)
        for module in (mine, theirs):
            stepped(module)
    assert_alike(comm, mine, theirs, f"{name} {options}")


def forward_raises(comm, name):
    """An exception in one rank's forward, while the others continue: its next batch takes the place of that one."""
    modules = pair(comm, name)
    for module in modules:
        for step in range(5):
            if step == 1 and comm.rank == 1:
                with pytest.raises(IndexError):
                    module(torch.tensor([[9001]]))
            elif step < 4 or comm.rank == 1:
                plain_step(module, comm, step)
                stepped(module)
    assert_alike(comm, *modules, f"{name} forward raises")


class Tied(nn.Module):
    """Two layers that share a weight, one of their own, and a buffer."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.full((3,), float(seed)))

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x))))) + self.shift


def tied_loss(module, rank, step):
    return module(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def new_head(model, seed):
    torch.manual_seed(seed)
    model.head = nn.Linear(6, 3)


def normed_head(model, seed):
    torch.manual_seed(seed)
    model.head = nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3))
    model.head.register_buffer("of_its_own", torch.full((2,), float(seed)))


def no_head(model, seed):
    model.head = nn.Identity()
    model.shift = torch.full((6,), float(seed))


def untied(model, seed):
    model.second.weight = nn.Parameter(torch.full((6, 6), 0.1 * (seed + 1)))


def tied_more(model, seed):
    model.second.bias = model.first.bias


def frozen(model, seed):
    model.head.requires_grad_(False)


CHANGES = [new_head, normed_head, no_head, untied, tied_more, frozen]


def changed(comm, name, **options):
    """The model is changed between two steps, to other values on each rank. A new DDP takes rank 0's values."""
    for change in CHANGES:
        mine, theirs = pair(comm, name, Tied, **options)
        for step in range(STEPS):
            if step == 2:
                seed = 5 + comm.rank
                change(mine.module, seed)
                theirs = copy.deepcopy(theirs.module)
                change(theirs, seed)
                theirs = ddp(theirs)  # which sends rank 0's values
            for module in (mine, theirs):
                tied_loss(module, comm.rank, step).backward()
                stepped(module)
        assert [len(b) for b in mine.module.buffers()] == [len(b) for b in theirs.module.buffers()]
        if change is normed_head:
            assert mine.module.head.of_its_own.tolist() == [5.0, 5.0]
        assert_alike(comm, mine, theirs, f"{name} {change.__name__}")


def whole_model_replaced(comm, name):
    mine = cos598d.data_parallel(Tied(comm.rank), name)
    tied_loss(mine, comm.rank, 0).backward()
    mine.zero_grad()
    mine.module = Tied(7 + comm.rank)
    theirs = ddp(Tied(7 + comm.rank))
    for step in range(2):
        for module in (mine, theirs):
            with module.no_sync():
                tied_loss(module, comm.rank, 9).backward()
            tied_loss(module, comm.rank, step).backward()
            stepped(module)
    assert_alike(comm, mine, theirs, f"{name} model.module")


def changed_on_one_rank(comm, name, **options):
    """Every rank gets the same sentence at each step until the others have changed too."""
    mine = cos598d.data_parallel(Tied(comm.rank), name, **options)

    def loss_of_step(step):
        if (step == 1 and comm.rank == 1) or (step == 3 and comm.rank != 1):
            new_head(mine.module, 8)
        return tied_loss(mine, comm.rank, step)

    said = sentences(comm, mine, 5, loss_of_step)
    assert [each is None for each in said] == [True, False, False, True, True], said
    assert "rank 1 changed its model" in said[1]
    mine.module.head = nn.Linear(6, 3 + comm.rank)
    with pytest.raises(UserError, match=r"rank 1 has head.weight \(4, 6\) float32 where rank 0 has head.weight"):
        tied_loss(mine, comm.rank, 4).backward()
    mine.detach()


def missing_gradient(comm, name):
    """With find_unused_parameters off, a gradient that one rank lacks is one error on every rank, and no step."""
    mine = cos598d.data_parallel(Tied(0), name, find_unused_parameters=False)

    def loss_of_step(step):
        loss = tied_loss(mine, comm.rank, step)
        return mine.module.head.bias.sum() if step == 1 and comm.rank == 1 else loss

    said = sentences(comm, mine, 3, loss_of_step)
    assert "rank 1: " in said[1]
    assert "got no gradient in this step" in said[1]
    assert said == [None, said[1], None]
    mine.detach()


def scaled_weights(comm, name, how, word, steps=8, bad=()):
    """The weights after steps with a GradScaler whose scale goes up and down; at `bad` ones a gradient overflows.

    how: "plain" without a scaler, "scaler", "loss_scale" by hand.
    """
    options = {"bucket_mb": 0.001} if "bucket_mb" in get_sync(name).uses else {}
    module = cos598d.data_parallel(Two(0), name, compress=word, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2, enabled=how == "scaler")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(steps):
        module.module.factor = float("inf") if step in bad and comm.rank == 1 else 1.0
        loss = tied_loss(module, comm.rank, step - sum(each < step for each in bad))
        if how == "loss_scale":
            module.loss_scale = 2.0 ** (step % 3)
            (loss * module.loss_scale).backward()
            for p in module.parameters():
                p.grad /= module.loss_scale
        else:
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    module.detach()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


class Two(nn.Module):
    """Two layers in two buckets, of which the first one's gradient can overflow alone."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.factor = nn.Linear(6, 40), nn.Linear(40, 40), 1.0

    def forward(self, x):
        return self.second(Times.apply(torch.tanh(self.first(x)), self.factor))


def scaled(comm, name, **options):
    for word in ("topk:0.1", "powersgd:1"):
        plain = scaled_weights(comm, name, "plain", word)
        moved = (plain - torch.cat([p.detach().flatten() for p in Two(0).parameters()])).abs().max()
        for how in ("scaler", "loss_scale"):
            worst = ((scaled_weights(comm, name, how, word) - plain).abs().max() / moved).item()
            assert worst < 1e-4, f"{word}, {how}: off by {worst:.1e} of what the weights moved"
        worst = ((scaled_weights(comm, name, "scaler", word, 10, (3, 7)) - plain).abs().max() / moved).item()
        assert worst < 1e-4, f"{word}, overflow: off by {worst:.1e} of what the weights moved"


def crossing(comm, name):
    """Forward outside `no_sync` and backward inside it, the other way round, and nanoGPT's flag for it."""
    modules = pair(comm, name)
    for module in modules:
        for step in range(3):
            with module.no_sync():
                loss = loss_of(module, comm.rank, 20 + step)
            loss.backward()
            loss = loss_of(module, comm.rank, step)
            with module.no_sync():
                loss.backward()
            stepped(module)
        for micro in range(6):
            module.require_backward_grad_sync = micro % 3 == 2
            assert module.require_backward_grad_sync == (micro % 3 == 2)
            plain_step(module, comm, micro)
            if micro % 3 == 2:
                stepped(module)
    assert_alike(comm, *modules, f"{name} crossing")


def frozen_in_between(comm, name, **options):
    """A layer is frozen between a backward under `no_sync` and the one that averages; later it is trained again."""
    mine, theirs = pair(comm, name, **options)
    for step in range(4):
        for module in (mine, theirs):
            with module.no_sync():
                plain_step(module, comm, 30 + step)
                if step == 1:
                    module.module.hidden.requires_grad_(False)
                    module.module.embedding.requires_grad_(False)
                plain_step(module, comm, 40 + step)
            plain_step(module, comm, step)
            stepped(module)
            if step == 2:
                module.module.requires_grad_(True)
                module.module.frozen.requires_grad_(False)
    assert_alike(comm, mine, theirs, f"{name} frozen in between")


def loads(comm, name):
    """A state under plain names and one under DDP's, whole and in a larger model; what does not fit is named."""
    plain = {key: value + 1 for key, value in Tied(3).state_dict().items()}
    of_ddp = {f"module.{key}": value for key, value in plain.items()}
    mine = cos598d.data_parallel(Tied(0), name)
    assert list(mine.state_dict()) == list(plain)
    for state in (plain, of_ddp):
        for strict in (True, False):
            mine.load_state_dict(Tied(4).state_dict())
            found = mine.load_state_dict(state, strict=strict)
            assert (found.missing_keys, found.unexpected_keys) == ([], [])
            assert torch.equal(mine.module.head.weight, plain["head.weight"])
        whole = nn.ModuleDict({"a": mine, "b": nn.Linear(2, 2)})
        inner = {f"a.{key}": value for key, value in state.items()}
        found = whole.load_state_dict(inner, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == (["b.weight", "b.bias"], [])
        prefix = "module." if state is of_ddp else ""
        other = {key: value for key, value in state.items() if key != f"{prefix}head.weight"}
        other |= {f"{prefix}more": torch.zeros(1)}
        found = mine.load_state_dict(other, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == ([f"{prefix}head.weight"], [f"{prefix}more"])
        with pytest.raises(RuntimeError, match=f'Missing key.*"{prefix}head.weight"'):
            mine.load_state_dict(other)
    odd = nn.Module()
    odd.module, odd.weight = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))
    whole = cos598d.data_parallel(odd, name)
    for state in (odd.state_dict(), {f"module.{key}": value for key, value in odd.state_dict().items()}):
        whole.load_state_dict(state)
    mine.detach()
    whole.detach()


CASES = {
    "left out": (left_out, EXACT),
    "left out, every parameter used": (lambda comm, name: left_out(comm, name, find_unused_parameters=False), EXACT),
    "left out, topk": (lambda comm, name: left_out(comm, name, compress="topk:0.1"), DENSE),
    "left out, powersgd": (lambda comm, name: left_out(comm, name, compress="powersgd:2"), DENSE),
    "forward raises": (forward_raises, EXACT),
    "changed": (changed, EXACT),
    "model.module": (whole_model_replaced, EXACT),
    "changed on one rank": (changed_on_one_rank, EXACT),
    "scaled": (scaled, CODED),
    "missing gradient": (missing_gradient, EXACT),
    "loads": (loads, ["bucketed"]),
    "crossing": (crossing, EXACT),
    "frozen in between": (frozen_in_between, EXACT),
}


def run_cases(comm, cases, names):
    """By case and sync: what went wrong, or None."""
    found = {}
    for case in cases:
        function, fitting = CASES[case]
        for name in names:
            if name in fitting:
                try:
                    found[f"{case}, {name}"] = function(comm, name)
                except Exception:
                    found[f"{case}, {name}"] = traceback.format_exc()
                if any(comm.exchange(found[f"{case}, {name}"])):
                    return found  # the ranks' calls may not match any more
    return found


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ranks_end_with_ddp_s_weights_or_one_sentence(world_size):
    """Each world has half of the syncs."""
    names = EXACT[world_size - 2 :: 2]
    for rank, found in enumerate(run_ranks(world_size, run_cases, list(CASES), names)):
        assert {name: problem for name, problem in found.items() if problem} == {}, f"rank {rank}"
