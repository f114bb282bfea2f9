"""Claims about what `finish` leaves in .grad: the mean, of whatever was used, and of nothing else."""

from cos598d.records.conventions import AGREEMENT, GRADIENTS
from cos598d.tools.check.claims.base import FEW_STEPS, Claim, OnRank, World, moment_of
from cos598d.tools.check.toy import LARGE, SMALL, Shape

MORE_STEPS = 9
ALL_USED = Shape(all_used=True)
MORE_FROZEN = Shape(is_tied=False, more_frozen=1_013)
SHARING = Shape(shares_gradients=True)


@Claim
def averages_gradients(on: OnRank) -> None:
    """After finish .grad is the mean of all ranks' gradients on every rank, step after step; no weight has changed."""
    for label, options in on.buckets():
        for run, shape, steps in _runs(label):
            model = on.model(shape, differs=True)
            sync, module = on.attached(model, options=options)
            for step in range(steps):
                on.step(sync, module, model, moment_of(run, step), step)
            on.hand_in(f"weights, {run}", dict(model.named_parameters()))


@averages_gradients.judgement
def _(world: World) -> None:
    for label in world.labels():
        for run, shape, steps in _runs(label):
            weights = dict(world.model(shape).named_parameters())
            sentence = "finish changed the weight {name}: only .grad may change"
            world.equals(f"weights, {run}", weights, sentence, "finish changed weights: only .grad may change")
            for step in range(steps):
                local = world.local([step], shape=shape)
                world.gradients_are(moment_of(run, step), local, run=run, step=step, shape=shape)


@Claim
def handles_unused_parameters(on: OnRank) -> None:
    """A parameter that no rank used keeps .grad None; one that some used gets the mean, the others counting as 0."""
    for label, options in on.buckets():
        model = on.model()
        sync, module = on.attached(model, options=options)
        for step, users in enumerate(_users(on.world_size)):
            on.step(sync, module, model, _used(label, step, users), step, with_first_label=on.rank in users)


@handles_unused_parameters.judgement
def _(world: World) -> None:
    for label in world.labels():
        for step, users in enumerate(_users(world.size)):
            world.gradients_are(_used(label, step, users), world.local([step], users), run=label, step=step)


@Claim
def needs_no_agreement(on: OnRank) -> None:
    """With find_unused_parameters=False it still averages, and makes no call to agree on what was used."""
    model = on.model(ALL_USED)
    sync, module = on.attached(model, find_unused_parameters=False)
    ledger = on.fresh_ledger()
    for step in range(FEW_STEPS):
        on.step(sync, module, model, moment_of("", step), step)
    on.report("calls to agree", len([row for row in ledger.rows if row.purpose == AGREEMENT]))


@needs_no_agreement.judgement
def _(world: World) -> None:
    for step in range(FEW_STEPS):
        world.gradients_are(moment_of("", step), world.local([step], shape=ALL_USED), step=step, shape=ALL_USED)
    for rank, calls in enumerate(world.reported("calls to agree", int)):
        world.require(calls == 0, f"{calls} calls to agree on which parameters were used, although all were", rank)


@Claim
def leaves_frozen_weights_alone(on: OnRank) -> None:
    """A frozen weight gets no gradient and is not sent; a weight used in two places is sent once."""
    # Both train the same tensors; only one ties them, and only the other has many frozen ones.
    for name, shape in (("tied", SMALL), ("with more frozen", MORE_FROZEN)):
        model = on.model(shape)
        sync, module = on.attached(model)
        ledger = on.fresh_ledger()
        module(**on.batch(0))[0].backward()
        sync.finish()
        on.report(f"payload, {name}", sum(row.payload_bytes for row in ledger.rows if row.purpose == GRADIENTS))
        on.hand_in(name, {n: p.grad for n, p in model.named_parameters() if not p.requires_grad})


@leaves_frozen_weights_alone.judgement
def _(world: World) -> None:
    for moment, shape in (("tied", SMALL), ("with more frozen", MORE_FROZEN)):
        frozen = {name: p for name, p in world.model(shape).named_parameters() if not p.requires_grad}
        for rank, found in enumerate(world.handed_in(moment, frozen)):
            for name, gradient in found.items():
                world.require(gradient is None, f"the frozen {name} has a gradient", rank)
    tied, more = (world.reported(f"payload, {name}", int) for name in ("tied", "with more frozen"))
    for rank, (once, other) in enumerate(zip(tied, more, strict=True)):
        why = "frozen weights are sent" if other > once else "a weight that is used in two places is sent twice"
        world.require(
            once == other,
            f"{once} bytes were sent of a model with a tied weight, {other} of one with the same to train and more "
            f"that is frozen: {why}",
            rank,
            why,
        )


@Claim
def averages_gradients_that_share_memory(on: OnRank) -> None:
    """If autograd keeps two parameters' gradients in one memory, and needs it later in backward, each is right."""
    for label, options in on.buckets():
        model = on.model(SHARING)
        sync, module = on.attached(model, options=options)
        for step in range(FEW_STEPS):
            on.step(sync, module, model, moment_of(label, step), step)


@averages_gradients_that_share_memory.judgement
def _(world: World) -> None:
    for label in world.labels():
        for step in range(FEW_STEPS):
            local = world.local([step], shape=SHARING)
            world.gradients_are(moment_of(label, step), local, run=label, step=step, shape=SHARING)


def _runs(label: str) -> tuple[tuple[str, Shape, int], ...]:
    """Names, shapes, steps. Long tensors once, many steps once: cutting mistakes show at once, a warm-up's late."""
    if label:
        return ((label, SMALL, FEW_STEPS),)
    return ("long tensors", LARGE, FEW_STEPS), ("", SMALL, MORE_STEPS)


def _users(world_size: int) -> tuple[set[int], ...]:
    return {0}, {world_size - 1}, set()


def _used(label: str, step: int, users: set[int]) -> str:
    return f"{moment_of(label, step)}, `sometimes` used on ranks {sorted(users)}"


@Claim
def accumulates(on: OnRank) -> None:
    """Within no_sync nothing is sent; the next finish gives the mean of the gradients summed over micro-batches."""
    for label, options in on.buckets():
        model = on.model()
        sync, module = on.attached(model, options=options)
        for first in (0, 2):
            ledger = on.fresh_ledger()
            with sync.no_sync():
                module(**on.batch(first))[0].backward()
            on.report(f"calls, {moment_of(label, first)}", len(ledger.rows))
            on.step(sync, module, model, moment_of(label, first), first + 1)


@accumulates.judgement
def _(world: World) -> None:
    for label in world.labels():
        for first in (0, 2):
            moment = moment_of(label, first)
            for rank, calls in enumerate(world.reported(f"calls, {moment}", int)):
                world.require(
                    calls == 0, f"{calls} calls under no_sync ({moment})", rank, "under no_sync it communicates"
                )
            world.gradients_are(moment, world.local([first, first + 1]), run=label, step=first)


@Claim
def accumulates_without_no_sync(on: OnRank) -> None:
    """Two backward passes in a step, without no_sync around the first, give the mean of their sum as well."""
    for label, options in on.buckets():
        model = on.model()
        sync, module = on.attached(model, options=options)
        for first in (0, 2):
            on.step(sync, module, model, moment_of(label, first), first, first + 1)


@accumulates_without_no_sync.judgement
def _(world: World) -> None:
    for label in world.labels():
        for first in (0, 2):
            world.gradients_are(moment_of(label, first), world.local([first, first + 1]), run=label, step=first)
