"""The page begins with the answer: a few sentences and a picture, which claim only what the records support."""

import re

import pytest
from report_records import attempt, edit, read, report, update, write_run
from scale_records import write_bench

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
from cos598d.commands.report import load_records
from cos598d.tools.report.answer import answer_of
from cos598d.tools.report.blocks import MOST_SENTENCES, Figure, Table
from cos598d.tools.report.load import load_run
from cos598d.tools.report.page import build_page
from cos598d.tools.report.table import comparison

SOME = "gather_scatter,all_reduce,bucketed"


def answer(*folders):
    found = answer_of(*load_records(folders))
    assert 1 <= len(found.sentences) <= max(2, MOST_SENTENCES - len(found.cautions))
    assert all(len(re.findall(r"[.!?] ", sentence)) == 0 for sentence in found.sentences), "each is one sentence"
    return found


def said(*folders):
    return " ".join(answer(*folders).sentences)


def run(folder, name, seconds, **more):
    """A run of four ranks whose mean has an interval of 0.1 s to either side."""
    return write_run(folder / name, ranks=4, seconds=[9.0, 9.0] + [seconds] * 3, **more)


def test_the_fastest_is_named_with_its_interval_and_its_ratio(tmp_path):
    slow, fast = run(tmp_path, "slow", 4.0, sync="flat"), run(tmp_path, "ddp", 2.0, sync="ddp")
    words = said(slow, fast, run(tmp_path, "mid", 3.0))
    assert words.startswith("ddp is the fastest of 3 with 2.00 s per iteration (95 % 1.90 to 2.10) on 4 ranks")
    assert "slow, the slowest, takes 2.00 times the seconds of ddp" in words
    assert "each was run once" in words
    assert "no run on as many ranks had sync none" in words


def test_differences_within_the_spread_have_no_fastest(tmp_path):
    words = said(run(tmp_path, "a", 2.05), run(tmp_path, "b", 2.0, sync="ddp"), run(tmp_path, "c", 3.0, sync="flat"))
    assert "is the fastest of" not in words
    assert "b and a take 2.00 to 2.05 s per iteration" in words
    assert "no run is clearly the fastest" in words
    assert "c, the slowest, takes 1.50 times" in words


def test_a_difference_is_judged_by_its_own_interval_not_by_overlap(tmp_path):
    """1.95 to 2.15 and 2.08 to 2.28 overlap, and the difference's interval, 0.04 to 0.22 by Welch's t, leaves 0."""
    words = said(run(tmp_path, "a", 2.18), run(tmp_path, "b", 2.05, sync="ddp"))
    assert "b is the fastest of 2" in words


def test_the_fastest_of_other_groups_is_named_too(tmp_path):
    seconds = [9.0, 9.0] + [2.0] * 5
    long = [write_run(tmp_path / f"{s}-long", ranks=4, sync=s, seconds=seconds) for s in ("ddp", "flat")]
    short = [run(tmp_path, f"{s}-short", t, sync=s, batch=32) for s, t in (("ring", 3.0), ("tree", 2.0))]
    words = said(*short, *long)
    assert "ring-short and tree-short differ in more than the sync from ddp-long and flat-long" in words
    assert "tree-short has the fewest seconds of 2" in words
    words = said(*short, long[0])
    assert words.startswith("tree-short is the fastest of 2 ")
    assert "ddp-long differs in more than the sync from ring-short and tree-short" in words


def test_one_rank_that_is_faster_than_all_the_others_is_named(tmp_path):
    several = run(tmp_path, "a", 2.0), run(tmp_path, "b", 3.0, sync="ddp")
    alone = [write_run(tmp_path / name, ranks=1, seconds=[9.0, 9.0] + [s] * 3) for name, s in (("q", 1.0), ("s", 4.0))]
    assert "q (1.00 s per iteration) is faster than a and b" in said(*several, alone[0])
    assert "is faster than" not in said(*several, alone[1])


