"""One rank of a bench: from its plan to the record, which rank 0 delivers."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tqdm import tqdm

from cos598d.errors import UsageError, flag_called
from cos598d.measure.environment import describe_environment
from cos598d.measure.monitor import HostGauges
from cos598d.measure.peak import peak_of_all
from cos598d.models.build import ModelSource, count_parameters, find_model
from cos598d.models.operations import training_operations
from cos598d.models.products import core_peak
from cos598d.precision import slow_on_this_processor
from cos598d.rank import RankProcess, init_rank
from cos598d.records.conventions import DDP, FLOOR, WARM_UP
from cos598d.records.summary import summarize
from cos598d.sync import get_sync
from cos598d.tools.bench.plan import BenchPlan
from cos598d.tools.bench.rounds import measure_rounds, stays_attached
from cos598d.tools.bench.workload import TASK, Workload
from cos598d.world.identity import Identity
from cos598d.world.meeting import Meeting


def run_bench_rank(plan: BenchPlan, identity: Identity, deliver: Callable[[dict[str, Any]], None]) -> int:
    """Run one rank and return the process's exit code. Rank 0 calls `deliver` with the record."""
    with RankProcess(identity) as process:
        plan.check(identity.world_size)
        source = _find_model(plan)
        record = _measure(plan, source, process.meet(plan.timeout, plan.facts()))
        if identity.rank == 0:
            deliver(record)
    return process.exit_code


def _find_model(plan: BenchPlan) -> ModelSource:
    with flag_called("--model", there="--model_name_or_path"):
        source = find_model(plan.model)
    if source.longest_sequence and plan.tokens > source.longest_sequence:
        raise UsageError(
            f"--tokens {plan.tokens} is more than this model's positions. Give at most {source.longest_sequence}."
        )
    return source


def _measure(plan: BenchPlan, source: ModelSource, meeting: Meeting | None) -> dict[str, Any]:
    """Measure, and return the record, complete on rank 0."""
    ranks, threads, ranks_on_host = init_rank(meeting, plan.backend, plan.no_cuda, plan.threads)
    candidates = plan.candidates()
    workload = Workload(source, ranks.device, plan.batch, plan.tokens, plan.seed, plan.precision)
    gauges, began = HostGauges(ranks.device, lambda sentence: None), time.perf_counter()
    # On standard error, and only on a terminal: standard output is the table.
    turns, hidden = len(candidates) * plan.rounds, None if ranks.rank == 0 else True
    with tqdm(total=turns, unit="turn", disable=hidden, leave=False) as bar:
        stay = stays_attached(workload, len(candidates), plan.step, ranks, ranks_on_host)
        found = measure_rounds(workload, candidates, ranks, plan.rounds, plan.seed, stay, plan.step, bar.update)
    host = ranks.collect({"seconds": time.perf_counter() - began, **gauges.read()})
    seconds = {
        candidate.label: [s["seconds"] for s in found["samples"] if s["candidate"] == candidate.label]
        for candidate in candidates
    }
    needed = training_operations(
        source.model_type, source.config, TASK.head, TASK.num_labels, np.full(plan.batch, plan.tokens)
    )
    setting = {
        "model": source.description,
        "world_size": ranks.world_size,
        "backend": ranks.backend,
        "device": ranks.device.type,
        "threads_per_rank": threads,
        "rounds": plan.rounds,
        "warm_up": WARM_UP,
        "seed": plan.seed,
        "seconds_of": found.pop("seconds_of"),
        "data": "the bundled sample",
        "parameters": count_parameters(workload.model),
        "gradient_bytes": workload.gradient_bytes,
        "batch": plan.batch,
        "tokens": plan.tokens,
        "step": plan.step,
        "precision": plan.precision,
        "precision_note": slow_on_this_processor(plan.precision, ranks.device) or "",
        "operations": int(needed.sum()) * ranks.world_size,
        "peak_per_second": peak_of_all(ranks, plan.precision, threads, core_peak),
    }
    environment = describe_environment(ranks.device, ranks.backend, threads, ranks_on_host)
    named = [
        {"label": one.label, "sync": one.name, "options": one.options, "bytes_from": get_sync(one.name).bytes_from}
        for one in candidates
    ]
    return {
        "setting": setting,
        "environment": environment | {"model_revisions": dict(source.revisions)},
        "candidates": named,
        "bytes_are_assumed": ranks.backend == "nccl",
        "summary": summarize(seconds, FLOOR, DDP),
        "host": host,
        **found,
    }
