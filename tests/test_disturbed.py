"""Where other programs kept the machine busy, seconds are shown with a warning and not compared."""

import json

import pytest
from report_records import edit, report, write_rows, write_run
from scale_records import write_bench

from cos598d.commands.report import load_records
from cos598d.tools.report.bench_table import bench_table
from cos598d.tools.report.disturbed import DISTURBED, share_of_others
from cos598d.tools.report.lab import lab_page
from cos598d.tools.report.load import load_run
from cos598d.tools.report.table import comparison

CORES = 2


def with_host(folder, busy, own, **changes):
    """A run on 2 cores whose machine was busy to this share, and whose ranks used this share of it together."""
    write_run(folder, **{"ranks": 2, "seconds": [9.0, 9.0, 2.0, 2.0, 2.0]} | changes)
    edit(folder / "environment.json", lambda found: found.update(cores=CORES, device="cpu"))
    ranks = changes.get("ranks", 2)
    for rank in range(ranks):
        rows = [
            {"seconds": float(at), "iteration": at, "rss_bytes": 1, "host_cpu_percent": 100.0 * busy}
            | {"process_cpu_seconds": at * own * CORES / ranks}
            for at in range(6)
        ]
        write_rows(folder / f"host.rank{rank}.jsonl", rows)
    return folder


@pytest.mark.parametrize(
    ("ranks", "facts", "share"),
    [
        ([(1.0, 0.34)], {}, 0.83),
        ([(1.0, 0.9), (1.0, 0.9)], {}, 0.0),
        ([(0.6, 0.2)], {"cores": 16, "threads_per_rank": 2}, 0.0),  # others have cores enough of their own
        ([(0.6, 0.2)], {"cores": 16, "threads_per_rank": 16}, 0.5875),
        ([(0.6, 0.2)], {"cores": 16, "threads_per_rank": 16, "device": "a GPU"}, 0.0),
        ([(1.0, 2.0), (1.0, 0.5)], {"ranks_on_host": 1, "places": [{"node": "a"}, {"node": "b"}]}, 0.75),
        ([(1.0, 2.0), (1.0, 0.5)], {"ranks_on_host": 1}, None),
        ([(1.0, 1.0), None], {}, None),
        ([(1.0, 1.0)], {"cores": None}, None),
    ],
)
def test_the_share_of_others_is_the_busy_share_less_the_ranks_own(ranks, facts, share):
    environment = {"cores": CORES, "ranks_on_host": 2, "threads_per_rank": 2} | facts
    assert share_of_others(ranks, environment) == (share if share is None else pytest.approx(share))


@pytest.mark.long
def test_a_run_on_a_busy_machine_is_named_first_and_not_ranked(tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    from cos598d.tools.report.page import build_page

    quiet = [
        with_host(tmp_path / "ddp", 0.95, 0.9, sync="ddp"),
        with_host(tmp_path / "flat", 0.95, 0.9, sync="flat", seconds=[9.0, 9.0, 3.0, 3.0, 3.0]),
    ]
    busy = with_host(tmp_path / "busy", 1.0, 0.17, sync="ring", seconds=[9.0, 9.0, 1.0, 1.0, 1.0])
    alone = with_host(tmp_path / "alone", 1.0, 0.17, sync="none", ranks=1)
    words = "the machine was busy: other programs took 83 % of its processors during busy and alone"
    text = comparison([load_run(folder) for folder in (*quiet, busy, alone)])
    assert text.index(words) < text.index("ratio to ddp")
    assert [line.count(DISTURBED) for line in text.splitlines() if line.startswith("busy  ") and "1.000" in line] == [1]
    page = build_page(*load_records([*quiet, busy, alone]))
    assert page.answer.cautions[0].startswith(words)
    assert page.answer.sentences[0].startswith("ddp is the fastest of 2 with 2.00 s")
    assert page.answer.sentences[0].endswith("; not compared, because the machine was busy: busy.")
    scaling = next(section for section in page.sections if section.title == "Scaling").blocks
    assert ({row[5] for row in scaling[0].rows[1:]}, len(scaling)) == ({DISTURBED}, 1)
    only = build_page(*load_records([busy, with_host(tmp_path / "too", 1.0, 0.3, sync="flat")]))
    assert only.answer.sentences[0] == "The fastest run is unknown: the machine was busy during all runs."
    text = report(tmp_path / "page.html", busy, alone).read_text()
    assert "fastest of" not in text
    assert f'<td><a href="#answer">{DISTURBED}</a></td>' in text, "a cell leads to the warning"
    assert text.index('id="answer"') < text.index("so these times are disturbed, and not compared")


def test_a_page_says_why_an_impossible_speed_up_is_disturbed(tmp_path):
    pytest.importorskip("matplotlib")
    from cos598d.tools.report.page import build_page

    alone = with_host(tmp_path / "alone", 0.95, 0.9, ranks=1, sync="none", seconds=[9.0, 9.0, 6.0, 6.0, 6.0])
    page = build_page(*load_records([alone, with_host(tmp_path / "ddp", 0.95, 0.9, sync="ddp")]))
    table, warning = next(section for section in page.sections if section.title == "Scaling").blocks
    assert table.rows[1][5] == DISTURBED
    assert "ddp is 3.00 times as fast as alone, where at most 2.00 times is possible" in warning


def test_a_busy_machine_s_lab_and_bench_are_not_ranked(tmp_path):
    pytest.importorskip("matplotlib")
    from cos598d.tools.report.answer import answer_of

    for task, sync in (("task1", "none"), ("task2a", "gather_scatter"), ("task2b", "all_reduce"), ("task3", "ddp")):
        folder = with_host(tmp_path / "lab" / task, 1.0, 0.2 if task == "task3" else 0.95, sync=sync)
        edit(folder / "summary.json", lambda found, task=task: found.update(label=task))
    text = lab_page(tmp_path / "lab")
    assert "other programs took 80 % of its processors during task3" in text
    assert text.count(f"| {DISTURBED} |") == 4
    path = write_bench(tmp_path / "bench", syncs="gather_scatter,bucketed")
    record = json.loads((path / "bench.json").read_text())
    record["environment"] |= {"cores": CORES, "ranks_on_host": 4}
    record["host"] = [{"seconds": 10.0, "process_cpu_seconds": 2.0, "host_cpu_percent": 100.0}] * 4
    (path / "bench.json").write_text(json.dumps(record))
    words = "the machine was busy: other programs took 60 % of its processors, so no sync is called the fastest"
    assert bench_table(record | {"setting": record["setting"] | {"rounds": 7, "attach": "once"}}).count(words) == 1
    found = answer_of(*load_records([path]))
    assert words in found.cautions[0]
    assert found.sentences[0] == "The fastest sync in bench is unknown: the machine was busy."