def test_exposed_communication_within_the_spread_is_none(tmp_path):
    words = said(run(tmp_path, "a", 2.05), run(tmp_path, "floor", 2.0, sync="none"))
    assert "Exposed communication is nothing beyond the spread in a" in words
    far = said(run(tmp_path, "b", 3.0), tmp_path / "floor")
    assert "Exposed communication is 1.00 s (33 %) of b's iteration" in far


def test_repeats_are_compared_pair_by_pair_and_count_as_one_run(tmp_path):
    folders = []
    for number, base in enumerate((1.0, 1.4, 1.2)):
        for name, seconds in (("mine", base + 0.5), ("ddp", base + 0.1)):
            sync = "ddp" if name == "ddp" else "all_reduce"
            folders.append(write_run(tmp_path / str(number) / name, sync=sync, seconds=[9.0, 9.0] + [seconds] * 3))
    words = said(*folders)
    # The means' intervals overlap widely; those of the ratio within each repeat leave 1.
    assert words.startswith("ddp is the fastest of 2 with 1.30 s")
    assert "over 3 repeats" in words
    assert "each is one run" not in words
    assert "mine, the slowest, takes 1.31 times the seconds of ddp" in words


def test_the_answer_has_the_largest_difference_of_the_losses(tmp_path):
    losses = [0.7, 0.6, 0.5, 0.4, 0.3]
    one = run(tmp_path, "one", 2.0, losses=losses)
    same = run(tmp_path, "same", 3.0, sync="ddp", losses=losses)
    assert "the losses of one and same are the same to the last digit" in said(one, same)
    other = run(tmp_path, "other", 4.0, sync="flat", losses=[0.7, 0.6, 0.52, 0.4, 0.3])
    assert "the losses of one, same and other are at most 2.0e-02 apart" in said(one, same, other)
    drifting = run(tmp_path, "floor", 1.0, sync="none", losses=[0.9] * 5)
    assert "the losses of one and same are the same" in said(one, same, drifting), "replicas that never agree"


@pytest.mark.parametrize("seconds", [[], [1.0], [1.0, 2.0]])
def test_runs_without_a_counted_iteration_have_no_speed(seconds, tmp_path):
    found = answer(write_run(tmp_path / "few", seconds=seconds))
    assert "warm-up (the first 2)" in found.sentences[0]
    assert "no speed" in found.sentences[0]
    assert found.figure is None


def test_a_run_of_one_rank_is_not_compared(tmp_path):
    words = said(write_run(tmp_path / "one", ranks=1, sync="none", seconds=[2.0, 1, 1, 1]))
    assert words.startswith("one takes 1.00 s per iteration")
    assert "fastest" not in words
    assert "xposed" not in words


def test_a_bench_names_its_fastest_only_where_its_rounds_show_one(tmp_path):
    def near(found):
        for label, interval in (("bucketed", [0.97, 0.99]), ("all_reduce", [1.3, 1.5]), ("gather_scatter", [2, 3])):
            found["summary"][label]["ratio_to_ddp"]["interval_95"] = interval

    def blur(found):
        found["summary"]["bucketed"]["ratio_to_ddp"]["interval_95"] = [0.9, 1.02]

    bench = edit(write_bench(tmp_path / "bench", syncs=SOME) / "bench.json", near)
    found = read(bench / "bench.json")["summary"]
    first = min((label for label in found if label != "none"), key=lambda label: found[label]["seconds_median"])
    assert first in ("bucketed", "ddp")
    assert f"In bench, {first} is the fastest of 4 syncs" in said(bench)
    words = said(edit(bench / "bench.json", blur))
    assert "is the fastest of" not in words
    assert "no sync is clearly the fastest" in words


def test_a_candidate_with_other_work_is_a_caution_and_never_the_fastest(tmp_path):
    def cheat(found):
        found["summary"]["bucketed"]["seconds_median"] = 1e-3
        found["gradient_norm"] = {label: [1.0] for label in found["summary"]} | {"bucketed": [0.5]}

    def agree(found):
        found["gradient_norm"] = {label: [1.0] for label in found["summary"]}

    bench = edit(write_bench(tmp_path / "bench", syncs=SOME) / "bench.json", agree)
    assert "averaged gradients have ddp's norm to within 2 %." in said(bench)
    found = answer(edit(bench / "bench.json", cheat))
    (caution,) = found.cautions
    assert "not the same work: bucketed" in caution
    assert not any("bucketed" in sentence for sentence in found.sentences)
    assert "bucketed" not in re.sub(r"<[^>]*>", "", found.figure.svg)


