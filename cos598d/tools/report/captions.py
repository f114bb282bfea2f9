"""What the figures show, in sentences made of their numbers; a difference within the spread is said to be one."""

from collections.abc import Sequence
from statistics import fmean

from cos598d.records.conventions import DDP, PHASES
from cos598d.terminal.words import listed, number_of
from cos598d.tools.report.disturbed import is_disturbed
from cos598d.tools.report.epochs import number_in_words
from cos598d.tools.report.figures.learning import epoch_values, points_per_block
from cos598d.tools.report.load import Run, is_number
from cos598d.tools.report.numbers import more_or_less, percent, plain, seconds
from cos598d.tools.report.references import drifts, exposed_seconds, floor_of, has_all_rows, is_floor, same_setting
from cos598d.tools.report.settings import comparable
from cos598d.tools.report.spread import are_apart, why_not_apart, with_interval
from cos598d.tools.report.timeline import Timeline
from cos598d.tools.report.traffic import Traffic

# Libraries that make their calls, and wait for them, in other phases than `sync`.
CALLS_INSIDE = {DDP: "backward", "torch_fsdp": "forward and backward"}


def metric_caption(runs: Sequence[Run], metric: str) -> list[str]:
    """The metric after each run's last epoch."""
    found = {}
    for run in runs:
        known = [epoch for epoch in run.summary["epochs"] if is_number(epoch.get(metric))]
        if known:
            words = number_in_words(known[-1], run.summary)
            found[run.name] = f"{metric} {known[-1][metric]:.4f} after epoch {words}"
    return _joined(found)


def speed_caption(runs: Sequence[Run], speed: str) -> list[str]:
    """Each run's whole epochs from the least to the most."""
    found = {run.name: list(epoch_values(run, speed).values()) for run in runs}
    ends = {name: dict.fromkeys(map(plain, (min(values), max(values)))) for name, values in found.items() if values}
    return _joined({name: f"{' to '.join(words)} {speed}" for name, words in ends.items()})


