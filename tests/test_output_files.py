"""A file that a flag names goes into a folder that is there, for every command: it is told before any work is done."""

import re

import pytest
from report_records import write_run
from scale_records import write_bench

from cos598d.commands import cli

COMMANDS = {
    "report -o": ["report", "RUN", "-o", "nosuch/report.html"],
    "scale -o": ["scale", "BENCH", "-o", "nosuch/scale.svg"],
    "scale --json": ["scale", "BENCH", "--json", "nosuch/scale.json"],
    "bench --json": ["bench", "--sync", "flat", "--rounds", "1", "--json", "nosuch/bench.json"],
    "check --json": ["check", "flat", "--json", "nosuch/card.json"],
    "new": ["new", "nosuch/mine.py"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_folder_is_told_and_not_made(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    places = {"RUN": str(write_run(tmp_path / "run")), "BENCH": str(write_bench(tmp_path / "bench"))}
    words = [places.get(word, word) for word in COMMANDS[name]]
    file = next(word for word in words if word.startswith("nosuch/"))
    assert cli.main(words) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert f"{file} cannot be written" in told.err
    assert re.search(
        r": there is no folder nosuch\. Make it first\.|\(No such file or directory\)\. Give another path\.", told.err
    )
    assert not (tmp_path / "nosuch").exists()
    assert told.out == ""


def test_a_folder_where_a_file_is_meant_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.html").mkdir()
    assert cli.main(["report", str(write_run(tmp_path / "run")), "-o", "x.html"]) == 2
    assert capsys.readouterr().err == "error: -o x.html is a folder. Give a file's name.\n"
