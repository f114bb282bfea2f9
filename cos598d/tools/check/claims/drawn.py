"""Claims about anything that a model or a training may have, drawn again in each check."""

import contextlib
import json
from dataclasses import replace

import torch
from torch import nn

from cos598d.sync.base import GradientSync
from cos598d.sync.options import DEFAULTS, SyncOptions
from cos598d.tools.check.claims.base import BUCKETS, Claim, Finding, OnRank, World
from cos598d.tools.check.comparison import Gradients
from cos598d.tools.check.drawn import Draw, DrawnComparison, DrawnStep, models, random_of, training

# For float32 sums of random numbers, with a common sign: a rounded 1/n has an error of half an eps, 6e-8.
MOST_DRIFT = 8e-8
AFTER = "weights after the steps"


class _BrokenOff(Exception):
    """What a script catches: a batch that ends in an exception."""


@Claim
def averages_any_tensors(on: OnRank) -> None:
    """Tensors of any size, shape, dtype and values are averaged, to the last bit of their dtype.

    Of none to four dimensions, of one to three million elements, at round numbers, fewer than ranks; zeros too.
    Those of half precision, or not contiguous, may be refused on every rank by an exception: the loop makes none.
    """
    for place, draw in enumerate(models(on.nonce, on.world_size)):
        labels = [label for label, _ in on.buckets()]
        options = BUCKETS[labels[place % len(labels)]]
        try:
            Driven(on, draw, options).run()
        except Exception as error:
            if not draw.may_refuse:
                raise
            on.report(f"refused, {draw.label}", f"{type(error).__name__}: {error}")
        else:
            on.report(f"refused, {draw.label}", "")


@averages_any_tensors.judgement
def _(world: World) -> None:
    for draw in models(world.nonce, world.size):
        refused = world.reported(f"refused, {draw.label}", str)
        if draw.may_refuse and all(refused):
            continue
        for rank, words in enumerate(refused):
            world.require(not words, f"{draw.label}: refused on only some ranks: {words}", rank)
        if not any(refused):
            hold(world, draw)


@Claim
def averages_many_steps(on: OnRank) -> None:
    """Over up to 40 steps, each of 1 to 4 backward passes, with and without no_sync and scale, gradients do not drift.

    Then over as many steps, each of which leaves out other tensors on some ranks or on all.
    """
    for draw in _long_trainings(on.nonce, on.world_size):
        Driven(on, draw).run()


@averages_many_steps.judgement
def _(world: World) -> None:
    draw, with_unused = _long_trainings(world.nonce, world.size)
    comparisons = hold(world, draw)
    hold(world, with_unused)
    # Steps with one average: each further average rounds again.
    sums = [each.drift() for each, step in zip(comparisons, draw.steps, strict=True) if step.parts == 1 or step.within]
    away, up, size = (sum(each) for each in zip(*sums, strict=True))
    if not world.findings and max(abs(away), abs(up)) > MOST_DRIFT * size:
        words = f"gradients drift: over {len(draw.steps)} steps they are off by {max(away, up, key=abs) / size:.1e} of "
        world.find(0, words + f"their size in one direction: expected up to {MOST_DRIFT:g}", "gradients drift")


@Claim
def passes_overflow_on(on: OnRank) -> None:
    """If one rank's gradient is infinite or NaN, every rank's is, and all know it; the next step is clean."""
    draw = _overflowing(on.nonce, on.world_size)
    driven = Driven(on, draw)
    for step in draw.steps:
        gradients = driven.step(step)
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values() if gradient is not None)
        agreed = driven.sync.agree_on_finite(finite)
        on.report(f"agreed, {step.number}", [finite, agreed if isinstance(agreed, bool) else repr(agreed)])
        driven.sync.after_step() if finite else driven.sync.forget_step()


@passes_overflow_on.judgement
def _(world: World) -> None:
    draw = _overflowing(world.nonce, world.size)
    hold(world, draw, with_weights=False)
    for step in draw.steps:
        for rank, (finite, agreed) in enumerate(world.reported(f"agreed, {step.number}", list)):
            words = f"{draw.words(step)}: where this rank's gradients are {'' if finite else 'not '}finite, and so all "
            words += f"ranks', agree_on_finite({finite}) returned {agreed}: expected {finite}"
            world.require(agreed == finite, words, rank, "agree_on_finite does not return what all ranks found")


@Claim
def goes_on_from_its_state(on: OnRank) -> None:
    """A new sync that takes over a model and the old sync's own_state averages as the old one did."""
    Driven(on, _left(on.nonce, on.world_size)).run()


@goes_on_from_its_state.judgement
def _(world: World) -> None:
    hold(world, _left(world.nonce, world.size))


