"""The choice of `--sync auto`, and of a script's: the measurements, the cost model's predictions, and its report."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.hosts import host_groups
from cos598d.config import RunConfig, recorded
from cos598d.cost.calls import planned_calls
from cos598d.cost.compute import Computed, step_seconds, time_compute
from cos598d.cost.model import Compute, ModelledCall, arrange, iteration_seconds
from cos598d.cost.probe import Probe, measure
from cos598d.data.examples import Examples
from cos598d.errors import UsageError, UserError
from cos598d.records.conventions import DDP, FLOOR
from cos598d.strategies import STRATEGIES, class_of, get_strategy, is_our_own
from cos598d.strategies.base import MakeOptimizer, Strategy
from cos598d.strategies.formula import TrafficEstimate, TrainingSpec, without_values
from cos598d.strategies.optimizers import counter_bytes, states_per_weight
from cos598d.strategies.replicated import Replicated
from cos598d.sync import SYNCS
from cos598d.sync.parts.shared_buffers import Segments
from cos598d.terminal.words import number_of
from cos598d.world.devices import count_cores
from cos598d.world.limits import available_bytes


def candidates(
    config: RunConfig, hosts: Sequence[Sequence[int]], shares_memory: bool
) -> tuple[list[str], dict[str, str]]:
    """The candidates' names, in the order of the built-in syncs, and the reasons for those left out, as phrases.

    hosts: the ranks of each host; shares_memory: whether the ranks of a host can share memory.
    """
    chosen, left_out = [], {}
    ranks = sum(map(len, hosts))
    for name in (*SYNCS, *STRATEGIES):
        if name == FLOOR:
            continue
        reason = _reason(name, config, ranks, len(hosts), shares_memory)
        if reason:
            left_out[name] = reason
        else:
            chosen.append(name)
    return chosen, left_out


def _reason(name: str, config: RunConfig, ranks: int, hosts: int, shares_memory: bool) -> str:
    """Why it is left out; "" for a candidate."""
    if not is_our_own(name):
        return "another library's engine"
    kind = class_of(name)
    if not getattr(kind, "exact", True):
        return "not exact"
    if kind.one_host and hosts > 1:
        return "for one host only"
    if kind.shares_memory and not shares_memory:
        return "memory cannot be shared here"
    try:
        replace(config, sync=name).check(ranks)
    except UsageError as error:
        return str(error).rstrip(".")
    return ""


RUNNERS_UP = 2


@dataclass(frozen=True)
class Choice:
    """The choice, the same on every rank.

    predicted: seconds per iteration by candidate, fastest first; empty if nothing was measured. why: a phrase for what
    the choice rests on, or why nothing was measured. left_out: reasons, by name.
    """

    sync: str
    why: str
    predicted: Mapping[str, float]
    left_out: Mapping[str, str]
    measured: Mapping[str, Any]

    @property
    def sentence(self) -> str:
        """The line for the screen."""
        return f"--sync auto: {self.words}"

    @property
    def words(self) -> str:
        """The choice and its reason."""
        if not self.predicted:
            return f"{self.sync}, {self.why}"
        others = [f"{name} {seconds:.3g} s" for name, seconds in self.predicted.items() if name != self.sync]
        then = f"; then {', '.join(others[:RUNNERS_UP])}" if others else ""
        return f"{self.sync}, {self.predicted[self.sync]:.3g} s per iteration predicted{then} ({self.why})"

    def as_record(self) -> dict[str, Any]:
        """For the run's record, as JSON."""
        return asdict(self)


def choose(
    config: RunConfig,
    comm: Communicator,
    model: nn.Module,
    examples: Examples,
    may_be_unused: bool,
    before: Mapping[str, Any] | None = None,
) -> Choice:
    """Measure and choose. Every rank calls it, and gets rank 0's choice.

    before: the sync and options of a run that is resumed on the same number of ranks. It keeps them if possible.
    """
    return _choose(config, comm, model, may_be_unused, lambda _: time_compute(config, comm, model, examples), before)


