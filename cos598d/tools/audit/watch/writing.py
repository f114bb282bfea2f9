"""Write an observer's findings as a rank's book."""

import os
from typing import Any

import torch

from cos598d.tools.audit.book import ENDED, FORMAT, RUNNING, Book
from cos598d.tools.audit.sketch import to_text
from cos598d.tools.audit.watch.observer import Observer
from cos598d.tools.audit.watch.places import NOWHERE, is_in_torch, main_line

_LONGEST = 500  # letters of an error


def book_of(
    observer: Observer,
    about: dict[str, Any],
    seconds: float,
    exit_code: int | None = None,
    error: str = "",
    stopped: str = "",
) -> Book:
    """The book so far. `about` has the run, rank, world size, host and script. With an `exit_code` it is complete.
    `stopped` names what asked the process to end."""
    is_over = exit_code is not None
    end = observer.replica.sketches() if is_over else {}
    return about | {
        "format": FORMAT,
        "pid": os.getpid(),
        "state": ENDED if is_over else RUNNING,
        "exit_code": exit_code,
        "error": error[:_LONGEST],
        "failed": observer.failed[:_LONGEST],
        "stopped": stopped,
        "at": [*main_line()] if stopped else [*NOWHERE],
        "is_in_torch": bool(stopped) and is_in_torch(),
        "recent": observer.recent.rows() if stopped else [],
        "made": observer.recent.made() if stopped else [],
        "unwaited": observer.calls.never_waited() if is_over else [],
        "backend": observer.calls.backend,
        "torch": torch.__version__,
        "examined": observer.steps.examined,
        "seconds": seconds,
        "own_seconds": observer.own_seconds,
        "own_after": observer.own_after,
        "iterations_seen": observer.steps.finished,
        "model": observer.replica.facts,
        "start": observer.start,
        "end": end,
        "steps": [_written(step) for step in observer.steps.rows],
        "calls": observer.calls.rows,
        "ledger": list(observer.calls.entries.values()),
        "groups": [list(ranks) for ranks in sorted(observer.calls.groups)],
        "iterations": observer.iterations,
        "training_samples": observer.samples.training,
        "evaluation_samples": observer.samples.evaluation,
        "evaluated": observer.samples.evaluated,
        "evaluation_batches": observer.samples.evaluation_batches,
        "sums": observer.samples.sums,
        "loaders": list(observer.data.loaders.values()),
        "samplers": list(observer.data.samplers.values()),
        "counts": observer.counts | {"batches": observer.data.batches},
        "saved": observer.saved,
        "settings": observer.steps.optimizers.settings(),
        "seed": torch.initial_seed(),
        "threads": torch.get_num_threads(),
    }


def _written(step: dict[str, Any]) -> dict[str, Any]:
    local = {name: [None if each is None else to_text(each) for each in found] for name, found in step["local"].items()}
    parts = {
        name: [None if each is None else [*map(to_text, each)] for each in found]
        for name, found in step["local_parts"].items()
    }
    return step | {"local": local, "local_parts": parts}
