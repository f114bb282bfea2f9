"""A run that is killed and goes on ends as the run that was never interrupted: bit for bit, in weights and record."""

from pathlib import Path

import pytest
from lives import checkpoints_in, kept, live
from worlds import run_ranks

from cos598d.tools.check.spawn import DIED, run_world

SAME = ("losses", "weights", "epochs", "totals")
KILLED = ("forward", 6, 0)


def killed(world_size, folder, values, kill):
    """Start the run, which is killed at a point; the other ranks end because of it."""
    ends = run_world(world_size, live, str(folder), values, kill, seconds=90)
    assert ends[kill[2]].how == DIED, [(end.how, end.traceback, end.output) for end in ends]


def gone_on(world_size, folder, values, **more):
    return run_ranks(world_size, live, str(folder), values | {"resume": "auto"} | more)


SYNCS = [
    (1, {"sync": "none"}),
    (2, {"sync": "all_reduce"}),
    (3, {"sync": "bucketed"}),
    (2, {"sync": "bucketed", "compress": "topk"}),
    (2, {"sync": "bucketed", "compress": "powersgd"}),
    (2, {"sync": "sparse_rows"}),
    (2, {"sync": "local_sgd", "sync_every": 3}),
    (2, {"sync": "diloco", "fragments": 2, "sync_every": 2}),
    (3, {"sync": "ddp"}),
    (2, {"sync": "shared_memory"}),
    (3, {"sync": "zero1"}),
    (3, {"sync": "sparse_zero1"}),
    (3, {"sync": "zero2"}),
    (3, {"sync": "zero3"}),
    (2, {"sync": "shared_weights"}),
]


@pytest.mark.parametrize(
    ("world_size", "values"),
    SYNCS,
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_a_killed_run_ends_as_it_would_have(world_size, values, tmp_path: Path):
    """Dropout is on, a step comes in two parts, and the checkpoint is made within an epoch."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run_ranks(world_size, live, str(whole), values)
    killed(world_size, broken, values, KILLED)
    assert checkpoints_in(broken)[0] == 4
    found = gone_on(world_size, broken, values)
    for rank, (one, other) in enumerate(zip(found, expected)):
        assert (one["from"], other["from"]) == (4, 0)
        for name in SAME:
            assert one[name] == other[name], (rank, name)
        of_steps = [
            {number: calls for number, calls in each["calls"].items() if number != "0"} for each in (one, other)
        ]
        assert of_steps[0] == of_steps[1], rank
    assert len(set(expected[0]["losses"])) == 12
    assert checkpoints_in(broken) == checkpoints_in(whole)
    assert checkpoints_in(whole)[-2:] == [8, 12]
    assert kept(broken, 12) == kept(whole, 12)
