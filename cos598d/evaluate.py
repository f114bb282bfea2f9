"""Evaluation over all ranks, each example exactly once."""

import contextlib

import numpy as np
import torch
from torch import nn

from cos598d.comm import Communicator
from cos598d.data.features import Features
from cos598d.data.sampler import evaluation_batches
from cos598d.measure.ledger import EVALUATION


def model_outputs(
    model: nn.Module,
    features: Features,
    comm: Communicator,
    batch_size: int,
    autocast: contextlib.AbstractContextManager,
) -> np.ndarray:
    """What the model says of every example, float32 (examples, values), in the features' order, on every rank.

    Each rank computes every n-th batch and leaves zeros elsewhere; the sum over ranks is then exact, because every
    row has one rank's numbers and zeros from the others.
    """
    was_training = model.training
    model.eval()
    rows = None
    with torch.no_grad(), autocast:
        for place, batch in enumerate(evaluation_batches(features.lengths, batch_size)):
            # Every rank needs one batch to learn the outputs' width, also where there are fewer batches than ranks.
            mine = place % comm.world_size == comm.rank
            if not mine and rows is not None:
                continue
            inputs = {k: v.to(comm.device) for k, v in features.collate(batch).items() if k != "labels"}
            outputs = model(**inputs)[0].float()
            if rows is None:
                rows = torch.zeros((len(features), outputs.shape[-1]), device=comm.device)
            if mine:
                rows[torch.as_tensor(batch, device=comm.device)] = outputs
    comm.all_reduce(rows, "model outputs", purpose=EVALUATION)
    model.train(was_training)
    return rows.cpu().numpy()
