"""The validation loss is the mean of the model's own loss over every example, once, however the batches are padded."""

import contextlib

import numpy as np
import pytest
import torch

from cos598d.comm.communicator import Communicator
from cos598d.data import get_task
from cos598d.data.tasks import TaskOptions
from cos598d.data.text.encoder import TextEncoder
from cos598d.data.text.features import Features
from cos598d.data.text.layout import Layout
from cos598d.data.text.tokenization import load_encoder
from cos598d.evaluate import mean_loss, model_outputs
from cos598d.models.build import build_model, find_model


@pytest.mark.parametrize("name", ["rte", "squad"])
def test_it_is_the_mean_of_the_models_own_loss_of_each_example(name):
    source = find_model("tiny")
    encoder: TextEncoder = load_encoder(source.model_type, source.vocabulary, source.lower_case)
    task = get_task(name, TaskOptions(version_2_with_negative=True))
    features = task.load("dev", None, encoder, 96, limit=24)
    model = build_model(source, task.head, task.num_labels, 0.0, 1)
    widths = task.output_widths(features)
    comm = Communicator(None, "gloo", torch.device("cpu"))
    outputs = model_outputs(model, features, widths, comm, 5, contextlib.nullcontext())
    with torch.no_grad():
        losses = [model(**features.collate([number]))[0].item() for number in range(len(features))]
    assert np.std(losses) > 1e-4, "else the mean of some of them would do"
    assert mean_loss(outputs, widths, features) == pytest.approx(np.mean(losses), rel=1e-5)


def test_of_scores_it_is_the_squared_error():
    lengths = np.full(3, 2)
    targets = {"labels": np.array([1.0, 2.0, 4.0], dtype=np.float32)}
    offsets = np.append(0, np.cumsum(lengths))
    features = Features(np.zeros(6, np.int32), offsets, lengths, targets, Layout(uses_segments=False), 0)
    assert mean_loss(np.array([[1.0], [1.0], [1.0]], np.float32), (1,), features) == pytest.approx((0 + 1 + 9) / 3)
