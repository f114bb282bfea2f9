"""Weights that are cast once a step train as under autocast, to the last bit, and are let go of afterwards."""

import pytest
import torch
from beside import SMALL_BUCKETS, adamw, batch, layered, sgd, train_sharded
from held import Uneven
from worlds import run_ranks

from cos598d.models.linear import Linear
from cos598d.strategies.formula import TrainingSpec, without_values
from cos598d.strategies.memory import Peak
from cos598d.strategies.parts.cast_weights import linear_layers
from cos598d.strategies.shared_weights import SharedWeights


class UnderAutocast(SharedWeights):
    """As it is without copies in half precision: autocast casts the weights of every forward."""

    def make_gradients(self):
        gradients = super().make_gradients()
        gradients.cast_to = None
        return gradients


def losses_and_weights(comm, kind, make, precision):
    """On a rank: what three steps of two micro-batches and a second backward without no_sync come to."""
    model, found = layered(), []
    strategy = kind(comm, True, SMALL_BUCKETS, precision)
    module = strategy.attach(model, make)
    found.append(train_sharded(strategy, module, comm, 3, 2, 0.3))
    for micro in range(2):
        loss, logits = module(**batch(9, micro, comm.rank))
        found.append([loss.item(), str(logits.dtype)])
        strategy.backward(loss / comm.world_size)
    strategy.finish()
    strategy.clip(0.3)
    strategy.step()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found.append(model(**batch(10, 0, 0))[1].tolist())  # evaluated as it is
    wholes = {name: p.tolist() for name, p in model.named_parameters()}
    layers = [name for name, p in model.named_parameters() if p.dtype != torch.float32]
    strategy.detach()
    with torch.autocast("cpu", torch.bfloat16):
        model.blocks[0].linear(torch.ones(1, 8)).sum().backward()
    return found, wholes, layers, model.blocks[0].linear.weight.grad is not None


def with_and_without_copies(comm):
    found = []
    for make, precision in ((sgd, "bf16"), (adamw, "bf16"), (sgd, "fp32")):
        mine, autocast_s = (losses_and_weights(comm, kind, make, precision) for kind in (SharedWeights, UnderAutocast))
        found.append([mine[0] == autocast_s[0], mine[1] == autocast_s[1], list(mine[2:]), list(autocast_s[2:])])
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_bit_is_autocast_s_with_accumulation_a_layer_used_twice_and_tied_weights(ranks):
    for rank in run_ranks(ranks, with_and_without_copies):
        assert rank == [[True, True, [[], True], [[], True]]] * 3


def bytes_cast(comm):
    """On a rank: what is held between two steps and at a step's peak, and what the formula says."""
    model = Uneven()
    job = TrainingSpec(without_values(model), comm.world_size, comm.rank, 2, 4)
    strategy = SharedWeights(comm, False, SMALL_BUCKETS, "bf16")
    module, peak = strategy.attach(model, adamw), Peak(strategy.memory)
    inputs = {"input_ids": torch.arange(12).view(3, 4)}
    for _ in range(3):
        with peak.watching():
            strategy.backward(module(**inputs)[0].float())
        strategy.finish()
        strategy.clip(1.0)
        strategy.step()
    between, expected = strategy.memory(), strategy.expected_memory(job)
    grads = {p.grad for p in model.parameters()}
    strategy.detach()
    return between, dict(expected.between_steps), peak.held["gradients"], expected.peak["gradients"], grads == {None}


@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_and_gradients_in_half_precision_count_as_the_formula_says(ranks):
    for between, expected, peak, expected_peak, has_none in run_ranks(ranks, bytes_cast):
        assert between == expected
        assert peak == expected_peak
        assert has_none


def test_only_what_a_plain_linear_layer_has_to_itself_is_cast():
    model = Uneven()
    names = {name for name, p in model.named_parameters() if p in linear_layers(model)}
    assert {"twice.weight", "twice.bias", "output.bias", "layers.0.0.weight"} <= names
    assert not names & {"words.weight", "frozen.weight", "frozen.bias"}
    assert linear_layers(model.double()) == {}
    assert len(linear_layers(Linear(3, 2))) == 2, "torch's own under autocast"

    class Own(torch.nn.Linear):
        def forward(self, input):
            return input @ self.weight.t()

    assert linear_layers(Own(3, 2)) == {}
