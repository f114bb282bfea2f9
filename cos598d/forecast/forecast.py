"""From a run's flags to its forecast."""

from collections.abc import Sequence

import torch

from cos598d.checkpoints.stopping import Stopping
from cos598d.comm.communicator import Communicator
from cos598d.comm.gloo import all_reduce_bytes
from cos598d.config import RunConfig
from cos598d.errors import UsageError
from cos598d.forecast.facts import Forecast
from cos598d.forecast.known import Known
from cos598d.forecast.seconds import predict_seconds
from cos598d.forecast.steps import PlannedSteps
from cos598d.forecast.writes import writes
from cos598d.models.build import count_parameters
from cos598d.scale.records import Link
from cos598d.strategies import AUTO_SYNC, get_strategy
from cos598d.strategies.formula import MemoryEstimate, TrafficEstimate, TrainingSpec
from cos598d.strategies.optimizers import counter_bytes, states_per_weight

LOOKED_AT = 16  # so many ranks' memory: of more, those at both ends, since shares only differ by a rounding
OWN_CALLS = 2  # of a step, beside those that synchronize: the loss, and what the ranks agree on
LOSS_BYTES = 8  # and of each vote that travels with it


def forecast(
    config: RunConfig,
    world_size: int,
    hosts: int = 1,
    rate: float | None = None,
    delay: float = 0.0,
    timings: Known | None = None,
) -> Forecast:
    """What the run of these flags on `world_size` ranks, spread evenly over `hosts`, will come to.

    `rate` (bits a second; None: no limit) and `delay` (seconds from host to host) are the links'. `timings` keeps what
    was found out and timed, so that several forecasts share it. Nothing is started and no folder of a run is made; the
    training data are read as the run reads them, into the same cache.
    Raises UserError, as the run itself would, for flags, data and a model that cannot work.
    """
    config.check(world_size)
    if not config.do_train:
        raise UsageError("--dry_run tells what a training will come to: add --do_train.")
    if config.sync == AUTO_SYNC:
        raise UsageError(f"--dry_run starts no ranks by which --sync {AUTO_SYNC} could choose: name a sync.")
    known = timings or Known()
    work = known.work(config)
    alone = Communicator(None, "gloo", torch.device("cpu"))
    strategy = get_strategy(config.sync)(alone, work.may_be_unused, config.sync_options(), config.precision)
    steps = PlannedSteps(config, work.examples, world_size, strategy.equal_passes, work.model)
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
    held = _most([strategy.expected_memory(job(rank)) for rank in _looked_at(world_size)])
    bytes_unsaid = sent[0].unsaid
    seconds = predict_seconds(config, strategy, job(0), steps, sent[0], Link(rate, delay), known)
    in_all = seconds.iteration and seconds.iteration * steps.plan.steps
    return Forecast(
        parameters=count_parameters(work.model),
        memory=dict(held.between_steps or {}),
        peak=dict(held.peak or {}),
        memory_unsaid=held.unsaid,
        iterations=steps.plan.steps,
        iterations_per_epoch=steps.plan.epoch_steps,
        bytes_sent_per_iteration=[] if bytes_unsaid else [each.synchronizing for each in sent],
        bytes_sent_per_epoch=[] if bytes_unsaid else [_of_an_epoch(each, steps) for each in sent],
        bytes_unsaid=bytes_unsaid,
        seconds_per_iteration=seconds.iteration,
        seconds_per_epoch=seconds.epoch,
        seconds_from=seconds.words,
        writes=writes(config, work, steps, sent[0].calls + OWN_CALLS, in_all),
    )


def _of_an_epoch(sent: TrafficEstimate, steps: PlannedSteps) -> int:
    """With the loss and the votes that travel with it in every step."""
    loss = all_reduce_bytes(LOSS_BYTES * (1 + len(Stopping.VOTES)), steps.ranks)
    iterations = min(steps.plan.epoch_steps, steps.plan.steps)
    in_steps = iterations * (sent.synchronizing + sent.others + loss)
    return in_steps + steps.evaluations_per_epoch() * sent.settling


def _looked_at(ranks: int) -> Sequence[int]:
    return range(ranks) if ranks <= LOOKED_AT else (0, ranks - 1)


def _most(found: Sequence[MemoryEstimate]) -> MemoryEstimate:
    """Of the rank that holds most at the peak."""
    return max(found, key=lambda each: sum((each.peak or each.between_steps or {}).values()))
