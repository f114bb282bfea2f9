"""The training loop: an ordinary PyTorch loop, around the door that any script uses."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from cos598d.comm.group import Ranks
from cos598d.config import RunConfig
from cos598d.data import sampler
from cos598d.data.examples import Examples
from cos598d.data.sampler import MicroBatch
from cos598d.measure.clock import IterationClock
from cos598d.measure.record import RunRecord
from cos598d.memory import held
from cos598d.optimizers import make_optimizer
from cos598d.parallel import Parallel, parallelize
from cos598d.plan import Plan
from cos598d.precision import autocast, step_scaled
from cos598d.records.conventions import CHECKPOINT, LOSS, WARM_UP
from cos598d.replicas import check_finite, check_replicas
from cos598d.terminal.console import Console

if TYPE_CHECKING:
    from cos598d.attempt import Attempt


@dataclass(frozen=True)
class Job:
    """What one rank trains: `model` by `config` on `examples`. `sync_options` are those of the sync.

    `record` takes the measurements, `console` prints.
    """

    config: RunConfig
    ranks: Ranks
    model: nn.Module
    examples: Examples
    record: RunRecord
    console: Console
    sync_options: dict[str, Any] = field(default_factory=dict)


def step(
    model: Parallel,
    micro_batches: Sequence[MicroBatch],
    load: Callable[[MicroBatch], dict[str, torch.Tensor]],
    max_grad_norm: float,
    scaler: ShardedGradScaler,
    precision: str,
    votes: Callable[[], Sequence[float]] = tuple,
) -> tuple[bool, list[float]]:
    """Make one step on this rank's share of a global batch: micro-batches with their weights.

    The losses of all ranks' micro-batches, each times its weight, add up to the global batch's mean loss. The average
    over n ranks divides by n, so each loss is multiplied by n. Return whether the optimizer has stepped (not if fp16
    has overflowed), and sums over the ranks: the loss, and every rank's `votes`.
    """
    sync, phase = model.sync, model.phase
    optimizer: Any = model.optimizer
    device = next(model.module.parameters()).device
    sums = torch.zeros(1, dtype=torch.float64, device=device)
    for micro_batch in micro_batches:
        is_last = micro_batch is micro_batches[-1]
        with phase("data"):
            inputs = load(micro_batch)
        with nullcontext() if is_last else model.no_sync():
            with phase("forward"), autocast(precision, device):
                loss = model(**inputs)[0] * micro_batch.weight  # BERT's outputs begin with the loss
            sums[0] += loss.detach()
            if is_last:  # the loss travels while backward runs
                sums = torch.cat([sums, sums.new_tensor(votes())])
                with sync.ledger.naming("loss", LOSS):
                    summing = dist.all_reduce(sums, group=sync.group, async_op=True)
            with phase("backward"):
                scaler.scale(loss * sync.ranks).backward()  # when the last one returns, .grad is the average
    with phase("sync"):
        summing.wait()
    with phase("clip"):
        scaler.unscale_(optimizer)
        if max_grad_norm:
            model.clip_grad_norm_(max_grad_norm)  # after the average, never before it
    with phase("step"):
        has_stepped = step_scaled(scaler, optimizer, sync.ledger.iteration)
        optimizer.zero_grad()
    return has_stepped, sums.tolist()


def train(job: Job, evaluate: Callable[[], dict[str, Any] | None], control: "Attempt") -> None:
    """Train the model of `job` in place. Every rank calls it with the same arguments.

    Every rank calls `evaluate` after every epoch, and at each step of --eval_steps. It returns the current model's
    metrics, or None if a rank was asked to end meanwhile. `control` decides what happens between two steps.

    Raises UserError, the same on every rank, for a global batch's loss that is not finite, or such a weight before an
    evaluation. Also raises it if the replicas have diverged, or if fp16's loss scale would fall below 1.
    """
    config, ranks, record, console, examples = job.config, job.ranks, job.record, job.console, job.examples
    plan = Plan(config, len(examples), ranks.world_size)
    clock = IterationClock(ranks.device)
    model, optimizer = parallelize(
        job.model,
        lambda _: make_optimizer(job.model, config, config.precision),
        config.sync,
        ledger=ranks.ledger,
        **job.sync_options,
    )
    phase = model.phase = clock.phase
    # On for fp16: all ranks skip the same steps, whatever part of the gradient they have.
    scaler = ShardedGradScaler(ranks.device.type, enabled=config.precision == "fp16")
    job.model.train()
    at = control.begin(plan, model, scaler)  # the start, or where an earlier attempt of this run was saved
    weighed = min(at.iteration + WARM_UP, plan.steps)

    def load(micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        """A micro-batch's inputs, on the device."""
        inputs = examples.collate(micro_batch.indices, (config.seed, plan.epoch_of(at.iteration)))
        return {name: tensor.to(ranks.device) for name, tensor in inputs.items()}

    def weigh(*_: Any) -> None:
        if at.iteration == weighed:
            record.memory["peak"] = held(model)

    optimizer.register_step_pre_hook(weigh)

    def validate() -> None:
        """Check and evaluate the current model, and record the metrics; after an epoch, record that too."""
        record.begin_training()  # after a resume, the bytes sent by settling are the first that count
        model.settle()
        # once all ranks have received everything, this rank has sent and counted all its bytes
        ranks.exchange("settled")
        record.pause_training()
        if model.sync.replicas_equal:  # else the ranks hold different weights on purpose
            check_replicas(ranks, [*job.model.named_parameters(), *job.model.named_buffers()], at.iteration)
        check_finite(job.model.named_parameters(), at.iteration, config.learning_rate)
        found, epoch = evaluate(), plan.epoch_of(at.iteration)
        if found is None:
            control.count([sum(votes) for votes in zip(*ranks.exchange(control.votes()), strict=True)])
            return
        at.evaluated = at.iteration
        if plan.ends_epoch(at.iteration) or control.reason:
            cut = {"is_cut": True} if at.iteration % plan.epoch_steps else {}
            record.epoch({"epoch": epoch} | cut | found)
            console.epoch(record.epochs[-1])
        else:
            record.evaluation({"iteration": at.iteration, "epoch": epoch} | found)
            console.evaluation({"iteration": at.iteration} | found)

    def goes_on() -> bool:
        """Do what is due between two steps. Return whether another step follows."""
        if plan.evaluates(at) and not control.reason:
            validate()
        if control.saves(at):
            record.begin_saving()
            with phase(CHECKPOINT):
                control.save(at)
        return not control.reason

    with console.progress(plan.steps, at.iteration, config.log_every) as progress:
        for epoch, batch in plan.batches(after=at.iteration) if goes_on() else ():
            record.begin_iteration()
            at.iteration += 1
            rate = plan.learning_rate(at.stepped)
            for group in optimizer.param_groups:
                group["lr"] = rate
            clock.start()
            ranks.ledger.begin(at.iteration, clock.started)
            with phase("data"):
                parts = config.gradient_accumulation_steps
                micro_batches = sampler.micro_batches(batch, ranks.rank, ranks.world_size, parts)
            has_stepped, (loss, *votes) = step(
                model, micro_batches, load, config.max_grad_norm, scaler, config.precision, control.votes
            )
            seconds = clock.stop()
            at.stepped += has_stepped
            check_finite([("the loss", torch.tensor(loss))], at.iteration, config.learning_rate)
            facts: dict[str, Any] = {"iteration": at.iteration, "loss": loss, "epoch": epoch, "learning_rate": rate}
            facts |= {"examples": len(batch), "spans_seconds": clock.spans}
            record.iteration(facts, seconds, clock.phases, examples.counts(batch))
            progress(at.iteration, loss, seconds, len(batch))
            if config.check_replicas and at.iteration % config.check_replicas == 0 and model.sync.replicas_equal:
                model.settle()
                check_replicas(ranks, job.model.named_parameters(), at.iteration)
            control.count(votes)
            if not goes_on():
                break
    model.detach()
