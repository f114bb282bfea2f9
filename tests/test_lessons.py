"""Every lesson's wrong files are refused in the words that tell the mistake, at its line; right files pass. Calls the
lessons' own tests (tests/lesson_run.py), so that one server of ranks serves all files."""

import importlib
from pathlib import Path

import pytest
from lesson_run import first_mistake, verdict

from cos598d.tools.course import NUMBERS, get_lesson

SHORT = {"TMPDIR": "/tmp"}  # a socket's path may have 107 letters
ONCE = Path(__file__).parent / "lesson_cases" / "once"
# In every run a lesson whose files take seconds; the others are long.
EACH_RUN = [number if number == 9 else pytest.param(number, marks=pytest.mark.long) for number in NUMBERS]


def cases_of(number):
    return importlib.import_module(f"lesson_cases.lesson{number}")


@pytest.mark.parametrize("number", EACH_RUN)
def test_wrong_files_are_refused_in_the_words_that_tell_the_mistake(number):
    said = {}
    for name, (code, says, *sizes) in cases_of(number).WRONG.items():
        said[name] = verdict(number, code, says, sizes[0] if sizes else None)
    assert {name: words for name, words in said.items() if words} == {}


@pytest.mark.parametrize("number", EACH_RUN)
def test_right_files_pass(number):
    right = {"the answer": get_lesson(number).answer(), **cases_of(number).RIGHT}
    accused = {name: str(wrong) for name, code in right.items() if (wrong := first_mistake(number, code))}
    assert accused == {}


def test_a_lesson_from_its_page_to_done(command, start, tmp_path):
    def check(*words):
        program = start(f"check{len(words)}", ["-m", "cos598d", "learn", "3", "--check", *words], SHORT)
        return program.wait(), program.text

    code, text = command("learn", "3")
    assert code == 0
    assert "wrote lesson3.py: fill it in." in text
    code, text = check()
    assert code == 1
    assert "this blank is still to be filled in" in text
    assert "Hint 1 of 3" in command("learn", "3", "--hint")[1]
    assert "Hint 2 of 3" in command("learn", "3", "--hint")[1]
    file = tmp_path / "lesson3.py"
    file.write_text(get_lesson(3).answer())
    code, text = check("--results", "results.json")
    assert code == 0, text
    assert "lesson3.py passes all tests of lesson 3." in text
    assert "one_ring_each" in (tmp_path / "results.json").read_text()
    rows = [line for line in command("learn")[1].splitlines() if "done" in line]
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["77"], "there is no lesson 77"),
        (["3", "--check", "missing.py"], "cannot be read"),
        (["3", "--check", "lesson4.py"], "is a file of lesson 4"),
        (["--check"], "need a lesson"),
        (["3", "--hint", "9"], "--hint 9 does not exist"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(command, tmp_path, words, says):
    (tmp_path / "lesson4.py").write_text(get_lesson(4).answer())
    code, text = command("learn", *words)
    assert code == 2
    assert says in text


@pytest.mark.parametrize(("number", "name"), [(2, "02w1_three_copies"), (5, "05w1_abs"), (5, "05w2_only_1200")])
def test_wrong_files_that_were_once_taken(number, name):
    assert first_mistake(number, (ONCE / f"{name}.py.txt").read_text()) is not None


def test_numbers_of_numpy_are_numbers():
    assert first_mistake(18, (ONCE / "18r1_numpy.py.txt").read_text()) is None
