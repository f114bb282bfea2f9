"""Evaluation over all ranks, each example exactly once."""

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import EVALUATION
from cos598d.data.sampler import evaluation_batches
from cos598d.data.text.features import Features


def model_outputs(
    model: nn.Module,
    features: Features,
    widths: Sequence[int],
    comm: Communicator,
    batch_size: int,
    autocast: contextlib.AbstractContextManager,
) -> np.ndarray:
    """What the model says of every example, float32 (examples, sum of `widths`), in the features' order, on every rank.

    `widths` are the most values that each of the model's first outputs has for an example; where a batch gives fewer,
    the rest is zeros. Each rank computes every n-th batch and leaves zeros elsewhere; the sum over ranks is then
    exact, because every row has one rank's numbers and zeros from the others.
    """
    was_training = model.training
    model.eval()
    rows = torch.zeros((len(features), sum(widths)), device=comm.device)
    places = np.cumsum([0, *widths])
    with torch.no_grad(), autocast:
        for batch in evaluation_batches(features.lengths, batch_size)[comm.rank :: comm.world_size]:
            inputs = {k: v.to(comm.device) for k, v in features.collate(batch).items() if k not in features.targets}
            chosen = torch.as_tensor(batch, device=comm.device)
            for place, width, output in zip(places, widths, model(**inputs), strict=False):
                values = output.float().reshape(len(batch), -1)
                if values.shape[1] > width:
                    raise ValueError(f"The model gives {values.shape[1]} values for an example, not {width}.")
                rows[chosen, place : place + values.shape[1]] = values
    comm.all_reduce(rows, "model outputs", purpose=EVALUATION)
    model.train(was_training)
    return rows.cpu().numpy()
