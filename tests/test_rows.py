"""The two strategies that send rows of embeddings: the same training, resumed states, memory, and lost ranks."""

import math
import os

import pytest
from compared import SMALL_BUCKETS, adamw, layered, sgd, train_sharded
from states import Case
from test_shard import SHARDED, compare, odd_steps, toy_steps
from test_state import compare as compare_states
from worlds import run_ranks

from cos598d.strategies.formula import TrainingSpec
from cos598d.strategies.parts import row_gradients
from cos598d.strategies.parts.row_gradients import EmbeddingRows, RowGradients
from cos598d.strategies.parts.shared_gradients import SharedGradients
from cos598d.strategies.parts.units import ReplicatedUnit
from cos598d.strategies.shared_weights import SharedWeights
from cos598d.strategies.sparse_zero1 import SparseZero1
from cos598d.sync.parts import embeddings
from cos598d.tools.check.spawn import DIED, LATE, RETURNED, run_world

SPARSE, SHARED = NAMES = ("sparse_zero1", "shared_weights")


def with_rows():
    """From here on in this process the toys' embeddings are large enough for rows of them to travel."""
    row_gradients.LEAST_BYTES = embeddings.LEAST_BYTES = 100


def train_with_rows(comm, name):
    """On a rank: how far strategy `name` is from one process, by kind of training, and what odd steps left."""
    with_rows()
    kinds = ((sgd, 4), (adamw, 1), (adamw, 3))
    found = {f"{make.__name__} {micros}": compare(comm, name, make, micros)[:2] for make, micros in kinds}
    if comm.world_size == 1:  # on which no other one overflows
        return found, None
    found["bf16"] = [each / 1000 for each in compare(comm, name, sgd, 2, "bf16")[:2]]
    found["toy"] = [toy_steps(comm, name, 3)[0]]
    odd = odd_steps(comm, name)
    row_gradients.MIB = -math.inf  # a ring's rows, whatever it saves
    found["in a ring"] = compare(comm, name, adamw, 3)[:2]
    return found, odd


@pytest.mark.long(one_in=5)
@pytest.mark.parametrize(("name", "ranks"), [(SPARSE, 2), (SPARSE, 1), (SPARSE, 4), (SHARED, 2), (SHARED, 3)])
def test_with_rows_it_is_the_same_training(name, ranks):
    for found, odd in run_ranks(ranks, train_with_rows, name):
        assert {kind: worst for kind, worst in found.items() if max(worst) > 2e-5} == {}
        if odd:
            assert odd["overflow"] == [False, 4.0, True, 0]
            assert odd["going on"] < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_with_rows_a_training_resumes_to_the_last_bit(tmp_path, name):
    kinds = [("adamw", "fp32"), ("momentum", "fp32"), ("adamw", "fp16")]
    cases = [Case(name, {"bucket_mb": 0.3}, "bert", optimizer=kind, precision=word) for kind, word in kinds]
    assert compare_states(tmp_path, cases, prepare=with_rows) == {}


def held_with_rows(comm, name):
    """On a rank: what is held between two steps; by formula that, and the peak; what is never stepped; the replicas."""
    with_rows()
    model = layered()
    model.order = (0, 1, 2)
    job = TrainingSpec(layered(), comm.world_size, comm.rank, 2, 4)
    strategy = SHARDED[name](comm, True, SMALL_BUCKETS)
    train_sharded(strategy, strategy.attach(model, adamw), comm, 2, 1, 0.3)
    held, expected = strategy.memory(), strategy.expected_memory(job)
    never = sum(2 * part.nbytes + 4 for of, part, *_ in strategy.pieces if of.startswith("never"))
    replicas = [unit.name for unit in strategy._gradients.units if isinstance(unit, ReplicatedUnit)]
    strategy.detach()
    return held, dict(expected.between_steps), sum(expected.peak.values()), never, replicas


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_that_of_the_formula(name):
    for held, between, peak, never, replicas in run_ranks(2, held_with_rows, name):
        assert held == between | {"optimizer": between["optimizer"] - never}, "what is never used has no state"
        assert peak >= sum(between.values())
        # The words' embedding is the output's weight, too.
        assert replicas == (["positions.weight"] if name == SPARSE else [])
        assert between["buckets"] == 97 + 8 or name == SPARSE


POINTS = {
    "tell": (RowGradients, "begin_backward"),
    "send rows": (EmbeddingRows, "start"),
    "add up rows": (EmbeddingRows, "end"),
    "norm": (SparseZero1, "sum_over_ranks"),
    "gather": (SparseZero1, "stepped"),
    "forget": (EmbeddingRows, "forget"),
    "fill": (SharedGradients, "start_sum"),
    "add up": (SharedGradients, "end_sums"),
    "clear": (SharedGradients, "flat"),
    "come": (SharedWeights, "_come"),
    "step": (SharedWeights, "stepped"),
    "cast": (SharedWeights, "_cast"),
}


def die_at(comm, point):
    """On a rank: three steps, in the second of which rank 1 is gone without a word, at `point`."""
    with_rows()
    kind, precision = (SparseZero1, "fp32") if list(POINTS).index(point) < 6 else (SharedWeights, "bf16")
    strategy = kind(comm, True, SMALL_BUCKETS, precision)
    module = strategy.attach(layered(), sgd)
    train_sharded(strategy, module, comm, 1, 1, 0.3)
    if comm.rank == 1:
        setattr(*POINTS[point], lambda *_, **__: os._exit(9))
    train_sharded(strategy, module, comm, 2, 1, 0.3, first=1)


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_lost_at_any_point_of_a_step_ends_the_others(point):
    ends = run_world(2, die_at, point, seconds=90)
    assert ends[1].how == DIED
    assert ends[0].how not in (RETURNED, LATE), ends[0]
    assert "lost connection to rank 1" in ends[0].output, ends[0]
