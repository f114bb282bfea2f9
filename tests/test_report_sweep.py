"""A sweep's table and page: made only from its runs' records, and readable."""

import json
import re
from dataclasses import replace
from itertools import product
from xml.etree import ElementTree

import pytest
from report_records import entry, report

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
from cos598d.errors import UserError
from cos598d.records.conventions import BROKEN_OFF, FAILED, LEFT_OUT
from cos598d.tools.report.blocks import Figure, as_html, as_markdown_page
from cos598d.tools.report.sweep_charts import EVEN, LINEAR, LOGARITHMIC, MOST_LINES, MOST_PANELS, chart_of
from cos598d.tools.report.sweep_entries import (
    SECONDS,
    Measure,
    SweepEntry,
    axes_of,
    long_table,
    metric_measures,
    points_of,
)
from cos598d.tools.report.sweep_page import MOST_RUNS, sentences, sweep_page
from cos598d.tools.report.sweep_table import cautions, sweep_rows

EVIL = '<script>alert(1)</script> "x"'
RANKS = {"1x1": 1, "1x2": 2, "2x1": 2}


def cells(entries):
    """The table's rows as mappings."""
    head, *rows = sweep_rows(entries)
    return [dict(zip(head, row, strict=True)) for row in rows]


def said(entries):
    return " ".join(sentences(entries))


def warned(entries):
    return " ".join(cautions(entries))


