"""The formula of a step's operations gives what torch's counter counts; the peak counts each core once."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cos598d.data.encoders import ImageForm
from cos598d.measure import peak
from cos598d.measure.peak import peak_of_all
from cos598d.models.build import build_model, find_model
from cos598d.models.operations import training_operations

CLASSIFIES, ANSWERS, IMAGES = "sequence_classification", "question_answering", "image_classification"
EXAMPLES, TOKENS, LABELS = 3, 50, 4


def counted(model, inputs):
    """What torch counts in a forward and a backward pass. Attention is computed by products that it sees."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(**inputs)[0].backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "model_type", "head"),
    [
        ("tiny", "bert", CLASSIFIES),
        ("tiny", "bert", ANSWERS),
        ("tiny", "distilbert", CLASSIFIES),
        ("tiny", "distilbert", ANSWERS),
        ("minilm", "bert", CLASSIFIES),
        ("vit-tiny", "vit", IMAGES),
    ],
)
def test_the_formula_counts_what_torch_counts(name, model_type, head):
    source = find_model(name, ImageForm(8, 1) if model_type == "vit" else None, model_type=model_type)
    labels = 2 if head == ANSWERS else LABELS
    model = build_model(source, head, labels, 0.0, seed=1)
    if model_type == "vit":
        config = source.config
        inputs = {"pixel_values": torch.rand(EXAMPLES, config.num_channels, config.image_size, config.image_size)}
    else:
        inputs = {"input_ids": torch.ones(EXAMPLES, TOKENS, dtype=torch.long)}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    zeros = torch.zeros(EXAMPLES, dtype=torch.long)
    inputs |= {"start_positions": zeros, "end_positions": zeros} if head == ANSWERS else {"labels": zeros}
    expected = counted(model, inputs)
    if (model_type, head) == ("bert", ANSWERS):  # the library computes the pooler's forward, which nothing uses
        expected -= 2 * source.config.hidden_size**2 * EXAMPLES
    found = training_operations(model_type, source.config, head, labels, np.full(EXAMPLES, TOKENS))
    assert found.shape == (EXAMPLES,)
    assert found.sum() == expected


def test_attention_grows_with_the_square_of_the_length():
    config = find_model("tiny").config
    one, two, four = training_operations("bert", config, ANSWERS, 2, np.array([10, 20, 40]))
    square = config.num_hidden_layers * 3 * 4 * config.hidden_size * 10**2
    assert two - 2 * one == 2 * square
    assert four - 4 * one == 12 * square


def on_cpu(*ranks):
    """A communicator of rank 0 that hears what the other ranks give."""
    return SimpleNamespace(device=torch.device("cpu"), exchange=lambda mine: [mine, *ranks])


def test_the_peak_counts_each_core_that_has_a_thread_once(monkeypatch):
    here, there = [("here", 0), ("here", 1)], [("there", 5)]
    monkeypatch.setattr(peak, "own_cores", lambda: here)
    assert peak_of_all(on_cpu(), "fp32", 1, lambda precision: 100.0) == 100
    assert peak_of_all(on_cpu(*[[here, 1, 100.0]] * 3), "fp32", 1, lambda precision: 100.0) == 200
    assert peak_of_all(on_cpu([there, 1, 50.0]), "bf16", 2, {"bf16": 100.0}.get) == 3 * 75
