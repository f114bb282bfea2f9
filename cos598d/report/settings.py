"""What runs have in common, what they differ in, and which of them make a series."""

from collections.abc import Sequence
from typing import Any

from cos598d.report.load import Run
from cos598d.report.units import quantity

# Word for the page, and where the value is: in the summary, the run's config or its environment.
FACTS = (
    ("sync", "summary", "sync"),
    ("ranks", "summary", "world_size"),
    ("examples a step", "summary", "total_train_batch_size"),
    ("rate", "network", "rate"),
    ("delay", "network", "delay"),
    ("offload", "network", "offload"),
    ("task", "summary", "task"),
    ("model", "summary", "model"),
    ("data", "summary", "data"),
    ("longest sequence", "summary", "max_seq_length"),
    ("dropout", "summary", "dropout"),
    ("precision", "summary", "precision"),
    ("seed", "summary", "seed"),
    ("learning rate", "config", "learning_rate"),
    ("gradient accumulation", "config", "gradient_accumulation_steps"),
    ("bucket MB", "config", "bucket_mb"),
    ("compression", "config", "compress"),
    ("steps between averages", "config", "sync_every"),
    ("backend", "summary", "backend"),
    ("device", "environment", "device"),
    ("processor", "environment", "processor"),
    ("cores", "environment", "cores"),
    ("threads a rank", "environment", "threads_per_rank"),
    ("ranks on a machine", "environment", "ranks_on_host"),
)
# What need not be alike in runs of other numbers of ranks: a rank alone has other threads, and no network.
OF_THE_RANKS = frozenset(("ranks", "threads a rank", "ranks on a machine", "rate", "delay", "offload"))
SWEPT = ("examples a step", "rate", "delay")


def facts(run: Run) -> dict[str, Any]:
    """The run's setting by the page's words."""
    places = {
        "summary": run.summary,
        "config": run.config,
        "environment": run.environment,
        "network": run.summary["network"] or {},
    }
    return {word: places[place].get(name) for word, place, name in FACTS}


def differences(runs: Sequence[Run]) -> list[str]:
    """The words of the setting in which the runs are not all alike."""
    found = [facts(run) for run in runs]
    return [word for word, _, _ in FACTS if any(one[word] != found[0][word] for one in found)]


def comparable(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs with a mean, in groups that differ in nothing that the page knows of but the sync and its own options."""
    free = frozenset(("sync", "bucket MB", "compression", "steps between averages"))
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        if run.seconds["mean"]:
            groups.setdefault(_key(run, free), []).append(run)
    return list(groups.values())


def sweeps(runs: Sequence[Run]) -> dict[str, list[list[Run]]]:
    """For each of SWEPT the series of runs that differ in it alone, by its value; each of two values or more."""
    found = {}
    for word in SWEPT:
        series = [one for one in _series(runs, word, frozenset((word,))) if one[0].summary["world_size"] > 1]
        if series:
            found[word] = series
    return found


def scaling(runs: Sequence[Run]) -> list[tuple[Run, list[Run]]]:
    """Each sync's runs on several ranks, by their number, with the run of one rank that they are measured against."""
    alone = [run for run in runs if run.summary["world_size"] == 1 and run.seconds["mean"]]
    found: dict[tuple, tuple[Run, list[Run]]] = {}
    for run in runs:
        base = next(
            (one for one in alone if _key(one, OF_THE_RANKS | {"sync"}) == _key(run, OF_THE_RANKS | {"sync"})), None
        )
        if base is None or run.summary["world_size"] == 1 or not run.seconds["mean"] or run.summary["sync"] == "none":
            continue
        # Runs over other links, or of another cast on the hosts, are series of their own.
        key = _key(run, frozenset(("ranks", "threads a rank", "ranks on a machine")))
        found.setdefault(key, (base, []))[1].append(run)
    return [(base, sorted(series, key=lambda run: run.summary["world_size"])) for base, series in found.values()]


def swept_value(run: Run, word: str) -> float | None:
    """The number behind a setting: examples, bits a second, seconds."""
    return quantity(facts(run)[word])


def series_name(series: Sequence[Run], all_series: Sequence[Sequence[Run]]) -> str:
    """The sync, and what else tells this series from the others of its figure."""
    own, found = facts(series[0]), [facts(one[0]) for one in all_series]
    varies = set(differences(series)) | {"sync", "ranks", "threads a rank", "ranks on a machine"}
    words = [word for word in own if word not in varies and any(one[word] != own[word] for one in found)]
    return ", ".join([own["sync"], *(f"{word} {own[word]}" for word in words if own[word] is not None)])


def _series(runs: Sequence[Run], word: str, free: frozenset[str]) -> list[list[Run]]:
    groups: dict[tuple, dict[float, Run]] = {}
    for run in runs:
        value = swept_value(run, word)
        if value is not None and run.seconds["mean"]:
            groups.setdefault(_key(run, free), {}).setdefault(value, run)
    return [[group[value] for value in sorted(group)] for group in groups.values() if len(group) > 1]


def _key(run: Run, free: frozenset[str]) -> tuple:
    return tuple(str(value) for word, value in facts(run).items() if word not in free)