def choose_for_script(
    comm: Communicator, model: nn.Module, may_be_unused: bool, make_optimizer: MakeOptimizer | None
) -> Choice:
    """Choose for a model whose inputs cannot be timed. Every rank calls it, and gets rank 0's choice.

    Calls, bytes and the optimizer's step are measured. The passes are estimated: backward takes as long as `bucketed`
    needs for its gradients, and forward half of that. It assumes that every row of an embedding is looked up.
    make_optimizer: makes the script's optimizer for shards; None if it can only step whole parameters.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    weights = sum(p.numel() for _, p in trainable)

    def guess(predicted: Callable[[Sequence[str], Computed], Mapping[str, float]]) -> Computed:
        step = step_seconds(make_optimizer, True, comm, weights) if make_optimizer is not None else 0.0
        names = [name for name, _ in reversed(trainable)]
        computed = Computed(Compute(0.0, 0.0, step, dict.fromkeys(names, 0.0)), step, names, 1.0)
        backward = comm.exchange(predicted(["bucketed"], computed)["bucketed"] - step)[0]
        ends = itertools.accumulate(p.numel() / weights for _, p in reversed(trainable))
        moments = {name: backward * end for name, end in zip(names, ends, strict=True)}
        return replace(computed, compute=Compute(backward / 2, backward, step, moments))

    def unfit(name: str) -> str:
        kind = class_of(name)
        if issubclass(kind, Strategy) and make_optimizer is None:
            return "the optimizer cannot step shards"
        return "all ranks would have to call the same layers" if getattr(kind, "equal_layers", False) else ""

    return _choose(RunConfig(), comm, model, may_be_unused, guess, None, unfit)


def _choose(
    config: RunConfig,
    comm: Communicator,
    model: nn.Module,
    may_be_unused: bool,
    compute: Callable[[Callable[[Sequence[str], Computed], Mapping[str, float]]], Computed],
    before: Mapping[str, Any] | None,
    unfit: Callable[[str], str] = lambda name: "",
) -> Choice:
    """compute: an iteration's costs, from a function that predicts seconds by name; unfit: why not a sync, or ""."""
    hosts = host_groups(comm)
    if comm.world_size == 1:
        return _default(FLOOR, "since a single rank has nothing to average")
    if comm.backend != "gloo" or comm.device.type != "cpu":
        return _default(
            DDP, f"since calls are measured only over gloo between CPUs, not {comm.backend} on {comm.device.type}"
        )
    shares_memory = _can_share(comm, hosts, sum(p.nbytes for p in model.parameters()))
    names, left_out = candidates(config, hosts, shares_memory)
    left_out |= {name: why for name in names if (why := unfit(name))}
    names = [name for name in names if name not in left_out]
    if before is not None and _fits(before, names, config):
        return _default(before["sync"], "as in the run that is resumed")
    crowd = max(comm.exchange(max(1.0, torch.get_num_threads() * len(_mine(hosts, comm.rank)) / count_cores())))
    probe = measure(comm, hosts, crowd)

    def seconds(names: Sequence[str], computed: Computed) -> tuple[dict[str, float], dict[str, str]]:
        return predict(names, config, model, may_be_unused, hosts, computed, probe, crowd)

    computed = compute(lambda names, computed: seconds(names, computed)[0])
    predicted: dict[str, float] = {}
    if comm.rank == 0:
        predicted, unsaid = seconds(names, computed)
        left_out |= unsaid
    predicted, left_out = comm.exchange([predicted, left_out])[0]
    ordered = dict(sorted(predicted.items(), key=lambda one: one[1]))
    measured = asdict(probe) | {"hosts": [len(ranks) for ranks in hosts], "compute_seconds": computed.compute.seconds}
    return Choice(next(iter(ordered)), _words(hosts, probe), ordered, left_out, measured)


