"""Whether two records say the same, and else the first place where they do not: for goldens."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cos598d.records.conventions import NOT_METRICS
from cos598d.terminal.printable import printable
from cos598d.tools.report.bytes_from import is_in_ledger
from cos598d.tools.report.load import Run, load_run_as, own_names
from cos598d.tools.report.repeats import PLACES

LOSSES, METRICS, TOTALS = PARTS = ("losses", "metrics", "totals")
# What of an epoch's row is no metric, and no seconds of a clock either.
OF_EPOCHS = ("iterations", "last_iteration", "loss")
# Of the totals where a record has none by purpose.
MEANS = ("calls", "tensors", "payload_bytes", "bytes_sent", "bytes_received")
ABSENT = object()


@dataclass(frozen=True)
class EqualityVerdict:
    """Whether two records are equal, and one sentence that says so, or where they first differ."""

    is_equal: bool
    sentence: str


def compare_equal(folders: Sequence[Path], within: float = 0.0, parts: Sequence[str] = PARTS) -> EqualityVerdict:
    """Compare two runs' records, of those PARTS that are asked for, in their order.

    losses: of every iteration. metrics: of every epoch, of the evaluations within it, and its mean loss. totals: the
    iterations, and calls and bytes by what they were for, on every rank. Losses and metrics may differ by `within`
    (absolute; 0: not in the last bit), totals not at all. Seconds, and bytes that the kernel counted, are not compared.
    Flags, model, data and versions that differ are named, and are no difference. Raises UserError for a record that
    cannot be read, or that is not of a run that ended well.
    """
    runs = [load_run_as(folder, name) for folder, name in zip(folders, own_names(folders), strict=True)]
    first, second = runs
    others = _others(first, second)
    for part in parts:
        say = _PARTS[part]
        found = next(differences(say(first), say(second), within=0.0 if part == TOTALS else within), None)
        if found is not None:
            place, mine, theirs = found
            apart = f", {abs(mine - theirs):.3g} apart" if _are_numbers(mine, theirs) else ""
            said = f"{place} {_shown(mine)} in {first.name} and {_shown(theirs)} in {second.name}{apart}"
            return EqualityVerdict(False, f"not equal: {said}{others}.")
    how = f"within {within:g}" if within else "to the last bit"
    compared = ", ".join(_compared(first, second, part) for part in parts)
    return EqualityVerdict(True, f"{first.name} and {second.name} are equal {how}: {compared}{others}.")


def differences(mine: Any, theirs: Any, place: str = "", within: float = 0.0) -> Iterator[tuple[str, Any, Any]]:
    """Where two values of JSON differ, in order: the place in words, and the two, ABSENT for what is not there."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in mine | theirs:
            yield from differences(
                mine.get(name, ABSENT), theirs.get(name, ABSENT), f"{place}, {name}" if place else name, within
            )
    elif isinstance(mine, list) and isinstance(theirs, list):
        for number in range(max(len(mine), len(theirs))):
            one, other = (of[number] if number < len(of) else ABSENT for of in (mine, theirs))
            yield from differences(one, other, f"{place} {number + 1}", within)
    elif _are_numbers(mine, theirs):
        if abs(mine - theirs) > within:
            yield place, mine, theirs
    elif type(mine) is not type(theirs) or mine != theirs:
        yield place, mine, theirs


def _losses(run: Run) -> dict[str, float]:
    return {f"the loss of iteration {number} is": loss for number, loss in enumerate(run.summary["losses"], start=1)}


def _metrics(run: Run) -> dict[str, Any]:
    within = run.summary.get("evaluations", [])
    return _by_name((f"epoch {row['epoch']}", row) for row in run.summary["epochs"]) | _by_name(
        (f"the evaluation after iteration {row['iteration']}", row) for row in within
    )


