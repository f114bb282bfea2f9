"""The report is made only from records: what it shows, and what it must not do."""

import ast
import html.parser
import math
import os
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from report_records import read, report, write_rows, write_run

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
from cos598d.commands.report import load_records
from cos598d.records.quantities import quantity
from cos598d.terminal.tables import markdown_text
from cos598d.tools.report.blocks import Figure, Table, as_html, as_markdown_page
from cos598d.tools.report.numbers import percent
from cos598d.tools.report.numbers import seconds as seconds_words
from cos598d.tools.report.page import build_page
from cos598d.tools.report.traffic import MOST_TENSORS
from cos598d.tools.report.wire import mean_rate, throughputs

REPORT = Path(__file__).resolve().parents[1] / "cos598d" / "tools" / "report"
EVIL = '<script>alert(1)<b> | `x` _y_ $z$ "q" &amp;'
SECTIONS = (
    "The runs",
    "Evaluation by epoch",
    "The first losses",
    "Seconds per iteration",
    "Where an iteration's time goes",
    "Loss by iteration and by time",
    "Timeline of one iteration",
    "Traffic, predicted and counted",
    "Network traffic over time",
    "Scaling",
    "Sweep: examples per step",
    "Sweep: rate",
    "Sweep: delay",
    "Environment",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One rank, two syncs on 2 and 4 ranks, the floor, and sweeps; one name and one data's words are hostile."""
    root = tmp_path_factory.mktemp("records")

    def times(mean):
        return [2 * mean, mean, 1.02 * mean, 0.98 * mean, mean]

    return [
        write_run(root / "one", ranks=1, sync="none", seconds=times(4)),
        write_run(root / "all_reduce-2", seconds=times(3), host=True),
        write_run(root / EVIL, ranks=4, seconds=times(2.5), wire_share=1.03),
        write_run(root / "ddp", ranks=4, sync="ddp", seconds=times(2.45), wire_share=0.98, shared=4),
        write_run(root / "floor", ranks=4, sync="none", seconds=times(1.5), wire_share=1),
        write_run(root / "slow", ranks=4, seconds=times(9), network={"rate": "100mbit", "delay": None}),
        write_run(root / "fast", ranks=4, seconds=times(3), network={"rate": "1gbit", "delay": None}),
        write_run(root / "far", ranks=4, seconds=times(5), network={"rate": "1gbit", "delay": "10ms"}),
        write_run(root / "near", ranks=4, seconds=times(3), network={"rate": "1gbit", "delay": "1ms"}),
        write_run(root / "large", batch=32, seconds=times(5)),
        write_run(root / "other", words=EVIL),
    ]


@pytest.fixture(scope="module")
def page(runs):
    return build_page(*load_records(runs))


@pytest.fixture(scope="module")
def text(page):
    return as_html(page)


def blocks(page, title, kind):
    section = next(section for section in page.sections if section.title == title)
    return [block for block in section.blocks if isinstance(block, kind)]


def captions(page, title):
    return " ".join(line for figure in blocks(page, title, Figure) for line in figure.caption)


class Elements(html.parser.HTMLParser):
    """Every element's tag and attributes, and all text between them."""

    def __init__(self, text):
        super().__init__()
        self.found, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


def test_every_section_has_something_and_the_lead_names_what_differs(page):
    assert tuple(section.title for section in page.sections) == SECTIONS
    assert all(section.blocks for section in page.sections)
    assert page.lead.startswith("11 runs that differ in sync, ranks, examples per step, rate, delay, data")


def test_hostile_names_stay_text_in_html_and_in_its_plots(text):
    elements = Elements(text)
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"script", "b", "img", "iframe", "link"}
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    assert elements.words.count(EVIL) > 1, "the name and the data's words are shown, letter by letter"
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert any("&lt;script&gt;" in plot for plot in plots)


def test_hostile_names_stay_text_in_markdown(page):
    text, _ = as_markdown_page(page, "report_files")
    assert "<script>" not in text
    assert "<b>" not in text
    assert markdown_text(EVIL) == r"&lt;script&gt;alert(1)&lt;b&gt; \| \`x\` \_y\_ \$z\$ " + '"q" &amp;amp;'
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert tables
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1, "no name opens a cell of its own"
    assert all(f"\n## {markdown_text(section)}\n" in text for section in SECTIONS)


def test_markdown_links_the_plots_next_to_it(runs, tmp_path):
    text = report(tmp_path / "a page.md", runs[1]).read_text()
    names = [unquote(name) for name in re.findall(r"\]\((a%20page_files/[^)]*)\)", text)]
    assert sorted(names) == sorted(f"a page_files/{path.name}" for path in (tmp_path / "a page_files").iterdir())
    for name in names:
        assert ElementTree.parse(tmp_path / name).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_the_page_loads_nothing_and_runs_nothing(text):
    assert "http" not in text
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    for _, attributes in Elements(text).found:
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#")


def test_ids_are_unique_and_references_meet_them(text):
    found = [attributes["id"] for _, attributes in Elements(text).found if "id" in attributes]
    assert len(found) == len(set(found))
    assert {place for pair in re.findall(r"url\(#([^)]*)\)|href=\"#([^\"]*)\"", text) for place in pair} <= {"", *found}


