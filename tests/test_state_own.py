"""The local state of a rank, how a state is collected, and which states are refused."""

import json

import pytest
import torch
from saved_states import COMM
from states import BUCKETS, Case, Training, digest, wholes
from test_state import compare
from worlds import run_ranks

from cos598d.errors import UserError
from cos598d.strategies import class_of, get_strategy
from cos598d.strategies.precision import LossScale
from cos598d.strategies.state import FullTensor

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


def test_a_sync_of_one_s_own_resumes_only_with_own_state(tmp_path, file):
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


def test_a_strategy_names_what_is_lost_on_other_ranks(file):
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


def test_local_sgd_s_state_is_the_average_of_its_replicas(tmp_path):
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


def test_zero3_gathers_one_layer_at_a_time_on_rank_0_only():
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


# States that do not belong to a training are refused in one sentence.


def alone(optimizer="adamw", **changes):
    return Training(COMM, Case("none", optimizer=optimizer, **changes))


@pytest.fixture(scope="module")
def state():
    """The state of a training of one rank after a step."""
    training = alone().steps(0, 1)
    return [FullTensor(kind, name, values.view(shape)) for kind, name, shape, _, values in training.pieces()]


def without(state, kind, name):
    return [whole for whole in state if (whole.kind, whole.name) != (kind, name)]


def refusal(training, wholes):
    with pytest.raises(UserError) as error:
        training.strategy.load_state(wholes)
    said = str(error.value)
    assert said.endswith(".")
    assert "\n" not in said
    return said


def test_missing_tensors_are_named(state):
    for kind, name in (("weights", "hidden.bias"), ("buffers", "scale"), ("step", "large")):
        assert f"lacks the {kind} of {name}. Resume" in refusal(alone(), without(state, kind, name))
    assert "(and 1 more)" in refusal(alone(), without(without(state, "weights", "large"), "buffers", "scale"))


def test_surplus_tensors_are_named(state):
    assert "has the weights of other, which this model does not have" in refusal(
        alone(), [*state, FullTensor("weights", "other", torch.zeros(2))]
    )
    assert "has the weights of large twice" in refusal(alone(), [*state, *state])
    assert "has the exp_avg of frozen.weight, which" in refusal(
        alone(), [*state, FullTensor("exp_avg", "frozen.weight", torch.zeros(7, 7))]
    )


def test_another_model_and_another_optimizer_are_refused(state):
    longer = [FullTensor(w.kind, w.name, torch.zeros(9)) if w.name == "large" else w for w in state]
    assert "in the shape (9,), and this model has (1009,)" in refusal(alone(), longer)
    assert "this run's optimizer keeps momentum_buffer. Resume with the same --optimizer" in refusal(
        alone("momentum"), state
    )
    assert "keeps nothing" in refusal(alone("sgd"), state)


@pytest.mark.parametrize("kind", ["weights", "buffers", "exp_avg", "step"])
def test_another_dtype_or_shape_of_any_kind_is_refused(state, kind):
    name = "scale" if kind == "buffers" else "large"
    others = (torch.int64, torch.bool, torch.complex64, torch.float16, torch.float64)
    for dtype in others if kind != "step" else (torch.bool, torch.complex64):
        changed = [FullTensor(w.kind, w.name, w.tensor.to(dtype), "a/file") if w.kind == kind else w for w in state]
        said = refusal(alone(), changed)
        assert said.startswith(f"a/file has the {kind} of "), said
        assert f" as {str(dtype).removeprefix('torch.')}, and this model has " in said
    for shape in ((), (1,), (2, 2)):
        wrong = torch.zeros(shape)
        changed = [FullTensor(w.kind, w.name, wrong) if (w.kind, w.name) == (kind, name) else w for w in state]
        if (kind, shape) not in (("step", ()), ("buffers", next(w for w in state if w.name == "scale").tensor.shape)):
            assert f"has the {kind} of {name} in the shape {shape}, and this model has" in refusal(alone(), changed)


def test_a_parameter_that_was_never_used_needs_no_state(state):
    names = {whole.name for whole in state if whole.kind == "exp_avg"}
    assert "never.weight" not in names
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        state = without(state, kind, "hidden.weight")
    training = alone()
    training.strategy.load_state(state)
    assert not training.strategy.optimizer.state.get(training.model.hidden.weight)


def test_a_damaged_loss_scale_is_refused():
    for wrong in ({"loss_scale": 0.5, "good_steps": 1}, {"loss_scale": "x"}, {"loss_scale": float("inf")}):
        with pytest.raises(UserError, match="Resume from another checkpoint"):
            LossScale(is_on=True).load(wrong)
    scale = LossScale(is_on=True)
    scale.load(json.loads(json.dumps({"loss_scale": 1024.0, "good_steps": 7})))
    assert scale.state() == {"loss_scale": 1024.0, "good_steps": 7}
    plain = LossScale(is_on=False)
    plain.load({"loss_scale": 1024.0, "good_steps": 7})
    assert plain.value == 1.0


def test_a_local_state_that_does_not_fit_is_refused():
    for facts in ({}, {"sync": 3}, {"sync": {}, "scalars": []}):
        with pytest.raises(UserError, match="the local state of rank 0 does not fit this run"):
            alone().strategy.load_own_state(facts, {"weights/none": torch.zeros(1)})
