"""Reports of short, damaged or absent records, without a package or with a wrong name: a page, or one sentence."""

import importlib
import re

import pytest
from report_records import read, report, write, write_rows, write_run

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
from cos598d.commands import cli


@pytest.fixture
def refused(tmp_path, capsys):
    """refused(*words) -> the one sentence with which `report` refuses, and writes nothing; or another command."""

    def _refused(*words, command="report", code=1):
        output = ["-o", tmp_path / "report.html"] if command == "report" and "-o" not in words else []
        assert cli.main([command, *map(str, (*words, *output))]) == code
        error = capsys.readouterr().err.rpartition("wrote ")[-1].partition("error: ")[2]
        assert error.count("\n") == 1
        assert not (tmp_path / "report.html").exists()
        return error

    return _refused


@pytest.mark.parametrize("seconds", [[], [1.0], [1.0, 2.0]])
def test_a_run_of_few_iterations_or_none_makes_a_page(seconds, tmp_path):
    text = report(tmp_path / "report.html", write_run(tmp_path / "few", seconds=seconds))
    assert "<title>cos598d report: few</title>" in text
    assert ">nan<" not in text.lower()


def test_runs_of_one_name_get_their_folders_names_and_none_is_given_twice(tmp_path, refused):
    text = report(tmp_path / "page.html", write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run"))
    assert ">a/run<" in text
    assert ">b/run<" in text
    assert "is given twice. Give each folder once." in refused(tmp_path / "a" / "run", tmp_path / "a" / "." / "run")


def cut(path):
    path.write_text(path.read_text()[:-9] + "\n")


def not_json(path):
    path.write_text("{\n")


def no_text(path):
    path.write_bytes(b"\xff\xfe\x00\n")


def other_row(path):
    write_rows(path, [{"iteration": "first"}])


def missing(path):
    path.unlink()


def folder_there(path):
    path.unlink()
    path.mkdir()


def changed(**values):
    def change(path):
        found = read(path) | values
        write(path, found)

    return change


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *[("summary.json", damage) for damage in (cut, no_text, not_json, folder_there)],
        *[
            ("summary.json", changed(**{field: value}))
            for field, value in {
                "losses": ["low"],
                "world_size": 3,
                "memory": {"peak": 3},
                "wire": {"bytes_sent_per_iteration": 0},
                "epochs": [{"epoch": 1, "by_class": [{"class": 3}]}],
                "phases": {"seconds_sync": "long"},
                "bytes_from": "hearsay",
                "iterations": 10**400,
            }.items()
        ],
        *[("environment.json", damage) for damage in (cut, missing, changed(cores="two"))],
        *[("config.json", damage) for damage in (cut, missing)],
        *[("iterations.rank0.jsonl", damage) for damage in (cut, not_json, no_text, other_row)],
        *[("communication.rank0.jsonl", damage) for damage in (cut,)],
        *[("host.rank1.jsonl", damage) for damage in (cut, other_row)],
    ],
)
def test_a_damaged_record_is_named_in_one_sentence(name, damage, tmp_path, refused):
    folder = write_run(tmp_path / "run", summary={"sync": "ring"})
    damage(folder / name)
    error = refused(folder)
    assert name in error
    assert len(re.findall(r"\. [A-Z]", error)) == 1, "what is wrong, and what to do"
    if not name.endswith("rank0.jsonl"):
        assert name in refused(folder, command="compare")


@pytest.mark.parametrize("package", ["pandas", "jinja2", "matplotlib"])
def test_a_missing_package_is_named_with_what_to_install(package, tmp_path, monkeypatch, refused):
    really = importlib.import_module

    def without(name, *more):
        if name == package:
            raise ImportError(name)
        return really(name, *more)

    monkeypatch.setattr(importlib, "import_module", without)
    assert f"needs {package}, which is not installed. Run `pip install -e '.[report]'`" in refused(
        write_run(tmp_path / "r")
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "nothing does not exist. Give the folder of a finished run."),
        ("a file", "a file is damaged: Input data was truncated. Measure again."),
        ("empty", "empty has neither summary.json nor bench.json. Give the folder of a finished run, or of a bench."),
    ],
)
def test_what_is_no_record_is_refused_by_its_kind(name, words, tmp_path, refused):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").write_text("")
    assert words in refused(tmp_path / name)
