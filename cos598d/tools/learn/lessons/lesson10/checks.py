"""Lesson 10, send less: of an embedding the rows that were looked up, of other gradients the largest elements."""

from cos598d.tools.check.claims.base import Claim
from cos598d.tools.learn.checking import Check, Checks, OnLesson
from cos598d.tools.learn.lessons.lesson10.embedding_rows import (
    averages_rows,
    gradient_of,
    lookups,
    sends_rows_looked_up,
)
from cos598d.tools.learn.lessons.lesson10.top_k import (
    NAMES,
    SHARE,
    feeds_back,
    sends_the_largest,
    step_gradient,
    takes_any_size,
    trains,
)


@Claim
def record(on: OnLesson) -> None:
    """An embedding's gradient, then two others, after a first time."""
    codec = on.student.TopK(on.comm, SHARE)
    for step in range(2):
        ids = lookups(on.nonce, 0, on.rank, on.world_size)
        rows = gradient_of(on.nonce, 0, on.rank, ids)
        gradients = [step_gradient(on.nonce, step, name, on.rank) for name in NAMES]
        on.comm.exchange(step)
        on.comm.begin_record()
        on.student.average_rows(on.comm, rows, ids)
        for name, gradient in zip(NAMES, gradients, strict=True):
            codec.average(name, gradient)
    on.report_events()


CHECKS = Checks(
    (
        Check(averages_rows, (3, 2)),
        Check(sends_rows_looked_up, (3, 2)),
        Check(feeds_back, (3, 2), about="TopK"),
        Check(takes_any_size, (3, 2), about="TopK"),
        Check(sends_the_largest, (3, 2), about="TopK"),
        Check(trains, (3,), about="TopK"),
    ),
    record=record,
)
