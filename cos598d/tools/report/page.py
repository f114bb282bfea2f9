"""The page: which sections, tables and figures a set of runs gives, whatever they are rendered to."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from cos598d.terminal.words import listed, number_of
from cos598d.tools.report.answer import answer_of
from cos598d.tools.report.answer_figure import has_every_bar
from cos598d.tools.report.benches import Bench, bench_sections
from cos598d.tools.report.blocks import Block, Page, Section, Table
from cos598d.tools.report.classes import classes_blocks
from cos598d.tools.report.epochs import attempts, endings
from cos598d.tools.report.learning import first_losses, loss_blocks, metrics_blocks, speed_blocks
from cos598d.tools.report.load import Run
from cos598d.tools.report.memory import memory_note, memory_rows
from cos598d.tools.report.numbers import is_number, words_of
from cos598d.tools.report.overfitting import overfitting_blocks
from cos598d.tools.report.scaling import differences, scaling_blocks, sweep_sections
from cos598d.tools.report.seconds import phases_blocks, seconds_blocks
from cos598d.tools.report.timeline import timeline_blocks
from cos598d.tools.report.traffic import traffic_blocks
from cos598d.tools.report.wire import wire_blocks


def build_page(runs: Sequence[Run], benches: Sequence[Bench] = ()) -> Page:
    """Everything that these runs and benches have recorded."""
    sections = [
        Section("The runs", [*_runs(runs), *endings(runs), *attempts(runs)]),
        *bench_sections(benches, are_drawn=not runs and has_every_bar(benches)),
        Section("Evaluation by epoch", metrics_blocks(runs)),
        Section("Seconds and speed by epoch", speed_blocks(runs)),
        Section("Class by class", classes_blocks(runs)),
        Section("Training and validation loss", overfitting_blocks(runs)),
        Section("The first losses", first_losses(runs)),
        Section("Seconds per iteration", seconds_blocks(runs)),
        Section("Where an iteration's time goes", phases_blocks(runs)),
        Section("Memory", _memory(runs)),
        Section("Loss by iteration and by time", loss_blocks(runs)),
        Section("Timeline of one iteration", timeline_blocks(runs)),
        Section("Traffic, predicted and counted", traffic_blocks(runs)),
        Section("Network traffic over time", wire_blocks(runs)),
        Section("Scaling", scaling_blocks(runs)),
        *sweep_sections(runs),
        Section("Environment", _environment([*runs, *benches])),
    ]
    records: list[Run | Bench] = [*runs, *benches]
    counts = [number_of(len(found), word) for found, word in ((runs, "run"), (benches, "bench")) if found]
    title = records[0].name if len(records) == 1 else " and ".join(counts)
    return Page(
        f"cos598d report: {title}{_subject(records)}",
        _lead(runs, benches),
        answer_of(runs, benches),
        [section for section in sections if section.blocks],
    )


def _subject(records: Sequence[Run | Bench]) -> str:
    """ ", MiniLM-L6 on rte": the model and the task, where all records have the same."""
    models = {str(one.facts.get("model") or "").partition(",")[0] for one in records}
    tasks = {str(one.facts.get("task") or "") for one in records}
    words = [*models] if len(models) == 1 and models != {""} else []
    words += [f"on {task}" for task in tasks] if len(tasks) == 1 and tasks != {""} else []
    return f", {' '.join(words)}" if words else ""


def _lead(runs: Sequence[Run], benches: Sequence[Bench]) -> str:
    words = []
    for records, word in ((runs, "run"), (benches, "bench")):
        if records:
            count = number_of(len(records), word)
            different = differences(records)
            if word == "run" and len({run.summary["step"].get("planned") for run in runs} - {None}) > 1:
                different.append("number of steps")
            if different:
                count += f" that differ in {listed(different)}"
            elif len(records) > 1:
                count += " with the same settings"
            words.append(count)
    data = sorted({str(run.facts["data"]) for run in runs if run.facts.get("data")})
    on = f" Data: {listed(data)}." if data else ""
    if len(runs) + len(benches) == 1:
        return f"One {'run' if runs else 'bench'}.{on}"
    return f"{'; '.join(words)}.{on}"


def _runs(runs: Sequence[Run]) -> list[Table]:
    if not runs:
        return []
    found = [run.facts for run in runs]
    different = list(dict.fromkeys(["sync", "ranks", "examples per step", *differences(runs)]))
    alike = [word for word in found[0] if word not in different and found[0][word] is not None]
    rows = [["run", "iterations", *different]]
    for run, facts in zip(runs, found, strict=True):
        cells = {word: words_of(facts[word]) for word in different}
        if run.series.examples and (least := min(run.series.examples)) < max(run.series.examples):
            cells["examples per step"] += f" (an epoch's last: {least})"
        rows.append([run.name, str(run.summary["iterations"]), *cells.values()])
    return [
        Table("The runs and their differences." if len(runs) > 1 else "The run.", rows),
        Table(
            "Its settings." if len(runs) == 1 else "Settings that all runs share.",
            [["setting", "value"], *([word, words_of(found[0][word])] for word in alike)],
        ),
    ]


def _environment(runs: Sequence[Run | Bench]) -> list[Block]:
    found = [_flat(run.environment) for run in runs]
    above = {word for run in runs for word in run.facts}  # in the tables of settings
    known = (name for facts in found for name, value in facts.items() if value != "-" and name not in above)
    names = list(dict.fromkeys(known))
    alike = [name for name in names if all(facts.get(name) == found[0].get(name) for facts in found)]
    different = [name for name in names if name not in alike]
    tables: list[Block] = []
    if alike:
        rows = [["fact", "value"], *([name, found[0][name]] for name in alike)]
        tables.append(Table("The same for all runs." if len(runs) > 1 else "What it ran on.", rows))
    if different:
        rows = [["run", *different]]
        rows += [[run.name, *(facts.get(name, "-") for name in different)] for run, facts in zip(runs, found)]
        tables.append(Table("Different between runs.", rows))
    return tables


def _flat(environment: dict[str, Any], above: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in environment.items():
        if isinstance(value, dict):
            found |= _flat(value, "" if name == "versions" else f"{name} ")
        elif name == "places" and isinstance(value, list):
            found[name] = _places(value)
        elif name.endswith("_bytes") and is_number(value):
            found[f"{above}{name.removesuffix('_bytes')} MB"] = f"{value / 1e6:,.0f}"
        else:
            # Emulated hosts are one machine.
            word = "ranks per machine" if name == "ranks_on_host" else f"{above}{name}".replace("_", " ")
            found[word] = words_of(value)
    return found


def _memory(runs: Sequence[Run]) -> list[Table]:
    summaries = [run.summary for run in runs]
    rows = memory_rows(summaries)
    return [Table(memory_note(summaries), rows)] if rows else []


def _places(places: Sequence[Mapping[str, Any]]) -> str:
    """ "ranks 0-1 on n1 (cpu), rank 2 on n2 (cpu)": neighbours that share a node."""
    words, first = [], 0
    for node, group in groupby(places, key=lambda place: place.get("node")):
        devices = [str(place.get("device")) for place in group]
        last = first + len(devices) - 1
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        words.append(f"{ranks} on {node} ({', '.join(dict.fromkeys(devices))})")
        first = last + 1
    return ", ".join(words) or "-"
