"""The claim about everything together: training on n ranks equals training in one process."""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import Ledger
from cos598d.sync.base import GradientSync
from cos598d.sync.none import NoSync
from cos598d.tools.check.claims.base import Claim, OnRank, World
from cos598d.tools.check.comparison import difference
from cos598d.tools.check.toy import ToyFeatures, toy_model

# Of losses and weights after training, relative to the largest.
TRAINING_TOLERANCE = 1e-5


@dataclass(frozen=True)
class _Training:
    name: str
    optimizer: str
    learning_rate: float
    max_grad_norm: float
    parts: int = 1
    momentum: float = 0.0


TRAININGS = (
    _Training("AdamW, clipped", "adamw", 0.01, 0.3),  # the toy's gradients have norms above 1
    _Training("SGD", "sgd", 0.05, 0.0),
    _Training("SGD with momentum, clipped, 2 parts a step", "sgd", 0.1, 0.3, parts=2, momentum=0.9),
)


@Claim
def trains_like_one_process(on: OnRank) -> None:
    """Training on n ranks gives the losses and weights of one process on the whole batch.

    THE loop: clipping bites, the last batch is uneven and smaller than the world, ranks start from different weights,
    and a step may come in parts. With SGD too: the steps of AdamW, and clipped ones, hardly know a gradient's scale.
    """
    for training in TRAININGS:
        model = on.model(differs=True)
        losses = _train(training, model, on.sync(), on.comm, on.folder)
        on.report(f"losses, {training.name}", losses)
        on.hand_in(training.name, dict(model.named_parameters()))


@trains_like_one_process.judgement
def _(world: World) -> None:
    for training in TRAININGS:
        expected_losses, expected = _alone(training, world.nonce)
        weights = world.handed_in(training.name, expected)
        for rank, losses in enumerate(world.reported(f"losses, {training.name}", list)):
            numbers = len(losses) == len(expected_losses) and all(isinstance(loss, float) for loss in losses)
            world.require(numbers, f"{len(losses)} losses instead of {len(expected_losses)}", rank)
            worst = max(abs(a - b) for a, b in zip(losses, expected_losses)) if numbers else 0.0
            bound = TRAINING_TOLERANCE * max(expected_losses)
            world.require(worst < bound, f"losses differ from one process's by {worst:.1e} ({training.name})", rank)
            for name, tensor in expected.items():
                worst = difference(weights[rank][name], tensor)
                world.require(
                    worst < TRAINING_TOLERANCE,
                    f"{name} differs from one process's by {worst:.1e} ({training.name})",
                    rank,
                )


def _train(training: _Training, model: nn.Module, sync: GradientSync, comm: Communicator, folder: Path) -> list[float]:
    # Not at the top: the whole library comes with it, which most lessons do not need.
    from cos598d.config import RunConfig
    from cos598d.loop import train
    from cos598d.measure.record import RunRecord
    from cos598d.plan import TrainingSetup
    from cos598d.strategies.replicated import Replicated
    from cos598d.terminal.console import Console

    config = RunConfig(
        do_train=True,
        total_train_batch_size=8,
        gradient_accumulation_steps=training.parts,
        num_train_epochs=1,
        optimizer=training.optimizer,
        momentum=training.momentum,
        learning_rate=training.learning_rate,
        max_grad_norm=training.max_grad_norm,
        adam_epsilon=1e-3,  # with a small one, Adam turns rounding noise in near-zero gradients into whole steps
        warmup_steps=1,
    )
    with RunRecord(folder, comm.rank) as record:
        comm.ledger = record.ledger
        train(
            TrainingSetup(config, comm, model, Replicated(sync), ToyFeatures(26), record, Console("", speaks=False)),
            dict,
        )
        losses = list(record.losses)
    comm.ledger = Ledger()
    return losses


@functools.lru_cache(maxsize=16)
def _alone(training: _Training, nonce: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    alone, model = Communicator(None, "gloo", torch.device("cpu")), toy_model(nonce)
    with tempfile.TemporaryDirectory() as folder:
        losses = _train(training, model, NoSync(alone), alone, Path(folder))
    return losses, {name: p.detach() for name, p in model.named_parameters()}
