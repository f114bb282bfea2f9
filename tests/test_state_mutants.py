"""Mistakes in saving and loading a state, each of which must show in the training that goes on."""

import pytest
from states import BUCKETS, Case
from test_state import RANKS, differences, take_up, train_and_leave
from worlds import run_ranks

from cos598d.strategies import base, state
from cos598d.strategies.precision import LossScale
from cos598d.strategies.replicated import Replicated
from cos598d.strategies.state import FullTensor, OptimizerState
from cos598d.sync import ddp
from cos598d.sync.codecs.base import Kept
from cos598d.sync.codecs.int8 import Int8
from cos598d.sync.codecs.topk import TopK
from cos598d.sync.local_sgd import LocalSGD
from cos598d.sync.parts.reducer import Reducer


def forget_step(self, whole, put=OptimizerState.put):
    if whole.kind != "step":
        put(self, whole)


def count_one_less(self, whole, put=OptimizerState.put):
    put(self, FullTensor(whole.kind, whole.name, whole.tensor - 1) if whole.kind == "step" else whole)


def take_another_part(self, whole):
    """Of the whole what another rank steps."""
    mine = state.local(self.parameter)
    begin = (self.begin + mine.numel()) % (whole.numel() - mine.numel() + 1)
    return whole.reshape(-1)[begin : begin + mine.numel()].view(mine.shape)


def forget(*_):
    """Go on without it."""


def keep_what_is_older(self):
    return {name: pair[0] for name, pair in self._pairs.items()}


TOPK, POWERSGD = ({"compress": word, **BUCKETS} for word in ("topk:0.1", "powersgd:1"))
# What is put in whose place, and a training that must tell.
MUTANTS = {
    "forgets how often each parameter was stepped": (OptimizerState, "put", forget_step, Case("zero1", BUCKETS)),
    "counts one step less": (OptimizerState, "put", count_one_less, Case("all_reduce")),
    "mixes the ranks' pieces": (state.Stepped, "part_of", take_another_part, Case("zero3", BUCKETS)),
    "forgets the error feedback": (TopK, "load_own_state", forget, Case("bucketed", TOPK)),
    "forgets the factors": (Kept, "load", forget, Case("bucketed", POWERSGD)),
    "keeps an older error": (Kept, "state", keep_what_is_older, Case("bucketed", TOPK)),
    "forgets the random numbers": (Int8, "load_own_state", forget, Case("bucketed", {"compress": "int8", **BUCKETS})),
    "forgets when to average": (LocalSGD, "load_own_state", forget, Case("local_sgd", {"sync_every": 2})),
    "gives every rank the average": (Replicated, "load_own_state", forget, Case("local_sgd", {"sync_every": 2})),
    "lays DDP's buckets as at first": (Reducer, "rehearse", forget, Case("ddp", {}, "plain")),
    "forgets the ranks' buffers": (base, "load_own_buffers", forget, Case("all_reduce", {}, "plain")),
    "forgets torch's PowerSGD": (
        ddp, "POWERSGD", (), Case("ddp", {"ddp_hook": "powersgd"}, "plain", left=12, end=14),
    ),
    "forgets the loss scale": (LossScale, "load", forget, Case("bucketed", BUCKETS, precision="fp16")),
}  # fmt: skip


def with_mistakes(comm, folder, function):
    """What `function` finds of each training while its mutant is in place, or what it raises."""
    found = []
    for place, (owner, attribute, mutant, case) in enumerate(MUTANTS.values()):
        right = getattr(owner, attribute)
        setattr(owner, attribute, mutant)
        try:
            found.append(function(comm, f"{folder}/{place}", [case])[0])
        except Exception as error:  # noqa: BLE001 - whatever it is, it has been noticed
            found.append(repr(error))
        finally:
            setattr(owner, attribute, right)
    return found


# Where it shows; elsewhere in the weights.
SHOWS = {
    "forgets how often each parameter was stepped": "KeyError('step')",
    "forgets the ranks' buffers": "own",
    "forgets the loss scale": "scalars",
}


@pytest.mark.long
def test_every_mistake_shows(tmp_path):
    for place in range(len(MUTANTS)):
        (tmp_path / str(place)).mkdir()
    begun = run_ranks(RANKS, with_mistakes, str(tmp_path), train_and_leave, seconds=200)
    gone_on = run_ranks(RANKS, with_mistakes, str(tmp_path), take_up, seconds=200)
    for place, name in enumerate(MUTANTS):
        wrong = set()
        for rank in range(RANKS):
            (_, asked), found = begun[rank][place], gone_on[rank][place]
            if isinstance(found, str):
                wrong.add(found)
            else:
                later = asked | {"losses": asked["losses"][-len(found["losses"]) :]}
                wrong.update(differences(later, found))
        assert SHOWS.get(name, "model") in wrong, name