def test_runs_and_benches_together_have_their_answer_first(tmp_path):
    runs = [run(tmp_path, "a", 2.0, wire_share=1), run(tmp_path, "floor", 1.0, sync="none")]
    runs.append(run(tmp_path, "b", 3.0, sync="ddp"))
    benches = [write_bench(tmp_path / name, rate=rate, syncs=SOME) for name, rate in (("slow", 1e8), ("fast", 1e9))]
    words = said(*runs, *benches)
    assert words.startswith("a is the fastest of 2")
    assert "In slow, " in words
    text = report(tmp_path / "page.html", *runs, *benches).read_text()
    assert text.index("In short") < text.index("<svg") < text.index("<nav") < text.index("<table")
    assert len(answer(*benches).sentences) >= 3


def test_tables_use_the_screen_s_width_and_paragraphs_do_not(tmp_path):
    style = report(tmp_path / "page.html", run(tmp_path, "a", 2.0)).read_text().partition("</style>")[0]
    assert "max-width" not in re.search(r"\nbody \{[^}]*\}", style)[0]
    assert re.search(r"\np \{ max-width: 4\drem; \}", style)


def classes(*found):
    """An evaluation's classes from (examples, precision, recall)."""
    rows = [dict(zip(("examples", "precision", "recall"), one)) for one in found]
    return [row | {"class": f"c{number}", "f1": 0.0} for number, row in enumerate(rows)]


def test_a_model_that_predicts_one_class_is_a_caution(tmp_path):
    one, two = classes((30, 0.0, 0.0), (70, 0.7, 1.0)), classes((30, 1.0, 0.1), (70, 0.72, 1.0))
    epoch = {"epoch": 1, "iterations": 5, "loss": 0.7, "acc": 0.7}
    found = {}
    cases = {"a": (one, None), "b": (two, None), "c": (two, one), "d": (one, two), "e": (one[1:], None)}
    for name, (last, kept) in cases.items():
        best = {"iteration": 3, "metric": "acc", "value": 0.7} | ({"evaluated": {"by_class": kept}} if kept else {})
        summary = run(tmp_path, name, 2.0, sync=name) / "summary.json"
        found[name] = update(summary, best=best, epochs=[epoch | {"by_class": last}])
    words = "only one class is predicted by a and c (the model that it kept): every example is classified as c1"
    assert any(caution.startswith(words) for caution in answer(*found.values()).cautions)
    assert words in comparison([load_run(folder) for folder in found.values()])
    assert not answer(found["b"], found["d"], found["e"]).cautions
    page = build_page(*load_records([found["a"]]))
    (blocks,) = (section.blocks for section in page.sections if section.title == "Class by class")
    (table,), (figure,) = ([block for block in blocks if isinstance(block, kind)] for kind in (Table, Figure))
    assert [row[2] for row in table.rows] == ["precision", "-", "0.7000"], "0 of 0 is no precision"
    assert "classified as c1" in figure.caption[0]


def test_the_page_has_the_early_stop_the_kept_model_and_the_places_of_the_ranks(tmp_path):
    why = "stopped early: 2 evaluations in a row had no better acc than the best 0.5000 after iteration 3"
    best = {"iteration": 3, "metric": "acc", "value": 0.5}
    folder = run(tmp_path, "a", 2.0)
    places = [{"node": node, "device": "cpu", "gpu": None} for node in ("n1", "n1", "n1", "n2")]
    update(folder / "environment.json", places=places)
    made = [attempt(ranks=4, why=why)]
    update(folder / "summary.json", attempts=made, best=best | {"evaluated": {"acc": 0.5}})
    text = report(tmp_path / "page.html", folder).read_text()
    assert f"a ended after iteration 5, {why}" in text
    assert "the model of iteration 3: acc 0.5000" in text
    assert "ranks 0-2 on n1 (cpu), rank 3 on n2 (cpu)" in text
    assert "&#39;node&#39;" not in text
    update(folder / "summary.json", best=best)
    assert "The model of iteration 3 could not be kept" in report(tmp_path / "other.html", folder).read_text()


