"""The book's pages: their blocks are filled, their pictures there, and the wrong files that they show fail as shown."""

import re
import sys

import pytest
from lesson_run import first_mistake
from programs import ROOT

from cos598d.tools.course import get_lesson
from cos598d.tools.exam.plugin import in_words

sys.path.insert(0, str(ROOT / "benchmarks"))

import book

FOLDER = ROOT / "docs" / "lessons"
PAGES = sorted(FOLDER.glob("*.md"))
WRONG = sorted((FOLDER / "wrong").glob("*.py.txt"))


def blocks(path):
    return [block for _, block in book.blocks(path.read_text(encoding="utf-8"), path.name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_is_filled(page):
    assert [each.line for each in blocks(page) if "\n<small>" not in each.inside] == []


def test_pictures_are_those_that_pages_show_and_blocks_draw_some_of_them():
    shown = [name for page in PAGES for name in re.findall(rf"\]\({book.FIGURES}/([\w.-]+)\)", page.read_text())]
    assert sorted(shown) == sorted(path.name for path in (FOLDER / book.FIGURES).glob("*"))
    drawn = [block.name for page in PAGES for block in blocks(page) if block.kind == book.PICTURE]
    assert drawn
    assert set(drawn) <= set(shown)


def comparable(words):
    """A finding without spaces and the numbers, which are drawn again each time, but with the file's line."""
    place, _, rest = words.partition(": ")
    rest = re.sub(r"\[[^]]*\]", "[]", rest)
    return place + re.sub(r"-?\d+([.,]\d+)*(e[+-]\d+)?|\s", "", rest)


def said_first(block, wrong):
    """A block's output from the sentence about the wrong file on."""
    lines = block.inside.partition("```text\n")[2].splitlines()
    begins = re.compile(rf"{re.escape(wrong.name)}( line \d+)?: (?!checking)")
    first = next(place for place, line in enumerate(lines) if begins.match(line))
    return "\n".join(lines[first:])


@pytest.mark.long(one_in=8)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_wrong_file_fails_as_its_page_shows(wrong):
    check = re.compile(rf"learn (\d+) --check {re.escape(str(wrong.relative_to(ROOT)))}")
    shown = [
        (get_lesson(int(found[1])), comparable(said_first(block, wrong)))
        for page in PAGES
        for block in blocks(page)
        if block.kind == book.OUTPUT and (found := check.fullmatch(" ".join(block.words)))
    ]
    assert shown, f"no page shows what the check says of {wrong.name}"
    for lesson, words in shown:
        mistake = first_mistake(lesson.number, wrong.read_text(), name=wrong.name)
        assert mistake is not None
        first = comparable(in_words(mistake, wrong).partition("\nexpected")[0])
        assert words.startswith(first)
