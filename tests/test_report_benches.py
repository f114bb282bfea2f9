"""What the report makes of benches: the table, the figure, the sweeps, and what their spread does not support."""

import json
import re

import pytest
from report_records import edit, report, write_run
from scale_records import GBIT, write_bench

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
from cos598d.errors import UserError
from cos598d.tools.report.benches import load_bench
from cos598d.tools.report.blocks import Figure, Table
from cos598d.tools.report.page import build_page

SOME = "gather_scatter,all_reduce,bucketed"


def section(page, title):
    return next(section for section in page.sections if section.title == title).blocks


@pytest.fixture
def rates(tmp_path):
    return [write_bench(tmp_path / name, rate=rate, syncs=SOME) for name, rate in (("slow", GBIT / 10), ("fast", GBIT))]


def test_every_candidate_has_a_row_and_a_bar_and_the_slowest_stands_first(rates):
    slow, fast = (load_bench(folder, folder.name) for folder in rates)
    found = section(build_page([], [slow, fast]), "Side by side")
    rows = [block.rows for block in found if isinstance(block, Table)][-1]
    assert {row[0] for row in rows[1:]} == {"gather_scatter", "all_reduce", "bucketed", "ddp", "none"}
    (figure,) = (block for block in found if isinstance(block, Figure))
    words = re.findall(r"<text[^>]*>([^<]*)</text>", figure.svg)
    lanes = [word for word in words if word in {row[0] for row in rows[1:]}]
    assert lanes[0] == "gather_scatter"
    assert lanes[-1] == "none"
    gather_scatter = json.loads((rates[0] / "bench.json").read_text())["summary"]["gather_scatter"]
    assert f">{gather_scatter['ratio_to_ddp']['median']:.2f}</text>" in figure.svg
    one = build_page([], [slow])
    assert one.answer.figure is not None
    assert not [block for block in section(one, "Side by side") if isinstance(block, Figure)], "drawn once"


def test_a_ratio_whose_interval_holds_1_is_said_to_be_no_difference(rates):
    def blur(found):
        found["summary"]["bucketed"]["ratio_to_ddp"]["interval_95"] = [0.97, 1.02]
        found["summary"]["all_reduce"]["ratio_to_ddp"]["interval_95"] = [1.3, 1.5]

    def forget(found):
        for summary in found["summary"].values():
            summary["ratio_to_ddp"]["interval_95"] = None

    blurred = load_bench(edit(rates[0] / "bench.json", blur), "slow")
    few = load_bench(edit(rates[1] / "bench.json", forget), "fast")
    (figure,) = (b for b in section(build_page([], [blurred, few]), "Side by side") if isinstance(b, Figure))
    assert "slow: the rounds do not tell bucketed from ddp (the 95 % interval contains 1)." in figure.caption
    assert "fast: an interval needs at least 6 rounds, so ratios near 1 may be chance." in figure.caption


def test_benches_that_differ_in_their_rate_alone_make_a_sweep(rates, tmp_path):
    far = write_bench(tmp_path / "far", delay=0.01, syncs=SOME)
    more = write_bench(tmp_path / "more", batch=8, ranks=2, syncs=SOME)
    benches = [load_bench(folder, folder.name) for folder in (*rates, far, more)]
    page = build_page([], benches)
    titles = [section.title for section in page.sections]
    assert titles == ["Side by side", "Side by side: rate", "Side by side: delay", "Environment"]
    (figure,) = section(page, "Side by side: rate")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", figure.svg)
    assert {"gather_scatter", "all_reduce", "bucketed", "Mbit/s", "100", "1000"} <= set(words)
    assert "from slow (100mbit) to fast" in figure.caption[0]


def test_a_sweep_of_ratios_near_1_has_more_than_one_tick(rates):
    def level(found):
        for label, ratio in (("gather_scatter", 1.42), ("all_reduce", 0.96), ("bucketed", 1.0)):
            found["summary"][label]["ratio_to_ddp"]["median"] = ratio

    page = build_page([], [load_bench(edit(folder / "bench.json", level), folder.name) for folder in rates])
    (figure,) = section(page, "Side by side: rate")
    assert {"1", "1.1", "1.2"} <= set(re.findall(r"<text[^>]*>([^<]*)</text>", figure.svg))


def test_benches_of_other_machines_are_no_sweep_and_not_of_one_setting(rates):
    edit(rates[0] / "bench.json", lambda found: found["environment"].update(processor="another"))
    page = build_page([], [load_bench(folder, folder.name) for folder in rates])
    assert "Side by side: rate" not in [section.title for section in page.sections]
    assert "processor" in page.lead


def test_benches_that_differ_in_their_precision_alone_are_compared_candidate_by_candidate(tmp_path):
    before = write_bench(tmp_path / "old", syncs=SOME)  # it has no its precision: fp32
    after = write_bench(tmp_path / "half", syncs=SOME, compute=0.2)
    other = write_bench(tmp_path / "other", syncs=SOME, batch=8)
    edit(after / "bench.json", lambda found: found["setting"].update(precision="bf16"))
    page = build_page([], [load_bench(folder, folder.name) for folder in (after, before, other)])
    (table,) = section(page, "Side by side: precision")
    assert table.rows[0] == ["sync", "fp32 s", "bf16 s", "times", "ratio to ddp in fp32", "ratio to ddp in bf16"]
    cells = {row[0]: row[1:] for row in table.rows[1:]}
    assert list(cells)[0] == "none"
    assert list(map(float, cells["none"][:3])) == pytest.approx([0.5, 0.2, 0.4])
    assert cells["ddp"][3:] == ["-", "-"]
    assert "old and half, which differ only in precision" in table.caption


