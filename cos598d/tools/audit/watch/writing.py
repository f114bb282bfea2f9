"""Write an observer's findings as a rank's book."""

import os
from typing import Any

from cos598d.tools.audit.book import ENDED, FORMAT, RUNNING, Book
from cos598d.tools.audit.sketch import to_text
from cos598d.tools.audit.watch.observer import Observer
from cos598d.tools.audit.watch.places import NOWHERE, is_in_torch, main_line

_LONGEST = 500  # letters of an error


def book_of(
    observer: Observer, about: dict[str, Any], seconds: float, exit_code: int | None = None, error: str = ""
) -> Book:
    """The book so far. `about` has the run, rank, world size, host and script. With an `exit_code` it is complete."""
    is_over, steps, samples = exit_code is not None, observer.steps, observer.samples
    return about | {
        "format": FORMAT,
        "pid": os.getpid(),
        "state": ENDED if is_over else RUNNING,
        "exit_code": exit_code,
        "error": error[:_LONGEST],
        "failed": observer.failed[:_LONGEST],
        "at": NOWHERE if is_over else main_line(),
        "is_in_torch": not is_over and is_in_torch(),
        "recent": [] if is_over else observer.recent.rows(),
        "made": [] if is_over else observer.recent.made(),
        "unwaited": observer.calls.never_waited() if is_over else [],
        "examined": steps.examined,
        "seconds": seconds,
        "own_seconds": observer.own_seconds,
        "iterations_seen": steps.finished,
        "model": observer.replica.facts,
        "start": observer.start,
        "end": observer.replica.sketches() if is_over else {},
        "steps": [_written(step) for step in steps.rows],
        "ledger": list(observer.calls.entries.values()),
        "groups": sorted(observer.calls.groups),
        "iterations": observer.iterations,
        "training_samples": samples.training,
        "evaluation_samples": samples.evaluation,
        "evaluation_batches": samples.evaluation_batches,
        "sums": samples.sums,
        "loaders": list(observer.data.loaders.values()),
        "samplers": list(observer.data.samplers.values()),
        "backwards": steps.backwards,
        "batches": observer.data.batches,
        "saved": observer.saved,
        "gathers": observer.gathers,
        "settings": list(steps.settings.values()),
    }


def _written(step: dict[str, Any]) -> dict[str, Any]:
    local = {name: [None if each is None else to_text(each) for each in found] for name, found in step["local"].items()}
    return step | {"local": local}
