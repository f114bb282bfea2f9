"""What came from outside shows on a terminal and does nothing else."""

import json

import pytest
from report_records import write_run

from cos598d.commands.cli import main
from cos598d.data.samples import write_squad_sample
from cos598d.data.squad.read import read_squad
from cos598d.terminal.console import Console
from cos598d.terminal.printable import LONGEST, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain words, naïve 日本語 ∑", "plain words, naïve 日本語 ∑"),
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("two\nlines\r\ttab", r"two\x0alines\x0d\x09tab"),
        ("\x9b2J", r"\x9b2J"),  # the one-byte form of ESC [
        ("\ud800", r"\ud800"),
        ("cod\u202eexe.doc\u2066", r"cod\u202eexe.doc\u2066"),
        ("zero\u200bwidth\u2028line\U000e0041tag", r"zero\u200bwidth\u2028line\U000e0041tag"),
        ("", ""),
    ],
)
def test_what_a_terminal_would_obey_is_written_as_an_escape(text, shown):
    assert printable(text) == shown
    assert printable(text).isprintable()
    printable(text).encode("utf-8")


def test_a_text_of_several_lines_may_keep_them():
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def test_a_long_text_loses_its_middle_and_says_how_much():
    shown = printable("a" * LONGEST + "\x1b" * 70 + "z" * LONGEST)
    assert "aaa [2070 characters left out] zzz" in shown
    assert len(shown) < LONGEST + 50


def test_any_value_is_shown():
    assert printable(None) == "None"
    assert printable(["\x1b"]) == "['\\x1b']"


def test_compare_shows_what_a_record_says_and_obeys_none_of_it(tmp_path, capsys):
    folder = write_run(tmp_path / "a\x1brun", sync="\x1b[2Jevil\u202e", words="data\x07")
    for more in ([], ["--markdown"], ["--verbose"], ["--verbose", "--markdown"]):
        assert main(["compare", str(folder), *more]) == 0
        out = capsys.readouterr().out
        assert "x1b[2Jevil" in out.replace("\\", "")
        assert all(line.isprintable() for line in out.splitlines())


def test_an_error_names_what_was_given_and_obeys_none_of_it(tmp_path, capsys):
    assert main(["compare", str(tmp_path / "\x1b]0;gone\x07")]) == 1
    assert "\\x1b]0;gone\\x07" in capsys.readouterr().err


def test_score_names_strange_ids_and_obeys_none_of_them(tmp_path, capsys):
    dev = sorted(write_squad_sample(tmp_path).rglob("dev*1.1*.json"))[0]
    known = read_squad(dev).questions[0].identity
    (tmp_path / "answers.json").write_text(json.dumps({known: "one", "\x1b[2Jstrange": "two"}))
    assert main(["score", "--task", "squad", "--data", str(dev), "--predictions", str(tmp_path / "answers.json")]) == 0
    err = capsys.readouterr().err
    assert "\\x1b[2Jstrange" in err
    assert all(line.isprintable() for line in err.splitlines())


def test_a_rank_shows_what_came_from_outside_and_obeys_none_of_it(capsys):
    console = Console("rank 1: ", speaks=True)
    console.say("data from \x1b[2J")
    console.warn("lost \x07")
    shown = capsys.readouterr()
    assert shown.out == "rank 1: data from \\x1b[2J\n"
    assert shown.err == "warning: lost \\x07\n"