class Driven:
    """A sync that makes the steps of a draw on this rank."""

    def __init__(self, on: OnRank, draw: Draw, options: SyncOptions = DEFAULTS, sync: GradientSync | None = None):
        self._on, self._draw, self._options = on, draw, options
        self._model = draw.model(on.rank)
        self.sync = self._make() if sync is None else sync
        self._module: nn.Module = self.sync.attach(self._model)

    def run(self) -> None:
        """Make all steps, then hand in the weights, which must be rank 0's from before them."""
        for step in self._draw.steps:
            if step.loads:
                self._go_on_anew()
            self.step(step)
            self.sync.after_step()
        self._on.hand_in(f"{self._draw.label}, {AFTER}", dict(self._model.named_parameters()))
        self.sync.detach()

    def step(self, step: DrawnStep) -> Gradients:
        """Make one step, up to `finish`: hand in the gradients, and return them."""
        self.begin(step)
        return self.finish(step)

    def begin(self, step: DrawnStep) -> None:
        """The step's backward passes."""
        sync, rank = self.sync, self._on.rank
        if step.breaks_off:
            with contextlib.suppress(_BrokenOff), sync.no_sync():
                self._module(**self._draw.gradients(step, 0, rank))
                raise _BrokenOff
        sync.loss_scale = step.loss_scale
        for part in range(step.parts):
            is_last = part == step.parts - 1
            with contextlib.nullcontext() if is_last or not step.within else sync.no_sync():
                loss = self._module(**self._draw.gradients(step, part, rank))[0]
                (loss * step.loss_scale).backward()

    def finish(self, step: DrawnStep) -> Gradients:
        """Average the step's gradients, and hand them in."""
        self.sync.finish()
        gradients = {name: p.grad for name, p in self._model.named_parameters()}
        self._on.hand_in(_moment(self._draw, step), gradients)
        following = self._draw.steps[step.number + 1 : step.number + 2]
        self._model.zero_grad(set_to_none=not any(each.zeroes for each in following))
        return gradients

    def of(self, draw: Draw) -> "Driven":
        """The same, with the steps of another draw of the same tensors."""
        self._draw = draw
        return self

    def _make(self) -> GradientSync:
        find_unused = self._draw.may_be_unused or len(self._draw.steps) % 2 == 0
        return self._on.sync(find_unused_parameters=find_unused, options=self._options)

    def _go_on_anew(self) -> None:
        facts, tensors = self.sync.own_state()
        saved = json.dumps(facts), {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.sync.detach()
        self.sync = self._make()
        self._module = self.sync.attach(self._model)
        self.sync.load_own_state(json.loads(saved[0]), saved[1])


def hold(world: World, draw: Draw, with_weights: bool = True) -> list[DrawnComparison]:
    """Find faults in what the ranks handed in for a draw: gradients, then weights."""
    like = dict(draw.model().named_parameters())
    made = []
    for step in draw.steps:
        comparison = draw.comparison(step, world.handed_in(_moment(draw, step), like))
        made.append(comparison)
        world.comparisons.append(comparison)
        for rank, names in enumerate(comparison.wrong):
            if names:
                words = f"{draw.words(step)}: {comparison.words(rank, names[0])}"
                more = f", and {len(names) - 1} more of {len(like)} tensors are wrong" if len(names) > 1 else ""
                world.findings.append(Finding(rank, words + more, is_compared=True))
    if not world.findings:
        _find_different_bits(world, draw, made)
    if with_weights:
        sentence = f"{draw.label}: the weight {{name}} is not as it was on rank 0 before the steps"
        world.equals(f"{draw.label}, {AFTER}", like, sentence, "attach or finish left another weight than rank 0's")
    return made


def _find_different_bits(world: World, draw: Draw, comparisons: list[DrawnComparison]) -> None:
    """Find the first step whose averages are right, but not the same numbers on every rank."""
    for step, comparison in zip(draw.steps, comparisons, strict=True):
        first, *others = comparison.found
        for rank, other in enumerate(others, 1):
            names = [name for name in first if not _same_numbers(first[name], other[name])]
            if names:
                words = f"{draw.words(step)}: {names[0]}'s average is not rank 0's to the last bit, and so in "
                words += f"{len(names)} of {len(first)} tensors: add up in the same order on every rank"
                world.find(rank, words, "the ranks' averages differ in their last bits: the replicas drift apart")
                return


def _same_numbers(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether all numbers are equal; two non-finite ones count as equal."""
    if one is None or other is None:
        return one is other
    finite = one.isfinite() & other.isfinite()
    return bool(torch.where(finite, one == other, one.isfinite() == other.isfinite()).all())


def _moment(draw: Draw, step: DrawnStep) -> str:
    return f"{draw.label}, step {step.number}"


def _long_trainings(nonce: int, ranks: int) -> tuple[Draw, Draw]:
    """Steps that use all tensors, a third of them after zero_grad(set_to_none=False), and steps that do not."""
    first = training(nonce, ranks)
    first = replace(first, steps=[replace(step, zeroes=step.number % 3 == 2) for step in first.steps])
    other = training(nonce, ranks, "many steps that leave tensors out")
    steps = [replace(step, within=True, breaks_off=False) for step in other.steps]
    return first, replace(other, steps=steps, may_be_unused=True)


def _overflowing(nonce: int, ranks: int) -> Draw:
    """Ten steps, in three to five of which one rank's gradient is not finite."""
    draw, random = training(nonce, ranks, "steps that overflow", 10, 10), random_of(nonce, "overflow", ranks)
    odd = {int(number): int(random.integers(ranks)) for number in random.permutation(9)[: random.integers(3, 6)]}
    odd[3] = ranks - 1
    return replace(draw, steps=[replace(step, infinite=odd.get(step.number, -1)) for step in draw.steps])


def _left(nonce: int, ranks: int) -> Draw:
    """Nine steps; a new sync takes over twice."""
    draw, random = training(nonce, ranks, "steps with a new sync", 9, 9), random_of(nonce, "state", ranks)
    at = (int(random.integers(1, 5)), int(random.integers(5, 8)))
    return replace(draw, steps=[replace(step, loads=step.number in at) for step in draw.steps])
