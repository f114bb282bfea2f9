"""Seconds of an iteration by the cost model: the compute, timed here, and the cost of the sync's calls."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from cos598d.config import RunConfig
from cos598d.cost.benches import load_records
from cos598d.cost.calls import planned_calls
from cos598d.cost.fit import fit
from cos598d.cost.model import Compute, Costs, Link, arrange, iteration_seconds
from cos598d.cost.planned import Known, PlannedSteps
from cos598d.cost.timed import Timed, TimingRequest
from cos598d.errors import UserError
from cos598d.records.bench import FILE_NAME
from cos598d.strategies.base import Strategy
from cos598d.strategies.formula import TrafficEstimate, TrainingSpec
from cos598d.terminal.program import start
from cos598d.world.devices import count_cores

MOST_SECONDS = 300  # after this time something has gone wrong


def answer_of(words: Sequence[str], failure: str, question: str = "") -> str:
    """The output of `python WORDS`, with `question` on its standard input.

    A process computes with one thread unless OMP_NUM_THREADS is set. Raises UserError that begins with `failure` if it
    does not end well.
    """
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with start([sys.executable, *words], {"OMP_NUM_THREADS": "1"}, **pipes) as child:
        try:
            answer, errors = child.communicate(question, MOST_SECONDS)
            if child.returncode == 0:
                return answer
            said = (errors.strip() or "it printed nothing").splitlines()[-1]
        except subprocess.TimeoutExpired:
            said = f"it did not end within {MOST_SECONDS} s"
        finally:
            child.terminate()
    raise UserError(f"{failure}: {said}.")


# Many small calls and one large one separate a call's own cost from that of its bytes.
SHORT_BENCH = ("--model", "tiny", "--batch", "2", "--tokens", "32", "--rounds", "15", "--sync", "all_reduce,flat")


@dataclass(frozen=True)
class CallCosts:
    """The costs of calls, and a phrase for their source."""

    costs: Costs
    words: str


def costs_of(benches: Sequence[Path], ranks: int) -> CallCosts:
    """The costs fitted to `benches`; without any, to a short bench of `ranks` ranks, run here over loopback.

    Raises UserError for a bench's record that cannot be used, and if the short bench fails.
    """
    if benches:
        words = f"their costs are fitted to {len(benches)} bench{'es' if len(benches) > 1 else ''}"
        return CallCosts(fit(load_records(benches)).costs, words)
    where = ["--world_size", str(ranks), "--no_cuda", "--json", "-"]
    said = answer_of(["-m", "cos598d", "bench", *SHORT_BENCH, *where], "what calls cost could not be measured here")
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / FILE_NAME
        record.write_text(said, encoding="utf-8")
        return CallCosts(
            fit(load_records([record])).costs, "their costs are fitted to a short bench that was made here"
        )


TIMED_SECONDS = 3.0
MOST_PROCESSES = 16  # timed at once, for any number of ranks
BUSY = 0.6  # a rank that gets less than this share of its part of the cores competes with other programs
MOST_BATCHES = 200  # whose cost is computed, for the mean
# Flags that may change an iteration's compute, in addition to those of data and model.
OF_COMPUTE = (
    *("total_train_batch_size", "per_gpu_train_batch_size", "gradient_accumulation_steps", "precision", "optimizer"),
    *("momentum", "max_grad_norm", "dropout", "threads", "seed", "activation_checkpointing"),
)


@dataclass(frozen=True)
class Seconds:
    """Seconds of an iteration and of an epoch, and a phrase for their source; None if they are not known."""

    iteration: float | None
    epoch: float | None
    words: str


def predict_seconds(
    config: RunConfig,
    strategy: Strategy,
    job: TrainingSpec,
    steps: PlannedSteps,
    sent: TrafficEstimate,
    link: Link,
    known: Known,
) -> Seconds:
    """What an iteration of rank `job.rank` takes, averaged over the batches of an epoch."""
    if not known.times:
        return Seconds(None, None, "nothing was timed, as asked")
    if torch.cuda.is_available() and not config.no_cuda:
        return Seconds(None, None, "only CPUs are timed here, and the run would use a GPU (see --no_cuda)")
    timed = known.once(
        ("timed", known.work_key(config), *(getattr(config, name) for name in OF_COMPUTE), job.ranks)
        + ("optimizer" in strategy.shards,),
        lambda: _time(config, strategy, job.ranks),
    )
    processes = min(job.ranks, MOST_PROCESSES)
    compute = _compute(timed, steps, job, job.ranks / processes)
    cores = count_cores()
    said = (
        f"from the cost model: {timed.counted} iterations of {_count(processes, 'rank')} were timed here at once "
        f"on {_count(cores, 'core')}, without communication"
    )
    busy = ""
    crowd = max(1.0, job.ranks * timed.threads / cores)
    if timed.share * max(1.0, processes * timed.threads / cores) < BUSY:
        busy = ". Other programs were using the CPU, so this is an overestimate; try again on an idle machine"
    if known.costs_from or job.ranks > 1:  # a single rank does not use them, but they may not be valid benches
        costs = known.once(("costs", known.costs_from, processes), lambda: costs_of(known.costs_from, processes))
    if job.ranks == 1:
        return _of_all(compute.seconds, steps, f"{said} (one rank has none){busy}")
    if sent.unsaid:
        return Seconds(None, None, f"{sent.unsaid}")
    calls, overlaps = planned_calls(strategy, job, sent)
    arranged = arrange(calls, compute, crowd)
    label = f"{config.sync}+{config.compress}" if config.compress else config.sync  # as benches name it
    seconds = iteration_seconds(label, arranged, compute, link, costs.costs.crowded(crowd), overlaps)
    added = f"the cost of {_count(len(calls), 'call')} was added"
    return _of_all(seconds, steps, "; ".join(filter(None, [said, added, costs.words])) + busy)


def _of_all(seconds: float, steps: PlannedSteps, words: str) -> Seconds:
    return Seconds(seconds, seconds * min(steps.plan.epoch_steps, steps.plan.steps), words)


def _compute(timed: Timed, steps: PlannedSteps, job: TrainingSpec, crowding: float) -> Compute:
    """The compute of the epoch's mean batch. `crowding`: by what factor there will be more processes."""
    batches = steps.first(min(MOST_BATCHES, steps.plan.epoch_steps, steps.plan.steps))
    factor = statistics.fmean(steps.costs(batches)) / timed.cost * crowding
    compute = replace(timed.compute.scaled(factor), after=timed.compute.after * crowding)
    # A tensor without a gradient is sent at the end.
    arrivals = {tensor.name: compute.backward for tensor in job.tensors} | compute.arrivals
    return replace(compute, arrivals=arrivals)


def _time(config: RunConfig, strategy: Strategy, ranks: int) -> Timed:
    """The result of `timed`. Raises UserError if it fails."""
    question = TimingRequest(
        asdict(replace(config, no_cuda=True)),
        ranks,
        min(ranks, MOST_PROCESSES),
        TIMED_SECONDS,
        "optimizer" in strategy.shards,
    )
    said = answer_of(
        ["-m", "cos598d.cost.timed"],
        "the computation of this run could not be timed here",
        json.dumps(asdict(question)),
    )
    return Timed.read(said)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s'[: number != 1]}"
