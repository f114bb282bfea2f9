"""What the tests of both strategies whose embeddings have sparse gradients ask of a training."""

import os

from test_shard import adamw, compare, layered, odd_steps, sgd, toy_steps, train_sharded
from test_state import differences
from worlds import run_ranks

from cos598d.tools.check.spawn import DIED, LATE, RETURNED, run_world

KINDS = ((sgd, 4), (adamw, 1), (adamw, 3))


def compared(comm, name):
    """On a rank: how far strategy `name` is from one process, by kind of training, and what odd steps left."""
    found = {f"{make.__name__} {micros}": compare(comm, name, make, micros)[:2] for make, micros in KINDS}
    found["bf16"] = [each / 1000 for each in compare(comm, name, sgd, 2, "bf16")[:2]]
    found["toy"] = [toy_steps(comm, name, 3)[0]]
    return found, odd_steps(comm, name)


def are_the_same_training(found, odd):
    assert {name: worst for name, worst in found.items() if max(worst) > 2e-5} == {}
    assert odd["overflow"] == [False, 4.0, True, 0]
    assert odd["going on"] < 1e-5


def is_taken_up(state_of, folder, cases):
    """`state_of` is called on 3 ranks: to train and leave, and to take up what was left."""
    begun = run_ranks(3, state_of, str(folder), cases, False)
    gone_on = run_ranks(3, state_of, str(folder), cases, True)
    for before, after in zip(begun, gone_on, strict=True):
        for (alone, asked), found in zip(before, after, strict=True):
            assert differences(alone | {"rows": asked["rows"]}, asked) == []
            assert differences(asked | {"losses": asked["losses"][-len(found["losses"]) :]}, found) == []


def step_until_gone(comm, strategy, point):
    """On a rank: three steps, in the second of which rank 1 is gone without a word, at `point`: a class's function."""
    module = strategy.attach(layered(), sgd)
    train_sharded(strategy, module, comm, 1, 1, 0.3)
    if comm.rank == 1:
        setattr(*point, lambda *_, **__: os._exit(9))
    train_sharded(strategy, module, comm, 2, 1, 0.3, first=1)


def ends_the_other(die_at, point):
    """`die_at` is called on 2 ranks, with `point`."""
    ends = run_world(2, die_at, point, seconds=90)
    assert ends[1].how == DIED
    assert ends[0].how not in (RETURNED, LATE), ends[0]
    assert "lost rank 1, which ended without a word" in ends[0].output, ends[0]