def chart(entries, axis, title=SECONDS):
    points = points_of(long_table(entries), Measure(title))
    return chart_of(points, axes_of(one.settings for one in entries), axis, Measure(title))


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Two batches on three set-ups, the links of two hosts with two delays; two seeds: 16 runs."""
    folder, found = tmp_path_factory.mktemp("sweep"), []
    for seed, batch, setup, delay in product((42, 43), ("4", "16"), RANKS, ("0", "10ms")):
        settings = {"batch": batch, "setup": setup} | ({"delay": delay} if setup == "2x1" else {})
        if setup != "2x1" and delay != "0":
            continue
        seconds = 80 / int(batch) / RANKS[setup] * (3 if delay != "0" else 1) * (1.1 if seed == 43 else 1)
        acc = 0.9 - int(batch) / 100 + (0.002 if seed == 43 else 0)
        size = int(batch) * RANKS[setup]
        found.append(entry(folder, settings, seed, seconds=seconds, acc=acc, batch=size))
    return found


@pytest.fixture(scope="module")
def page(grid):
    return sweep_page(grid, "cos598d sweep: grid")


def test_each_combination_is_a_row_with_the_mean_and_range_of_its_seeds(grid):
    rows = cells(grid)
    assert [row["setup"] for row in rows] == ["1x1", "1x2", "2x1", "2x1"] * 2
    assert [row["delay"] for row in rows[:4]] == ["-", "-", "0", "10ms"]
    first = rows[0]
    assert (first["batch"], first["seeds"], first["epochs"]) == ("4", "2", "2")
    assert first["acc"] == "0.8610 (0.8600-0.8620)"
    assert first["validation_loss"] == "0.6000 (0.6000-0.6000)"
    assert first["s/epoch"] == "21.0 (20.0-22.0)"
    assert (first["sent MB/it"], rows[1]["sent MB/it"]) == ("0.00", "2.00")
    assert "remarks" not in first, "nothing went wrong"


def test_speed_up_is_relative_to_one_process_seed_by_seed(grid):
    rows = cells(grid)
    assert [row["speed-up"] for row in rows[:4]] == ["-", "2.00 (2.00-2.00)", "2.00 (2.00-2.00)", "0.667 (0.667-0.667)"]
    unlike = [one for one in grid if not (one.settings["setup"] == "1x1" and one.seed == 43)]
    assert cells(unlike)[1]["speed-up"] == "2.00", "seed 43 has no run of one process"
    without = [one for one in grid if one.settings["setup"] != "1x1"]
    assert "speed-up" not in sweep_rows(without)[0]


def test_remarks_name_failed_stopped_and_unfinished_seeds(tmp_path):
    at = {"learning_rate": "2e-5"}
    entries = [
        entry(tmp_path, at, 1, acc=0.5, attempts=3),
        entry(tmp_path, at, 2, acc=0.7, epochs=1, why="stopped early: 2 evaluations in a row had no better loss"),
        SweepEntry(at, 3, FAILED, "rank 1 was lost."),
        SweepEntry(at, 4, BROKEN_OFF, "it has not been run yet."),
        SweepEntry({"learning_rate": "2e-9"}, 1, LEFT_OUT, "it is too small."),
        SweepEntry({"learning_rate": "2e-9"}, 2, LEFT_OUT, "it is too small."),
    ]
    first, last = cells(entries)
    assert (first["seeds"], first["acc"], first["epochs"]) == ("2 of 4", "0.6000 (0.5000-0.7000)", "1-2")
    assert first["remarks"] == "seed 1 took 3 attempts; seed 2 stopped early; seed 3 failed; seed 4 not finished"
    assert (last["acc"], last["s/epoch"], last["seeds"], last["remarks"]) == ("-", "-", "0 of 2", "left out")
    found = sweep_page(entries, "a sweep")
    assert "6 runs, of which 2 finished, 1 failed, 1 not finished and 2 left out" in found.lead
    failed, unfinished = found.answer.cautions
    assert "learning_rate 2e-5, seed 3" in failed
    assert "rank 1 was lost" in failed
    assert "learning_rate 2e-5, seed 4" in unfinished
    assert "it has not been run yet" in unfinished
    assert as_html(found).count("it is too small.") == 1


def test_a_sweep_without_a_finished_run_has_only_a_table():
    found = sweep_page([SweepEntry({"batch": "4"}, 1, FAILED, "no room.")], "a sweep")
    assert "No run has finished" in found.answer.sentences[0]
    assert [section.title for section in found.sections] == ["All combinations"]


def test_seconds_per_epoch_are_of_whole_epochs(tmp_path):
    one = entry(tmp_path, {"batch": "4"}, seconds=10.0)
    last = one.run.summary["epochs"][-1]
    last["training"] = {"examples": last["training"]["examples"] // 2, "wall_seconds": 5.0}
    assert cells([one])[0]["s/epoch"] == "10.0"


def test_numbers_are_sorted_and_words_keep_the_user_s_order():
    words = (("10ms", "ddp"), ("0", "ring"), ("500us", "all_reduce"), ("1s", "ddp"))
    entries = [SweepEntry({"delay": delay, "sync": sync, "rate": "1gbit"}, 1, FAILED) for delay, sync in words]
    axes = axes_of(one.settings for one in entries)
    assert axes == {"delay": ["0", "500us", "10ms", "1s"], "sync": ["ddp", "ring", "all_reduce"], "rate": ["1gbit"]}


@pytest.mark.parametrize(
    ("words", "scale"),
    [
        (("1", "4", "16"), LOGARITHMIC),
        (("2e-5", "2e-4"), LINEAR),
        (("1", "2", "3"), LINEAR),
        (("0", "1", "10", "40"), EVEN),
    ],
)
def test_an_axis_is_to_scale_where_its_values_stay_apart(words, scale, tmp_path):
    entries = [entry(tmp_path, {"max_grad_norm": word}) for word in words]
    axis = chart(entries, "max_grad_norm").axis
    assert list(axis.places) == list(words)
    assert axis.scale == scale
    places = list(axis.places.values())
    assert min(after - before for before, after in zip(places, places[1:])) >= 0.08 * (places[-1] - places[0])


def test_a_line_has_runs_that_are_alike_in_all_other_axes(grid):
    lines = chart(grid, "setup").lines
    assert [dict(line.settings) for line in lines] == [
        {"batch": batch, "delay": delay} for batch in ("4", "16") for delay in ("0", "10ms")
    ]
    assert all(list(line.points) == list(RANKS) for line in lines)
    over_delay = chart(grid, "delay").lines
    assert [list(line.points) for line in over_delay] == [["0", "10ms"]] * 2, "one host has no delay"
    assert chart(grid, "batch", "speed-up") is not None
    assert chart([one for one in grid if one.settings["batch"] == "4"], "batch") is None, "one value is no axis"


def test_many_lines_are_split_into_panels_and_the_caption_counts_the_rest(tmp_path):
    def sweep(*counts):
        values = [[str(number) for number in range(count)] for count in counts]
        names = ("seed_of_data", "momentum", "dropout")
        folder = tmp_path / str(len(values[2]))
        return [entry(folder, dict(zip(names, words)), seconds=1.0 + int(words[0])) for words in product(*values)]

    found = chart(sweep(2, 3, 5), "seed_of_data")
    assert len(found.lines) == 15
    assert found.panel_axes == ("momentum",)
    (words,) = found.figure("chart").caption  # every line has room
    assert "One seed each" in words
    assert all(len(lines) <= MOST_LINES for lines in found.panels.values())
    crowded = chart(sweep(2, MOST_PANELS + 1, MOST_LINES + 1), "seed_of_data")
    assert sum(map(len, crowded.panels.values())) <= MOST_LINES * MOST_PANELS
    assert crowded.figure("chart").caption[0].startswith("There is room for 42 of 56 lines here")


def test_every_point_is_inside_its_plot(grid):
    """The panels share one scale, and the slow ones may come last."""
    root = ElementTree.fromstring(chart(grid, "setup").figure("plot").svg)
    space = "{http://www.w3.org/2000/svg}"
    clips = {clip.get("id"): clip[0] for clip in root.iter(f"{space}clipPath")}
    seen = 0
    for group in root.iter(f"{space}g"):
        clip = clips.get((group.get("clip-path") or "").removeprefix("url(#").removesuffix(")"))
        for mark in group.findall(f"{space}use") if clip is not None else ():
            top, height = float(clip.get("y")), float(clip.get("height"))
            assert top <= float(mark.get("y")) <= top + height
            seen += 1
    assert seen >= 12


def test_the_page_has_each_figure_against_each_axis_and_then_the_table(page):
    titles = [section.title for section in page.sections]
    assert titles == [
        "acc against each axis",
        "validation_loss against each axis",
        "Seconds per epoch",
        "Speed-up against setup 1x1",
        "Delay",
        "All combinations",
    ]
    figures = {section.title: [one for one in section.blocks if isinstance(one, Figure)] for section in page.sections}
    assert [len(figures[title]) for title in titles] == [2, 3, 2, 2, 2, 0]
    assert "setup (hosts x ranks on each)" in figures["Seconds per epoch"][0].svg
    every = [page.answer.figure, *(figure for found in figures.values() for figure in found)]
    assert len({figure.name for figure in every}) == len(every)
    for figure in every:
        assert all(figure.caption)
        assert "Points and bars: the mean, the least and the most of 2 seeds." in figure.caption[-1]
    ids = re.findall(r' id="([^"]*)"', as_html(page))
    assert len(set(ids)) == len(ids)


@pytest.mark.long
def test_the_usual_sections_follow_where_the_runs_are_few(grid, page):
    few = grid[:MOST_RUNS]
    assert "Timeline of one iteration" not in [section.title for section in page.sections]
    titles = [section.title for section in sweep_page(few, "few").sections]
    assert titles.index("All combinations") < titles.index("The runs") < titles.index("Timeline of one iteration")


def test_the_answer_names_best_fastest_speed_up_and_delay(grid, page):
    words = " ".join(page.answer.sentences)
    highest, lowest = words.partition("highest with ")[2], words.partition("in seconds, is lowest with ")[2]
    alike = ["batch 4 and setup 1x1", "batch 4 and setup 1x2", "batch 4, setup 2x1 and delay 0"]
    alike = ", ".join([*alike, "batch 4, setup 2x1 and delay 10ms"])
    assert "acc after the last epoch is highest with" in words
    assert "An epoch's training, in seconds, is lowest with" in words
    assert highest.startswith(f"4 combinations alike ({alike}), 0.8610 (0.8600 to 0.8620 over 2 seeds)")
    alike = "batch 16 and setup 1x2, batch 16, setup 2x1 and delay 0"
    assert lowest.startswith(f"2 combinations alike ({alike}), 2.62 (2.50 to 2.75 over 2 seeds)")
    assert "2.00 times as fast with 1x2 and 0.667 to 2.00 times as fast with 2x1" in words
    assert "From delay 0 to 10ms, an epoch takes 3.00 times as long" in words
    assert page.lead.startswith("A sweep of batch (4, 16), setup (1x1, 1x2, 2x1) and delay (0, 10ms) with 2 seeds: 16 ")


def test_ranges_that_overlap_show_no_best_and_one_seed_shows_little(tmp_path):
    values = {("2e-5", 1): 0.50, ("2e-5", 2): 0.60, ("2e-4", 1): 0.55, ("2e-4", 2): 0.65}
    entries = [entry(tmp_path, {"learning_rate": word}, seed, acc=acc) for (word, seed), acc in values.items()]
    assert "(0.5000 to 0.6000 over 2 seeds); the ranges overlap" in said(entries)
    far = [entry(tmp_path / "far", {"learning_rate": word}, 1, acc=float(word)) for word in ("0.1", "0.2", "0.3")]
    assert "One seed each" in said(far)
    assert "overlap" not in said(far)
    same = [entry(tmp_path / "same", {"learning_rate": word}) for word in ("0.1", "0.2")]
    assert "acc after the last epoch is 0.8000 everywhere" in said(same)
    assert "in seconds, is 10.0 everywhere" in said(same)
    twice = [entry(tmp_path / "twice", {"learning_rate": "0.1"}, seed) for seed in (1, 2)]
    assert "0.8000 (with each of 2 seeds)" in said(twice)


def test_other_work_is_what_no_axis_asks_for(tmp_path):
    entries = []
    for batch, rate, seed in product(("4", "16"), ("2e-5", "2e-4"), (1, 2)):
        config, settings = {"learning_rate": float(rate)}, {"batch": batch, "learning_rate": rate}
        entries.append(entry(tmp_path, settings, seed, batch=int(batch), config=config))
    assert warned(entries) == ""
    entries[-1].run.summary["work"]["TF32"] = True
    entries[0].run.summary["work"]["TF32"] = False
    entries[1].run.summary["ground"]["cores"], entries[2].run.summary["ground"]["cores"] = 2, 64
    assert "not the same work: TF32" in warned(entries)
    assert "not on the same ground: cores 2 in" in warned(entries)


def test_other_code_is_a_caution(tmp_path):
    code = [{"commit": "abc", "versions": {"torch": "2.13.0"}}, {"commit": "def", "versions": {"torch": "2.14.0"}}]
    entries = [entry(tmp_path, {"batch": "4"}, seed, environment=found) for seed, found in enumerate(code)]
    assert warned(entries[:1] * 2) == ""
    assert "commit abc in batch4-seed0 and def in batch4-seed1" in warned(entries)
    assert "torch 2.13.0 in batch4-seed0 and 2.14.0 in batch4-seed1" in warned(entries)


def test_runs_side_by_side_are_a_caution(tmp_path):
    alone = [entry(tmp_path, {"batch": batch}) for batch in ("4", "16")]
    shared = [replace(one, parallel=3) for one in alone]
    assert "The runs ran up to 3 at a time" in warned(shared)
    assert "1 of 2 runs ran up to 3 at a time" in warned([alone[0], shared[1]])
    assert sweep_page(shared, "a sweep").answer.cautions == cautions(shared)


def test_losses_that_differ_between_set_ups_are_a_caution(tmp_path):
    losses = [0.7, 0.6, 0.5, 0.4, 0.3]
    entries = [entry(tmp_path, {"setup": setup}, losses=losses) for setup in ("1x2", "2x1")]
    assert warned(entries) == ""
    entries.append(entry(tmp_path, {"setup": "1x4"}, losses=[0.7, 0.6, 0.5, 0.45, 0.4]))
    assert "so its gradients differ" in warned(entries)


def test_epochs_of_different_lengths_are_a_caution(tmp_path):
    entries = [entry(tmp_path, {"batch": batch}, examples=10 * int(batch)) for batch in ("4", "16")]
    assert "from 40 to 160 examples" in warned(entries)


def test_hostile_values_stay_text_and_the_page_is_reproducible(tmp_path):
    entries = [entry(tmp_path, {"sync": sync}) for sync in ("ddp", "flat")]
    entries += [SweepEntry({"sync": EVIL}, 42, FAILED, EVIL)]
    found = sweep_page(entries, EVIL)
    text, (markdown, _) = as_html(found), as_markdown_page(found, "files")
    assert "<script" not in text
    assert "<script" not in markdown
    assert text == as_html(sweep_page(entries, EVIL)), "the same records give the same bytes"


def test_a_task_without_metrics_is_ranked_by_its_losses(tmp_path):
    entries = [entry(tmp_path, {"batch": batch}, acc=None, loss=int(batch) / 10) for batch in ("4", "8")]
    assert [measure.title for measure in metric_measures(long_table(entries))] == ["validation_loss"]
    assert "validation_loss after the last epoch is lowest with batch 4, 0.5000, and highest with batch 8" in said(
        entries
    )


def test_a_tie_is_not_called_the_best(tmp_path):
    grid = [dict(zip(("batch", "optimizer", "learning_rate"), one)) for one in product("48", ("sgd", "adamw"), "12")]
    entries = [entry(tmp_path, one, acc=float(one["learning_rate"]) / 10) for one in grid]
    assert "highest with 4 combinations alike (batch 4, optimizer sgd" in said(entries)


def test_a_sweep_s_folder_makes_its_page_and_refuses_forged_grids(tmp_path):
    label, folder = "learning_rate2e-05-seed42", tmp_path / "sweep"
    config = {"learning_rate": 2e-5, "label": label, "seed": 42, "world_size": 1}
    summary = {"label": label, "memory": {"process_peak_bytes": [1], "gpu_peak_bytes": [None]}}
    ground = {"device": "cpu", "cores": 2}
    done = entry(folder, {"learning_rate": "2e-05"}, config=config, summary=summary, environment=ground)
    row = {"settings": done.settings, "seed": 42, "seconds": None, "outcome": "finished", "said": ""}
    asked = {"axes": {"learning_rate": ["2e-05", "0.0002"]}, "seeds": [42], "flags": {}, "rate": "1gbit"}
    asked["launch"] = None

    def write(**changes):
        (folder / "sweep.json").write_text(json.dumps({**asked, **changes, "combinations": {label: row}}))

    write()
    for form in ("html", "md"):
        text = report(tmp_path / f"page.{form}", folder).read_text()
        assert "All combinations" in text
        assert "2 runs, of which 1 finished and 1 not finished" in text
    with pytest.raises(UserError, match="Give only this folder"):
        report(tmp_path / "both.html", folder, tmp_path / "other")
    write(axes={f"axis{number}": ["1", "2"] for number in range(40)})
    with pytest.raises(UserError, match=r"sweep\.json asks for more than 100,000 runs.* Start the sweep again\.$"):
        report(tmp_path / "forged.html", folder)
    write(flags={"nonsense": [1]}, axes={"nonsense": ["1"]})
    with pytest.raises(UserError, match=r"sweep\.json"):
        report(tmp_path / "forged.html", folder)