def test_runs_and_benches_stand_on_one_page_each_under_its_own_name(rates, tmp_path):
    run = write_run(tmp_path / "run")
    text = report(tmp_path / "page.html", run, *rates).read_text()
    assert "<title>cos598d report: 1 run and 2 benches" in text
    assert "2 benches that differ in rate" in text
    assert "Seconds per iteration" in text
    again = report(tmp_path / "again.html", rates[0] / "bench.json").read_text()
    assert "One bench." in again


def test_a_bench_without_ddp_or_floor_or_candidates_makes_a_page(rates, tmp_path):
    def alone(found):
        found["candidates"] = [one for one in found["candidates"] if one["label"] not in ("ddp", "none")]
        for summary in found["summary"].values():
            summary |= {"ratio_to_ddp": None, "ratio_to_floor": None, "seconds_exposed": None}

    def sizes(found):
        row = {"payload_bytes": 1024, "seconds_median": 1e-3, "seconds_fitted": 1e-3}
        row |= {"algbw_bytes_per_second": 1e6, "busbw_bytes_per_second": 1.5e6}
        fit = {"overhead_seconds": 1e-3, "bytes_per_second": 1e8}
        found |= {"candidates": [], "message_size": {"sizes": [row], "fit": fit}}

    text = report(
        tmp_path / "page.html", edit(rates[0] / "bench.json", alone), edit(rates[1] / "bench.json", sizes)
    ).read_text()
    assert "total (sync none was not measured)" in text
    assert "exposed communication</text>" not in text
    assert "a call takes 1000 us" in text
    assert "Side by side: rate" not in text


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found["summary"].pop("ddp"),
        lambda found: found["summary"]["ddp"].update(seconds_median="fast"),
        lambda found: found["summary"]["ddp"].update(seconds_median=float("nan")),
        lambda found: found["summary"]["ddp"].update(seconds_quartiles=[1]),
        lambda found: found["summary"]["bucketed"].update(ratio_to_ddp={"median": 1, "interval_95": [1, None]}),
        lambda found: found.pop("environment"),
        lambda found: found.pop("setting"),
        lambda found: found.update(environment=[]),
        lambda found: found["traffic"].clear(),
        lambda found: found["summary"]["bucketed"].update(seconds_exposed=None),
        lambda found: found["summary"]["bucketed"].update(ratio_to_ddp=None),
        lambda found: found["summary"]["bucketed"]["ratio_to_ddp"].update(median=0),
        lambda found: found["setting"].update(batch=10**400),
        lambda found: found["setting"].update(batch=[4]),
        lambda found: found.update(candidates=3),
    ],
)
def test_a_damaged_bench_is_named_in_one_sentence(damage, rates, tmp_path):
    edit(rates[0] / "bench.json", damage)
    with pytest.raises(UserError) as error:
        report(tmp_path / "page.html", rates[0])
    assert "bench.json" in str(error.value)
    assert str(error.value).count(". ") == 1, "what is wrong, and what to do"
    assert not (tmp_path / "page.html").exists()


def test_a_bench_without_a_floor_beside_one_with_it_has_a_colour_of_its_own(rates, tmp_path):
    def alone(found):
        found["candidates"] = [one for one in found["candidates"] if one["label"] != "none"]
        for summary in found["summary"].values():
            summary |= {"ratio_to_floor": None, "seconds_exposed": None}

    text = report(tmp_path / "page.html", edit(rates[0] / "bench.json", alone), rates[1]).read_text()
    assert "total (sync none was not measured)" in text
    assert "without any sync</text>" in text


def test_a_floor_alone_makes_a_page(rates, tmp_path):
    def only(found):
        found["candidates"] = [one for one in found["candidates"] if one["label"] == "none"]
        found["summary"]["none"]["ratio_to_ddp"] = None

    assert (
        "The bench compared no syncs."
        in report(tmp_path / "page.html", edit(rates[0] / "bench.json", only)).read_text()
    )


def test_the_same_bench_given_by_its_folder_and_its_file_is_given_twice(rates, tmp_path):
    with pytest.raises(UserError, match="given twice"):
        report(tmp_path / "page.html", rates[0], rates[0] / "bench.json")


def test_a_label_with_markup_stays_text(rates, tmp_path):
    evil = "<script>alert(1)</script>\x1b.py:Sync"

    def rename(found):
        for candidate in found["candidates"]:
            if candidate["label"] == "bucketed":
                candidate["label"] = evil
        for name in ("summary", "traffic"):
            found[name][evil] = found[name].pop("bucketed")

    text = report(tmp_path / "page.html", edit(rates[0] / "bench.json", rename)).read_text()
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
