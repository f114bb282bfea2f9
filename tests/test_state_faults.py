"""States that do not belong to a training are refused in one sentence."""

import json

import pytest
import torch
from states import Case, Training

from cos598d.comm.communicator import Communicator
from cos598d.errors import UserError
from cos598d.strategies.precision import LossScale
from cos598d.strategies.state import FullTensor


def alone(optimizer="adamw", **changes):
    return Training(Communicator(None, "gloo", torch.device("cpu")), Case("none", optimizer=optimizer, **changes))


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


def test_tensors_that_are_missing_are_named(state):
    assert "lacks the weights of hidden.bias. Resume" in refusal(alone(), without(state, "weights", "hidden.bias"))
    assert "lacks the buffers of scale" in refusal(alone(), without(state, "buffers", "scale"))
    assert "lacks the step of large" in refusal(alone(), without(state, "step", "large"))
    assert "(and 1 more)" in refusal(alone(), without(without(state, "weights", "large"), "buffers", "scale"))


def test_tensors_that_are_too_many_are_named(state):
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


def test_a_loss_scale_that_is_none_is_refused():
    for wrong in ({"loss_scale": 0.5, "good_steps": 1}, {"loss_scale": "x"}, {"loss_scale": float("inf")}):
        with pytest.raises(UserError, match="Resume from another checkpoint"):
            LossScale(is_on=True).load(wrong)
    scale = LossScale(is_on=True)
    scale.load(json.loads(json.dumps({"loss_scale": 1024.0, "good_steps": 7})))
    assert scale.state() == {"loss_scale": 1024.0, "good_steps": 7}
    plain = LossScale(is_on=False)
    plain.load({"loss_scale": 1024.0, "good_steps": 7})
    assert plain.value == 1.0


def test_what_a_rank_remembered_is_refused_where_it_does_not_fit():
    for facts in ({}, {"sync": 3}, {"sync": {}, "scalars": []}):
        with pytest.raises(UserError, match="the local state of rank 0 does not fit this run"):
            alone().strategy.load_own_state(facts, {"weights/none": torch.zeros(1)})