def test_a_run_that_does_not_fit_the_picture_is_named(tmp_path):
    found = answer(*(run(tmp_path, f"r{number}", 2.0 + number, sync=f"s{number}") for number in range(6)))
    assert found.sentences[0].startswith("r0 is the fastest of 6")
    assert "no room for r4" in found.figure.caption[-1]


def test_losses_are_not_compared_with_the_floor_s(tmp_path):
    words = said(run(tmp_path, "ddp", 2.0, sync="ddp"), run(tmp_path, "floor", 1.0, sync="none"))
    assert "and 0.6600 in the last of 5; no other run's can be compared" in words


def test_the_page_does_not_claim_that_a_library_sends_nothing(tmp_path):
    folder = update(run(tmp_path, "engine", 2.0, sync="none") / "summary.json", bytes_from="counters")
    text = report(tmp_path / "page.html", folder).read_text()
    assert "No gradient travels" not in text
    assert "The library does not report its calls" in text


def test_one_rank_is_called_faster_only_than_runs_that_it_is_shown_to_be_faster_than(tmp_path):
    fast, noisy = run(tmp_path, "fast", 2.0, sync="ddp"), run(tmp_path, "noisy", 4.0)
    edit(noisy / "summary.json", lambda found: found["seconds_per_iteration"].update(interval_95=[0.5, 7.5]))
    floor = run(tmp_path, "floor", 0.5, sync="none")
    alone = write_run(tmp_path / "alone", ranks=1, seconds=[9.0, 9.0] + [1.0] * 3)
    (sentence,) = (one for one in answer(fast, noisy, floor, alone).sentences if "is faster than" in one)
    assert sentence.startswith("On one rank, alone (1.00 s per iteration) is faster than fast")
    assert "noisy" not in sentence
    assert "floor" not in sentence


def test_a_slower_run_on_one_rank_is_not_called_uncompared_since_its_speed_up_is_on_the_page(tmp_path):
    folders = [
        run(tmp_path, "a", 2.0, sync="ddp"),
        run(tmp_path, "b", 3.0),
        write_run(tmp_path / "one", ranks=1, seconds=[9.0, 9.0] + [4.0] * 3),
    ]
    assert "one differs in more than the sync" not in said(*folders)
    (table,) = (s.blocks[0] for s in build_page(*load_records(folders)).sections if s.title == "Scaling")
    assert {row[1] for row in table.rows[1:]} == {"one"}


def test_the_picture_of_a_bench_has_the_ratios_of_its_table(tmp_path):
    def twist(found):
        found["summary"]["all_reduce"]["ratio_to_ddp"]["median"] = 7.77  # not the ratio of the medians

    bench = edit(write_bench(tmp_path / "bench", syncs=SOME) / "bench.json", twist)
    words = re.findall(r"<text[^>]*>([^<]*)</text>", answer(bench).figure.svg)
    assert any(word.startswith("7.77 x ddp") for word in words)
    assert any(word.startswith("1.00 x ddp") for word in words), "of ddp itself, which is not the fastest here"


def test_the_fewest_seconds_among_others_are_of_a_run_that_is_named_there(tmp_path):
    group = [run(tmp_path, f"{sync}2", 2.0 + place, sync=sync) for place, sync in enumerate(("ring", "ddp", "flat"))]
    ones = [
        write_run(tmp_path / name, ranks=1, sync=sync, seconds=[9.0, 9.0] + [s] * 3)
        for name, sync, s in (("none1", "none", 7.0), ("ddp1", "ddp", 8.0))
    ]
    (sentence,) = (one for one in answer(*group, *ones).sentences if "in more than the sync" in one)
    before, _, after = sentence.partition("among which")
    assert "none1 has the fewest" not in after.partition(";")[0] or "none1" in before
