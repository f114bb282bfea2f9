"""Every table of bytes names their source: the ledger, or the kernel's counters for a library without a log."""

import json

import pytest
from report_records import write_run
from scale_records import write_bench

from cos598d.errors import UserError
from cos598d.tools.report.benches import load_bench
from cos598d.tools.report.blocks import Table
from cos598d.tools.report.load import load_run, load_run_as
from cos598d.tools.report.page import build_page
from cos598d.tools.report.table import comparison
from cos598d.tools.report.traffic import WAYS, counted_traffic, epoch_rows
from cos598d.tools.report.traffic_table import traffic_rows


def change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_runs(folder, **changes):
    """A run whose bytes are in the ledger, and one that only the kernel counted, on an interface of both ranks."""
    known = write_run(folder / "ring", sync="ring", wire_share=1.02, shared=2)
    silent = write_run(folder / "horovod", sync="horovod", wire_share=1.02, shared=2)
    nothing = {f"bytes_{way}_per_iteration": [0, 0] for way in ("sent", "received")}
    change(silent / "summary.json", bytes_from="counters", calls_per_iteration=0, **nothing, **changes)
    change(known / "summary.json", bytes_from="ledger")
    return known, silent


def test_compare_shows_the_source_and_no_formula_for_counters(tmp_path):
    head, known, silent = traffic_rows([load_run(folder) for folder in write_runs(tmp_path)])
    assert head[-2:] == ["counted MB/it", "bytes from"]
    assert known[1:] == ["2", "2", "2.000", "2.000 x 2", "2.000 x 2", "4.080 (ranks 0, 1)", "log"]
    assert silent[1:] == ["-", "-", "-", "-", "-", "4.080 (ranks 0, 1)", "counters"]
    assert "Bytes from: the communication log (log)" in comparison([load_run(tmp_path / "ring")])


def test_predicted_and_counted_bytes_are_of_the_same_iterations(tmp_path):
    folder = write_run(tmp_path / "zero1", sync="zero1", wire_share=1.5)
    # Bytes at the end of an epoch weigh more in a mean without the warm-up.
    sent = {f"{how}_bytes_{way}": [n, n] for how, n in (("predicted", 1000), ("counted", 1020)) for way in WAYS}
    epochs = [epoch | sent for epoch in json.loads((folder / "summary.json").read_text())["epochs"]]
    change(folder / "summary.json", bytes_from="ledger", epochs=epochs)
    assert [one.sent[1] / one.sent[0] for one in counted_traffic([load_run_as(folder, "z")])] == [1.02] * 2
    epochs[0] = epochs[0] | {name: [*by_rank, 7] for name, by_rank in sent.items()}
    change(folder / "summary.json", epochs=epochs)
    assert [one.sent[1] / one.sent[0] for one in counted_traffic([load_run_as(folder, "z")])] == [1.5] * 2


def test_counters_of_a_host_s_loopback_are_in_no_table(tmp_path):
    _, silent = write_runs(tmp_path)
    wire = json.loads((silent / "summary.json").read_text())["wire"]
    change(silent / "summary.json", wire=wire | {"interface": "lo"})
    run = load_run_as(silent, "horovod")
    assert traffic_rows([run.summary])[1][-2:] == ["-", "counters"]
    assert counted_traffic([run]) == []
    assert epoch_rows([run]) == []
    change(silent / "summary.json", wire=wire | {"interface": "own sockets", "ranks_by_interface": [[0], [1]]})
    run = load_run_as(silent, "horovod")
    assert traffic_rows([run.summary])[1][-2:] == ["4.080 x 2", "own sockets"]
    assert not any(one.has_headers for one in counted_traffic([run]))


def test_the_page_shows_the_source_and_no_formula_for_counters(tmp_path):
    page = build_page([load_run_as(folder, folder.name) for folder in write_runs(tmp_path)])
    (blocks,) = (section.blocks for section in page.sections if section.title == "Traffic, predicted and counted")
    tables = [block for block in blocks if isinstance(block, Table)]
    assert [row[-1] for row in tables[0].rows] == ["bytes from", "log", "counters"]
    (rows,) = (table.rows for table in tables if table.rows[0][1] == "whose")
    predicted = {row[0]: row[2:5] for row in rows}
    assert predicted["ring"] == ["4.000", "4.080", "+2.0%"]
    assert predicted["horovod"] == ["-", "4.080", "-"]
    assert tables[-1].rows[-1][3:] == ["-", "20.400", "-"], "by epoch"


def test_a_bench_names_the_candidates_with_unknown_bytes(tmp_path):
    path = write_bench(tmp_path / "bench") / "bench.json"
    found = json.loads(path.read_text())
    silent = next(one for one in found["candidates"] if one["label"] == "bucketed")
    silent["bytes_from"] = "counters"
    path.write_text(json.dumps(found))
    bench = load_bench(path, "bench")
    head, *rows = next(rows for _, rows in bench.tables if "MB sent" in rows[0])
    cells = {row[0]: row[head.index("calls") : head.index("MB sent") + 1] for row in rows}
    assert cells["bucketed"] == ["-", "-"]
    assert "-" not in cells["ddp"]
    assert any(remark.startswith("bytes unknown") and "bucketed" in remark for remark in bench.remarks)
    assert bench.candidate("bucketed").bytes_sent is None


def test_an_unknown_source_is_a_damaged_record(tmp_path):
    _, silent = write_runs(tmp_path)
    change(silent / "summary.json", bytes_from="hearsay")
    with pytest.raises(UserError, match="bytes_from"):
        load_run(silent)
