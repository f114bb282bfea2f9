"""Whether two records are equal, and otherwise the first place where they differ: for regression tests."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cos598d.records.conventions import NOT_METRICS
from cos598d.terminal.printable import printable
from cos598d.tools.report.load import Run, load_run_as, own_names
from cos598d.tools.report.references import PLACES
from cos598d.tools.report.traffic_table import is_in_ledger

LOSSES, METRICS, TOTALS = PARTS = ("losses", "metrics", "totals")
# Fields of an epoch's row that are compared in addition to its metrics; seconds and the kernel's counts are not.
OF_EPOCHS = frozenset(("iterations", "last_iteration", "loss"))
NOT_COMPARED = (NOT_METRICS - OF_EPOCHS).union(
    ("training",), (f"{kind}_bytes_{way}" for kind in ("counted", "predicted") for way in ("sent", "received"))
)
# Totals to compare if a record has none by purpose.
MEANS = ("calls", "tensors", "payload_bytes", "bytes_sent", "bytes_received")
ABSENT = object()


@dataclass(frozen=True)
class EqualityVerdict:
    """Whether two records are equal, and one sentence that states it, or where they first differ."""

    is_equal: bool
    sentence: str


def compare_equal(folders: Sequence[Path], within: float = 0.0, parts: Sequence[str] = PARTS) -> EqualityVerdict:
    """Compare two runs' records: the requested PARTS, in order.

    losses: of every iteration. metrics: of every epoch, of the evaluations inside it, and its mean loss. totals: the
    iterations, and calls and bytes by purpose, on every rank. Losses and metrics may differ by `within` (absolute; 0:
    bit-identical), totals not at all. Seconds, and bytes that the kernel counted, are not compared. Differing flags,
    model, data and versions are listed, but do not count as a difference. Raises UserError for a record that cannot be
    read, or of a run that did not end well.
    """
    first, second = (load_run_as(*place) for place in zip(folders, own_names(folders), strict=True))
    mine, theirs = _ground(first), _ground(second)
    apart = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
    apart.sort(key=lambda name: not name.startswith("--"))  # first the flags of both, then the rest
    others = ", ".join(f"{name} ({_shown(mine.get(name))} and {_shown(theirs.get(name))})" for name in apart)
    others = f" Their settings differ: {others}." if others else ""
    say = {LOSSES: _losses, METRICS: _metrics, TOTALS: _totals}
    for part in parts:
        for place, one, other in differences(say[part](first), say[part](second), within * (part != TOTALS)):
            by = f", {abs(one - other):.3g} apart" if _are_numbers(one, other) else ""
            words = f"{place} {_shown(one)} in {first.name} and {_shown(other)} in {second.name}{by}"
            return EqualityVerdict(False, f"not equal: {words}.{others}")
    how = f"equal within {within:g}" if within else "bit-identical"
    compared = "; ".join(_compared(first, second, part) for part in parts)
    return EqualityVerdict(True, f"{first.name} and {second.name} are {how}: {compared}.{others}")


def differences(mine: Any, theirs: Any, within: float = 0.0, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The differences of two JSON values, in order: the place as text, and both values, ABSENT for a missing one."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in mine | theirs:
            inside = f"{place}, {name}" if place else name
            yield from differences(mine.get(name, ABSENT), theirs.get(name, ABSENT), within, inside)
    elif isinstance(mine, list) and isinstance(theirs, list):
        for number in range(max(len(mine), len(theirs))):
            one, other = (of[number] if number < len(of) else ABSENT for of in (mine, theirs))
            yield from differences(one, other, within, f"{place} {number + 1}")
    elif _are_numbers(mine, theirs):
        if abs(mine - theirs) > within:
            yield place, mine, theirs
    elif type(mine) is not type(theirs) or mine != theirs:
        yield place, mine, theirs


def _losses(run: Run) -> dict[str, float]:
    return {f"the loss of iteration {number} is": loss for number, loss in enumerate(run.summary["losses"], start=1)}


def _metrics(run: Run) -> dict[str, Any]:
    epochs, within = run.summary["epochs"], run.summary.get("evaluations", [])
    return _by_name((f"epoch {row['epoch']}", row) for row in epochs) | _by_name(
        (f"the evaluation after iteration {row['iteration']}", row) for row in within
    )


def _by_name(rows: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Every row by its name; if several have the same, each gets a unique one."""
    times: Counter[str] = Counter()
    found = {}
    for name, row in rows:
        times[name] += 1
        own = name if times[name] == 1 else f"{name}, row {times[name]}"
        found[own] = {key: value for key, value in row.items() if key not in NOT_COMPARED}
    return found


def _totals(run: Run) -> dict[str, Any]:
    """All calls of the run by purpose; in a record without purposes, means per iteration of the synchronizing ones."""
    summary = run.summary
    found: dict[str, Any] = {"iterations": summary["iterations"]}
    for purpose, totals in _by_purpose(run).items():
        found[f"all calls for {purpose}"] = {
            name.replace("_", " ") + (" by rank" if isinstance(value, list) else ""): value
            for name, value in totals.items()
        }
    if len(found) == 1:
        found |= {f"{name} per iteration": summary[f"{name}_per_iteration"] for name in MEANS}
    return found


def _by_purpose(run: Run) -> dict[str, dict[str, Any]]:
    """Empty for an older record, if nothing was called, and for an engine that does not report its calls."""
    return run.summary.get("ledger", {}).get("by_purpose", {})


def _compared(first: Run, second: Run, part: str) -> str:
    losses, epochs = first.summary["losses"], first.summary["epochs"]
    if part == LOSSES:
        return f"{len(losses)} losses"
    if part == METRICS:
        names = dict.fromkeys(name for row in epochs for name in row if name not in NOT_COMPARED | OF_EPOCHS)
        known = " and ".join(filter(None, ["mean loss", ", ".join(names)]))
        return f"{known} of {len(epochs)} epoch{'s'[: len(epochs) != 1]}"
    untold = next((run for run in (first, second) if not is_in_ledger(run.summary)), None)
    if untold is not None:
        sync = printable(untold.summary["sync"], 60)
        return f"all iterations, and calls and bytes in the communication log, which does not have those of {sync}"
    return f"all iterations, calls and bytes{'' if _by_purpose(first) else ' per iteration'}"


def _ground(run: Run) -> dict[str, Any]:
    """The run's flags, its other settings, and what may change the last bits of losses, by name."""
    flags = {f"--{name}": value for name, value in run.config.items() if name not in PLACES}
    examples = [row.get("training", {}).get("examples") for row in run.summary["epochs"]]
    versions = run.environment.get("versions")
    names = {
        "model": "model",
        "data": "data",
        "parameters": "parameters",
        "total_train_batch_size": "examples per step",
    }
    return (
        flags
        | {words: run.summary.get(name) for name, words in names.items()}
        | {"examples trained on": None if None in examples else sum(examples)}
        | {"attempts": len(run.summary.get("attempts", [None]))}
        | {
            name.replace("_", " "): run.environment.get(name)
            for name in ("processor", "cores", "device", "threads_per_rank", "python")
        }
        | {"torch": versions.get("torch") if isinstance(versions, dict) else None}
    )


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _shown(value: Any) -> str:
    return "not there" if value is ABSENT else "none" if value is None else printable(value, 60)
