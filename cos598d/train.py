"""THE loop: it does not know which gradient sync, which task or which launcher."""

import contextlib
import math
import re
from collections.abc import Callable

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import LOSS
from cos598d.config import RunConfig
from cos598d.data.sampler import global_batches, micro_batches, steps_per_epoch
from cos598d.data.text.features import Features
from cos598d.errors import UserError
from cos598d.measure.clock import IterationClock
from cos598d.measure.record import RunRecord
from cos598d.records.conventions import PRECISIONS
from cos598d.strategies.loss_scale import LossScale
from cos598d.strategies.replicas import check_replicas
from cos598d.sync.base import GradientSync
from cos598d.terminal.console import Console

NO_WEIGHT_DECAY = re.compile(r"bias$|layer_?norm[^/]*weight$", re.IGNORECASE)
DTYPES = dict(zip(PRECISIONS, (None, torch.bfloat16, torch.float16), strict=True))


def train(
    model: nn.Module,
    sync: GradientSync,
    comm: Communicator,
    features: Features,
    config: RunConfig,
    record: RunRecord,
    console: Console,
    evaluate: Callable[[], dict[str, float]],
) -> None:
    """Train `model` in place on `features` as `config` says, the same on every rank; leave the figures in `record`.

    `evaluate` gives the metrics of the model as it stands; it is called by every rank after every epoch and at the end.
    Raises UserError, the same on every rank, when a global batch's loss or, after an epoch, a weight is not finite,
    when the replicas have come to differ, and when fp16's loss scale would fall below 1.
    """
    batch_size = config.total_batch_size(comm.world_size)
    epoch_steps = steps_per_epoch(len(features), batch_size)
    steps = config.max_steps if config.max_steps > 0 else math.ceil(config.num_train_epochs * epoch_steps)
    optimizer = make_optimizer(model, config)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, linear_schedule(config.warmup_steps, steps))
    loss_scale = LossScale(is_on=config.precision == "fp16")
    clock = IterationClock(comm.device)

    module = sync.attach(model)
    model.train()
    step = 0
    with console.progress(steps) as progress:
        for epoch in range(math.ceil(steps / epoch_steps)):
            losses = []
            record.begin_training()
            for batch in global_batches(len(features), batch_size, config.seed, epoch):
                if step == steps:
                    break
                step += 1
                clock.start()
                comm.ledger.begin(step, clock.began)
                with clock.phase("data"):
                    parts = micro_batches(
                        batch,
                        features.lengths,
                        comm.rank,
                        comm.world_size,
                        config.gradient_accumulation_steps,
                        group_by_length=comm.device.type == "cpu",
                    )
                sync.loss_scale = loss_scale.value
                local_loss = torch.zeros((), dtype=torch.float64, device=comm.device)
                tokens = 0
                for part in parts:
                    is_last = part is parts[-1]
                    with clock.phase("data"):
                        inputs = {
                            name: tensor.to(comm.device) for name, tensor in features.collate(part.indices).items()
                        }
                        tokens += inputs["input_ids"].numel()
                    with contextlib.nullcontext() if is_last else sync.no_sync():
                        with clock.phase("forward"), autocast(config.precision, comm.device):
                            loss = module(**inputs)[0]
                        local_loss += loss.detach() * part.weight
                        if is_last:
                            # Under way while backward runs, so that knowing the global loss costs no waiting.
                            mean_loss = comm.all_reduce(local_loss, "loss", purpose=LOSS, async_op=True)
                        with clock.phase("backward"):
                            # Gradients are averaged over ranks: times n, the average is the global batch's gradient.
                            (loss * (part.weight * comm.world_size * loss_scale.value)).backward()
                with clock.phase("sync"):
                    sync.finish()
                    mean_loss.wait()
                with clock.phase("clip"):
                    is_good = loss_scale.unscale(model.parameters())
                    if config.max_grad_norm > 0:
                        # After the average, never before it: the norm is that of the global batch's gradient.
                        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
                learning_rate = schedule.get_last_lr()[0]
                if loss_scale.is_on:
                    with clock.phase("sync"):
                        is_good = sync.agree_on_finite(is_good)
                with clock.phase("step"):
                    if is_good:  # else fp16 overflowed: the step leaves no trace
                        optimizer.step()
                        schedule.step()
                    loss_scale.update(is_good, step)
                    optimizer.zero_grad(set_to_none=True)
                with clock.phase("sync"):
                    if is_good:
                        sync.after_step()
                    else:
                        sync.forget_step()
                seconds = clock.stop()
                losses.append(local_loss.item())  # not sooner: it waits for the device, which has work until here
                if not math.isfinite(losses[-1]):
                    raise UserError(
                        f"the loss of iteration {step} is {losses[-1]}, not a finite number: "
                        f"lower --learning_rate {config.learning_rate:g} or check the weights."
                    )
                facts = {
                    "iteration": step,
                    "epoch": epoch + 1,
                    "loss": losses[-1],
                    "learning_rate": learning_rate,
                    "examples": len(batch),
                    "tokens_padded": tokens,
                    "spans_seconds": clock.spans,
                }
                record.iteration(facts, seconds, clock.phases)
                progress(step, losses[-1], seconds, len(batch))
                if config.check_replicas and step % config.check_replicas == 0 and sync.replicas_equal:
                    check_replicas(comm, model.named_parameters(), step)
            sync.settle()
            record.pause_training()
            if sync.replicas_equal:  # only then is rank 0's model everybody's
                check_replicas(comm, [*model.named_parameters(), *model.named_buffers()], step)
            if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
                raise UserError(
                    f"the weights after iteration {step} are not finite numbers: "
                    f"lower --learning_rate {config.learning_rate:g}."
                )
            epoch_record = {"epoch": epoch + 1, "iterations": len(losses), "loss": sum(losses) / len(losses)}
            record.epoch(epoch_record | evaluate())
            console.epoch(record.epochs[-1])
    sync.detach()


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    """torch's autocast to the dtype of `precision` ("fp32" leaves it off). Weights and gradients stay float32."""
    dtype = DTYPES[precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def make_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """AdamW as BERT is fine-tuned, or SGD: with either, weight decay on all but biases and layer norms."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (plain if NO_WEIGHT_DECAY.search(name) else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if config.optimizer == "sgd":
        # Not fused: torch's fused SGD fails where a parameter's first gradient comes later than the others'.
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    # fused: one pass over the weights instead of several; on a CPU shared by the ranks that is time.
    return torch.optim.AdamW(groups, lr=config.learning_rate, eps=config.adam_epsilon, fused=True)


def linear_schedule(warmup_steps: int, steps: int) -> Callable[[int], float]:
    """The learning rate's factor: up from 0 to 1 over `warmup_steps`, then down to 0 at `steps`."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        return max(0.0, (steps - step) / max(1, steps - warmup_steps))

    return factor
