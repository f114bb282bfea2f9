"""Claims about the calls that a sync makes: only through the communicator, in one order, and waited for."""

from cos598d.records.conventions import GRADIENTS
from cos598d.tools.check.claims.base import FEW_STEPS, Claim, OnRank, World, first_few, moment_of


@Claim
def waits_for_its_calls(on: OnRank) -> None:
    """When finish returns, no call is still running: each that was started has been waited for."""
    model = on.model()
    sync, module = on.attached(model)
    on.comm.not_waited_for()
    for step in range(FEW_STEPS):
        module(**on.batch(step))[0].backward()
        sync.finish()
        on.report(moment_of("", step), on.comm.not_waited_for())
        model.zero_grad(set_to_none=True)


@waits_for_its_calls.judgement
def _(world: World) -> None:
    for step in range(FEW_STEPS):
        for rank, calls in enumerate(world.reported(moment_of("", step), list)):
            world.require(
                not calls,
                f"{len(calls)} calls are not waited for when finish returns: {', '.join(map(str, calls[:3]))}",
                rank,
                "finish returns while calls are still running: wait for each call that you start with async_op",
            )


@Claim
def goes_through_comm(on: OnRank) -> None:
    """Ranks reach each other only through self.comm, and send all of the gradients' bytes there.

    self.comm counts what is sent. None calls torch.distributed.
    """
    model = on.model()
    sync, module = on.attached(model)
    ledger = on.fresh_ledger()
    module(**on.batch(0))[0].backward()
    sync.finish()
    on.report("payload", sum(row.payload_bytes for row in ledger.rows if row.purpose == GRADIENTS))


@goes_through_comm.judgement
def _(world: World) -> None:
    mean = world.local([0]).mean
    gradient = sum(each.numel() * each.element_size() for each in mean.values() if each is not None)
    for rank, payload in enumerate(world.reported("payload", int)):
        direct = world.evidence[rank].reported("", "direct calls", list)
        cause = "it calls torch.distributed directly, bypassing self.comm" if direct else ""
        world.require(not direct, f"torch.distributed is called, bypassing self.comm: {first_few(direct)}", rank, cause)
        if world.size > 1 and not direct:
            message = f"{payload} bytes were sent through self.comm for {gradient} bytes of gradients"
            world.require(payload >= gradient, message, rank)


@Claim
def calls_in_one_order(on: OnRank) -> None:
    """Every rank makes the same calls in the same order, and together they receive what they send."""
    model = on.model()
    sync, module = on.attached(model)
    ledger = on.fresh_ledger()
    for step in range(2):
        module(**on.batch(step, on.rank == 0))[0].backward()
        sync.finish()
    on.report("calls", [[row.op, row.tensor, list(row.shape)] for row in ledger.rows])
    on.report("sent", sum(row.bytes_sent for row in ledger.rows))
    on.report("received", sum(row.bytes_received for row in ledger.rows))


@calls_in_one_order.judgement
def _(world: World) -> None:
    made = world.reported("calls", list)
    for rank, calls in enumerate(made):
        world.require(calls == made[0], "the ranks' calls differ in number, order or shape", rank)
    sent, received = (sum(world.reported(name, int)) for name in ("sent", "received"))
    is_even = abs(sent - received) <= len(made[0]) * world.size
    world.require(is_even, f"{sent} bytes sent but {received} received")
