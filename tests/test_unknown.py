"""Values that a record does not have are marked and not invented: bytes by another backend's formulas, seconds."""

import json

import pytest
from report_records import counted_run, write_run

from cos598d.records.conventions import ASSUMED_BYTES
from cos598d.tools.report.bench_table import remarks
from cos598d.tools.report.load import load_run
from cos598d.tools.report.table import comparison
from cos598d.tools.report.traffic_table import traffic_table


def edit(path, change):
    path.write_text("".join(json.dumps(change(json.loads(line))) + "\n" for line in path.read_text().splitlines()))


@pytest.fixture
def runs(tmp_path):
    """A run whose bytes were counted on the wire once, and one whose bytes are assumed."""
    known, assumed = (write_run(tmp_path / name, wire_share=1.01) for name in ("known", "assumed"))
    edit(assumed / "summary.json", lambda summary: summary | {"backend": "nccl", "bytes_are_assumed": True})
    edit(assumed / "config.json", lambda config: config | {"backend": "nccl"})
    return [known, assumed]


def test_tables_mark_bytes_of_another_backend_as_assumed(runs):
    said = f"Bytes of assumed are assumed: {ASSUMED_BYTES}."
    both = [load_run(folder) for folder in runs]
    assert said in comparison(both)
    assert "assumed" not in comparison(both[:1])
    assert said in traffic_table([counted_run(), counted_run(run="assumed", bytes_are_assumed=True)])
    assert "assumed" not in traffic_table([counted_run()])
    assert remarks({"bytes_are_assumed": True}) == [f"bytes are assumed: {ASSUMED_BYTES}"]
    assert remarks({}) == remarks({"bytes_are_assumed": False}) == []


def test_the_report_marks_assumed_bytes_and_takes_calls_without_times(runs):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    from cos598d.commands.report import load_records
    from cos598d.tools.report.page import Table, build_page

    for folder in runs:
        edit(folder / "communication.rank0.jsonl", lambda row: row | {"seconds": None, "started": None})
    page = build_page(*load_records(runs))
    notes = [block.caption for section in page.sections for block in section.blocks if isinstance(block, Table)]
    assert [note for note in notes if f"Bytes of assumed are assumed: {ASSUMED_BYTES}." in note]
