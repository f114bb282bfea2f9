"""One rank of a bench: from its plan to the record, which rank 0 delivers."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tqdm import tqdm

from cos598d.comm.group import Ranks
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
from cos598d.tools.bench.candidates import Candidate
from cos598d.tools.bench.messages import message_sizes, sweep_message_size
from cos598d.tools.bench.plan import BenchPlan
from cos598d.tools.bench.rounds import measure_rounds, stays_attached
from cos598d.tools.bench.workload import TASK, Workload
from cos598d.world.identity import Identity
from cos598d.world.meeting import Meeting


def run_bench_rank(plan: BenchPlan, identity: Identity, deliver: Callable[[dict[str, Any]], None]) -> int:
    """Run one rank and return the process's exit code. Rank 0 calls `deliver` with the record."""
    with RankProcess(identity) as process:
        plan.check(identity.world_size)
        source = None if plan.sweep else _find_model(plan)
        record = _work(plan, source, process.meet(plan.timeout, plan.facts()))
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


def _work(plan: BenchPlan, source: ModelSource | None, meeting: Meeting | None) -> dict[str, Any]:
    ranks, threads, ranks_on_host = init_rank(meeting, plan.backend, plan.no_cuda, plan.threads)
    candidates = plan.candidates()
    record: dict[str, Any] = {
        "setting": {
            "model": source and source.description,
            "world_size": ranks.world_size,
            "backend": ranks.backend,
            "device": ranks.device.type,
            "threads_per_rank": threads,
            "rounds": plan.rounds,
            "warm_up": WARM_UP,
            "seed": plan.seed,
        },
        "environment": describe_environment(ranks.device, ranks.backend, threads, ranks_on_host)
        | {"model_revisions": dict(source.revisions) if source else {}},
        "candidates": [
            {"label": one.label, "sync": one.name, "options": one.options, "bytes_from": get_sync(one.name).bytes_from}
            for one in candidates
        ],
        "bytes_are_assumed": ranks.backend == "nccl",
    }
    sizes = len(message_sizes(plan.largest_mb)) * (plan.rounds + 1) if plan.sweep else 0
    # On standard error, and only on a terminal: standard output may be the record.
    turns = sizes + len(candidates) * plan.rounds
    with tqdm(total=turns, unit="turn", disable=None if ranks.rank == 0 else True, leave=False) as bar:
        if plan.sweep:
            record["message_size"] = sweep_message_size(ranks, plan.largest_mb, plan.rounds, plan.seed, bar.update)
        if candidates and source:
            gauges, began = HostGauges(ranks.device, lambda sentence: None), time.perf_counter()
            record |= _measure(plan, source, candidates, ranks, ranks_on_host, record, bar.update)
            record["host"] = ranks.collect({"seconds": time.perf_counter() - began, **gauges.read()})
    return record


def _measure(
    plan: BenchPlan,
    source: ModelSource,
    candidates: list[Candidate],
    ranks: Ranks,
    ranks_on_host: int,
    record: dict[str, Any],
    progress: Callable[[], Any],
) -> dict[str, Any]:
    """The candidates' part of the record."""
    workload = Workload(source, ranks.device, plan.batch, plan.tokens, plan.seed, plan.precision)
    stay = stays_attached(workload, len(candidates), plan.step, ranks, ranks_on_host)
    found = measure_rounds(workload, candidates, ranks, plan.rounds, plan.seed, stay, plan.step, progress)
    seconds = {
        candidate.label: [s["seconds"] for s in found["samples"] if s["candidate"] == candidate.label]
        for candidate in candidates
    }
    found["summary"] = summarize(seconds, FLOOR, DDP)
    found["setting"] = record["setting"] | {
        "seconds_of": found.pop("seconds_of"),
        "task": TASK.name,
        "data": "the bundled sample",
        "parameters": count_parameters(workload.model),
        "gradient_bytes": workload.gradient_bytes,
        "batch": plan.batch,
        "tokens": plan.tokens,
        "step": plan.step,
        "precision": plan.precision,
    }
    per_rank = np.full(plan.batch, plan.tokens)
    needed = training_operations(source.model_type, source.config, TASK.head, TASK.num_labels, per_rank)
    peak = peak_of_all(ranks, plan.precision, record["setting"]["threads_per_rank"], core_peak)
    found["setting"] |= {"operations": int(needed.sum()) * ranks.world_size, "peak_per_second": peak}
    if note := slow_on_this_processor(plan.precision, ranks.device):
        found["setting"]["precision_note"] = note
    return found
