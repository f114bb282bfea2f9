"""Lesson 11, hold less: ZeRO's first and third stage."""

from cos598d.tools.check.claims.base import Claim
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.lessons.lesson11.stepping import Optimizers
from cos598d.tools.learn.lessons.lesson11.zero1 import ADAMW, zero1_sends, zero1_shares_the_state, zero1_steps
from cos598d.tools.learn.lessons.lesson11.zero3 import (
    forward,
    run_layer,
    start_weights,
    zero3_holds,
    zero3_sends,
    zero3_steps,
)


@Claim
def record(on: OnLesson) -> None:
    """A step of Zero3, after a first one."""
    zero = on.student.Zero3(on.comm, start_weights(on.nonce), Optimizers(ADAMW))
    for step in range(2):
        on.comm.exchange(step)
        on.comm.begin_record()
        loss = forward(zero, on.nonce, step, on.rank, on.world_size, run_layer)
        on.comm.computed("forward")
        loss.backward()
        on.comm.computed("backward")
        zero.step()
        on.comm.computed("step")
    on.report_events()


CHECKS = Checks(
    (
        Check(zero1_steps, (3, 2)),
        Check(zero1_shares_the_state, (3, 2)),
        Check(zero1_sends, (3,)),
        Check(zero3_steps, (3, 2), about="Zero3"),
        Check(zero3_holds, (3,), about="Zero3"),
        Check(zero3_sends, (3,), about="Zero3"),
    ),
    record=record,
)
