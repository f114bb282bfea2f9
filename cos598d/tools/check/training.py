"""One real training, which sees what single steps do not: a BERT-shaped model, and what happens between its steps.

1. More than 128 tensors: layers of attention, dropout, an embedding, convolutions
   (5 dimensions, channels last), complex and double precision, a number, a tensor without elements.
2. Steps in which layers are used by some ranks, by the first of two micro-batches, or by nobody.
3. Evaluations and settles between steps, a forward within no_sync that ends in an exception, a new sync with the
   state of the first.
4. Each rank draws its dropout from a generator of its own. It must be where it was when a backward ends.
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cos598d.comm.ledger import Ledger
from cos598d.tools.check.driving import noted, whole_state, wrap
from cos598d.tools.exam.explain import explain, mean_of
from cos598d.tools.exam.models import gradients_of, seeded
from cos598d.tools.exam.notes import LessonComm
from cos598d.tools.exam.ranks import World

WIDTH, WORDS, TOKENS, LAYERS, EXAMPLES = 12, 53, 5, 11, 3
RATE, CLOSE = 0.002, 2e-4  # what rounding may add up to over the training, of a tensor's largest gradient
LARGE = 3e4  # half precision has no larger numbers than twice that
ALL, NONE = "all ranks", "no rank"
EVAL = "eval()"
BUFFERS = ("mean", "seen", "lately")


@dataclass(frozen=True)
class Moment:
    """A step of the training, and what comes before it.

    uses: which ranks use the layer `sometimes`: ALL, NONE, "the first rank", or "the first micro-batch" of two.
    only_a_number: whether nothing but one parameter is used, of all ranks or of the last one. before: "evaluation",
    "exception", "settle", "new sync", or EVAL: its step is made in evaluation mode, as in fine-tuning.
    """

    uses: str = ALL
    only_a_number: str = ""
    before: str = ""

    @property
    def parts(self) -> int:
        """Its micro-batches."""
        return 2 if self.uses == "the first micro-batch" else 1

    def words(self) -> str:
        """What is special about it."""
        facts = [f"{self.uses} used a layer" if self.uses != ALL else ""]
        facts += [f"{self.only_a_number} used only one parameter" if self.only_a_number else ""]
        facts += [f"after {'an' if self.before[0] in 'ae' else 'a'} {self.before}" if self.before else ""]
        return ", ".join(filter(None, facts))


# After the new sync a thousand gradients are averaged, and more.
SCRIPT = (
    Moment(),
    Moment(before="new sync"),
    Moment(uses="the first rank"),
    Moment(before="evaluation"),
    Moment(uses="the first micro-batch"),
    Moment(before="exception"),
    Moment(uses=NONE, before="settle"),
    Moment(only_a_number="every rank", uses=NONE),
    Moment(only_a_number="the last rank"),
    Moment(before=EVAL),
    Moment(uses="the first rank"),
)


class TransformerLayer(nn.Module):
    """A layer of a transformer: attention, then two linear layers, each with dropout and a residual connection."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)  # softmax would cancel a bias
        self.wide, self.narrow = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width), for input and output."""
        normed = self.norm(state)
        scores = self.query(normed) @ self.key(normed).transpose(1, 2)
        state = state + self.dropout(scores.softmax(dim=-1) @ self.value(normed))
        return state + self.dropout(self.narrow(torch.tanh(self.wide(state))))


class Bert(nn.Module):
    """Classifies sentences, and has what models outside of textbooks have."""

    mean: torch.Tensor
    seen: torch.Tensor
    lately: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))  # early, so that a loop that ends there ends early
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.number = nn.Parameter(torch.tensor(1.5))
        self.layers = nn.ModuleList(TransformerLayer(WIDTH, 0.1) for _ in range(LAYERS))
        self.flat_conv: nn.Module = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.deep_conv = nn.Conv3d(1, 2, 2)
        self.waves = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.precise = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.large = nn.Parameter(torch.randn(97))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.tensor(2**24 + 1))  # from there on float32 has no odd numbers
        self.register_buffer("lately", torch.zeros(WIDTH), persistent=False)

    def forward(self, ids: torch.Tensor, signs: torch.Tensor, uses: bool, only_a_number: bool) -> torch.Tensor:
        """ids (examples, tokens), signs (97,): the loss."""
        if not len(ids):
            raise ValueError("a batch without examples")
        if only_a_number:
            return self.number * signs[0]
        state = self.words(ids) + self.places.weight
        for layer in self.layers:
            state = layer(state)
        summary = state.mean(dim=1)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * summary.detach().mean(dim=0))
            self.lately.copy_(summary.detach()[0])
            self.seen += 1
        if uses:
            summary = summary + torch.tanh(self.sometimes(summary))
        picture = summary[:, None, :, None].expand(-1, 2, -1, 4) * self.number
        summary = summary * (1 + self.flat_conv(picture).mean(dim=(1, 2, 3)))[:, None]
        summary = summary * (1 + self.deep_conv(summary.view(-1, 1, 2, 3, 2)).mean(dim=(1, 2, 3, 4)))[:, None]
        turned = (summary * self.waves).abs().sum() + (summary.double() * self.precise).sum().float()
        logits = self.last(summary)
        targets = ids[:, 0] % 3
        return nn.functional.cross_entropy(logits, targets) + 0.1 * turned + LARGE * (self.large * signs).sum()


def batch(seed: int, rank: int, step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentences that only this rank has, and signs for the large gradients."""
    generator = torch.Generator().manual_seed(seed + 10_000 * rank + 10 * step + part)
    ids = torch.randint(0, WORDS, (EXAMPLES, TOKENS), generator=generator)
    return ids, torch.randint(0, 2, (97,), generator=generator) * 2.0 - 1.0


