"""What lessons 6 and 7 share: calls that begin while backward runs, in one order whatever gradients arrive in."""

from collections.abc import Sequence

import torch
from torch import nn

from cos598d.comm.gloo import all_reduce_bytes
from cos598d.tools.check.claims.base import Claim, World, moment_of
from cos598d.tools.check.comparison import Comparison, Gradients, Local
from cos598d.tools.check.evidence import BadEvidence, seed_of
from cos598d.tools.check.toy import seeded
from cos598d.tools.learn.checking import OnLesson, record_steps
from cos598d.tools.learn.events import CALL, COMPUTE, WAIT, Event, before, from_rows
from cos598d.tools.learn.lessons.golf import STEPS as GOLF_STEPS
from cos598d.tools.learn.lessons.golf import Golf, Results, Turn, golf_of

# All layers are of one size, so that to mix them up is no error; each is larger than a bucket of lesson 7.
WIDTH, BRANCHES, STEPS = 24, 4, 2
NARROW = 10  # of a chain of layers
NEAR = 1e-3  # of the largest element
MOST_MOVED = 1.25  # times the gradients: ranks may agree on what was used, too
GOLF_WIDTH, GOLF_LAYERS, GOLF_RANKS = 128, 6, 3
LATE = 3  # gradients that may come before a call is begun that could have been: buckets differ in how many they take