def _by_name(rows: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Every row by its name; where several have one, each by a name of its own."""
    times: Counter[str] = Counter()
    found = {}
    for name, row in rows:
        times[name] += 1
        found[name if times[name] == 1 else f"{name}, row {times[name]}"] = _without_seconds(row)
    return found


def _without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    timed = ("training", *(f"{kind}_bytes_{way}" for kind in ("counted", "predicted") for way in ("sent", "received")))
    left_out = (NOT_METRICS - set(OF_EPOCHS)) | set(timed)
    return {name: value for name, value in row.items() if name not in left_out}


def _totals(run: Run) -> dict[str, Any]:
    """All calls of the run by their purpose; where none is told of, means an iteration of those that synchronize."""
    summary, by_purpose = run.summary, _by_purpose(run)
    if not by_purpose:
        return {"iterations": summary["iterations"]} | {
            f"{name} an iteration": summary[f"{name}_per_iteration"] for name in MEANS
        }
    return {"iterations": summary["iterations"]} | {
        f"all calls for {purpose}": {
            name.replace("_", " ") + (" by rank" if isinstance(value, list) else ""): value
            for name, value in found.items()
        }
        for purpose, found in by_purpose.items()
    }


def _by_purpose(run: Run) -> dict[str, dict[str, Any]]:
    """Empty of an older record, too, and where nothing was called, or an engine tells of nothing."""
    return run.summary.get("ledger", {}).get("by_purpose", {})


_PARTS = {LOSSES: _losses, METRICS: _metrics, TOTALS: _totals}


def _compared(first: Run, second: Run, part: str) -> str:
    summary = first.summary
    if part == LOSSES:
        return f"{len(summary['losses'])} losses"
    if part == METRICS:
        names = list(dict.fromkeys(name for row in summary["epochs"] for name in row if name not in NOT_METRICS))
        known = [name for name in names if name in _without_seconds(dict.fromkeys(names))]
        epochs = len(summary["epochs"])
        return f"{' and '.join(filter(None, ['mean loss', ', '.join(known)]))} of {epochs} epoch{'s'[: epochs != 1]}"
    untold = next((run for run in (first, second) if not is_in_ledger(run.summary)), None)
    if untold is not None:
        sync = printable(untold.summary["sync"], 60)
        return f"all iterations, and of calls and bytes what the ledger knows: not those of {sync}"
    return f"all iterations, calls and bytes{'' if _by_purpose(first) else ' an iteration'}"


def _others(first: Run, second: Run) -> str:
    """Which flags, and what of the work and of the ground and its versions, are not alike, as the end of a sentence."""
    flags = {
        f"--{name}": (first.config.get(name), second.config.get(name))
        for name in first.config | second.config
        if name not in PLACES and first.config.get(name) != second.config.get(name)
    }
    mine, theirs = (_work(run) | _ground(run) for run in (first, second))
    others = {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}
    unlike = [f"{name} ({_shown(one)} and {_shown(other)})" for name, (one, other) in (flags | others).items()]
    return f"; they were not run alike: {', '.join(unlike)}" if unlike else ""


def _work(run: Run) -> dict[str, Any]:
    """What was done, as the record says it beside the flags, by the words for it."""
    names = {"model": "model", "data": "data", "parameters": "parameters", "total_train_batch_size": "examples a step"}
    examples = [row.get("training", {}).get("examples") for row in run.summary["epochs"]]
    return {words: run.summary.get(name) for name, words in names.items()} | {
        "examples trained on": None if None in examples else sum(examples),
        "attempts": len(run.summary.get("attempts", [None])),
    }


def _ground(run: Run) -> dict[str, Any]:
    """What losses may depend on in their last bits, by the words for it."""
    versions = run.environment.get("versions")
    known = {"torch": versions.get("torch") if isinstance(versions, dict) else None}
    names = ("processor", "cores", "device", "threads_per_rank", "python")
    return {name.replace("_", " "): run.environment.get(name) for name in names} | known


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _shown(value: Any) -> str:
    return "not there" if value is ABSENT else "none" if value is None else printable(value, 60)
