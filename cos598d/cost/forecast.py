"""What a run will cost, by formula, without starting any rank: `--dry_run`.

The iterations are the plan's. Bytes and memory are those of `formulas.FACTS`, for the model's own tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import nn

from cos598d.config import RunConfig
from cos598d.data.examples import Examples
from cos598d.errors import UsageError
from cos598d.formulas import FACTS, Job
from cos598d.inputs import find
from cos598d.models.build import build_model, count_parameters
from cos598d.optimizers import remembered
from cos598d.plan import Plan
from cos598d.sync import AUTO_SYNC
from cos598d.sync.sparse_rows import LEAST_BYTES, large_embeddings
from cos598d.terminal.words import number_of
from cos598d.zero.layers import owners


@dataclass(frozen=True)
class Forecast:
    """What a run on some ranks costs.

    model: a phrase. parameters: of the model, frozen ones included. memory: bytes that a rank holds just before a step,
    without activations, as `memory.held` counts them. calls: of gradients and weights, in an iteration. bytes_sent: by
    rank, in an iteration. unsaid: why memory, calls and bytes are not known; "" if they are.
    """

    model: str
    parameters: int
    iterations: int
    iterations_per_epoch: int
    memory: Mapping[str, int] = field(default_factory=dict)
    calls: float = 0
    bytes_sent: Sequence[int] = ()
    unsaid: str = ""


def forecast(config: RunConfig, world_size: int) -> Forecast:
    """What a run with these flags costs on `world_size` ranks. No rank is started, and no run's folder is created.

    The training data are read as the run reads them. Raises UserError, as the run would, for flags, data and a model
    that cannot work.
    """
    config.check(world_size)
    if not config.do_train:
        raise UsageError("--dry_run predicts a training. Add --do_train.")
    if config.sync == AUTO_SYNC:
        raise UsageError(f"--dry_run starts no ranks, so --sync {AUTO_SYNC} cannot try anything. Name a sync.")
    inputs = find(config)
    task, source = inputs.task, inputs.source
    examples = task.load("train", source.encoder, config.max_seq_length, config.max_train_examples)
    with torch.device("meta"):
        model = build_model(source, task.head, task.num_labels, config.dropout, config.seed)
    plan = Plan(config, len(examples), world_size)
    known = partial(Forecast, source.description, count_parameters(model), plan.steps, plan.epoch_steps)
    if unsaid := _unsaid(config):
        return known(unsaid=unsaid)
    facts, job = FACTS[config.sync], _job(config, model, examples, plan, world_size)
    weights, gradients, state, buffers = facts.held(job)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    memory = {
        "parameters": round(weights + frozen),
        "gradients": round(gradients),
        "optimizer": round(state),
        "buckets": round(buffers),
    }
    if world_size == 1:
        return known(memory, bytes_sent=[0])
    return known(memory, facts.calls(job), [round(facts.sent(job, rank)) for rank in range(world_size)])


def _unsaid(config: RunConfig) -> str:
    """Why the formulas do not hold for this run; "" if they do."""
    if config.sync not in FACTS:
        return f"no formula is known for {config.sync}"
    codec = config.sync_options().get("compress")
    return f"how much --compress {codec} leaves of a gradient is measured, not predicted" if codec else ""


def _job(config: RunConfig, model: nn.Module, examples: Examples, plan: Plan, ranks: int) -> Job:
    """A step of this run, for the formulas."""
    options = config.sync_options()
    _, batch = next(plan.batches(after=0))
    layer_of = owners(model)
    if config.sync == "zero3":  # every embedding that is only looked up is a unit of its own
        every = [table for one in model.modules() if isinstance(one, nn.Embedding) for table in one.parameters()]
        tables = [table for table in every if layer_of[table] is not model]
    else:
        tables = large_embeddings(model, LEAST_BYTES)
    rows = max(map(len, tables), default=0)
    return Job(
        sizes=tuple(p.nbytes for p in model.parameters() if p.requires_grad),
        n=ranks,
        a=config.gradient_accumulation_steps,
        state=len(set(remembered(config)) - {"step"}),
        L=len({(layer, any(p is table for table in tables)) for p, layer in layer_of.items()}),
        E=sum(table.nbytes for table in tables),
        u=_looked_up(examples, batch, rows),
        v=_looked_up(examples, batch[::ranks], rows),
        H=options.get("sync_every", 1),
        **{name: options[name] for name in ("bucket_mb", "first_bucket_mb") if name in options},
    )


def _looked_up(examples: Examples, batch: np.ndarray, rows: int) -> float:
    """The share of the largest embedding's rows that these examples look up, for all embeddings."""
    inputs = examples.collate(batch) if rows else {}
    return len(torch.unique(inputs["input_ids"])) / rows if "input_ids" in inputs else 1.0


def forecast_lines(config: RunConfig, world_size: int, found: Forecast) -> list[str]:
    """The forecast for the run of `config`, a line per fact."""
    ranks = number_of(world_size, "rank")
    lines = [
        f"{config.label}: {config.task_name}, sync {config.sync}, {ranks}; nothing is started (--dry_run)",
        f"model: {found.model}",
        f"parameters: {found.parameters:,}",
        f"iterations: {found.iterations:,}, {found.iterations_per_epoch:,} per epoch; "
        f"{config.describe_batch(world_size)}",
    ]
    if found.unsaid:
        return [*lines, f"memory and bytes: not known, since {found.unsaid}"]
    parts = ", ".join(f"{name} {size / 1e6:,.2f} MB" for name, size in found.memory.items())
    sent = [f"{size:,}" for size in found.bytes_sent]
    sent = sent[:1] if len({*sent}) == 1 else sent
    return [
        *lines,
        f"memory per rank just before a step: {sum(found.memory.values()) / 1e6:,.2f} MB ({parts}), and activations",
        f"calls per iteration: {found.calls:,.4g}",
        f"sent per iteration: {', '.join(sent)} bytes by {'each rank' if len(sent) == 1 else 'rank 0, 1, ...'}",
    ]