def loss_caption(runs: Sequence[Run]) -> list[str]:
    """First and last losses, the seconds they took, and how far runs of one setting are apart."""
    trained = [run for run in runs if len(run.summary["losses"]) > 1]
    found, took = {}, {}
    for run in trained:
        losses = run.summary["losses"]
        last = losses[-max(1, min(5, len(losses) // 2)) :]
        examples = run.series.examples[-len(last) :]
        mean = fmean(last, examples if sum(examples) else None)
        found[run.name] = (
            f"loss {losses[0]:.4f} in the first of {len(losses)} iterations, {mean:.4f} "
            f"{f'as the mean over the examples of the last {len(last)}' if len(last) > 1 else 'in the last'}"
        )
        took[run.name] = sum(run.series.seconds)
    sentences = [*_joined(found), *_apart_by(trained)]
    sentences.append(f"In seconds: {', '.join(f'{name} {plain(spent)}' for name, spent in took.items())}.")
    most = max((points_per_block(run) for run in trained), default=1)
    if most > 1:
        sentences.append(f"A point of a long run's curve is the mean of up to {most} iterations.")
    return [*sentences, "Time is rank 0's in iterations; evaluation is not in it."]


def _apart_by(runs: Sequence[Run]) -> list[str]:
    """How far the losses of runs of one setting are apart."""
    return [
        f"In the same iteration, the losses of {listed([run.name for run in group])} are {losses_apart(group)}."
        for group in of_one_setting(runs)
        if len(group) > 1
    ]


def of_one_setting(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs whose losses can be compared; replicas that do not agree in every step are left out."""
    groups: list[list[Run]] = []
    for run in runs:
        if drifts(run.summary) or not has_all_rows(run.summary):
            continue
        group = next((group for group in groups if same_setting(group[0].summary, run.summary)), None)
        groups.append([run]) if group is None else group.append(run)
    return groups


def losses_apart(group: Sequence[Run]) -> str:
    """How far the losses of these runs are apart in one iteration at the most."""
    apart = max(max(found) - min(found) for found in zip(*(run.summary["losses"] for run in group)))
    return f"at most {apart:.1e} apart" if apart else "the same to the last digit"


def seconds_caption(runs: Sequence[Run]) -> list[str]:
    """Within each group of runs that differ in their sync alone: the fastest, and how much longer the others take."""
    sentences = []
    for group in comparable(runs):
        floors = [run for run in group if is_floor(run.summary)]
        disturbed = [run for run in group if run not in floors and is_disturbed(run.summary)]
        others = [run for run in group if run not in (*floors, *disturbed)]
        ranked = sorted(others, key=lambda run: run.seconds["mean"])
        if ranked:
            first, *others = ranked
            sentences.append(f"{first.name} takes {with_interval(first)} an iteration{_exposed(first, runs)}.")
            sentences += [_slower(run, first, runs) for run in others]
        sentences += [f"{run.name} takes {with_interval(run)}, on a machine that was busy." for run in disturbed]
        for run in floors:
            sentences.append(f"{run.name}, which never agrees on its gradients, takes {with_interval(run)}: the floor.")
    return sentences


def phases_caption(runs: Sequence[Run]) -> list[str]:
    """The largest phase of each run, and what its sync phase takes."""
    found = {}
    for run in runs:
        shares = phase_shares(run)
        if not run.seconds["mean"] or not shares:
            continue
        largest = next(iter(shares))
        found[run.name] = f"{largest} is {percent(shares[largest])} of the phases' sum, the largest part"
        if largest != "sync":
            found[run.name] += f"; sync is {percent(shares['sync'])}"
    sentences = _joined(found)
    if inside := calls_inside(runs):
        sentences.append(f"{inside[0].upper()}{inside[1:]}.")
    return sentences


def calls_inside(runs: Sequence[Run]) -> str:
    """Words on the runs whose gradients travel inside another phase than `sync`; "" where there are none."""
    found: dict[str, list[str]] = {}
    for run in runs:
        phases = CALLS_INSIDE.get(run.summary["sync"])
        if phases and run.summary["world_size"] > 1:
            found.setdefault(phases, []).append(run.name)
    return "; ".join(f"the calls of {listed(names)} run inside {phases}" for phases, names in found.items())


def phase_shares(run: Run) -> dict[str, float]:
    """The share of each phase in all of them, the largest first; empty where none took any time."""
    phases = {phase: run.summary["phases"][f"seconds_{phase}"] or 0.0 for phase in PHASES}
    total = sum(phases.values())
    return {phase: phases[phase] / total for phase in sorted(PHASES, key=lambda one: -phases[one])} if total else {}


def timeline_caption(timeline: Timeline) -> list[str]:
    """When backward ends, and how much of the gradient calls' time lies before and after it."""
    words = f"{timeline.run}, iteration {timeline.iteration} of rank 0, {seconds(timeline.seconds)}"
    sentences = [f"{words}: backward ends at {seconds(timeline.backward_end)}."]
    if timeline.calls:
        before, after = timeline.seconds_under_way
        sentences.append(
            f"{number_of(len(timeline.calls), 'gradient call')}: for {seconds(before)} at least one is under way "
            f"before that, for {seconds(after)} after it."
        )
        if timeline.of_weights:
            sentences.append(f"{number_of(timeline.of_weights, 'call')} that gathered weights: not counted here.")
        if before > 0:
            sentences.append("A call beside backward is drawn until it was waited for: it may have been done sooner.")
    if timeline.untimed:
        sentences.append(
            f"{number_of(timeline.untimed, 'gradient call')} of torch's own: the record does not tell when."
        )
    if timeline.kept:
        sentences.append(f"Its calls are not in the record (--ledger {timeline.kept}).")
    elif not timeline.is_told:
        sentences.append("What travels is not in the record, for a library does not tell.")
    elif not timeline.calls and not timeline.untimed:
        sentences.append("No gradient travels.")
    return [" ".join(sentences)]


def traffic_caption(traffic: Sequence[Traffic]) -> list[str]:
    """How far the counted bytes are from the predicted ones, run by run."""
    has_headers = any(one.has_headers for one in traffic)
    where = "crossed the interface, with packet headers" if has_headers else "a rank's own sockets carried"
    sentences = [f"Predicted is what the ledger has by formula; counted is all that {where}."]
    by_run: dict[str, list[Traffic]] = {}
    for one in traffic:
        by_run.setdefault(one.run, []).append(one)
    for run, found in by_run.items():
        pairs = [pair for one in found for pair in one.pairs]
        ratios = [counted / predicted - 1 for predicted, counted in pairs if predicted > 0]
        if ratios:
            low, high = more_or_less(min(ratios)), more_or_less(max(ratios))
            off = low if low == high else f"between {low} and {high}"
            sentences.append(f"{run}: counted is {off} than predicted.")
        else:
            most = max(counted for _, counted in pairs)
            sentences.append(f"{run}: nothing is predicted, and up to {most / 1e6:.3f} MB are counted.")
    if any(one.is_shared_in_part for one in traffic):
        sentences.append("Ranks of one host share an interface, and what they say to each other does not cross it.")
    return sentences


def scaling_caption(series: Sequence[tuple[Run, list[Run]]]) -> list[str]:
    """Each series' largest number of ranks: its speed-up and efficiency, and whether the spread supports it."""
    sentences = []
    for base, runs in series:
        run = runs[-1]
        ranks, ratio = run.summary["world_size"], base.seconds["mean"] / run.seconds["mean"]
        words = f"{run.name}: {plain(ratio)} times the speed of {base.name} on {number_of(ranks, 'rank')}"
        words += f", {percent(ratio / ranks)} of {ranks} times"
        words += ", which more ranks alone do not explain" if ratio > ranks else ""
        words += "" if are_apart(base, run) else f"; {why_not_apart(base, run)}"
        sentences.append(f"{words}.")
    threads = {str(run.environment.get("threads_per_rank")) for base, runs in series for run in (base, *runs)}
    hosts = [run.environment.get("ranks_on_host") for _, runs in series for run in runs]
    if len(threads) > 1:
        sentences.append("The ranks have not all the same number of threads.")
    if any(isinstance(ranks, int) and ranks > 1 for ranks in hosts):
        sentences.append(
            "Ranks on one machine (emulated hosts too) share its cores: this is not the speed-up of more machines, and "
            "where one rank already uses all cores, more ranks can hardly be faster."
        )
    return sentences


def sweep_caption(word: str, series: Sequence[list[Run]]) -> list[str]:
    """From the smallest value to the largest: what the seconds do."""
    sentences = []
    for runs in series:
        first, last = runs[0], runs[-1]
        ratio = last.seconds["mean"] / first.seconds["mean"]
        words = f"{first.summary['sync']}: from {_setting(first, word)} to {_setting(last, word)}, "
        words += f"{seconds(first.seconds['mean'])} an iteration become {seconds(last.seconds['mean'])}"
        words += f", {plain(ratio)} times as much"
        words += "" if are_apart(first, last) else f"; {why_not_apart(first, last)}"
        sentences.append(f"{words}.")
    return sentences


def _setting(run: Run, word: str) -> str:
    if word == "examples a step":
        return f"{run.summary['total_train_batch_size']} examples a step"
    return f"{word} {(run.summary['network'] or {}).get(word)}"


def _joined(words_by_run: dict[str, str]) -> list[str]:
    """A sentence for each run, "NAME: WORDS"; runs of the same words share one."""
    names: dict[str, list[str]] = {}
    for name, words in words_by_run.items():
        names.setdefault(words, []).append(name)
    return [f"{listed(shared)}: {words}." for words, shared in names.items()]


def _slower(run: Run, fastest: Run, runs: Sequence[Run]) -> str:
    ratio = run.seconds["mean"] / fastest.seconds["mean"]
    words = (
        f"{run.name} takes {plain(ratio)} times as long as {fastest.name} ({with_interval(run)}){_exposed(run, runs)}"
    )
    return f"{words}." if are_apart(run, fastest) else f"{words}; {why_not_apart(run, fastest)}."


def _exposed(run: Run, runs: Sequence[Run]) -> str:
    summaries = [other.summary for other in runs]
    floor = floor_of(summaries, run.summary)
    exposed = exposed_seconds(run.summary, floor)
    if exposed is None or floor is None or is_disturbed(run.summary) or is_disturbed(floor):
        return ""
    base = next(other for other in runs if other.summary is floor)
    if not are_apart(run, base):
        return f"; by the medians {seconds(exposed)} of it is exposed communication, which is within the spread"
    return f"; {seconds(exposed)} of it is exposed communication"
