"""What a run will cost, by formula and by the cost model, without starting any rank: `--dry_run`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cos598d.checkpoints.control import Stopping
from cos598d.comm.communicator import Communicator
from cos598d.comm.gloo import all_reduce_bytes
from cos598d.config import RunConfig
from cos598d.cost.model import Link
from cos598d.cost.planned import Known, PlannedSteps, Work
from cos598d.cost.seconds import OF_COMPUTE, predict_seconds
from cos598d.cost.writes import writes
from cos598d.errors import WARNING, UsageError
from cos598d.models.build import build_model, count_parameters
from cos598d.models.recompute import recompute_activations
from cos598d.strategies import AUTO_SYNC, get_strategy
from cos598d.strategies.activations import Moment, activations_of_pass
from cos598d.strategies.choose_precision import PrecisionChoice, choose_precision
from cos598d.strategies.formula import MemoryEstimate, TrafficEstimate, TrainingSpec
from cos598d.strategies.optimizers import counter_bytes, states_per_weight

NOT_ON_GPU = "without activations, which are predicted only for CPUs"
NOT_FOLLOWED = "without activations, since this model's pass cannot be followed by the shapes of its tensors alone"


@dataclass(frozen=True)
class Forecast:
    """What a run on some ranks costs.

    model                       a phrase for the model, and for what replaces one that no hub gave
    precision                   the one that this machine would compute in, with its remark and warning
    parameters                  of the model, frozen ones included
    memory                      bytes by category that a rank holds between two steps, by the strategy's own formula;
                                for the rank that holds most at the peak
    peak                        the same at the peak of a step, with the pass's activations
    memory_unsaid               why the two are empty, or what they lack; "" if nothing is missing
    activations_unsaid          why `peak` has no activations; "" if it has them
    iterations                  of the run; and per epoch
    bytes_sent_per_iteration    by rank, of gradients and of weights held in shards, as in a record; empty if there is
                                no prediction
    bytes_sent_per_epoch        by rank, of everything that an epoch's training sends, as predicted in its row
    bytes_unsaid                why the two are empty; "" if they are not
    bytes_more                  why the run may send more than the two, as a phrase; "" if they are exact
    seconds_per_iteration       None if none were asked for, or none are known
    seconds_per_epoch           of training only, without evaluation and checkpoints
    seconds_from                a phrase for the source of the seconds, or for why there are none
    writes                      what the run would write to the disk, and roughly how many bytes
    """

    model: str
    precision: PrecisionChoice
    parameters: int
    memory: Mapping[str, int]
    peak: Mapping[str, int]
    memory_unsaid: str
    activations_unsaid: str
    iterations: int
    iterations_per_epoch: int
    bytes_sent_per_iteration: Sequence[int]
    bytes_sent_per_epoch: Sequence[int]
    bytes_unsaid: str
    bytes_more: str
    seconds_per_iteration: float | None
    seconds_per_epoch: float | None
    seconds_from: str
    writes: Sequence[tuple[Path, int]]

    @property
    def peak_bytes(self) -> int:
        """The rank's bytes at the peak of a step, over all categories; 0 if there is no prediction."""
        return sum(self.peak.values())

    @property
    def seconds(self) -> float | None:
        """Seconds of all iterations of the run."""
        return None if self.seconds_per_iteration is None else self.seconds_per_iteration * self.iterations


# compute memory for this many ranks; for more, only the first and last ones, since shares differ by rounding
LOOKED_AT = 16
OWN_CALLS = 2  # per step, in addition to those that synchronize: the loss, and what the ranks agree on
LOSS_BYTES = 8  # also of each vote that is sent with it


