"""The training loop: epochs, global batches and steps, for any strategy, task and launcher."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cos598d.checkpoints.control import TrainingControl
from cos598d.comm.communicator import Communicator
from cos598d.data.sampler import MicroBatch, micro_batches
from cos598d.errors import UserError
from cos598d.measure.clock import IterationClock
from cos598d.models.checkpoint import all_finite
from cos598d.plan import Plan, TrainingSetup
from cos598d.records.conventions import WARM_UP, WITH_ACTIVATIONS
from cos598d.strategies.base import Module, Strategy
from cos598d.strategies.formula import TrainingSpec, without_values
from cos598d.strategies.observed import TimedStrategy
from cos598d.strategies.optimizers import counter_bytes, make_optimizer, set_learning_rate, states_per_weight
from cos598d.strategies.replicas import check_replicas

Inputs = dict[str, torch.Tensor]


def step(
    strategy: Strategy | TimedStrategy,
    module: Module,
    micro_batches: Sequence[MicroBatch],
    load: Callable[[MicroBatch], Inputs],
    max_grad_norm: float,
) -> bool:
    """Run one optimizer step on this rank's share of a global batch. Return False if fp16 overflowed and skipped it.

    The losses of all ranks' micro-batches, each times its weight, add up to the global batch's mean loss.
    """
    for micro_batch in micro_batches:
        inputs = load(micro_batch)
        is_last = micro_batch is micro_batches[-1]
        with contextlib.nullcontext() if is_last else strategy.no_sync():
            loss = module(**inputs)[0]  # BERT's outputs begin with the loss
            strategy.backward(loss * micro_batch.weight)
    strategy.finish()  # now every rank has the gradient of the global batch's mean loss, or its shard of it
    # clips by the averaged gradient's norm: clipping on each rank before averaging would bias the average
    strategy.clip(max_grad_norm)
    return strategy.step()  # the optimizer's step, and zero_grad


def train(
    setup: TrainingSetup,
    evaluate: Callable[[], dict[str, Any] | None],
    control: TrainingControl | None = None,
) -> None:
    """Train the model of `setup` in place. Every rank calls it with the same arguments.

    Every rank calls `evaluate` after every epoch, and at each step of --eval_steps. It returns the current model's
    metrics, or None if a rank was asked to end meanwhile. `control` restores and saves the training, and ends it early;
    without one nothing is saved.

    Raises UserError, the same on every rank, for a global batch's loss that is not finite, or such a weight before an
    evaluation. Also raises it if the replicas have diverged, or if fp16's loss scale would fall below 1.
    """
    config, comm, model, strategy = setup.config, setup.comm, setup.model, setup.strategy
    features, record, console = setup.examples, setup.record, setup.console
    plan = Plan(config, len(features), comm.world_size)
    control = control or TrainingControl(setup)
    clock = IterationClock(comm.device)
    job = TrainingSpec(
        without_values(model), comm.world_size, comm.rank, states_per_weight(config), counter_bytes(config)
    )
    observed = TimedStrategy(strategy, clock, comm, control.votes)
    module = observed.attach(model, functools.partial(make_optimizer, config=config))
    model.train()
    at = control.begin(plan)  # the start, or where an earlier attempt of this run was saved
    observed.watched = min(at.iteration + WARM_UP, plan.steps)

    @clock.phase("data")
    def load(epoch: int, micro_batch: MicroBatch) -> Inputs:
        batch = features.collate(micro_batch.indices, (config.seed, epoch))
        return {name: tensor.to(comm.device) for name, tensor in batch.items()}

    def validate() -> None:
        """Check and evaluate the current model, and record the metrics; after an epoch, record that too."""
        record.begin_training()  # after a resume, the bytes sent by settling are the first that count
        strategy.settle()
        # once all ranks have received everything, this rank has sent and counted all its bytes
        comm.exchange("settled")
        record.pause_training()
        _check_replicas(comm, strategy, [*model.named_parameters(), *model.named_buffers()], at.iteration)
        _check_weights(model, at.iteration, config.learning_rate)
        found, epoch = evaluate(), plan.epoch_of(at.iteration)
        if found is None:
            control.count([sum(votes) for votes in zip(*comm.exchange(control.votes()), strict=True)])
            return
        at.evaluated = at.iteration
        control.see(found, at)
        if plan.ends_epoch(at.iteration) or control.is_over:
            cut = {"is_cut": True} if at.epoch_iterations < plan.epoch_steps else {}
            record.epoch({"epoch": epoch} | cut | at.end_epoch(plan.share(at.iteration)) | found)
            console.epoch(record.epochs[-1])
        else:
            evaluation = {"iteration": at.iteration, "epoch": epoch} | found
            record.evaluation(evaluation)
            console.evaluation(evaluation)

    def goes_on() -> bool:
        """Do what is due between two steps. Return whether another step follows."""
        if plan.evaluates(at) and not control.is_over:
            validate()
        if control.saves(at):
            record.begin_saving()
            with clock.phase("checkpoint"):
                control.save(at)
        return not control.is_over

    with console.progress(plan.steps, at.iteration, config.log_every) as progress:
        batches = plan.batches(after=at.iteration) if goes_on() else ()
        for epoch, batch in batches:
            record.begin_training()
            at.iteration += 1
            learning_rate = plan.learning_rate(at.stepped)
            set_learning_rate(strategy.optimizer, learning_rate)
            with observed.iteration(at.iteration):
                share = micro_batches(batch, comm.rank, comm.world_size, config.gradient_accumulation_steps)
                at.stepped += step(observed, module, share, functools.partial(load, epoch), config.max_grad_norm)
            _check_loss(observed.loss, at.iteration, config.learning_rate)
            at.add(observed.loss, plan.share(at.iteration))
            facts = {"epoch": epoch, "learning_rate": learning_rate, "examples": len(batch)}
            record.iteration(observed.facts() | facts, observed.seconds, clock.phases, features.counts(batch))
            progress(at.iteration, observed.loss, observed.seconds, len(batch))
            if config.check_replicas and at.iteration % config.check_replicas == 0:
                with strategy.whole():
                    _check_replicas(comm, strategy, model.named_parameters(), at.iteration)
            control.count(observed.counted)
            if not goes_on():
                break
    expected = strategy.expected_memory(replace(job, passes=max(1, observed.passes)))
    record.memory |= {"between_steps": observed.between_steps, "peak": observed.peak.held, **expected.as_record()}
    record.memory[WITH_ACTIVATIONS] = observed.peak.with_activations
    strategy.detach()


def _check_replicas(
    comm: Communicator, strategy: Strategy, tensors: Iterable[tuple[str, torch.Tensor]], iteration: int
) -> None:
    if strategy.replicas_equal:  # else the ranks hold different weights on purpose
        check_replicas(comm, tensors, iteration)


def _check_loss(loss: float, iteration: int, learning_rate: float) -> None:
    if not math.isfinite(loss):
        raise UserError(
            f"the loss of iteration {iteration} is {loss}, not a finite number. "
            f"Lower --learning_rate {learning_rate:g} or check the weights."
        )


def _check_weights(model: nn.Module, iteration: int, learning_rate: float) -> None:
    if not all(all_finite(parameter.detach()) for parameter in model.parameters()):
        raise UserError(
            f"some weights are not finite numbers after iteration {iteration}. Lower --learning_rate {learning_rate:g}."
        )
