"""Claims about a step of several backward passes, with `no_sync` around all but the last and without it."""

from cos598d.tools.check.claims.base import Claim, OnRank, World, moment_of


@Claim
def accumulates(on: OnRank) -> None:
    """Within no_sync nothing travels; the next finish leaves the mean of the gradients summed over the step's parts."""
    for label, options in on.buckets():
        model = on.model()
        sync, module = on.attached(model, options=options)
        for first in (0, 2):
            ledger = on.fresh_ledger()
            with sync.no_sync():
                module(**on.batch(first))[0].backward()
            on.report(f"calls, {moment_of(label, first)}", len(ledger.rows))
            module(**on.batch(first + 1))[0].backward()
            sync.finish()
            on.hand_in_gradients(moment_of(label, first), model)
            model.zero_grad(set_to_none=True)


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
    """Two backward passes in a step, with no no_sync around the first, leave the mean of their sum as well."""
    for label, options in on.buckets():
        model = on.model()
        sync, module = on.attached(model, options=options)
        for first in (0, 2):
            for step in (first, first + 1):
                module(**on.batch(step))[0].backward()
            sync.finish()
            on.hand_in_gradients(moment_of(label, first), model)
            model.zero_grad(set_to_none=True)


@accumulates_without_no_sync.judgement
def _(world: World) -> None:
    for label in world.labels():
        for first in (0, 2):
            world.gradients_are(moment_of(label, first), world.local([first, first + 1]), run=label, step=first)