def predict(
    names: Sequence[str],
    config: RunConfig,
    model: nn.Module,
    may_be_unused: bool,
    hosts: Sequence[Sequence[int]],
    computed: Computed,
    probe: Probe,
    crowd: float,
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds per iteration of each candidate, and the reasons for candidates without a prediction."""
    states, ranks = (states_per_weight(config), counter_bytes(config)), sum(map(len, hosts))
    clips, touched = bool(config.max_grad_norm), computed.touched
    job = TrainingSpec(without_values(model), ranks, 0, *states, clips=clips, hosts=hosts, touched=touched)
    tensors = {tensor.name: tensor for tensor in job.tensors}
    arrival = [tensors[name] for name in computed.arrival]
    alone = Communicator(None, "gloo", torch.device("cpu"))  # formulas send nothing

    def seconds(name: str, calls: Sequence[ModelledCall], spread: float, compute: Compute, overlaps: bool) -> float:
        calls = [replace(call, link_bytes=call.link_bytes * spread) for call in calls]
        return iteration_seconds(name, arrange(calls, compute, crowd), compute, probe.link, probe.costs, overlaps)

    predicted, unsaid = {}, {}
    for name in names:
        options = replace(config, sync=name).sync_options()
        strategy = get_strategy(name)(alone, may_be_unused, options, config.precision)
        spread = 1.0 if isinstance(strategy, Replicated) else probe.spread  # its ranks send to all others at once
        sent = strategy.expected_sent(job)
        if sent.unsaid and not isinstance(strategy, Replicated):  # a sync's calls are enough
            unsaid[name] = sent.unsaid
            continue
        before_step, after_step = _halves(sent)
        compute = computed.compute
        if "optimizer" in strategy.shards:  # each rank clips and steps its n-th
            compute = replace(compute, after=compute.after - computed.step_seconds * (1 - 1 / ranks))
        calls, overlaps = planned_calls(strategy, job, before_step, arrival, touched)
        predicted[name] = seconds(name, calls, spread, compute, overlaps)
        if after_step.synchronizing:
            # Weights are sent during the next forward, from its start. The rest of that time is waited for.
            forward = Compute(0.0, compute.before, 0.0, dict.fromkeys(compute.arrivals, 0.0))
            calls, _ = planned_calls(strategy, job, after_step)
            predicted[name] += seconds(name, calls, spread, forward, True) - forward.seconds
    return predicted, unsaid


def _halves(sent: TrafficEstimate) -> tuple[TrafficEstimate, TrafficEstimate]:
    """What is sent before a step and after it. If anything is sent after it, half of the calls belong to each."""
    if not sent.gathered:
        return sent, TrafficEstimate()
    calls = sent.calls // 2
    before = replace(sent, synchronizing=sent.synchronizing - sent.gathered, calls=sent.calls - calls)
    return before, TrafficEstimate(sent.gathered, calls=calls)


def _default(sync: str, why: str) -> Choice:
    return Choice(sync, why, {}, {}, {})


def _fits(before: Mapping[str, Any], names: Sequence[str], config: RunConfig) -> bool:
    """Whether the sync that a run had, with its options, is a candidate here."""
    if not isinstance(before.get("sync"), str):
        return False
    return before["sync"] in names and dict(before) == {"sync": before["sync"]} | recorded(config.sync_options())


def _mine(hosts: Sequence[Sequence[int]], rank: int) -> Sequence[int]:
    return next(ranks for ranks in hosts if rank in ranks)


def _can_share(comm: Communicator, hosts: Sequence[Sequence[int]], weights: int) -> bool:
    """Whether the ranks of every host can map the same memory, with room for all their gradients."""
    mine = _mine(hosts, comm.rank)
    if not all(comm.exchange(available_bytes() > (len(mine) + 1) * weights)):
        return False
    try:
        Segments(comm, mine, [(1, torch.float32)], ["try"]).close()
    except UserError:
        return False
    return True


def _words(hosts: Sequence[Sequence[int]], probe: Probe) -> str:
    ranks = sum(map(len, hosts))
    where = f"{ranks} ranks on {number_of(len(hosts), 'host')}"
    link = "" if probe.rate is None else f", {probe.rate / 1e6:.3g} Mbit/s"
    delay = f", {probe.delay * 1e3:.3g} ms from host to host" if probe.delay else ""
    return f"{where}{link}{delay}, measured in {probe.seconds:.1f} s"