def test_the_page_is_readable_by_machines_and_on_a_phone(text):
    elements = Elements(text).found
    assert ("html", {"lang": "en"}) in elements
    (viewport,) = (found["content"] for tag, found in elements if tag == "meta" and found.get("name") == "viewport")
    assert "width=device-width" in viewport
    plots = [attributes for tag, attributes in elements if tag == "svg"]
    assert plots
    for attributes in plots:
        assert attributes["role"] == "img"
        assert attributes["aria-label"]
        assert "viewbox" in attributes
        assert not {"width", "height"} & set(attributes)
    assert len(plots) == sum(tag == "figure" for tag, _ in elements) == sum(tag == "figcaption" for tag, _ in elements)
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in elements if tag == "th")
    words = "".join(re.findall(r"<text[^>]*>([^<]*)</text>", text))
    assert "seconds per iteration" in words
    assert "speed-up over one rank" in words


def test_the_same_records_give_the_same_bytes(runs, tmp_path):
    here = report(tmp_path / "here.html", *runs[1:3]).read_bytes()
    # A set's order would differ in another process.
    program = "import sys, report_records; report_records.report(sys.argv[1], *sys.argv[2:])"
    words = [sys.executable, "-c", program, str(tmp_path / "there.html"), *map(str, runs[1:3])]
    environ = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(words, check=True, env=environ)
    assert (tmp_path / "there.html").read_bytes() == here


@pytest.mark.long
def test_a_pdf_has_pages_and_the_same_bytes_again(runs, tmp_path, monkeypatch):
    pytest.importorskip("weasyprint", exc_type=(ImportError, OSError))
    first = report(tmp_path / "a.pdf", runs[1]).read_bytes()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)  # an hour later
    second = report(tmp_path / "b.pdf", runs[1]).read_bytes()
    assert first.startswith(b"%PDF")
    assert first == second
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", first, re.DOTALL)
    objects = b"".join(zlib.decompress(stream) for stream in streams if stream[:1] == b"\x78") + first
    assert int(re.search(rb"/Count (\d+)", objects)[1]) > 1


def test_a_report_needs_no_torch():
    imports = {
        name.split(".")[0]
        for path in REPORT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    }
    assert "torch" not in imports
    program = "import sys, cos598d.tools.report.page, cos598d.commands.report; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=REPORT.parents[2])
    assert done.returncode == 0


def test_tables_on_the_screen_need_none_of_the_report_s_packages(runs):
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('pandas', 'matplotlib', 'jinja2', 'weasyprint')));"
        "import cos598d.tools.report.bench_table, cos598d.tools.report.lab, cos598d.tools.report.traffic_table;"
        "from cos598d.commands import cli; sys.exit(cli.main(['compare', *sys.argv[1:]]))"
    )
    words = [sys.executable, "-c", program, *map(str, runs[:2])]
    done = subprocess.run(words, check=False, cwd=REPORT.parents[2], capture_output=True, text=True)
    assert (done.returncode, "Sent per step" in done.stdout) == (0, True), done.stderr


def test_predicted_and_counted_bytes_are_compared_by_rank_and_by_epoch(page):
    tables = {block.rows[0][1]: block.rows for block in blocks(page, "Traffic, predicted and counted", Table)}
    rows, epochs = [row[:5] for row in tables["whose"]], tables["epoch"]
    assert rows[0] == ["run", "whose", "sent predicted", "sent counted", "off"]
    assert [EVIL, "rank 0 to rank 3, each", "2.000", "2.060", "+3.0%"] in rows
    # Four ranks read one interface, which counted the bytes of all of them once.
    assert ["ddp", "all 4 ranks", "8.000", "7.840", "-2.0%"] in rows
    assert ["floor", "rank 0 to rank 3, each", "0.000", "0.000", "-"] in rows
    assert [EVIL, "1", "5", "10.000 x 4", "10.300 x 4", "+3.0%"] in epochs
    assert ["ddp", "2", "5", "40.000", "39.200", "-2.0%"] in epochs
    assert ["floor", "1", "5", "0.000 x 4", "0.000 x 4", "-"] in epochs


def test_tensors_are_listed_by_bytes_and_small_ones_are_summed(tmp_path):
    folder = write_run(tmp_path / "run")
    path = folder / "communication.rank0.jsonl"
    sizes = [40, 700, *range(30, 10, -1)]
    rows = [
        call | {"tensor": f"t{size}", "bytes_sent": size, "bytes_received": 0, "payload_bytes": 2 * size}
        for call in read(path)[::2]
        for size in (*sizes, 40)  # one of them is sent twice
    ]
    write_rows(path, rows)
    tables = blocks(build_page(*load_records([folder])), "Traffic, predicted and counted", Table)
    (table,) = (table for table in tables if table.rows[0][0] == "tensor")
    assert table.rows[1:4] == [
        ["t700", "all_reduce", "gradients", "1", "1,400", "700", "0"],
        ["t40", "all_reduce", "gradients", "2", "160", "80", "0"],
        ["t30", "all_reduce", "gradients", "1", "60", "30", "0"],
    ]
    assert len(table.rows) == 1 + MOST_TENSORS + 1
    assert table.rows[-1][0] == f"{len(sizes) - MOST_TENSORS} more"
    assert sum(int(row[5].replace(",", "")) for row in table.rows[1:]) == sum(sizes) + 40


