"""THE loop: it does not know which strategy, which task or which launcher."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig
from cos598d.data.sampler import MicroBatch, global_batches, micro_batches, steps_per_epoch
from cos598d.data.text.features import Features
from cos598d.errors import UserError
from cos598d.measure.clock import IterationClock
from cos598d.measure.record import RunRecord
from cos598d.strategies.base import Module, Strategy
from cos598d.strategies.observed import Observed
from cos598d.strategies.optimizers import linear_schedule, make_optimizer, set_learning_rate
from cos598d.strategies.replicas import check_replicas
from cos598d.terminal.console import Console

Inputs = dict[str, torch.Tensor]


def step(
    strategy: Strategy,
    module: Module,
    parts: Sequence[MicroBatch],
    load: Callable[[MicroBatch], Inputs],
    max_grad_norm: float,
) -> bool:
    """One step by this rank's parts of a global batch; whether it counts, which fp16 may deny it."""
    for part in parts:
        inputs = load(part)
        with contextlib.nullcontext() if part is parts[-1] else strategy.no_sync():
            loss = module(**inputs)[0]
            strategy.backward(loss * part.weight)
    strategy.finish()  # now every rank has the gradients of the global batch's mean loss, or its shard of them
    strategy.clip(max_grad_norm)  # after the average, never before it
    return strategy.step()


def train(
    model: nn.Module,
    strategy: Strategy,
    comm: Communicator,
    features: Features,
    config: RunConfig,
    record: RunRecord,
    console: Console,
    evaluate: Callable[[], dict[str, float]],
) -> None:
    """Train `model` in place on `features` as `config` says, the same on every rank; leave the figures in `record`.

    `evaluate` gives the metrics of the model as it stands; every rank calls it after every epoch.
    Raises UserError, the same on every rank, when a global batch's loss or, after an epoch, a weight is not finite,
    when the replicas have come to differ, and when fp16's loss scale would fall below 1.
    """
    batch_size = config.total_batch_size(comm.world_size)
    epoch_steps = steps_per_epoch(len(features), batch_size)
    steps = config.max_steps if config.max_steps > 0 else math.ceil(config.num_train_epochs * epoch_steps)
    learning_rate = linear_schedule(config.learning_rate, config.warmup_steps, steps)
    clock = IterationClock(comm.device)
    strategy = observed = Observed(strategy, clock, comm)
    module = strategy.attach(model, functools.partial(make_optimizer, config=config))
    model.train()

    @clock.phase("data")
    def split(batch: np.ndarray) -> list[MicroBatch]:
        return micro_batches(
            batch,
            features.lengths,
            comm.rank,
            comm.world_size,
            config.gradient_accumulation_steps,
            group_by_length=comm.device.type == "cpu",
            equal_passes=strategy.equal_passes,
        )

    @clock.phase("data")
    def load(part: MicroBatch) -> Inputs:
        return {name: tensor.to(comm.device) for name, tensor in features.collate(part.indices).items()}

    number = counted = 0
    with console.progress(steps) as progress:
        for epoch in range(1, math.ceil(steps / epoch_steps) + 1):
            losses = []
            batches = global_batches(len(features), batch_size, config.seed, epoch - 1)
            record.begin_training()
            for batch in itertools.islice(batches, steps - number):
                number += 1
                rate = learning_rate(counted)
                set_learning_rate(strategy.optimizer, rate)
                with observed.iteration(number):
                    counted += step(strategy, module, split(batch), load, config.max_grad_norm)
                losses.append(observed.loss)
                _check_loss(observed.loss, number, config.learning_rate)
                facts = {
                    "iteration": number,
                    "epoch": epoch,
                    "loss": observed.loss,
                    "learning_rate": rate,
                    "examples": len(batch),
                    "tokens_padded": observed.tokens,
                    "spans_seconds": clock.spans,
                }
                record.iteration(facts, observed.seconds, clock.phases)
                progress(number, observed.loss, observed.seconds, len(batch))
                if config.check_replicas and number % config.check_replicas == 0:
                    with strategy.whole():
                        if strategy.replicas_equal:
                            check_replicas(comm, model.named_parameters(), number)
            strategy.settle()
            record.pause_training()
            if strategy.replicas_equal:  # only then is rank 0's model everybody's
                check_replicas(comm, [*model.named_parameters(), *model.named_buffers()], number)
            _check_weights(model, number, config.learning_rate)
            epoch_record = {"epoch": epoch, "iterations": len(losses), "loss": sum(losses) / len(losses)}
            record.epoch(epoch_record | evaluate())
            console.epoch(record.epochs[-1])
    strategy.detach()


def _check_loss(loss: float, iteration: int, learning_rate: float) -> None:
    if not math.isfinite(loss):
        raise UserError(
            f"the loss of iteration {iteration} is {loss}, not a finite number: "
            f"lower --learning_rate {learning_rate:g} or check the weights."
        )


def _check_weights(model: nn.Module, iteration: int, learning_rate: float) -> None:
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
        raise UserError(
            f"the weights after iteration {iteration} are not finite numbers: lower --learning_rate {learning_rate:g}."
        )