class Branches(nn.Module):
    """Layers side by side, of one size, added up in an order that each rank chooses: so backward comes in another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BRANCHES))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        """Inputs (batch, WIDTH) and the branches in order: the loss."""
        hidden = torch.tanh(self.first(inputs))
        total = torch.zeros_like(hidden)
        for branch in order:
            total = total + torch.tanh((branch + 1) * self.branches[branch](hidden))
        return self.last(total).square().mean()


def _loss(module: nn.Module, nonce: int, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed_of(nonce, rank) + step))
    return module(inputs, [(place + rank + step) % BRANCHES for place in range(BRANCHES)])


@Claim
def one_order(on: OnLesson) -> None:
    """If gradients arrive in another order on each rank, calls still come in one order, and the means are right."""
    model = seeded(on.nonce, Branches)
    sync, module = on.attached(model)
    for step in range(STEPS):
        _loss(module, on.nonce, on.rank, step).backward()
        sync.finish()
        on.hand_in_gradients(moment_of("", step), model)
        model.zero_grad(set_to_none=True)


@one_order.judgement
def _(world: World) -> None:
    like = dict(seeded(world.nonce, Branches).named_parameters())
    for step in range(STEPS):
        local = Local([[_own(world.nonce, rank, step) for rank in range(world.size)]])
        found = world.handed_in(moment_of("", step), like)
        world.compare(Comparison("", step, local, found, local.mean), moment_of("", step))


def _own(nonce: int, rank: int, step: int) -> Gradients:
    model = seeded(nonce, Branches)
    _loss(model, nonce, rank, step).backward()
    return {name: p.grad for name, p in model.named_parameters()}


class Chain(nn.Module):
    """Layers one behind the other, and a scale in the middle of another dtype: backward goes through them in reverse.

    Some tensors share a bucket of lesson 7's, also the scale with its neighbours, for those who mind no dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(NARROW, NARROW) for _ in range(3))
        self.scale = _Scale()
        self.middle = nn.ModuleList(nn.Linear(NARROW, NARROW) for _ in range(2))
        self.last = nn.Linear(NARROW, NARROW)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs (batch, NARROW): the loss."""
        hidden = inputs
        for layer in (*self.first, self.scale, *self.middle):
            hidden = torch.tanh(layer(hidden))
        return self.last(hidden).square().mean()


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(NARROW, dtype=torch.float64) + 0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.weight.float()


def chain_inputs(nonce: int, rank: int, step: int) -> torch.Tensor:
    """What a rank sees in a step, (5, NARROW)."""
    return torch.randn(5, NARROW, generator=torch.Generator().manual_seed(seed_of(nonce, rank) + step))


@Claim
def begins_during_backward(on: OnLesson) -> None:
    """Each call begins soon after its gradients are there, while backward runs; none is waited for before finish()."""
    model = seeded(on.nonce, Chain)

    def keep(step: int) -> None:
        on.hand_in_gradients(moment_of("", step), model)

    record_steps(on, model, lambda module, step: module(chain_inputs(on.nonce, on.rank, step)), keep)


@begins_during_backward.judgement
def _(world: World) -> None:
    for rank, rows in enumerate(world.reported("events", list)):
        try:
            events = from_rows(rows)
        except ValueError:
            raise BadEvidence(f"rank {rank} did not report what it did") from None
        ended = [event.end for event in events if event.name == "backward"]
        if not ended:
            raise BadEvidence(f"rank {rank} did not report the end of backward")
        _judge_events(world, rank, events, ended[-1])
    if not world.findings:
        _judge_recorded(world)


def _judge_recorded(world: World) -> None:
    """That the steps of which calls are judged leave the averages, or what other checks see: a multiple of them."""
    like = dict(seeded(world.nonce, Chain).named_parameters())
    for step in range(STEPS):
        own = []
        for rank in range(world.size):
            model = seeded(world.nonce, Chain)
            gradients = torch.autograd.grad(model(chain_inputs(world.nonce, rank, step)), list(model.parameters()))
            own.append(dict(zip(like, gradients, strict=True)))
        right = {name: torch.stack([each[name] for each in own]).sum(dim=0) for name in like}
        for rank, found in enumerate(world.handed_in(moment_of("", step), like)):
            for name, total in right.items():
                if not _is_multiple(found[name], total):
                    words = f"rank {rank} has no average of {name} after the step whose calls are checked"
                    world.find(rank, f"{words}: what begins while backward runs must be what is averaged")
                    return


def _is_multiple(found: torch.Tensor | None, total: torch.Tensor) -> bool:
    if found is None or not found.isfinite().all():
        return False
    factor = ((found * total).sum() / total.square().sum()).item()
    return factor > 0 and bool((found - factor * total).abs().max() <= NEAR * factor * total.abs().max())


def _judge_events(world: World, rank: int, events: Sequence[Event], ended: float) -> None:
    calls = [event for event in events if event.kind == CALL]
    arrived = [event.end for event in events if event.kind == COMPUTE and event.tensors]
    early, gradients = before(calls, ended, CALL), list(seeded(world.nonce, Chain).parameters())
    count, size = len(gradients), sum(each.nbytes for each in gradients)
    world.require(
        2 * len(early) >= len(calls) and bool(early),
        f"rank {rank} begins {len(early)} of {len(calls)} calls before backward ends, expected most of them: begin "
        f"each in the hook of its gradient (model of {count} gradients)",
        rank,
    )
    moved, soon = (sum(event.bytes for event in events) for events in (calls, early))
    words = f"rank {rank} makes {moved} bytes of calls for {size} bytes of gradients, and begins {soon} of them before "
    words += "backward ends: expected most of them, and each gradient in one call"
    world.require(moved <= MOST_MOVED * size and 2 * soon >= size, words, rank)
    waited = [event for event in events if event.kind in (CALL, WAIT) and event.end < ended]
    name = waited[0].name if waited else ""
    world.require(
        not waited,
        f"rank {rank} waits for {name} while backward runs, so backward stops: begin it with async_op=True in "
        "the hook, and wait in finish()",
        rank,
    )
    if world.findings:
        return
    for place, call in enumerate(calls, 1):
        # Where calls take as many gradients each, the first is due when its share of them is there.
        there, due = sum(moment <= call.start for moment in arrived), -(-place * count // len(calls))
        if there > due + LATE:
            words = f"rank {rank} begins call {place} of {len(calls)} when {there} of {count} gradients are there"
            world.find(
                rank,
                f"{words}, expected about {due}: begin each call as soon as its gradients are there, in the order in "
                "which backward reaches them, from the last layer to the first",
            )
            return


def _layers(nonce: int) -> nn.Module:
    return seeded(nonce, lambda: nn.Sequential(*(nn.Linear(GOLF_WIDTH, GOLF_WIDTH) for _ in range(GOLF_LAYERS))))


def _golf_loss(module: nn.Module, nonce: int, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed_of(nonce, rank) + 7 + step)
    return module(torch.randn(32, GOLF_WIDTH, generator=generator)).square().mean()


def _golf_means(nonce: int, ranks: int) -> list[Results]:
    model = _layers(nonce)
    found: list[Results] = []
    names = [name for name, _ in model.named_parameters()]
    for step in range(GOLF_STEPS):
        losses = [_golf_loss(model, nonce, rank, step) for rank in range(ranks)]
        means = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
        found.append(dict(zip(names, means, strict=True)))
    return found


def golf_in_backward(**options: int) -> Golf:
    """Golf of a sync that averages while backward runs; `options` are the sync's."""

    def start(on: OnLesson) -> Turn:
        model = _layers(on.nonce)
        sync, module = on.attached(model, **options)

        def turn(step: int):
            model.zero_grad(set_to_none=True)

            def run() -> None:
                _golf_loss(module, on.nonce, on.rank, step).backward()
                sync.finish()

            return run, lambda: {name: p.grad for name, p in model.named_parameters()}

        return turn

    size = sum(p.nbytes for p in _layers(0).parameters())
    what = f"forward, backward and the averages of {2 * GOLF_LAYERS} gradients, {size:,} bytes together"
    return golf_of(what, GOLF_RANKS, all_reduce_bytes(size, GOLF_RANKS), start, _golf_means, tolerance=1e-4)
