"""Which tables and figures a set of runs and benches gives."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import pandas as pd
from matplotlib.figure import Figure

from cos598d.records.bench import Bench
from cos598d.records.conventions import ENVIRONMENT_FILE, FINISHED
from cos598d.records.quantities import quantity
from cos598d.records.schema import read
from cos598d.tools.report import figures, tables
from cos598d.tools.report.benches import candidate_rows, legend
from cos598d.tools.report.cells import Rows, exact
from cos598d.tools.report.compare import SECONDS, SPEED_UP, alone_of, in_groups, speed_up, table
from cos598d.tools.report.records import HOW, Run, last_classes

MOST_TENSORS, MOST_CLASSES = 12, 100
MOST_ALONE = 8  # runs of a page that have tables and figures of their own
# What varies with the ranks or the moment, and is no axis of a sweep.
NO_AXES = frozenset(("seed", "threads_per_rank", "examples per epoch", "commit", "cores", "torch", "check_replicas"))


class Section(NamedTuple):
    """A heading with its tables, each below what its columns say, and its figures. Empty ones are left out."""

    title: str
    tables: Sequence[tuple[str, Rows]] = ()
    figures: Sequence[Callable[[], Figure | None]] = ()


def run_sections(runs: Sequence[Run]) -> list[Section]:
    """What a person wants first is at the top."""
    if not runs:
        return []
    files = [read(run.folder / ENVIRONMENT_FILE, dict) for run in runs]
    environments = {run.name: pd.json_normalize(found, sep=" ").iloc[0].to_dict() for run, found in zip(runs, files)}
    each = runs if len(runs) <= MOST_ALONE else []
    tensors = [(f"{run.name}: what rank 0 sends in one iteration, largest first.", tensor_rows(run)) for run in each]
    purposes = ("All calls of the run by their purpose; calls and payload are rank 0's.", tables.purpose_rows(runs))
    return [
        Section("In short", [("", table(runs))], [partial(figures.seconds, runs)]),
        Section("What the settings change", (), sweep_figures(runs)),
        Section("Losses", (), [partial(figures.losses, runs)]),
        Section("Epochs", [("A cut epoch ended early.", tables.epoch_rows(runs))], [partial(figures.epochs, runs)]),
        Section("Classes", [(f"{run.name}, after its last epoch.", class_rows(run)) for run in each]),
        Section("Time", [(tables.TIME, tables.time_rows(runs))], [partial(figures.timeline, run) for run in each]),
        Section("Traffic", [(tables.TRAFFIC, tables.traffic_rows(runs)), purposes, *tensors]),
        Section("Memory", [(tables.MEMORY, tables.memory_rows(runs))]),
        Section("Attempts", [("Times in UTC. Lost iterations were repeated.", attempt_rows(runs))]),
        Section("Settings", side_by_side({run.name: run.settings for run in runs})),
        Section("Environment", side_by_side(environments)),
    ]


def bench_sections(benches: Mapping[str, Bench]) -> list[Section]:
    """Each bench, and what they ran on."""
    if not benches:
        return []
    sections = [
        Section(f"Bench {name}", [(legend(one), candidate_rows(one))], [partial(figures.ladder, name, one)])
        for name, one in benches.items()
    ]
    facts = {name: bench_facts(one) for name, one in benches.items()}
    return [*sections, Section("Settings of benches", side_by_side(facts))]


def side_by_side(facts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Rows]]:
    """What differs, a row for each record, and what all share."""
    words = {who: {name: exact(value) for name, value in own.items()} for who, own in facts.items()}
    names = dict.fromkeys(name for own in words.values() for name in own)
    apart = [name for name in names if len({own.get(name) for own in words.values()}) > 1]
    different = [{"": who, **{name: own.get(name) for name in apart}} for who, own in words.items()] if apart else []
    first = next(iter(words.values()))
    alike = [{"": name, "value": first.get(name)} for name in names if name not in apart]
    return [("Different.", different), ("The same for all.", alike)]


def sweep_figures(runs: Sequence[Run]) -> list[Callable[[], Figure | None]]:
    """For each number in which runs differ, or quantity such as "10ms", a figure of their seconds, speed-up and
    metrics."""
    groups, found, metrics = in_groups(runs), [], dict[str, float]()
    for run in runs:
        own = {"sync": run.summary.sync, **{name: run.config.get(name) for name in sorted(HOW)}, **run.settings}
        gain = speed_up([run], alone_of(groups, [run]))
        own |= {"ranks": run.summary.world_size, SECONDS: None if run.busy else run.mean}
        own |= {SPEED_UP: gain if isinstance(gain, float) else None}
        last = tables.metrics_of(run.summary.epochs[-1]) if run.summary.epochs else {}
        metrics |= last
        found.append(own | last)
    rows, ys = pd.DataFrame(found), [SECONDS, SPEED_UP, *metrics]
    axes = [name for name in rows if name not in {*NO_AXES, *ys} and rows[name].astype(str).nunique() > 1]
    numbers = {name: rows[name].map(quantity) for name in axes}
    return [
        partial(figures.lines, rows.assign(**{name: own}), name, ys, [one for one in axes if one != name] or ["sync"])
        for name, own in numbers.items()
        if own.nunique() > 1
    ]


def class_rows(run: Run) -> Rows:
    """How well each class was found after the last epoch, and as which classes its examples were taken."""
    classes = last_classes(run)
    if classes is None or len(classes.by_class) > MOST_CLASSES:
        return []
    found = []
    for place, one in enumerate(classes.by_class):
        never = classes.confusion and not any(row[place] for row in classes.confusion)
        row = {"class": one.name, "examples": one.examples, "precision": None if never else one.precision}
        row |= {"recall": one.recall, "F1": one.f1}
        taken = classes.confusion[place] if classes.confusion else []
        found.append(row | {f"as {other.name}": count for other, count in zip(classes.by_class, taken)})
    return found


def tensor_rows(run: Run) -> Rows:
    """Rank 0's calls in its typical iteration by tensor: those with the most bytes, and the others' sums."""
    typical = run.typical()
    calls = pd.DataFrame(run.calls(typical.iteration) if typical else ())
    if calls.empty:
        return []
    sizes = ["calls", "payload_bytes", "bytes_sent", "bytes_received"]
    sums = calls.assign(calls=1).groupby(["tensor", "op", "purpose"], sort=False)[sizes].sum()
    sums = sums.loc[sums[sizes[2:]].sum(axis=1).sort_values(ascending=False, kind="stable").index]
    names, rest = ("tensor", "call", "carries"), sums.iloc[MOST_TENSORS:]
    rows = [dict(zip(names, key)) | own.to_dict() for key, own in sums.head(MOST_TENSORS).iterrows()]
    return [*rows, {"tensor": f"{len(rest)} more", **rest.sum().to_dict()}] if len(rest) else rows


def attempt_rows(runs: Sequence[Run]) -> Rows:
    """The attempts of the runs that took several, or of which one did not finish."""
    return [
        {"run": run.name, **msgspec.structs.asdict(one)}
        for run in runs
        for one in run.summary.attempts
        if len(run.summary.attempts) > 1 or one.why != FINISHED
    ]


def bench_facts(bench: Bench) -> dict[str, Any]:
    """A bench's setting, and what it ran on."""
    ground = msgspec.to_builtins(bench.environment)
    network = ground["network"] or {}
    return msgspec.to_builtins(bench.setting) | {name: ground[name] for name in ("processor", "cores")} | network
