"""The whole state of a training: any sync's, on any number of ranks, loads into any other's."""

import functools

import pytest
import torch
from ranks import on_ranks
from sync_cases import SHARDED, SINGLE, adamw, make_model, options_of, train, weights_of

from cos598d.errors import UserError
from cos598d.parallel import parallelize

SYNCS = ("bucketed", *SHARDED)
RANKS = (2, 3)


def resumed(rank, ranks, file):
    """Three steps under every sync, and its state then; with a file of states, three more from each of these.

    Returns weights after six steps, straight on, and from each state; all of them on this number of ranks."""
    found, states = {}, file and torch.load(file)
    for sync in SYNCS:
        net = make_model(SINGLE, rank)
        model, optimizer = parallelize(net, adamw, sync, **options_of(sync))
        if states is None:
            train(model, optimizer, range(3))
            found[sync, "state"] = {key: value.clone() for key, value in model.state()}
            train(model, optimizer, range(3, 6))
            model.settle()
            found[sync, "straight on"] = weights_of(net)
        for where, state in states[sync].items() if states else ():
            model.load_state(state)
            again = dict(model.state())
            found[(sync, *where, "kept")] = again.keys() == state.keys() and all(
                torch.equal(again[key], value) for key, value in state.items()
            )
            train(model, optimizer, range(3, 6))
            model.settle()
            found[(sync, *where)] = weights_of(net)
        model.detach()
    return found


@pytest.fixture(scope="module")
def first():
    """By number of ranks: what each rank found."""
    return {ranks: on_ranks(ranks, resumed, None) for ranks in RANKS}


@pytest.fixture(scope="module")
def then(first, tmp_path_factory):
    """Every sync goes on from its own state on as many ranks, and from another's on another number."""
    others = dict(zip(SYNCS, (*SYNCS[3:], *SYNCS[:3]), strict=True))
    found = {}
    for ranks, before in zip(RANKS, reversed(RANKS), strict=True):
        states = {}
        for sync, other in others.items():
            states[sync] = {(sync, ranks): first[ranks][0][sync, "state"]}
            states[sync][other, before] = first[before][0][other, "state"]
        file = tmp_path_factory.mktemp("states") / "states.pt"
        torch.save(states, file)
        found[ranks] = on_ranks(ranks, resumed, str(file))
    return found


@functools.cache
def one_process():
    net = make_model(SINGLE)
    train(net, adamw(net.parameters()), range(6))
    return weights_of(net)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("sync", SYNCS)
def test_a_training_goes_on_from_any_state(first, then, sync, ranks):
    """Within 1e-6 of one process from any sync's; to the last bit from its own on as many ranks."""
    for of_rank, straight in zip(then[ranks], first[ranks], strict=True):
        for (own, *where), weights in of_rank.items():
            if own == sync and where[-1] == "kept":
                assert weights, where  # what was loaded is given again, to the last bit
            elif own == sync:
                assert (weights - one_process()).abs().max() < 1e-6, where
                if where == [sync, ranks]:
                    assert torch.equal(weights, straight[sync, "straight on"])


def test_a_state_has_plain_names_and_whole_tensors(first):
    """The same keys and shapes under every sync: those of one process."""
    model = make_model(SINGLE)
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(3))
    expected = {f"weights/{name}": p.shape for name, p in model.named_parameters()}
    expected |= {f"buffers/{name}": buffer.shape for name, buffer in model.named_buffers()}
    for name, p in model.named_parameters():
        expected |= {f"{kind}/{name}": value.shape for kind, value in optimizer.state.get(p, {}).items()}
    for sync in SYNCS:
        assert {key: value.shape for key, value in first[2][0][sync, "state"].items()} == expected, sync


def wrong_states(rank, ranks):
    for sync in ("bucketed", "zero3"):
        model, _ = parallelize(make_model(SINGLE, rank), adamw, sync, **options_of(sync))
        state = {key: value.clone() for key, value in model.state()}
        with pytest.raises(UserError, match=r"scale of the shape \(\), and the state has one of the shape \(2,\)"):
            model.load_state(state | {"weights/scale": torch.ones(2)})
        del state["weights/table.weight"]
        with pytest.raises(UserError, match=r"weights/table.weight of the shape .*, and the state has none"):
            model.load_state(state)
        model.detach()


def test_a_state_that_does_not_fit_is_said():
    on_ranks(2, wrong_states)


def weights_alone(rank, ranks):
    """Adagrad remembers sums from its start, and torch reads them when a state is loaded."""
    model, optimizer = parallelize(make_model(SINGLE, rank), torch.optim.Adagrad, "bucketed")
    model.load_state({key: value.clone() for key, value in model.state() if key.startswith(("weights/", "buffers/"))})
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    model.detach()


def test_a_state_of_weights_alone_is_loaded():
    on_ranks(2, weights_alone)
