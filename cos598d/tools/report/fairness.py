"""Did runs in one comparison do the same work? A sentence before any ratio, from their records only."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from cos598d.records.run import Summary
from cos598d.terminal.words import listed
from cos598d.tools.report.numbers import names_of, plain, words_of
from cos598d.tools.report.references import drifts, grouped, has_all_rows

BATCH, STEPS, THREADS = "examples per step", "steps", "threads per rank"
# The number of iterations in which losses are compared, and the largest allowed difference, relative to the loss.
COMPARED = 20
LOSSES_APART = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}


def work_remark(runs: Sequence[Summary], by_design: Collection[str] = ()) -> str:
    """ "not the same work: ..." with all settings in which the runs' work differs; "" if no difference is known.

    A missing value is unknown, and differs from nothing. Threads are compared among equal numbers of ranks, since a
    single rank has the whole machine. Some differences are intended, as in a sweep. A batch, or a number of steps, is
    one if a run of the same sync, ranks and other settings has the others' value. Steps are then compared among runs
    with the same batch. Settings that differ `by_design` are not reported.
    """
    trained = [run for run in runs if run["losses"]]
    if len(trained) < 2:
        return ""
    found = []
    for word in trained[0].get("work", {}):
        if word in by_design:
            continue
        if word == BATCH:
            groups = [_without_sweep(trained, (BATCH, STEPS))]
        elif word == STEPS:
            is_swept = len(_without_sweep(trained, (BATCH, STEPS))) < len(trained)
            groups = (
                grouped(trained, lambda one, run: _work(one, BATCH) == _work(run, BATCH)) if is_swept else [trained]
            )
            groups = [_without_sweep(group, (STEPS,)) for group in groups]
        elif word == THREADS:
            groups = grouped(trained, lambda one, run: one["world_size"] == run["world_size"])
        else:
            groups = [trained]
        found += [words for group in groups if (words := _difference(group, word))]
    found += _other_gradients(trained)
    return f"not the same work: {'; '.join(found)}." if found else ""


def ground_remark(runs: Sequence[Summary]) -> str:
    """ "not on the same ground: ..." with the processors, cores and devices in which the runs' hosts differ; or ""."""
    return _remark(runs, "ground", "not on the same ground")


def code_remark(runs: Sequence[Summary]) -> str:
    """ "not by the same code: ..." with the commits and the versions of packages in which the runs differ; or ""."""
    return _remark(runs, "code", "not by the same code")


def shared_remark(parallel: Sequence[int]) -> str:
    """A warning if runs were made at the same time; `parallel`: how many ran at a time, for each run."""
    shared = [count for count in parallel if count > 1]
    if not shared:
        return ""
    who = "The runs" if len(shared) == len(parallel) else f"{len(shared)} of {len(parallel)} runs"
    return f"{who} ran up to {max(shared)} at a time. By itself each would be faster."


def _remark(runs: Sequence[Summary], where: str, title: str) -> str:
    trained = [run for run in runs if run["losses"]]
    words = dict.fromkeys(word for run in trained for word in run.get(where, {}))
    found = [said for word in words if (said := _difference(trained, word, where))]
    return f"{title}: {'; '.join(found)}." if found else ""


def _work(run: Summary, word: str) -> Any:
    return run.get("work", {}).get(word)


def _difference(runs: Sequence[Summary], word: str, where: str = "work") -> str:
    """ "steps 10 in a and 20 in b", or "" if the runs that have a value agree."""
    names: dict[Any, list[str]] = {}
    for run in runs:
        value = run.get(where, {}).get(word)
        if value is not None:
            names.setdefault(value, []).append(run["run"])
    if len(names) < 2:
        return ""
    places = [f"{words_of(value)} in {names_of(of, 'run')}" for value, of in names.items()]
    return f"{word} {listed(places)}"


def _without_sweep(runs: Sequence[Summary], words: Sequence[str]) -> list[Summary]:
    """The runs without those that differ from a run with the commonest value only in the first of `words`, and so in
    the others of them."""

    def rest(run: Summary) -> list[Any]:
        work = {word: value for word, value in run.get("work", {}).items() if word not in words}
        return [run["sync"], run["world_size"], work]

    ((usual, _),) = Counter(_work(run, words[0]) for run in runs).most_common(1)
    like = [rest(run) for run in runs if _work(run, words[0]) == usual]
    return [run for run in runs if _work(run, words[0]) == usual or rest(run) not in like]


def _other_gradients(runs: Sequence[Summary]) -> list[str]:
    """Runs whose losses diverge although everything that decides a step is the same: their gradients must differ.

    Runs with dropout are skipped, because its masks differ with the ranks. So are those that drift on purpose, and
    those that have lost rows, because their losses do not begin with the first iteration.
    """
    exact = [run for run in runs if run["dropout"] == 0 and not drifts(run) and has_all_rows(run)]
    found = []
    for group in grouped(exact, lambda one, run: _step(one) == _step(run)):
        alone = [run for run in group if run["world_size"] == 1]
        # If no run of one rank shows what is right, the majority does. If there is none, nobody knows which run is.
        alike = {run["run"]: sum(_parting(run, other) is None for other in group) for run in group}
        usual = (alone or sorted(group, key=lambda run: -alike[run["run"]]))[0]
        is_known = bool(alone) or alike[usual["run"]] > 1
        for run in group:
            apart = _parting(run, usual)
            if apart:
                one, other, where = run["run"], usual["run"], f"by {plain(apart[1])} in iteration {apart[0]}"
                if is_known:
                    found.append(f"the losses of {one} part from those of {other} ({where}), so its gradients differ")
                else:
                    found.append(f"the losses of {other} and {one} differ ({where}), so their gradients differ")
    return found


def _step(run: Summary) -> dict[str, str]:
    return {word: str(value) for word, value in run["step"].items()}


def _parting(run: Summary, other: Summary) -> tuple[int, float] | None:
    """The first iteration in which the losses differ too much, and their difference."""
    most = LOSSES_APART.get(run["precision"], max(LOSSES_APART.values()))
    pairs = list(zip(run["losses"], other["losses"]))[:COMPARED]
    for number, (mine, theirs) in enumerate(pairs, start=1):
        if abs(mine - theirs) > most * max(abs(theirs), 1e-3):
            return number, abs(mine - theirs)
    return None
