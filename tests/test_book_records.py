"""The book's blocks: their commands run and fill them completely or not at all, and a wrong block is one sentence.
Imports: the script that fills them, whose commands take minutes."""

import re
import sys

import pytest
from programs import ROOT

from cos598d.errors import UserError

sys.path.insert(0, str(ROOT / "benchmarks"))

import book

END = "<!-- book: end -->\n"
HINT = "<!-- book: output learn 3 --hint 1 -->\n"
BEFORE, AFTER = "# Lesson 3\n\nIt says:\n\n", "\nand ends.\n"
PICTURE = '<!-- book: picture ring.svg picture --sync ring --world_size 2 -o alt="a [ring] of two" -->\n'
MADE_BY = r"\n<small>Made by `cos598d {}` on \d{{4}}-\d\d-\d\d, \d+ cores of \S.*, torch \d+\.\d+.*\.</small>\n"


@pytest.fixture
def page(tmp_path):
    """page(text, *words): write a page into its own folder, and run the book on it; its path, and the exit code."""

    def _page(text, *words):
        path = tmp_path / "lessons" / "lesson3.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path, book.main([str(path), *words])

    return _page


@pytest.fixture
def made(monkeypatch):
    """The blocks whose commands would run."""
    asked = []
    monkeypatch.setattr(book, "make", lambda block, folder: asked.append(block))
    return asked


@pytest.mark.long
def test_blocks_are_filled_and_filling_them_again_changes_nothing(page):
    writes = "<!-- book: output\n     new 'a file.py' -->\n"  # would be refused where the file is already
    path, code = page(f"{BEFORE}{HINT}{END}\n{writes}{END}{PICTURE}{END}{AFTER}")
    assert code == 0
    text = path.read_text()
    assert text.startswith(f"{BEFORE}{HINT}\n```text\nHint 1 of 3")
    assert text.endswith(f"</small>\n\n{END}{AFTER}")
    assert f"{writes}\n```text\nwrote a file.py" in text
    assert re.search(MADE_BY.format("learn 3 --hint 1"), text)
    assert re.search(MADE_BY.format("new 'a file.py'"), text)
    assert "\n![a \\[ring\\] of two](figures/ring.svg)\n\n<small>Made by `cos598d picture" in text
    assert (path.parent / "figures" / "ring.svg").read_text().startswith("<svg")
    # The hint's number is kept in the command's folder: the second filling gets the same hint.
    assert page(text)[1] == 0
    assert path.read_text() == text


def test_a_failed_command_leaves_its_block_and_is_named_at_the_end(page, capsys):
    broken = "<!-- book: output learn 77 -->\nwhat stood here\n"
    path, code = page(f"{broken}{END}{HINT}{END}<!-- book: output exit=2 learn 77 -->\n{END}")
    assert code == 1
    text = path.read_text()
    assert text.startswith(f"{broken}{END}{HINT}\n```text\nHint 1")
    assert text.count("```text") == 2, "the exit code that a comment names is expected"
    said = capsys.readouterr().out.splitlines()
    assert said[-2].startswith("not filled")
    assert re.fullmatch(r"lesson3.md line 1: cos598d learn 77: .* exit code 2, not \[0, 1\], .*77.*", said[-1])


BAD = {
    "no end": HINT,
    "nested": f"{HINT}{HINT}{END}",
    "an end alone": f"text\n{END}",
    "unknown kind": f"<!-- book: film learn 3 -->\n{END}",
    "no command": f"<!-- book: output -->\n{END}",
    "an open quotation mark": f'<!-- book: output new "a b -->\n{END}',
    "an open comment": f"<!-- book: output learn 3\n{END[:-4]}",
    "text after it": f"{HINT.strip()} more\n{END}",
    "a name that leaves": f'<!-- book: picture ../x.svg alt="a" picture -o -->\n{END}',
    "another form": f'<!-- book: picture x.png alt="a" picture -o -->\n{END}',
    "no words for a picture": f"<!-- book: picture x.svg picture -o -->\n{END}",
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_block_is_a_sentence_and_nothing_is_run(name, page, made, tmp_path):
    text = f"{BAD[name]}{AFTER}"
    with pytest.raises(UserError) as error:
        page(text)
    assert re.match(r"lesson3.md line \d+: this (is no block|comment)", str(error.value))
    assert "\n" not in str(error.value)
    assert (tmp_path / "lessons" / "lesson3.md").read_text() == text
    assert made == []