def forecast(
    config: RunConfig,
    world_size: int,
    hosts: int = 1,
    rate: float | None = None,
    delay: float = 0.0,
    timings: Known | None = None,
) -> Forecast:
    """What a run with these flags costs on `world_size` ranks, spread evenly over `hosts`.

    `rate` (bits per second, None: no limit) and `delay` (seconds, host to host) describe the links. `timings` caches
    what was found and timed, for several forecasts. Nothing is started, and no run's folder is created. The training
    data are read as the run reads them, into the same cache. Raises UserError, as the run would, for flags, data and a
    model that cannot work.
    """
    config.check(world_size)
    if not config.do_train:
        raise UsageError("--dry_run predicts a training. Add --do_train.")
    if config.sync == AUTO_SYNC:
        raise UsageError(f"--dry_run starts no ranks, so --sync {AUTO_SYNC} cannot measure anything. Name a sync.")
    known = timings or Known()
    work = known.work(config)
    alone = Communicator(None, "gloo", torch.device("cpu"))
    asked, product = config.precision, work.source.product
    precision = known.once(("precision", asked, product), lambda: choose_precision(asked, product, alone))
    config = replace(config, precision=precision.precision)
    strategy = get_strategy(config.sync)(alone, False, config.sync_options(), config.precision)
    steps = PlannedSteps(config, work.examples, world_size)
    layout = [range(host * world_size // hosts, (host + 1) * world_size // hosts) for host in range(hosts)]

    def job(rank: int) -> TrainingSpec:
        return TrainingSpec(
            work.model,
            world_size,
            rank,
            states_per_weight(config),
            counter_bytes(config),
            steps.passes(rank),
            config.max_grad_norm > 0 or config.precision == "fp16",
            layout,
        )

    sent = [strategy.expected_sent(job(rank)) for rank in range(world_size)]
    looked_at = _looked_at(world_size)
    batch_flags = *(getattr(config, name) for name in OF_COMPUTE), world_size
    moments = known.once(("moments", known.work_key(config), *batch_flags), lambda: _moments(config, work, steps))
    held = _most(
        [strategy.expected_memory(job(rank)).with_activations(moments, steps.passes(rank)) for rank in looked_at]
    )
    bytes_unsaid = sent[0].unsaid
    seconds = predict_seconds(config, strategy, job(0), steps, sent[0], Link(rate, delay), known)
    in_all = seconds.iteration and seconds.iteration * steps.plan.steps
    return Forecast(
        model=work.source.description,
        precision=precision,
        parameters=count_parameters(work.model),
        memory=dict(held.between_steps or {}),
        peak=dict(held.peak or {}),
        memory_unsaid=held.unsaid,
        activations_unsaid="" if moments or not held.peak else NOT_ON_GPU if not steps.is_on_cpu else NOT_FOLLOWED,
        iterations=steps.plan.steps,
        iterations_per_epoch=steps.plan.epoch_steps,
        bytes_sent_per_iteration=[] if bytes_unsaid else [each.synchronizing for each in sent],
        bytes_sent_per_epoch=[] if bytes_unsaid else [_of_an_epoch(each, steps) for each in sent],
        bytes_unsaid=bytes_unsaid,
        bytes_more=sent[0].more,
        seconds_per_iteration=seconds.iteration,
        seconds_per_epoch=seconds.epoch,
        seconds_from=seconds.words,
        writes=writes(config, work, steps, sent[0].calls + OWN_CALLS, in_all),
    )


def _moments(config: RunConfig, work: Work, steps: PlannedSteps) -> list[Moment]:
    """What the largest pass holds next to weights and gradients."""
    with torch.device("meta"):
        model = build_model(work.source, work.task.head, work.task.num_labels, config.dropout, config.seed)
    if config.activation_checkpointing:
        recompute_activations(model)
    largest = steps.largest_pass(_looked_at(steps.ranks))
    inputs = work.examples.collate(largest.indices, (config.seed, 1))
    return activations_of_pass(model, inputs, config.precision, torch.device("cpu" if steps.is_on_cpu else "cuda"))


def _of_an_epoch(sent: TrafficEstimate, steps: PlannedSteps) -> int:
    """Bytes of an epoch, with the loss and the votes that are sent with it in every step."""
    loss = all_reduce_bytes(LOSS_BYTES * (1 + len(Stopping.VOTES)), steps.ranks)
    iterations = min(steps.plan.epoch_steps, steps.plan.steps)
    in_steps = iterations * (sent.synchronizing + sent.others + loss)
    return in_steps + steps.evaluations_per_epoch() * sent.settling


def _looked_at(ranks: int) -> Sequence[int]:
    return range(ranks) if ranks <= LOOKED_AT else (0, ranks - 1)


def _most(found: Sequence[MemoryEstimate]) -> MemoryEstimate:
    """The estimate of the rank that holds most at the peak."""
    return max(found, key=lambda each: sum((each.peak or each.between_steps or {}).values()))


def forecast_lines(config: RunConfig, world_size: int, found: Forecast) -> list[str]:
    """The forecast for the run of `config`, a line per fact, with its source."""
    ranks = f"{world_size} rank{'s'[: world_size != 1]}"
    lacks = "; ".join(filter(None, [found.memory_unsaid, found.activations_unsaid]))
    lines = [
        f"{config.label}: {config.task_name}, sync {config.sync}, {ranks}; nothing is started (--dry_run)",
        f"model: {found.model}",
        f"precision: {found.precision.precision}",
        *filter(None, [found.precision.remark, found.precision.warning and WARNING + found.precision.warning]),
        f"parameters: {found.parameters:,}",
        f"iterations: {found.iterations:,}, {found.iterations_per_epoch:,} per epoch; "
        f"{config.describe_batch(world_size)}",
        f"memory per rank between two steps: {_held(found.memory, found.memory_unsaid)}",
        f"memory per rank at a step's peak: {_held(found.peak, lacks)}",
        f"sent per rank and iteration: {_sent(found.bytes_sent_per_iteration, found)}",
        f"sent per rank and epoch, in total: {_sent(found.bytes_sent_per_epoch, found)}",
        _seconds(found),
    ]
    lines += [f"would write {path}: about {_size(size)}" for path, size in found.writes]
    return lines


def _held(held: Mapping[str, int], unsaid: str) -> str:
    if not held:
        return f"not known: {unsaid or 'this strategy predicts nothing'}"
    parts = ", ".join(f"{name} {_size(size)}" for name, size in held.items())
    return f"{_size(sum(held.values()))} ({parts}){f'; {unsaid}' if unsaid else ''}"


def _sent(by_rank: Sequence[int], found: Forecast) -> str:
    if not by_rank:
        return f"not known: {found.bytes_unsaid}"
    same = min(by_rank) == max(by_rank)
    sizes = f"{by_rank[0]:,}" if same else ", ".join(f"{size:,}" for size in by_rank)
    least = f" or more: {found.bytes_more}" if found.bytes_more else ""
    return f"{sizes} bytes{'' if same else ', rank by rank'}{least}"


def _seconds(found: Forecast) -> str:
    if found.seconds_per_iteration is None or found.seconds_per_epoch is None or found.seconds is None:
        return f"seconds: not known, {found.seconds_from}"
    return (
        f"seconds: {found.seconds_per_iteration:.3g} per iteration, {found.seconds_per_epoch:.3g} per epoch, "
        f"{found.seconds:.3g} in total, without evaluation and checkpoints; {found.seconds_from}"
    )


def _size(size: float) -> str:
    """Bytes as "12.3 MB", in powers of 1000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"
