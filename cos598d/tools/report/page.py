"""The page: which sections, tables and figures a set of runs gives, whatever they are rendered to."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from cos598d.terminal.tables import with_columns
from cos598d.terminal.words import listed, number_of
from cos598d.tools.report import captions, learned, settings, side_by_side
from cos598d.tools.report.answer import answer_of
from cos598d.tools.report.attempts import attempts, endings
from cos598d.tools.report.benches import Bench
from cos598d.tools.report.blocks import Block, Figure, Page, Section, Table, figures
from cos598d.tools.report.bytes_from import BYTES_NOTE
from cos598d.tools.report.classes import classes
from cos598d.tools.report.disturbed import DISTURBED, busy_and_own, speed_up_words
from cos598d.tools.report.figures import learning, series, time
from cos598d.tools.report.figures.wire import wire_figure
from cos598d.tools.report.load import Run, is_number
from cos598d.tools.report.memory import memory_note, memory_rows
from cos598d.tools.report.numbers import megabytes, plain, words_of
from cos598d.tools.report.precisions import precision_blocks
from cos598d.tools.report.repeats import in_groups
from cos598d.tools.report.speed import SPEED_NOTE, phases_of, speed_rows
from cos598d.tools.report.table import (
    AGAINST,
    SLOW_ONES,
    SPREAD,
    assumed_bytes,
    time_cells,
    traffic_rows,
    warm_up_words,
)
from cos598d.tools.report.timeline import timeline_of
from cos598d.tools.report.traffic import PURPOSE_NOTE, counted_traffic, epoch_rows, purpose_rows
from cos598d.tools.report.wire import throughputs, wire_caption

# A timeline is drawn on the scale of the longest, unless that would make it too small to read.
LEAST_OF_SCALE = 0.25


def build_page(runs: Sequence[Run], benches: Sequence[Bench] = ()) -> Page:
    """Everything that the records of these runs and benches have to show."""
    quiet = [bench for bench in benches if not bench.is_disturbed]
    sections = [
        Section("The runs", [*_runs(runs), *endings(runs), *attempts(runs)]),
        Section("Side by side", side_by_side.blocks(benches)),
        *(Section(f"Side by side: {word}", found) for word, found in side_by_side.sweep_blocks(quiet).items()),
        Section("Side by side: precision", precision_blocks(quiet)),
        Section("Environment", _environment([*runs, *benches])),
        Section("Evaluation by epoch", learned.metrics(runs)),
        Section("Seconds and speed by epoch", learned.speeds(runs)),
        Section("Class by class", classes(runs)),
        Section("Training and validation loss", learned.overfitting(runs)),
        Section("The first losses", learned.first_losses(runs)),
        Section("Seconds an iteration", _seconds(runs)),
        Section("Where an iteration's time goes", _phases(runs)),
        Section("Memory", _memory(runs)),
        Section(
            "Loss against iteration and time",
            figures(("loss", learning.loss_figure(runs), captions.loss_caption(runs))),
        ),
        Section("One iteration in time", _timelines(runs)),
        Section("Traffic predicted and counted", _traffic(runs)),
        Section("The wire in time", _wire(runs)),
        Section("Scaling", _scaling(runs)),
        *(Section(f"Sweep: {word}", _sweep(word, found)) for word, found in settings.sweeps(runs).items()),
    ]
    records: list[Run | Bench] = [*runs, *benches]
    counts = [number_of(len(found), word) for found, word in ((runs, "run"), (benches, "bench")) if found]
    title = records[0].name if len(records) == 1 else " and ".join(counts)
    return Page(
        f"cos598d report: {title}",
        _lead(runs, benches),
        answer_of(runs, benches),
        [section for section in sections if section.blocks],
    )


def _lead(runs: Sequence[Run], benches: Sequence[Bench]) -> str:
    words = []
    for records, word in ((runs, "run"), (benches, "bench")):
        if records:
            count = number_of(len(records), word)
            different = settings.differences(records)
            if word == "run" and len({run.summary["step"].get("planned") for run in runs} - {None}) > 1:
                different.append("number of steps")
            if different:
                count += f" that differ in {listed(different)}"
            elif len(records) > 1:
                count += " of one setting"
            words.append(count)
    if len(runs) + len(benches) == 1:
        return f"One {'run' if runs else 'bench'}, from its record alone."
    return f"{'; '.join(words)}. From their records alone."


def _runs(runs: Sequence[Run]) -> list[Table]:
    if not runs:
        return []
    found = [run.facts for run in runs]
    different = list(dict.fromkeys(["sync", "ranks", "examples a step", *settings.differences(runs)]))
    alike = [word for word in found[0] if word not in different and found[0][word] is not None]
    rows = [["run", "iterations", *different]]
    for run, facts in zip(runs, found, strict=True):
        cells = {word: words_of(facts[word]) for word in different}
        if run.series.examples and (least := min(run.series.examples)) < max(run.series.examples):
            cells["examples a step"] += f" (an epoch's last: {least})"
        rows.append([run.name, str(run.summary["iterations"]), *cells.values()])
    return [
        Table("The runs, and what they differ in." if len(runs) > 1 else "The run.", rows),
        Table(
            "Its setting." if len(runs) == 1 else "What they have in common.",
            [["setting", "value"], *([word, words_of(found[0][word])] for word in alike)],
        ),
    ]


def _environment(runs: Sequence[Run | Bench]) -> list[Block]:
    found = [_flat(run.environment) for run in runs]
    names = list(dict.fromkeys(name for facts in found for name in facts))
    alike = [name for name in names if all(facts.get(name) == found[0].get(name) for facts in found)]
    different = [name for name in names if name not in alike]
    tables: list[Block] = []
    if alike:
        rows = [["fact", "value"], *([name, found[0][name]] for name in alike)]
        tables.append(Table("The same for all." if len(runs) > 1 else "What it ran on.", rows))
    if different:
        rows = [["record", *different]]
        rows += [[run.name, *(facts.get(name, "-") for name in different)] for run, facts in zip(runs, found)]
        tables.append(Table("Not the same for all.", rows))
    return tables


def _flat(environment: dict[str, Any], above: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in environment.items():
        if isinstance(value, dict):
            found |= _flat(value, "" if name == "versions" else f"{name} ")
        elif name == "places" and isinstance(value, list):
            found[name] = settings.places_words(value)
        elif name.endswith("_bytes") and is_number(value):
            found[f"{above}{name.removesuffix('_bytes')} MB"] = f"{value / 1e6:,.0f}"
        else:
            # Emulated hosts are one machine.
            word = "ranks on a machine" if name == "ranks_on_host" else f"{above}{name}".replace("_", " ")
            found[word] = words_of(value)
    return found


def _seconds(runs: Sequence[Run]) -> list[Block]:
    trained = [run for run in runs if run.summary["losses"]]
    if not trained:
        return []
    note = (
        f"Rank 0's seconds without {warm_up_words([run.summary for run in trained])}; the first is given apart. "
        "95 %: of this one run's mean, from its own iterations: another run of the same may lie outside it. "
        "Exposed: the median less that of sync none."
    )
    if any(len(set(run.series.examples)) > 1 for run in trained):
        note += " Iterations with fewer examples, as at an epoch's end, count too."
    columns = ["run", *SPREAD, *SLOW_ONES, *AGAINST]
    table = Table(note, with_columns(time_cells([run.summary for run in trained]), columns))
    return [
        table,
        *([Table(SPEED_NOTE, speeds)] if (speeds := speed_rows([run.summary for run in trained])) else []),
        *_repeats(trained),
        *figures(("seconds", time.seconds_figure(trained), captions.seconds_caption(trained))),
    ]


def _repeats(runs: Sequence[Run]) -> list[Table]:
    """What repeated runs say together, where there are any."""
    groups = in_groups([run.summary for run in runs])
    if len(groups) == len(runs):
        return []
    repeated = [cells for cells, group in zip(time_cells(groups), groups, strict=True) if "repeats" in group]
    note = "Runs of the same settings together. 95 %: from run to run (Student's t), of the mean of their means; of "
    note += "ratios and exposed seconds as they are within each repeat. Median: the mean of their medians."
    return [Table(note, with_columns(repeated, ["run", *SPREAD, *AGAINST]))]


def _phases(runs: Sequence[Run]) -> list[Block]:
    counted = [run for run in runs if run.seconds["mean"]]
    if not counted:
        return []
    rows = with_columns(
        time_cells([run.summary for run in counted]), ["run", *phases_of([run.summary for run in counted])]
    )
    blocks: list[Block] = [Table("Seconds of each phase: the mean over iterations and ranks.", rows)]
    blocks += figures(("phases", time.phases_figure(counted), captions.phases_caption(counted)))
    has_gpu = any("gpu_utilization_percent" in row for run in runs for rows in run.host for row in rows)
    host = [["run", "processor seconds an iteration", "host's processors busy"]]
    host[0] += ["GPU busy"] if has_gpu else []
    host += [_host(run, has_gpu) for run in runs if any(run.host)]
    note = "Processor seconds: of all that a process did, evaluation too, divided "
    note += "by its iterations; the mean over the ranks. Busy: the mean over ranks and time"
    note += "; of GPUs over their samples." if has_gpu else "."
    return [*blocks, Table(note, host)] if len(host) > 1 else blocks


def _memory(runs: Sequence[Run]) -> list[Table]:
    summaries = [run.summary for run in runs]
    rows = memory_rows(summaries)
    return [Table(memory_note(summaries), rows)] if rows else []


def _host(run: Run, has_gpu: bool) -> list[str]:
    ranks = [rows for rows in run.host if rows]
    steps = [(rows[-1]["iteration"] - rows[0]["iteration"], rows) for rows in ranks]
    spent = [(rows[-1]["process_cpu_seconds"] - rows[0]["process_cpu_seconds"]) / n for n, rows in steps if n > 0]
    shares = [100 * found[0] for rows in ranks if (found := busy_and_own(rows))]
    cells = [run.name, plain(fmean(spent)) if spent else "-"]
    cells.append(f"{fmean(shares):.0f} %" if shares else "-")
    if has_gpu:
        name = "gpu_utilization_percent"
        busy = [row[name] for rows in ranks for row in rows if is_number(row.get(name))]
        cells.append(f"{fmean(busy):.0f} %" if busy else "-")
    return cells


def _timelines(runs: Sequence[Run]) -> list[Block]:
    found = [timeline_of(run) for run in runs]
    timelines = [one for one in found if one is not None]
    # Runs that can be compared share a scale.
    longest: dict[str, float] = {}
    for group in settings.comparable(runs):
        names = {run.name for run in group}
        most = max((one.seconds for one in timelines if one.run in names), default=0.0)
        longest |= dict.fromkeys(names, most)
    blocks: list[Block] = []
    for number, one in enumerate(timelines):
        shared = longest.get(one.run, 0.0)
        until = shared if one.seconds >= LEAST_OF_SCALE * shared > 0 else one.seconds
        name = f"timeline{number}"
        blocks += figures((name, time.timeline_figure(one, name, until), captions.timeline_caption(one)))
    without = [run.name for run, one in zip(runs, found, strict=True) if one is None and run.summary["losses"]]
    if without:
        blocks.append(f"The records of {', '.join(without)} do not say when phases began: they are older.")
    return blocks


def _traffic(runs: Sequence[Run]) -> list[Block]:
    trained = [run for run in runs if run.summary["losses"]]
    if not trained:
        return []
    note = "Calls that carry gradients or, where a strategy shards, parameters: the mean of all iterations, by the "
    note += "algorithms' formulas. Counted is all that travels while training, the loss and weights "
    note += f"gathered for an evaluation too. MB: 1,000,000 bytes. {BYTES_NOTE}"
    note += assumed_bytes([run.summary for run in trained], before=" ")
    blocks: list[Block] = [Table(note, traffic_rows([run.summary for run in trained]))]
    if purposes := purpose_rows(trained):
        blocks.append(Table(PURPOSE_NOTE, purposes))
    counted = counted_traffic(trained)
    if not counted:
        return [*blocks, "The kernel counted no run's bytes."]
    rows = [["run", "whose", "sent predicted", "sent counted", "off", "received predicted", "received counted", "off"]]
    for one in counted:
        row = [one.run, one.whose]
        for predicted, seen in one.pairs:
            row += [megabytes(predicted) if one.is_predicted else "-", megabytes(seen)]
            row += [f"{seen / predicted - 1:+.1%}" if predicted else "-"]
        rows.append(row)
    blocks.append(Table("MB an iteration, predicted and counted by the kernel.", rows))
    if epochs := epoch_rows(trained):
        note = "MB sent in an epoch's training, all calls, predicted and counted."
        blocks.append(Table(note, epochs))
    return [*blocks, *figures(("traffic", series.traffic_figure(counted), captions.traffic_caption(counted)))]


def _wire(runs: Sequence[Run]) -> list[Figure]:
    found = throughputs(runs)
    return figures(("wire", wire_figure(found), wire_caption(found)))


def _scaling(runs: Sequence[Run]) -> list[Block]:
    found = settings.scaling(runs)
    if not found:
        return []
    rows, quiet = [["run", "against", "sync", "ranks", "s/it", "speed-up", "efficiency"]], []
    for base, others in found:
        for run in others:
            ranks, ratio = run.summary["world_size"], base.seconds["mean"] / run.seconds["mean"]
            words = speed_up_words(ratio, run.summary, base.summary, run.environment)
            if words != DISTURBED:
                quiet.append((base.name, run.name))
            rows.append(
                [
                    run.name,
                    base.name,
                    run.summary["sync"],
                    str(ranks),
                    plain(run.seconds["mean"]),
                    words,
                    "-" if words == DISTURBED else f"{ratio / ranks:.0%}",
                ]
            )
    note = (
        "Speed-up: the one-rank run's mean seconds over this run's, same global batch, without the first iterations, "
        "which the table of `strategies` has. Efficiency: speed-up divided by "
        "ranks, where the table of `strategies` divides it by processors."
    )
    known = [(base, [run for run in others if (base.name, run.name) in quiet]) for base, others in found]
    known = [(base, others) for base, others in known if others]
    return [Table(note, rows), *figures(("scaling", series.scaling_figure(known), captions.scaling_caption(known)))]


def _sweep(word: str, found: list[list[Run]]) -> list[Figure]:
    name = f"sweep-{word.partition(' ')[0]}"
    return figures((name, series.sweep_figure(word, found, name), captions.sweep_caption(word, found)))
