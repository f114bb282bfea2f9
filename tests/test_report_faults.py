"""Reports of short or damaged records, without a package or with a wrong name: a page or one error."""

import importlib
import json
import os

import pytest
from recorded import rows_of
from report_records import report, write_rows, write_run

from cos598d.errors import UsageError, UserError

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
from cos598d.commands.report import load_records
from cos598d.tools.report.load import load_run
from cos598d.tools.report.page import build_page


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "one", ranks=1, sync="none")


@pytest.mark.parametrize("seconds", [[], [1.0], [1.0, 2.0]])
def test_a_run_of_few_iterations_or_none_makes_a_page(seconds, run, tmp_path):
    assert "<title>cos598d report: one, " in report(tmp_path / "one.html", run).read_text()
    few = write_run(tmp_path / "few", seconds=seconds)
    assert "few" in report(tmp_path / "report.html", few, run).read_text()
    assert "nan" not in report(tmp_path / "alone.html", few).read_text().lower()


def test_a_gpu_s_gauges_are_next_to_the_host_s(tmp_path):
    folder = write_run(tmp_path / "run", host=True)
    path = folder / "host.rank0.jsonl"
    rows = rows_of(path)
    write_rows(path, [row | {"gpu_memory_bytes": 5e9, "gpu_utilization_percent": 80} for row in rows])
    other = write_run(tmp_path / "other", host=True)
    (section,) = (s for s in build_page(*load_records([folder, other])).sections if s.title.startswith("Where"))
    (table,) = (block.rows for block in section.blocks if "GPU busy" in getattr(block, "rows", [[]])[0])
    assert [row[-2:] for row in table[1:]] == [["50 %", "80 %"], ["50 %", "-"]]


def test_records_without_times_of_phases_have_no_timeline_but_a_reason(tmp_path):
    page = build_page(*load_records([write_run(tmp_path / "old", old=True)]))
    (line,) = next(section for section in page.sections if section.title == "Timeline of one iteration").blocks
    assert "records of old have no times of phases" in line


def test_runs_of_one_name_get_their_folders_names(tmp_path):
    found, _ = load_records([write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")])
    assert [run.name for run in found] == ["a/run", "b/run"]
    with pytest.raises(UserError, match="given twice"):
        load_records([tmp_path / "a" / "run", tmp_path / "a" / "run"])


def cut(path):
    path.write_text(path.read_text()[:-9])


def not_json(path):
    path.write_text("{")


def no_text(path):
    path.write_bytes(b"\xff\xfe\x00")


def other_row(path):
    write_rows(path, [{"iteration": "first"}])


def wrong_span(path):
    rows = rows_of(path)
    write_rows(path, [row | {"spans_seconds": [["lunch", 0, 1]]} for row in rows])


def missing(path):
    path.unlink()


def pipe(path):
    """Which nobody writes to: to read it is to wait for ever."""
    path.unlink()
    os.mkfifo(path)


def huge(path):
    """A file that takes no room on the disk, and would take all of the memory."""
    os.truncate(path, 4 << 30)


def many_values(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"more": []})[:-2] + "[]," * 5_000_000 + "[]]}\n")


def folder_there(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *[("summary.json", damage) for damage in (cut, no_text, missing, pipe, folder_there, many_values)],
        ("environment.json", cut),
        *[(f"{name}.rank0.jsonl", pipe) for name in ("iterations", "communication")],
        *[("iterations.rank1.jsonl", damage) for damage in (cut, not_json, no_text, other_row, missing)],
        *[("communication.rank0.jsonl", damage) for damage in (cut, other_row, missing)],
        ("iterations.rank0.jsonl", wrong_span),
        ("host.rank0.jsonl", cut),
        *[("wire.rank0.jsonl", damage) for damage in (cut, not_json, other_row)],
        *[(name, huge) for name in ("summary.json", "config.json", "environment.json")],
        *[(f"{name}.rank0.jsonl", huge) for name in ("iterations", "communication", "host", "wire")],
    ],
)
def test_a_damaged_record_is_named_in_one_sentence(name, damage, tmp_path):
    folder = write_run(tmp_path / "run", host=True, wire_share=1)
    damage(folder / name)
    with pytest.raises(UserError) as error:
        report(tmp_path / "report.html", folder)
    assert name in str(error.value)
    assert str(error.value).count(". ") == 1, "what is wrong, and what to do"
    assert not (tmp_path / "report.html").exists()
    if damage in (huge, many_values):
        assert "MiB" in str(error.value) or "more than 4000000 values" in str(error.value)
    if name == "summary.json":
        with pytest.raises(UserError, match=name):
            load_run(folder, unfinished=True)


@pytest.mark.parametrize(
    ("package", "error", "words"),
    [
        *(
            (name, ImportError(name), rf"needs {name}, .*pip install -e '\.\[report\]'` in the project's folder\.$")
            for name in ("pandas", "jinja2", "matplotlib", "weasyprint")
        ),
        ("weasyprint", OSError("cannot load library 'libpango-1.0-0'"), "apt-get install libpango"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(package, error, words, run, tmp_path, monkeypatch):
    really = importlib.import_module

    def without(name, *more):
        if name == package:
            raise error
        return really(name, *more)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(UserError, match=words):
        report(tmp_path / "report.pdf", run)


def test_an_unknown_form_is_refused(run, tmp_path):
    with pytest.raises(UsageError, match=r"ends in \.html, \.pdf or \.md"):
        report(tmp_path / "report.docx", run)


def test_a_page_that_cannot_be_written_is_one_sentence(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        report(tmp_path / "file" / "report.html", run)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "does not exist"),
        ("a file", "a file is damaged: Input data was truncated. Measure again"),
        ("empty", "has neither summary.json nor bench.json. Give the folder of a finished run, or of a bench."),
    ],
)
def test_what_is_no_record_is_refused_by_its_kind(name, words, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").write_text("")
    with pytest.raises(UserError, match=words):
        report(tmp_path / "report.html", tmp_path / name)


def test_rows_of_another_run_than_the_summary_s_are_refused(run, tmp_path):
    other = write_run(tmp_path / "other", ranks=1, sync="none", losses=[0.5, 0.4, 0.3, 0.2, 0.1])
    (other / "iterations.rank0.jsonl").rename(run / "iterations.rank0.jsonl")
    with pytest.raises(UserError, match=r"not have the losses of summary.json, so these files are not of one"):
        load_records([run])


def test_an_ending_in_capitals_means_the_same_kind_of_page(tmp_path):
    run = write_run(tmp_path / "run")
    assert report(tmp_path / "page.HTML", run).read_text().startswith("<!DOCTYPE html>")
    assert report(tmp_path / "page.MD", run).read_text().startswith("# ")