def test_traffic_over_time_is_in_bits_per_second_and_shares_of_the_link_s_rate(tmp_path):
    fast = write_run(tmp_path / "fast", ranks=4, wire_share=1, network={"rate": "100mbit", "delay": "0"})
    own = build_page(*load_records([fast]))
    # 2 MB in half a second are 32 Mbit/s.
    said = captions(own, "Network traffic over time")
    assert "32.0 Mbit/s sent on average (32 % of the link's" in said
    assert "16.0 Mbit/s received" in said
    (figure,) = blocks(own, "Network traffic over time", Figure)
    assert "link's rate" not in figure.svg, "three times as much as was carried: out of the picture"


def test_a_pause_and_samples_of_the_same_moment_have_no_rate(tmp_path):
    run = write_run(tmp_path / "run", ranks=4, wire_share=1, network={"rate": "40mbit", "delay": "0"})
    rows = read(run / "wire.rank0.jsonl")
    last = rows[-1]
    rows.append(last | {"kind": "interval", "seconds": last["seconds"] + 2, "bytes_sent": last["bytes_sent"] + 1000})
    rows.append(rows[-1] | {"seconds": last["seconds"]})  # a clock that goes back
    write_rows(run / "wire.rank0.jsonl", rows)
    runs, _ = load_records([run])
    (found,) = throughputs(runs)
    assert [value for value in found.sent if math.isnan(value)] == [pytest.approx(math.nan, nan_ok=True)]
    assert len(found.moments) == len(found.sent) + 1
    # 10 MB in 2.5 s and 1 kB in 2 s: 32 Mbit/s and next to nothing.
    assert mean_rate(found.moments, found.sent) == pytest.approx(8 * 10_001_000 / 4.5)
    (figure,) = blocks(build_page(runs), "Network traffic over time", Figure)
    assert "link's rate" in figure.svg


def test_an_interface_that_carried_nothing_has_a_figure_and_no_warning(tmp_path, recwarn):
    floor = write_run(tmp_path / "floor", ranks=4, sync="none", wire_share=1)
    assert "0 Mbit/s sent on average" in captions(build_page(*load_records([floor])), "Network traffic over time")
    assert not [warning for warning in recwarn if "identical" in str(warning.message)]


def test_exposed_communication_needs_a_floor_on_the_same_network(page):
    table = blocks(page, "Seconds per iteration", Table)[0]
    exposed = {row[0]: row[-1] for row in table.rows}
    assert exposed["ddp"] == "0.950 (39%)"
    assert exposed["slow"] == "-", "no floor was run over its links"


def test_scaling_is_relative_to_the_run_of_one_rank(page):
    (table,) = blocks(page, "Scaling", Table)
    assert ["all_reduce-2", "one", "all_reduce", "2", "3.00", "1.33", "67%"] in table.rows
    assert not [row for row in table.rows if row[0] in ("floor", "large")]
    said = captions(page, "Scaling")
    assert "share its cores" in said
    assert "Not shown to differ" not in said, "all are apart from one rank's 4 s"


@pytest.mark.parametrize(
    ("title", "ticks"), [("rate", {"100", "1000"}), ("delay", {"1", "10"}), ("examples per step", {"16", "32"})]
)
def test_a_sweep_has_only_runs_that_differ_in_one_setting(page, title, ticks):
    (figure,) = blocks(page, f"Sweep: {title}", Figure)
    words = set(re.findall(r"<text[^>]*>([^<]*)</text>", figure.svg))
    assert {word for word in words if word.isdigit() and int(word) >= min(map(int, ticks))} >= ticks
    assert {word for word in words if word.startswith(("all_reduce", "ddp"))} == {"all_reduce"}, "one series"


def test_the_timeline_separates_calls_during_backward_from_those_after_it(page):
    said = captions(page, "Timeline of one iteration")
    # Of 3 s: backward ends at 66 %; calls from 50 to 70 % and from 70 to 90 %.
    assert "3.00 s: backward ends at 1.98 s. 2 gradient calls: 0.480 s with at least one under way before that" in said
    assert "0.720 s after it" in said
    assert "2 gradient calls of torch's own, whose times are not recorded." in said


def test_numbers_have_three_significant_digits():
    values = {2.5649: "2.56 s", 0.06131: "0.0613 s", 0: "0 s", 12.34: "12.3 s", 1234.5: "1,234 s"}
    assert {value: seconds_words(value) for value in values} == values
    assert [percent(share) for share in (0, 0.001, 0.54)] == ["0 %", "under 1 %", "54 %"]
    assert [quantity(words) for words in ("1gbit", "10ms", 16, "fast", None)] == [1e9, 0.01, 16.0, None, None]
