"""A state moves from any strategy to any other, and to other numbers of ranks, without a change."""

from pathlib import Path

import pytest
import torch
from states import BUCKETS, Case, Training, digest, wholes
from worlds import run_ranks

STEPS = 3
# One of each way to hold a state.
HOLDERS = [
    Case("all_reduce"),
    Case("local_sgd", {"sync_every": 2}),
    Case("ddp"),
    Case("zero1", BUCKETS),
    Case("sparse_zero1", BUCKETS),
    Case("zero2", BUCKETS),
    Case("zero3", BUCKETS),
    Case("shared_weights", BUCKETS),
]
OTHER_BUCKETS = {name: 7 * size for name, size in BUCKETS.items()}
CUT_OTHERWISE = [Case("zero1", OTHER_BUCKETS), Case("zero3", OTHER_BUCKETS)]


def train_and_save(comm, folder, cases):
    for place, case in enumerate(cases):
        into = Path(folder) / str(place)
        into.mkdir(exist_ok=True)
        Training(comm, case).steps(0, STEPS).save(into)


def pass_on(comm, source, target, cases):
    """Let every training of `cases` take up every state, and save it again without a step."""
    for place, case in enumerate(cases):
        for state in sorted(Path(source).iterdir()):
            into = Path(target) / f"{state.name}-{place}"
            into.mkdir(parents=True, exist_ok=True)
            Training(comm, case, seed=1).load(state, with_own=False).save(into)


def go_on(comm, source, cases):
    """On a rank: take two more steps from every state with every training; return the weights that each ends with."""
    found = {}
    for place, case in enumerate(cases):
        for state in sorted(Path(source).iterdir()):
            training = Training(comm, case, seed=1).load(state, with_own=False).steps(STEPS, STEPS + 2)
            training.strategy.settle()
            weights = [p.flatten().double() for p in training.model.parameters()]
            found[f"{state.name}-{place}"] = torch.cat(weights).tolist()
            training.strategy.detach()
    return found


def digests(folder):
    return {(whole.kind, whole.name): digest(whole.tensor) for whole in wholes(folder)}


@pytest.mark.long
def test_a_state_moves_between_strategies_and_numbers_of_ranks_unchanged(tmp_path):
    steps = [tmp_path / name for name in "abcd"]
    steps[0].mkdir()
    run_ranks(4, train_and_save, str(steps[0]), HOLDERS)
    run_ranks(2, pass_on, str(steps[0]), str(steps[1]), [*HOLDERS, *CUT_OTHERWISE])
    run_ranks(3, pass_on, str(steps[1]), str(steps[2]), [Case("zero3", BUCKETS)])
    run_ranks(1, pass_on, str(steps[2]), str(steps[3]), [Case("zero1", BUCKETS)])
    for first, later in ((steps[0], steps[1]), (steps[0], steps[2]), (steps[0], steps[3])):
        states = sorted(later.iterdir())
        assert len(states) == len(HOLDERS) * (len(HOLDERS) + len(CUT_OTHERWISE))
        for state in states:
            assert digests(state) == digests(first / state.name.split("-")[0]), state.name


def test_a_state_has_each_trained_tensor_once(tmp_path):
    (tmp_path / "a").mkdir()
    run_ranks(2, train_and_save, str(tmp_path / "a"), [Case("zero1", BUCKETS), Case("all_reduce")])
    for state in ("0", "1"):
        found = {(whole.kind, whole.name): whole.tensor for whole in wholes(tmp_path / "a" / state)}
        assert found["step", "hidden.weight"].item() == STEPS
        assert found["step", "sometimes.weight"].item() == 1, "it was used in the last step alone"
        assert found["weights", "frozen.weight"].shape == (7, 7)
        assert found["exp_avg", "precise"].dtype == torch.float64
        assert ("weights", "embedding.weight") in found
        assert ("weights", "output.weight") not in found, "a tied weight is there once"
        assert ("buffers", "scale") in found
        names = {name for kind, name in found if kind == "exp_avg"}
        assert not names & {"never.weight", "frozen.weight"}


@pytest.mark.long
def test_two_more_steps_by_another_strategy_are_the_same_training(tmp_path):
    exact = [case for case in HOLDERS if case.sync != "local_sgd"]
    (tmp_path / "a").mkdir()
    run_ranks(2, train_and_save, str(tmp_path / "a"), exact)
    by_rank = run_ranks(2, go_on, str(tmp_path / "a"), exact)
    for found in by_rank:
        right = torch.tensor(by_rank[0]["0-0"])
        for who, weights in found.items():
            assert (torch.tensor(weights) - right).abs().max() < 2e-6, who
