"""What a rank remembers by itself, and what a state leaves as it was."""

import pytest
import torch
from states import BUCKETS, Case, Training, digest, wholes
from test_state import compare
from worlds import run_ranks

from cos598d.strategies import class_of, get_strategy

MINE = """
import torch
from cos598d.sync.all_reduce import AllReduce

class Slow(AllReduce):
    \"\"\"Averages, and adds half of the last average.\"\"\"

    def average(self, name, gradient):
        super().average(name, gradient)
        before = self.kept().get(name)
        self.kept()[name] = gradient.clone()
        if before is not None:
            gradient += before / 2

    def kept(self):
        return self.__dict__.setdefault("before", {})

class Kept(Slow):
    exact = False

    def own_state(self):
        return {"count": len(self.kept())}, dict(self.kept())

    def load_own_state(self, facts, tensors):
        assert facts["count"] == len(tensors)
        self.kept().update(tensors)
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def test_a_sync_of_one_s_own_goes_on_with_what_it_keeps_and_begins_afresh_without(tmp_path, file):
    (tmp_path / "states").mkdir()
    cases = [Case(f"{file}:Kept"), Case(f"{file}:Slow")]
    wrong = compare(tmp_path / "states", cases, ranks=2)
    assert {case for case, *_ in wrong} == {cases[1].label}
    assert all("model" in words for words in wrong.values())


def words(comm, cases):
    said = {}
    for case in cases:
        strategy = get_strategy(case.sync)(comm, True, class_of(case.sync).options_kind(**case.options), "fp32")
        strategy.attach(torch.nn.Linear(2, 2), lambda named: torch.optim.SGD([p for _, p in named], lr=1.0))
        said[case.label] = [strategy.own_is_lost, strategy.never_kept]
    return said


def test_what_is_lost_is_said_in_words(file):
    cases = [
        *(Case("bucketed", {"compress": word}) for word in ("topk", "powersgd", "int8", "bf16")),
        *(Case(f"{file}:{name}") for name in ("Slow", "Kept")),
        *(Case("ddp", {"ddp_hook": hook}) for hook in ("powersgd", "fp16")),
        Case("local_sgd"), Case("zero3"), Case("diloco"),
    ]  # fmt: skip
    lost, never = zip(*run_ranks(2, words, cases)[0].values(), strict=True)
    topk, powersgd, int8, bf16, slow, kept, hook, fp16, local_sgd, zero3, diloco = lost
    assert (bf16, slow, kept, fp16, zero3) == (None,) * 5
    assert "topk has held back" in topk
    assert "factors" in powersgd
    assert "random" in int8
    assert "powersgd hook" in hook
    assert "since the last average" in local_sgd
    assert diloco == f"{local_sgd} and the outer steps' momentum, with the fragment that was under way"
    assert [word is not None for word in never] == [case.sync.endswith("Slow") for case in cases]
    assert "Slow keeps from step to step" in never[4]
    assert "has no own_state()" in never[4]


def part_and_average(comm, folder):
    """local_sgd between two averages: the weights of the state, and this rank's own before and after."""
    training = Training(comm, Case("local_sgd", {"sync_every": 3})).steps(0, 2)
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    training.save(folder)
    after = {name: digest(p.detach()) for name, p in training.model.named_parameters()}
    assert after == {name: digest(p) for name, p in before.items()}
    assert not training.strategy.replicas_equal
    return before["hidden.weight"].tolist()


def test_local_sgd_s_state_is_the_average_of_replicas_that_stay_apart(tmp_path):
    by_rank = torch.tensor(run_ranks(3, part_and_average, str(tmp_path)))
    assert not torch.equal(by_rank[0], by_rank[1])
    found = {whole.name: whole.tensor for whole in wholes(tmp_path) if whole.kind == "weights"}
    torch.testing.assert_close(found["hidden.weight"], by_rank.mean(dim=0))


def stream(comm):
    """The places in which a state of zero3's gives its weights, in bytes, the largest unit's bytes, and how many."""
    training = Training(comm, Case("zero3", {"bucket_mb": 0.3}, "plain")).steps(0, 1)
    held = training.strategy.memory()
    places = {}
    for piece in training.strategy.state():
        if piece.kind == "weights":
            storage = piece.values.untyped_storage()
            places[storage.data_ptr()] = storage.nbytes()
    assert training.strategy.memory() == held
    assert all(p.isnan().all() for p in training.model.parameters()), "freed weights stay freed"
    units = training.strategy._gradients.units
    return [list(places.values()), max(4 * unit.elements for unit in units), len(units)]


def test_zero3_gathers_a_layer_at_a_time_and_at_rank_0_alone():
    (places, largest, units), *others = run_ranks(3, stream)
    assert places == [largest]
    assert units > 3
    assert [other[0] for other in others] == [[], []]


def ask_while_on_its_way(comm):
    """zero1's all-gathers after a step are under way when its state is asked for; the state is rank 0's new weights."""
    training = Training(comm, Case("zero1", BUCKETS)).steps(0, 1)
    assert training.strategy._gathers
    pieces = training.pieces()
    training.strategy.settle()
    settled = {name: digest(p.detach()) for name, p in training.model.named_parameters()}
    return [name for kind, name, _, _, values in pieces if kind == "weights" and digest(values) != settled[name]]


def test_zero1_waits_for_weights_on_their_way():
    assert run_ranks(3, ask_while_on_its_way) == [[]] * 3
