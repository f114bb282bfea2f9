"""A page is made only from records: every number on it is that of the JSON files, and nothing on it can do harm."""

import base64
import html.parser
import re
import statistics
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report_records import read, report, write_rows, write_run, write_unfinished

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
# Below the page's HTML, for tests of its numbers.
from cos598d.records.quantities import quantity
from cos598d.tools.report.cells import texts
from cos598d.tools.report.page import load_records, runs_in
from cos598d.tools.report.sections import run_sections, sweep_figures

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden_runs"
EVIL = '<script>alert(1)<b> $z$ "q" &amp;\x1b[31m'


class Page(html.parser.HTMLParser):
    """A page's elements with their attributes, its text, and the tables of each section as lists of rows."""

    def __init__(self, text):
        super().__init__()
        self.found, self.words, self.tables, self.title = [], [], {"": []}, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "table":
            self.tables[self.title].append([])
        elif tag == "tr":
            self.tables[self.title][-1].append([])

    def handle_endtag(self, tag):
        if tag == "h2":
            self.title = self.words[-1]
            self.tables[self.title] = []

    def handle_data(self, data):
        self.words.append(data)
        if self.found and self.found[-1][0] in ("th", "td") and data.strip():
            self.tables[self.title][-1][-1].append(data)

    def images(self):
        """The drawings of all figures."""
        sources = [attributes["src"] for tag, attributes in self.found if tag == "img"]
        return [ElementTree.fromstring(base64.b64decode(one.partition("base64,")[2])) for one in sources]


def tables_of(*folders):
    """The tables of each section of a page, without its figures, which take seconds to draw."""
    sections = run_sections(load_records([one for folder in folders for one in runs_in(folder)])[0])
    return {section.title: [texts(rows) for _, rows in section.tables if rows] for section in sections}


