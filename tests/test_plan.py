"""Which steps a run has, and where it is evaluated, wherever it begins."""

import numpy as np
import pytest

from cos598d.config import RunConfig
from cos598d.plan import Plan, Position

EXAMPLES = 10


def plan_of(**values):
    return Plan(RunConfig(total_train_batch_size=4, **values), EXAMPLES, 1)


def drawn(plan, after=0):
    return [(epoch, batch.tolist()) for epoch, batch in plan.batches(after)]


@pytest.mark.parametrize("values", [{"num_train_epochs": 2.5}, {"max_steps": 7}, {"max_steps": 1}, {}], ids=str)
def test_a_training_that_goes_on_sees_the_batches_that_it_would_have_seen(values):
    plan = plan_of(**values)
    whole = drawn(plan)
    assert len(whole) == plan.steps
    for after in range(plan.steps + 2):
        assert drawn(plan, after) == whole[after:]


def test_every_epoch_has_each_example_once_but_one_that_is_cut_short():
    whole = drawn(plan_of(num_train_epochs=2.5))
    assert [epoch for epoch, _ in whole] == [1, 1, 1, 2, 2, 2, 3, 3]
    for epoch in (1, 2):
        seen = np.concatenate([batch for its, batch in whole if its == epoch])
        assert sorted(seen) == list(range(EXAMPLES))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_train_epochs": 2}, [3, 6]),
        ({"max_steps": 5}, [3, 5]),
        ({"max_steps": 7, "eval_steps": 2}, [2, 3, 4, 6, 7]),
    ],
    ids=str,
)
def test_a_run_is_evaluated_after_every_epoch_and_where_it_is_asked_to_be_once(values, expected):
    plan, at, found = plan_of(**values), Position(), []
    assert not plan.evaluates(at)
    for iteration in range(1, plan.steps + 1):
        at.iteration = iteration
        if plan.evaluates(at):
            found.append(iteration)
            at.evaluated = iteration
            assert not plan.evaluates(at)
    assert found == expected


def test_a_position_sums_up_the_epoch_that_is_under_way():
    at = Position()
    for loss, share in ((1.0, 1.0), (2.0, 1.0), (6.0, 0.5)):
        at.add(loss, share)
    assert at.end_epoch(0.5) == {"iterations": 3, "loss": (1 + 2 + 6 / 2) / 2.5}
    at.add(5.0, 1.0)
    assert at.end_epoch(1.0) == {"iterations": 1, "loss": 5.0}


def test_the_last_iteration_of_an_epoch_has_what_is_left_of_the_examples():
    plan = plan_of(num_train_epochs=2)
    for number, (_, batch) in enumerate(plan.batches(after=0), start=1):
        assert plan.share(number) == len(batch) / plan.batch_size
