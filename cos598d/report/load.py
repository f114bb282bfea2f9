"""A run's records as one frozen object, every file checked as it is read."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.measure.warm_up import WARM_UP
from cos598d.printable import printable
from cos598d.report.facts import OF_RUNS, collect
from cos598d.report.table import PHASES, left_out, load_run, read_json

Row = Mapping[str, Any]
NUMBER, WORDS = (int, float), (str,)
LARGEST = 1e100  # sums and squares of less stay finite
ITERATION = {"iteration": NUMBER, "loss": NUMBER, "seconds": NUMBER} | {f"seconds_{phase}": NUMBER for phase in PHASES}
CALL = {"iteration": NUMBER, "purpose": WORDS, "op": WORDS, "tensor": WORDS, "bytes_sent": NUMBER}
HOST = {"iteration": NUMBER, "process_cpu_seconds": NUMBER, "host_cpu_percent": NUMBER, "rss_bytes": NUMBER}
WIRE = dict.fromkeys(("seconds", "shared_by_ranks", "bytes_sent", "bytes_received"), NUMBER) | {"kind": WORDS}
# What a page reads of a summary, beyond that it is there.
SUMMARY = {
    **dict.fromkeys(("task", "sync", "model", "data"), WORDS),
    **dict.fromkeys(("world_size", "iterations", "total_train_batch_size", "calls_per_iteration"), NUMBER),
    **dict.fromkeys(("tensors_per_iteration", "payload_bytes_per_iteration"), NUMBER),
    **dict.fromkeys(("seconds_per_iteration", "phases"), (dict,)),
    **dict.fromkeys(("losses", "epochs", "bytes_sent_per_iteration", "bytes_received_per_iteration"), (list,)),
}


@dataclass(frozen=True)
class Run:
    """What the page needs of one run. `summary` is summary.json with the run's name as "run"; lists are by rank."""

    summary: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    iterations: Sequence[Sequence[Row]]
    calls: Sequence[Row]  # rank 0's, of its typical iteration
    host: Sequence[Sequence[Row]]
    wire: Sequence[Row]  # rank 0's, in the order of time

    @property
    def name(self) -> str:
        """The run's name, which no other run of the page has."""
        return self.summary["run"]

    @property
    def facts(self) -> dict[str, Any]:
        """The run's setting by the page's words."""
        # Off is what it is in runs of older versions, which do not say it.
        config = self.config | {"bucket_view": self.config.get("bucket_view") or None}
        places = {"summary": self.summary, "config": config, "environment": self.environment}
        return collect(OF_RUNS, places | {"network": self.summary["network"] or {}})

    @property
    def seconds(self) -> dict[str, Any]:
        """Seconds an iteration: first, counted, mean, median, p90, interval_95."""
        return self.summary["seconds_per_iteration"]

    @property
    def counted_seconds(self) -> list[float]:
        """Rank 0's seconds of the iterations that its summary counts: not of those that warm up."""
        rows = self.iterations[0] if self.iterations else []
        return [row["seconds"] for row in rows[left_out(self.summary) :]]

    @property
    def typical(self) -> Row | None:
        """Rank 0's iteration nearest the median, those that warm up left out where there are others."""
        return typical_iteration(self.iterations[0]) if self.iterations else None