def by_name(table):
    """The cells by the first one of their row, and then by column."""
    head, *rows = table
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The page of three real runs: one process, a ring, and buckets between two hosts."""
    return Page(
        report(tmp_path_factory.mktemp("golden") / "page.html", *(GOLDEN / n for n in ("one", "ring", "hosts")))
    )


def near(cell):
    """A number as it was before it was rounded for a cell: to four digits, or to two if it is small."""
    value = float(cell.replace(",", ""))
    return pytest.approx(value, rel=6e-4 if abs(value) >= 1e-3 else 6e-2)


@pytest.mark.parametrize("name", ["one", "ring", "hosts"])
def test_every_number_is_that_of_the_files(golden, name):
    summary, rows = read(GOLDEN / name / "summary.json"), read(GOLDEN / name / "iterations.rank0.jsonl")
    own = {title: by_name(golden.tables[title][0])[name] for title in ("In short", "Time", "Traffic", "Memory")}
    seconds = [row["seconds"] for row in rows][2:]
    assert statistics.fmean(seconds) == near(own["Time"]["s per step"])
    assert statistics.median(seconds) == near(own["Time"]["median"])
    assert rows[0]["seconds"] == near(own["Time"]["first"])
    for phase in ("data", "forward", "backward", "sync", "clip", "step"):
        assert summary["phases"][f"seconds_{phase}"] == near(own["Time"][phase])
    alone = read(GOLDEN / "one" / "summary.json")["losses"]
    apart = max(abs(one - other) for one, other in zip(summary["losses"], alone, strict=True))
    cell = own["In short"]["losses differ from 1 rank by"]
    assert cell == "-" if name == "one" else apart == near(cell)
    for way, column in (("sent", "sent MB, by rank"), ("received", "received MB, by rank")):
        by_rank = {round(value / 1e6, 3) for value in summary[f"bytes_{way}_per_iteration"]}
        assert by_rank == {float(own["Traffic"][column].partition(" x ")[0])}
    if name != "one":
        counted = sum(summary["wire"]["bytes_sent_per_iteration"])
        predicted = sum(summary["wire"]["predicted_bytes_sent_per_iteration"])
        assert 100 * (counted / predicted - 1) == pytest.approx(float(own["Traffic"]["off, %"]), rel=1e-3)
    held = max(summary["memory"]["peak"], key=lambda held: sum(held.values()))
    (head, *memory) = golden.tables["Memory"][0]
    (row,) = (dict(zip(head, row, strict=True)) for row in memory if row[0] == name)
    assert {key: value / 1e6 for key, value in held.items()} == {key: near(row[key]) for key in held}
    (head, *epochs) = golden.tables["Epochs"][0]
    shown = [dict(zip(head, row, strict=True)) for row in epochs if row[0] == name]
    assert [epoch["validation_loss"] for epoch in summary["epochs"]] == [near(row["validation_loss"]) for row in shown]
    assert [epoch["acc"] for epoch in summary["epochs"]] == [near(row["acc"]) for row in shown]


def test_classes_have_their_scores_and_confusions(golden):
    last = read(GOLDEN / "ring" / "summary.json")["epochs"][-1]
    (head, *rows) = golden.tables["Classes"][1]
    for one, counts, row in zip(last["by_class"], last["confusion"], rows, strict=True):
        cells = dict(zip(head, row, strict=True))
        assert (cells["class"], int(cells["examples"])) == (one["class"], one["examples"])
        assert float(cells["recall"]) == pytest.approx(one["recall"], rel=1e-3)
        assert [int(cells[f"as {other['class']}"]) for other in last["by_class"]] == counts
        assert (cells["precision"] == "-") == (not any(row[int(one["class"])] for row in last["confusion"]))


def test_calls_are_summed_by_purpose_and_by_tensor(golden):
    purposes = read(GOLDEN / "ring" / "summary.json")["ledger"]["by_purpose"]
    (head, *rows) = golden.tables["Traffic"][1]
    shown = {row[1]: dict(zip(head, row, strict=True)) for row in rows if row[0] == "ring"}
    assert set(shown) == set(purposes)
    assert {name: int(row["calls"].replace(",", "")) for name, row in shown.items()} == {
        name: sums["calls"] for name, sums in purposes.items()
    }
    calls = read(GOLDEN / "hosts" / "communication.rank0.jsonl")
    (head, *rows) = golden.tables["Traffic"][3]
    iterations = {row["iteration"] for row in calls if row["iteration"]}
    sums = [sum(row["bytes_sent"] for row in calls if row["iteration"] == each) for each in iterations]
    assert sum(int(row[head.index("bytes_sent")].replace(",", "")) for row in rows) in sums


def test_tensors_are_listed_by_bytes_and_small_ones_are_summed(tmp_path):
    folder = write_run(tmp_path / "run")
    sizes = [40, 700, *range(30, 10, -1)]
    rows = [
        one | {"tensor": f"t{size}", "bytes_sent": size, "bytes_received": 0, "payload_bytes": 2 * size}
        for one in read(folder / "communication.rank0.jsonl")[::2]
        for size in (*sizes, 40)  # one of them is sent twice
    ]
    write_rows(folder / "communication.rank0.jsonl", rows)
    head, *rows = tables_of(folder)["Traffic"][-1]
    assert head == ["tensor", "call", "carries", "calls", "payload_bytes", "bytes_sent", "bytes_received"]
    assert rows[:2] == [
        ["t700", "all_reduce", "gradients", "1", "1,400", "700", "0"],
        ["t40", "all_reduce", "gradients", "2", "160", "80", "0"],
    ]
    assert rows[-1][0] == "10 more"
    assert sum(int(row[5]) for row in rows) == sum(sizes) + 40


def test_bytes_that_only_the_kernel_knows(tmp_path):
    nothing = {f"bytes_{way}_per_iteration": [0, 0] for way in ("sent", "received")}
    counters = {"bytes_from": "counters"} | nothing
    folders = [
        write_run(tmp_path / "ring", sync="ring", wire_share=1.02),
        write_run(tmp_path / "horovod", sync="horovod", wire_share=1.02, summary=counters),
        write_run(tmp_path / "nccl", sync="flat", summary={"bytes_are_assumed": True}),
    ]
    found = by_name(tables_of(*folders)["Traffic"][0])
    columns = ("sent MB, by rank", "all sent MB, predicted", "all sent MB, counted", "off, %", "bytes from")
    assert {name: [row[one] for one in columns] for name, row in found.items()} == {
        "ring": ["2 x 2", "2 x 2", "2.04 x 2", "2", "log"],
        "horovod": ["-", "-", "2.04 x 2", "-", "counters"],
        "nccl": ["2 x 2", "-", "-", "-", "log (assumed)"],
    }


def test_ratios_exposed_seconds_and_speed_up_are_against_runs_that_differ_in_nothing_else(tmp_path):
    def times(mean):
        return [2 * mean, mean, 1.02 * mean, 0.98 * mean, mean]

    slow = {
        "environment": {"network": {"rate": "100mbit"}, "ranks_on_host": 1, "places": [{"node": n} for n in "abcd"]}
    }
    folders = [
        write_run(tmp_path / "one", ranks=1, sync="none", seconds=times(4)),
        write_run(tmp_path / "two", seconds=times(3)),
        *(write_run(tmp_path / n, ranks=4, sync=n, seconds=times(s)) for n, s in (("ddp", 2.45), ("none", 1.5))),
        write_run(tmp_path / "ring", ranks=4, sync="ring", seconds=times(2.94)),
        write_run(tmp_path / "slow", ranks=4, sync="ddp", seconds=times(9), **slow),
    ]
    found = by_name(tables_of(*folders)["In short"][0])
    columns = ("times ddp's", "exposed s", "speed-up")
    assert {name: [row[one] for one in columns] for name, row in found.items()} == {
        "one": ["-", "-", "-"],
        "two": ["-", "-", "1.333"],
        "ddp": ["-", "0.95", "1.633"],
        "none": ["0.6122", "-", "disturbed (warning)"],  # 2 cores cannot be 2.7 times as fast
        "ring": ["1.2", "1.44", "1.361"],
        "slow": ["-", "-", "0.4444"],
    }


def test_an_unfinished_run_has_the_figures_of_its_rows(tmp_path):
    page = Page(report(tmp_path / "page.html", write_unfinished(tmp_path / "run")))
    said = " ".join(page.words)
    assert (
        "run ended after 5 iterations without an error (killed, or its host is down). Its figures are of those" in said
    )
    assert by_name(page.tables["Time"][0])["run"]["s per step"] == "1.1"
    assert by_name(page.tables["Attempts"][0])["run"]["to_iteration"] == "5"


@pytest.mark.parametrize(
    ("axis", "values"),
    [("rate", ("100mbit", "1gbit")), ("delay", ("1ms", "10ms")), ("learning_rate", (1e-4, 1e-3)), ("ranks", (2, 3))],
)
def test_a_sweep_has_a_figure_of_what_its_setting_changes(axis, values, tmp_path):
    """A line through the mean seconds of each value."""
    for number, value in enumerate(values):
        more = {"ranks": value} if axis == "ranks" else {"config": {axis: value}}
        more = {"environment": {"network": {axis: value}}} if axis in ("rate", "delay") else more
        write_run(tmp_path / "sweep" / str(number), seconds=[9.0, 9.0] + [1.0 + number] * 3, **more)
    runs, _ = load_records(runs_in(tmp_path / "sweep"))
    (figure,) = (figure for draw in sweep_figures(runs) if (figure := draw()) is not None)
    (line,) = figure.axes[0].containers
    assert list(line[0].get_xdata()) == [quantity(value) for value in values]
    assert list(line[0].get_ydata()) == [1.0, 2.0]
    assert figure.axes[-1].get_xlabel() == axis


def test_names_stay_text_and_figures_are_xml(tmp_path):
    odd = {"epochs": [{"epoch": 1, "loss": 0.5, EVIL: 0.5}]}  # a metric
    folders = [write_run(tmp_path / EVIL), write_run(tmp_path / "b", sync=EVIL, summary={"data": EVIL} | odd)]
    rows = read(folders[0] / "communication.rank0.jsonl")
    write_rows(folders[0] / "communication.rank0.jsonl", [row | {"tensor": EVIL} for row in rows])
    text = report(tmp_path / "page.html", *folders)
    page = Page(text)
    assert not {tag for tag, _ in page.found} & {"script", "b", "iframe", "link"}
    assert not [name for _, attributes in page.found for name in attributes if name.startswith("on")]
    assert "".join(page.words).count(EVIL.replace("\x1b", "\\x1b")) > 3, "it is shown, letter by letter"
    assert "\x1b" not in text
    assert len(page.images()) >= 4


def test_the_page_loads_nothing_and_is_readable_by_machines(golden, tmp_path):
    text = report(tmp_path / "page.html", GOLDEN / "one")
    assert "http" not in re.sub(r'src="data:image/svg[^"]*"', "", text)
    assert "@import" not in text
    images = golden.images()
    assert all(one.tag.endswith("svg") for one in images)
    assert all(
        link.startswith("#") for one in images for each in one.iter() for link in each.attrib.values() if "://" in link
    )
    for tag, attributes in golden.found:
        assert attributes.get("href", "#").startswith("#")
        assert attributes.get("src", "data:image/svg+xml").startswith("data:image/svg+xml")
        assert tag != "img" or attributes["alt"]
        assert tag != "th" or attributes["scope"] in ("col", "row")
    ids = [attributes["id"] for _, attributes in golden.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert any(attributes.get("content", "").startswith("width=device-width") for _, attributes in golden.found)


def test_a_page_needs_no_torch_and_the_screen_s_tables_none_of_the_report_s_packages(tmp_path):
    program = (
        "import sys; sys.modules.update(dict.fromkeys({0}))\n"
        "from cos598d.commands import cli; code = cli.main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    )
    for packages, words in (
        (("torch",), ["report", str(GOLDEN / "one"), "-o", str(tmp_path / "page.html")]),
        (
            ("pandas", "matplotlib", "jinja2", "scipy.stats"),
            ["compare", "--verbose", str(GOLDEN / "one"), str(GOLDEN / "ring")],
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program.format(packages), *words],
            check=False,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == ("torch" in packages), done.stderr
