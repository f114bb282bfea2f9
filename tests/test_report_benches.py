"""Benches on a page and on the screen: their numbers, which sync is the fastest, and damaged records."""

import json
import re

import pytest
from report_records import edit, read, report, write_bench
from test_report import Page, by_name

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
from cos598d.commands import cli
from cos598d.records.bench import read_bench

# The screen's table, which a program prints that takes a minute.
from cos598d.tools.report.benches import bench_table


@pytest.fixture
def bench(tmp_path):
    return write_bench(tmp_path / "bench")


def said(folder):
    """What the screen shows above the table."""
    return bench_table(read_bench(folder)[1]).partition("\n\nsync ")[0]


def test_every_number_is_that_of_the_record(bench, tmp_path):
    found, page = read(bench / "bench.json"), Page(report(tmp_path / "page.html", bench))
    rows = by_name(page.tables["Bench bench"][0])
    assert list(rows) == ["reduce_broadcast", "all_reduce", "bucketed", "none", "ddp"]
    for label, row in rows.items():
        summary, traffic = found["summary"][label], found["traffic"][label]
        low, high = map(float, row["quartiles"].split(" to "))
        assert summary["seconds_quartiles"] == pytest.approx([low, high], rel=1e-3)
        ratio = summary["ratio_to_ddp"]
        if label != "ddp":
            assert list(map(float, row["95 %"].split(" to "))) == pytest.approx(ratio["interval_95"], rel=1e-3)
        for column, value in {
            "median s": summary["seconds_median"],
            "times ddp's": ratio["median"],
            "times none's": summary["ratio_to_floor"]["median"],
            "exposed s": summary["seconds_exposed"],
            "calls": max(traffic["calls"]),
            "MB sent": max(traffic["bytes_sent"]) / 1e6,
        }.items():
            assert float(row[column]) == pytest.approx(value, rel=1e-3), (label, column)
    (drawing,) = page.images()
    assert drawing.tag.endswith("svg")


def test_the_fastest_is_named_only_where_the_rounds_show_one(bench, tmp_path):
    def intervals(**by_label):
        def change(found):
            for label, interval in by_label.items():
                found["summary"][label]["ratio_to_ddp"]["interval_95"] = interval
                found["summary"][label]["seconds_median"] = sum(interval or [1]) / 2

        return edit(bench / "bench.json", change)

    intervals(bucketed=None)
    assert "Fastest" not in said(bench), "too few rounds"
    edit(bench / "bench.json", lambda found: found["summary"]["ddp"].update(seconds_median=1.0))
    intervals(bucketed=[0.97, 0.99], all_reduce=[1.3, 1.5], reduce_broadcast=[2, 3])
    assert said(bench).startswith("Fastest: bucketed (0.98 s), before ddp (1 s).")
    assert "bench. Fastest: bucketed" in report(tmp_path / "page.html", bench)
    intervals(bucketed=[0.9, 1.02])
    assert said(bench).startswith("Fastest: bucketed (0.96 s) and ddp (1 s) are too close to call.")
    norms = {label: [1.0] for label in ("ddp", "all_reduce", "reduce_broadcast")} | {"bucketed": [0.5]}
    edit(bench / "bench.json", lambda found: found.update(gradient_norm=norms))
    assert "warning: not ddp's average of the same batch, so not the same work: bucketed." in said(bench)
    assert said(bench).startswith("Fastest: ddp (1 s), before all_reduce")
    host = [{"seconds": 10.0, "process_cpu_seconds": 2.0, "host_cpu_percent": 100.0}] * 4
    ground = {"cores": 2, "ranks_on_host": 4}
    edit(bench / "bench.json", lambda found: found.update(host=host, environment=ground))
    assert "Fastest" not in said(bench)
    assert "the machine was busy: other programs took 60 % of its processors, so no sync is called the fastest" in said(
        bench
    )


def without(*labels):
    """A change to a bench: these were not measured."""

    def change(found):
        found["candidates"] = [one for one in found["candidates"] if one["label"] not in labels]
        for name in ("summary", "traffic"):
            found[name] = {label: value for label, value in found[name].items() if label not in labels}
        for summary in found["summary"].values():
            if "none" in labels:
                summary |= {"ratio_to_floor": None, "seconds_exposed": None}
            if "ddp" in labels:
                summary["ratio_to_ddp"] = None

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("ddp", "none"), "reduce_broadcast"),
        (without("none"), "times ddp&#39;s"),
        (without("ddp", "all_reduce", "bucketed", "reduce_broadcast"), "none"),
    ],
)
def test_a_bench_of_less_makes_a_page(change, words, bench, tmp_path):
    text = report(tmp_path / "page.html", edit(bench / "bench.json", change))
    assert words in text
    assert "<img" in text


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
def test_a_damaged_bench_is_one_sentence_that_names_it(damage, bench, tmp_path, capsys):
    edit(bench / "bench.json", damage)
    assert cli.main(["report", str(bench), "-o", str(tmp_path / "page.html")]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: \S*bench.json is damaged: [^\n]*\. Measure again\.\n", error)
    assert not (tmp_path / "page.html").exists()


def test_words_of_a_record_are_text_on_the_page_and_on_the_screen(bench, tmp_path):
    evil = "<script>alert(1)</script>\x1b.py:Sync"

    def rename(found):
        for candidate in found["candidates"]:
            if candidate["label"] == "bucketed":
                candidate["label"] = evil
        for name in ("summary", "traffic"):
            found[name][evil] = found[name].pop("bucketed")
        found["setting"] |= {"seconds_of": evil, "model": evil, "precision_note": evil}

    edit(bench / "bench.json", rename)
    text = report(tmp_path / "page.html", bench)
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    printed = bench_table(read_bench(bench)[1])
    assert "\x1b" not in text + printed
    assert printed.count("\\x1b") >= 4
    assert json.loads((bench / "bench.json").read_text())["setting"]["model"] == evil