def inputs(seed: int, rank: int, size: int, step: int, part: int) -> tuple[Any, ...]:
    """The arguments of the model for a micro-batch."""
    moment = SCRIPT[step]
    uses = {ALL: True, NONE: False, "the first rank": rank == 0, "the first micro-batch": part == 0}[moment.uses]
    only = moment.only_a_number == "every rank" or (moment.only_a_number == "the last rank" and rank == size - 1 > 0)
    return (*batch(seed, rank, step, part), uses, only)


def drive_training(comm: LessonComm, module: Any, name: str, seed: int) -> dict[str, Any]:
    """Train on this rank: the gradients of each step, the weights and buffers, and what else must not change."""
    model = seeded(seed + comm.rank, Bert)
    ledger, grads, faults = Ledger(), [], []
    with noted(comm, ledger):
        wrapped = wrap(name, model, ledger)
        torch.manual_seed(seed + comm.rank)
        for step, moment in enumerate(SCRIPT):
            if moment.before == "evaluation":
                wrapped.eval()
                with torch.no_grad():
                    wrapped(*inputs(seed, comm.rank, comm.world_size, step, 0))
                wrapped.train()
            if moment.before == "exception":
                with contextlib.suppress(ValueError), wrapped.no_sync():
                    wrapped(torch.zeros(0, TOKENS), torch.zeros(97), True, False)
            if moment.before == "settle":
                wrapped.settle()
            if moment.before == "new sync":
                state = {key: value.clone() for key, value in wrapped.sync.own_state().items()}
                wrapped.detach()
                wrapped = wrap(name, model, ledger)
                wrapped.sync.load_own_state(state)
            if SCRIPT[step - 1].before != EVAL and not all(each.training for each in model.modules()):
                faults.append(f"the model is in evaluation after {moment.before or 'the step before'}")
            wrapped.train(moment.before != EVAL)
            for part in range(moment.parts - 1):
                with wrapped.no_sync():
                    wrapped(*inputs(seed, comm.rank, comm.world_size, step, part)).backward()
            loss = wrapped(*inputs(seed, comm.rank, comm.world_size, step, moment.parts - 1))
            before = torch.get_rng_state()
            loss.backward()
            if not torch.equal(torch.get_rng_state(), before):
                faults.append("the sync draws from, or seeds, torch's random generator, which dropout needs")
                torch.set_rng_state(before)
            grads.append(gradients_of(model))
            _descend(model)
            ledger.rows.clear()
        wrapped.settle()
        wrapped.detach()
    return {"grads": grads, "state": whole_state(model), "faults": faults}


def _descend(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(RATE * p.grad.to_dense())
                p.grad = None


@functools.lru_cache(maxsize=8)
def alone(seed: int, size: int) -> tuple[list[list[dict[str, torch.Tensor | None]]], dict[str, torch.Tensor]]:
    """One process that plays all ranks: each rank's own gradients of each step, and rank 0's weights and buffers."""
    with torch.random.fork_rng(devices=[]):
        model, states = seeded(seed, Bert), []
        for rank in range(size):
            torch.manual_seed(seed + rank)
            states.append(torch.get_rng_state())
        steps = []
        for step, moment in enumerate(SCRIPT):
            own, buffers = [], {}
            model.train(moment.before != EVAL)
            for rank in range(size):
                start = {name: buffer.clone() for name, buffer in model.named_buffers()}
                torch.set_rng_state(states[rank])
                for part in range(moment.parts):
                    model(*inputs(seed, rank, size, step, part)).backward()
                states[rank] = torch.get_rng_state()
                own.append(gradients_of(model))
                model.zero_grad(set_to_none=True)
                if rank == 0:
                    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
                for name, buffer in model.named_buffers():
                    buffer.copy_(start[name])
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            mean = mean_of(own)
            for name, p in model.named_parameters():
                p.grad = mean[name]
            _descend(model)
            steps.append(own)
    return steps, whole_state(model)


def judge_training(world: World, seed: int) -> None:
    """Fail unless the ranks trained as one process does."""
    steps, state = alone(seed, world.size)
    for rank, value in enumerate(world.values):
        for fault in value["faults"][:1]:
            world.fail(f"{fault}, on rank {rank}", rank)
    before = None
    for step, own in enumerate(steps):
        found = [value["grads"][step] for value in world.values]
        told = explain(found, own, before, near=CLOSE)
        if told:
            rank, words, numbers = told
            special = SCRIPT[step].words()
            where = f"step {step + 1} of a training{f' ({special})' if special else ''}"
            world.fail(f"{where}: {words}", rank, numbers)
        before = mean_of(own)
    for rank, value in enumerate(world.values):
        for name, right in state.items():
            _equal(world, rank, name, value["state"][name], right)
    _replicas(world)


def _equal(world: World, rank: int, name: str, found: torch.Tensor, right: torch.Tensor) -> None:
    is_rounded = right.numel() and (right.is_floating_point() or right.is_complex())
    bound = CLOSE * float(right.abs().max()) if is_rounded else 0.0
    is_right = found.shape == right.shape and bool(((found - right).abs() <= bound).all())
    what = f"{name} differs from one process's"
    if name in BUFFERS:
        what = f"settle does not give all ranks rank 0's buffer {name}: it is another one"
    world.require(is_right, f"after the training {what} on rank {rank}", rank)


def _replicas(world: World) -> None:
    """Fail if ranks end with other bits."""
    first: Sequence[Any] = world.values
    for rank, value in enumerate(world.values):
        for name, right in first[0]["state"].items():
            is_same = torch.equal(value["state"][name], right)
            world.require(is_same, f"after the training {name} is not the same on rank 0 and rank {rank}", rank)
