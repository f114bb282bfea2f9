"""A resumed training is the same to the last bit under every strategy, and each mistake in saving or loading shows."""

from pathlib import Path

import pytest
from states import BUCKETS, Case, Training
from worlds import run_ranks

from cos598d.strategies import base, state
from cos598d.strategies.precision import LossScale
from cos598d.strategies.replicated import Replicated
from cos598d.strategies.state import FullTensor, OptimizerState
from cos598d.sync import SYNCS, ddp
from cos598d.sync.codecs.base import Kept
from cos598d.sync.codecs.int8 import Int8
from cos598d.sync.codecs.topk import TopK
from cos598d.sync.local_sgd import LocalSGD
from cos598d.sync.parts.reducer import Reducer

RANKS = 3
CASES = [
    Case("none"),
    Case("all_reduce", optimizer="momentum"),
    Case("all_reduce", optimizer="sgd"),
    Case("flat"),
    Case("gather_scatter"),
    Case("bucketed", BUCKETS),
    Case("bucketed", BUCKETS, precision="bf16"),
    Case("bucketed", BUCKETS, precision="fp16"),
    Case("bucketed", {"compress": "topk:0.1", **BUCKETS}),
    Case("bucketed", {"compress": "topk:0.1", **BUCKETS}, precision="fp16"),
    Case("bucketed", {"compress": "powersgd:1", **BUCKETS}),
    Case("bucketed", {"compress": "int8", **BUCKETS}),
    Case("ring", {"compress": "topk:0.1"}),
    Case("flat", {"compress": "powersgd:1"}),
    Case("tree", {"compress": "topk:0.1"}),
    Case("sparse_rows", {"compress": "topk:0.1", **BUCKETS}),
    Case("sparse_rows", BUCKETS),
    Case("local_sgd", {"sync_every": 2}),
    Case("local_sgd", {"sync_every": 3}),
    Case("diloco", {"fragments": 2}),
    Case("diloco", {"fragments": 3, "compress": "topk:0.1"}, precision="fp16"),
    Case("shared_memory", BUCKETS),
    Case("hierarchical", BUCKETS),
    Case("dp"),
    Case("ddp"),
    Case("ddp", {}, "plain"),
    Case("ddp", {"bucket_view": True}, "plain"),
    Case("ddp", {}, "plain", left=1),
    *(Case("ddp", {"ddp_hook": "powersgd"}, "plain", left=left, end=14) for left in (4, 12)),
    *(Case("ddp", {"ddp_hook": "post_localsgd", "sync_every": 3}, "plain", left=left, end=14) for left in (4, 12)),
    Case("zero1", BUCKETS),
    Case("zero1", BUCKETS, optimizer="momentum"),
    Case("zero1", BUCKETS, precision="fp16"),
    Case("sparse_zero1", BUCKETS),
    Case("sparse_zero1", {"pack_gradients": True, **BUCKETS}),
    Case("zero2", BUCKETS),
    Case("zero3", BUCKETS),
    Case("zero3", BUCKETS, precision="bf16"),
    Case("shared_weights", BUCKETS),
    Case("shared_weights", BUCKETS, optimizer="momentum"),
    Case("shared_weights", BUCKETS, precision="fp16"),
    *(Case(sync, {"bucket_mb": 0.3}, "plain") for sync in ("bucketed", "zero1", "zero2", "zero3", "shared_weights")),
    *(
        Case(sync, {"bucket_mb": 0.3}, "bert")
        for sync in ("bucketed", "ddp", "zero1", "zero2", "zero3", "shared_weights")
    ),
]
CASES += [Case(name) for name in SYNCS if not any(case.sync == name for case in CASES)]

GROUPS = [("ddp",), ("bucketed", "ring"), ("zero1", "sparse_zero1", "zero2", "zero3", "shared_weights")]
GROUPS.append(tuple(dict.fromkeys(case.sync for case in CASES if not any(case.sync in group for group in GROUPS))))


def train_and_leave(comm, folder, cases, prepare=None):
    """For each training: what it is without being asked for its state, and what it is where it was asked and saved."""
    if prepare:
        prepare()
    found = []
    for place, case in enumerate(cases):
        left = Training(comm, case).steps(0, case.left)
        into = Path(folder) / str(place)
        into.mkdir(exist_ok=True)
        left.save(into)
        asked = left.steps(case.left, case.end).found()
        found.append([Training(comm, case).steps(0, case.end).found(), asked])
    return found


def take_up(comm, folder, cases, prepare=None):
    """What each training is that is resumed from what was saved."""
    if prepare:
        prepare()
    return [
        Training(comm, case, seed=1).load(Path(folder) / str(place)).steps(case.left, case.end).found()
        for place, case in enumerate(cases)
    ]


def differences(right, found):
    """The words under which two answers differ."""
    return [word for word in right if right[word] != found[word]]


def resumed_differences(asked, found):
    """Those of a resumed training, which has the losses since then."""
    return differences(asked | {"losses": asked["losses"][-len(found["losses"]) :]}, found)


def compare(tmp_path, cases, ranks=RANKS, seconds=120, prepare=None):
    """What differs, by training, between one that nobody asked, one that was asked, and one that was resumed.

    Each rank calls `prepare` first.
    """
    begun = run_ranks(ranks, train_and_leave, str(tmp_path), cases, prepare, seconds=seconds)
    gone_on = run_ranks(ranks, take_up, str(tmp_path), cases, prepare, seconds=seconds)
    wrong = {}
    for rank in range(ranks):
        for case, (alone, asked), found in zip(cases, begun[rank], gone_on[rank], strict=True):
            wrong[case.label, rank, "asked"] = differences(alone | {"rows": asked["rows"]}, asked)
            wrong[case.label, rank, "resumed"] = resumed_differences(asked, found)
    return {who: words for who, words in wrong.items() if words}


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("syncs", GROUPS, ids=" ".join)
def test_every_strategy_resumes_to_the_last_bit(tmp_path, syncs):
    assert compare(tmp_path, [case for case in CASES if case.sync in syncs]) == {}


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
def test_every_mistake_in_saving_or_loading_shows(tmp_path):
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
                wrong.update(resumed_differences(asked, found))
        assert SHOWS.get(name, "model") in wrong, name