def typical_iteration(rows: Sequence[Row]) -> Row | None:
    """The row nearest the median of the seconds, those that warm up left out where there are others."""
    counted = sorted(rows[WARM_UP:] or rows, key=lambda row: row["seconds"])
    return counted[(len(counted) - 1) // 2] if counted else None


def load_run_as(folder: Path, name: str) -> Run:
    """The run in a folder, under this name. Raises UserError naming what cannot be read."""
    summary = load_run(folder) | {"run": name}
    _check(summary, SUMMARY, folder / "summary.json")
    _check_figures(summary, folder / "summary.json")
    environment = read_json(folder / "environment.json") or {}
    network = summary["network"]
    if not isinstance(network, dict | None):
        raise UserError(f"{folder / 'environment.json'} says of the network {network!r}: it is damaged, run again.")
    ranks = range(int(summary["world_size"]))
    iterations = [list(_rows(folder / f"iterations.rank{rank}.jsonl", ITERATION)) for rank in ranks]
    for row in iterations[0] if iterations else []:
        if not _are_spans(row.get("spans_seconds", [])):
            where = folder / "iterations.rank0.jsonl"
            raise UserError(
                f"{where} has a span that is none in iteration {row['iteration']}: it is damaged, run again."
            )
    typical = typical_iteration(iterations[0]) if iterations else None
    calls = [
        row
        for row in _rows(folder / "communication.rank0.jsonl", CALL)
        if typical is not None and row["iteration"] == typical["iteration"]
    ]
    host = [list(_rows(folder / f"host.rank{rank}.jsonl", HOST, is_needed=False)) for rank in ranks]
    wire = list(_rows(folder / "wire.rank0.jsonl", WIRE, is_needed=False))
    return Run(summary, read_json(folder / "config.json") or {}, environment, iterations, calls, host, wire)


def _rows(path: Path, needed: Mapping[str, tuple[type, ...]], is_needed: bool = True) -> Iterator[Row]:
    """The rows of a JSON-lines file. A file that is not needed may be missing: then there are none."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                yield _row(line, needed, f"{path}, line {number}")
    except FileNotFoundError:
        if is_needed:
            raise UserError(f"{path} is missing: give the folder of a run that ended well.") from None
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{path} cannot be read as text: it is damaged, run again.") from None


def _row(line: str, needed: Mapping[str, tuple[type, ...]], where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not line.endswith("\n"):
        raise UserError(f"{where} is not a whole JSON row: it is damaged, run again.")
    _check(row, needed, where)
    return row


def _check(row: Mapping[str, Any], needed: Mapping[str, tuple[type, ...]], where: str | Path) -> None:
    for name, types in needed.items():
        value = row.get(name)
        if not isinstance(value, types) or (types is NUMBER and not is_number(value)):
            raise UserError(f"{where} says of {name} {str(value)[:60]!r}: it is damaged, run again.")


def _check_figures(summary: Mapping[str, Any], path: Path) -> None:
    """Each figure is a number or, where there were too few iterations, None."""
    seconds, wire = summary["seconds_per_iteration"], summary.get("wire")
    ranks = summary["world_size"]
    by_rank = {name: summary[name] for name in ("bytes_sent_per_iteration", "bytes_received_per_iteration")}
    if wire is not None:
        found = wire if isinstance(wire, dict) else {}
        groups = found.get("ranks_by_interface")
        if not isinstance(groups, list) or not all(
            isinstance(group, list) and group and all(rank in range(ranks) for rank in group) for group in groups
        ):
            raise UserError(f"{path} does not say whose bytes were counted together: it is damaged, run again.")
        # A rank that has not counted says None.
        for name in list(by_rank):
            values = found.get(name)
            by_rank[f"wire's {name}"] = (
                [0 if value is None else value for value in values] if isinstance(values, list) else values
            )
    for name, values in by_rank.items():
        if not isinstance(values, list) or len(values) != ranks or not all(map(is_number, values)):
            raise UserError(f"{path} has not a number of {name} for each of {ranks} ranks: it is damaged, run again.")
    figures = [(seconds, name) for name in ("first", "mean", "median", "p90")]
    figures += [(summary["phases"], f"seconds_{phase}") for phase in PHASES]
    for figure, name in figures:
        if name not in figure or not (figure[name] is None or is_number(figure[name])):
            raise UserError(f"{path} says of {name} no number: it is damaged, run again.")
    interval = seconds.get("interval_95", ())
    if interval is not None and not (
        isinstance(interval, list) and len(interval) == 2 and all(map(is_number, interval))
    ):
        raise UserError(f"{path} says of interval_95 no two numbers: it is damaged, run again.")
    if not all(map(is_number, summary["losses"])):
        raise UserError(f"{path} has a loss that is no number: it is damaged, run again.")
    if not all(isinstance(epoch, dict) and is_number(epoch.get("epoch")) for epoch in summary["epochs"]):
        raise UserError(f"{path} has an epoch without its number: it is damaged, run again.")
    for epoch in summary["epochs"]:
        for name in ("predicted_bytes_sent", "counted_bytes_sent"):
            values = epoch.get(name) or [0] * ranks
            if name.startswith("counted") and isinstance(values, list):  # None: of a rank whose sampling has ended
                values = [value or 0 for value in values]
            if not isinstance(values, list) or len(values) != ranks or not all(map(is_number, values)):
                raise UserError(f"{path} has not {name} of each of {ranks} ranks: it is damaged, run again.")


def _are_spans(spans: Any) -> bool:
    """Whether each is a phase, its start and its seconds."""
    return isinstance(spans, list) and all(
        isinstance(span, list) and len(span) == 3 and span[0] in PHASES and all(map(is_number, span[1:]))
        for span in spans
    )


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a number that a run can have come to."""
    return isinstance(value, NUMBER) and not isinstance(value, bool) and abs(value) < LARGEST


def own_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of the folders above as tell them apart; a folder given twice is an error."""
    folders = [folder.resolve() for folder in folders]
    for place, folder in enumerate(folders):
        if folder in folders[:place]:
            raise UserError(f"{folder} is given twice: give each record once.")
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    # Characters that no page can show, such as an escape, would make the plots no XML.
    return [printable("/".join(folder.parts[-depth:])) for folder in folders]
