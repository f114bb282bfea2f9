"""The linter of prose: what it finds in documents and in the help of commands, and what it leaves alone."""

import argparse
import importlib.util
import sys
from pathlib import Path

import pytest

PROSE = Path(__file__).resolve().parents[1] / "scripts" / "prose.py"
spec = importlib.util.spec_from_file_location("prose", PROSE)
prose = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prose)

LONG = "The " + "very " * 40 + "end."


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("The rank stands in the table.", "page:1: 'stands in'"),
        ("One line.\n\nIt takes 2 s an iteration beside a bench.", "page:3: 'beside'"),
        ("It takes 2 s an iteration.", "'s an iteration'"),
        ("The report says it.", "'report says'"),
        (LONG, "page:1: 42 words in a sentence"),
    ],
)
def test_what_breaks_a_rule_is_named_with_its_line(text, named):
    assert any(named in fault for fault in prose.faults("page", text)), prose.faults("page", text)


@pytest.mark.parametrize("text", ["```\nbeside\n```", "| beside |", "# Beside", "`beside` is code."])
def test_code_tables_and_headings_are_not_prose(text):
    assert prose.faults("page", text) == []


def test_a_few_long_sentences_are_allowed():
    assert prose.faults("page", "A short one. " * 20 + LONG) == []


def test_only_a_long_line_of_prose_is_named():
    long = "word " * 80
    assert [*prose.long_lines("page", f"short\n{long}")] == ["page:2: 400 characters in a line, which may have 360"]
    assert [*prose.long_lines("page", f"```\n{long}\n```\n| {long} |\n[a]({long})")] == []


def test_help_is_read_in_commands_of_commands_too():
    parser = argparse.ArgumentParser(description="what it does")
    parser.add_subparsers().add_parser("one").add_argument("--flag", help="a flag beside others")
    assert "a flag beside others" in list(prose.helps_of(parser))


def test_a_fault_fails_the_linter(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("It is beside it.\n")
    monkeypatch.setattr(sys, "argv", ["prose.py", "--check", str(page)])
    assert prose.main() == 1
    assert "page.md:1: 'beside'" in capsys.readouterr().out
    page.write_text("It is next to it.\n")
    assert prose.main() == 0


def test_help_of_commands_is_checked():
    name, text = next(prose.help_texts())
    assert name.endswith(" --help")
    assert "run folder" in text or "--" in text or len(text) > 500
