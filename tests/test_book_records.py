"""The book's blocks: their commands run and fill them completely or not at all, and a wrong block is one sentence."""

import re
import subprocess
import sys

import pytest
from programs import ROOT, Program

from cos598d.errors import UserError

sys.path.insert(0, str(ROOT / "benchmarks"))

import book
import book_blocks
import book_pages

END = "<!-- book: end -->\n"
HINT = "<!-- book: output learn 3 --hint 1 -->\n"
BEFORE, AFTER = "# Lesson 3\n\nIt says:\n\n", "\nand ends.\n"
PICTURE = '<!-- book: picture ring.svg picture --sync ring --world_size 2 -o alt="a [ring] of two" -->\n'


@pytest.fixture
def page(tmp_path):
    """page(text, *words): write a page into its own folder, and run the book on it; its path, and the exit code."""

    def _page(text, *words):
        path = tmp_path / "lessons" / "lesson3.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path, book.main([str(path.parent), *words])

    return _page


@pytest.fixture
def warm(monkeypatch):
    """Commands start in a process that has loaded torch."""

    def _run(words, here, output):
        shown = {name: value for name, value in book_blocks.SHOWN.items() if not name.startswith("PYTHON")}
        program = Program(here, output.stem, words[1:], shown | {"PYTHONPATH": str(ROOT)})
        return program.wait(), program.text

    monkeypatch.setattr(book_blocks, "run", _run)


@pytest.fixture
def made(monkeypatch):
    """Commands are not run. The list has their blocks, which get this text and, for a picture, this drawing."""
    asked = []

    def _make(block, folder, root):
        asked.append(block)
        return book_blocks.Made("filled", "<svg/>" if block.kind == book_pages.PICTURE else None)

    monkeypatch.setattr(book, "make", _make)
    return asked


def tables(text):
    """The Markdown tables of a text, each the words of its rows."""
    parts = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[line.strip("| ").split(" | ") for line in part.splitlines() if "---" not in line] for part in parts]


def test_blocks_are_filled_and_filling_them_again_changes_nothing(page):
    writes = "<!-- book: output\n     new 'a file.py' -->\n"  # would be refused where the file is already
    path, code = page(f"{BEFORE}{HINT}{END}\n{writes}{END}{AFTER}")
    assert code == 0
    text = path.read_text()
    assert text.startswith(f"{BEFORE}{HINT}\n```text\nHint 1 of 3")
    assert text.endswith(f"</small>\n\n{END}{AFTER}")
    assert f"{writes}\n```text\nwrote a file.py" in text
    where = r"on \d{4}-\d\d-\d\d, \d+ cores? of \S.*, torch \d+\.\d+.*\.</small>\n"
    assert re.search(r"\n<small>Made by `cos598d learn 3 --hint 1` " + where, text)
    assert re.search(r"\n<small>Made by `cos598d new 'a file.py'` " + where, text)
    # The hint's number is kept in the command's folder: the second filling gets the same hint.
    assert page(text)[1] == 0
    assert path.read_text() == text
    assert [found.name for found in path.parent.iterdir()] == ["lesson3.md"]


def test_quick_skips_benches_and_emulated_hosts_and_list_runs_nothing(page, made, capsys):
    bench = f"<!-- book: bench of-two bench --sync ring -->\nas before\n{END}"
    hosts = f"<!-- book: output train cluster='--hosts 2' -->\nas before\n{END}"
    path, code = page(f"{bench}{HINT}{END}{hosts}{PICTURE}{END}", "--quick", "--list")
    assert (code, made) == (0, [])
    first, second = capsys.readouterr().out.splitlines()
    assert first == "lesson3.md line 4: cos598d learn 3 --hint 1"
    assert second.endswith(" -o lessons/figures/ring.svg")
    assert book.main([str(path.parent), "--quick"]) == 0
    assert [block.kind for block in made] == [book_pages.OUTPUT, book_pages.PICTURE]
    text = path.read_text()
    assert bench in text
    assert hosts in text
    assert text.count("filled") == 2


def test_a_picture_and_a_bench_are_made_by_a_real_run(page, warm):
    bench = "<!-- book: bench of-two bench --sync ring --model tiny --world_size 2 --rounds 2 -->\n"
    path, code = page(f"{PICTURE}{END}{bench}{END}")
    assert code == 0
    drawing = (path.parent / "figures" / "ring.svg").read_text()
    assert drawing.startswith("<svg")
    text = path.read_text()
    assert "\n![a \\[ring\\] of two](figures/ring.svg)\n\n<small>Made by `cos598d picture" in text
    assert "-o lessons/figures/ring.svg` on" in text
    ((head, *rows),) = tables(text)
    assert head == ["sync", "ms an iteration", "times ddp's", "exposed ms", "calls", "MB sent"]
    by_sync = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert sorted(by_sync) == ["ddp", "none", "ring"]
    assert by_sync["ddp"]["times ddp's"] == "1"
    assert float(by_sync["ring"]["ms an iteration"]) > 0
    assert by_sync["none"]["exposed ms"] == "-"
    assert by_sync["ring"]["MB sent"] == by_sync["ddp"]["MB sent"] != by_sync["none"]["MB sent"]
    assert "2 ranks (gloo, cpu, 1 thread each), fp32, 2 rounds; an iteration: 4 x 64 tokens" in text
    assert "Made by `cos598d bench --sync ring --model tiny --world_size 2 --rounds 2` on" in text
    assert "/tmp" not in text


@pytest.mark.long
def test_a_bench_of_one_has_no_ratio(page, warm):
    alone = "<!-- book: bench one bench --sync none --alone --step --model tiny --world_size 1 --rounds 1 -->"
    path, code = page(f"{alone}\n{END}")
    assert code == 0
    text = path.read_text()
    assert tables(text)[0][0] == ["sync", "ms a step", "calls", "MB sent"]
    assert "ratios" not in text.partition("<small>")[2].partition("</small>")[0]


def test_a_failed_command_leaves_its_block_and_is_named_at_the_end(page, capfd):
    broken = "<!-- book: output learn 77 -->\nwhat stood here\n"
    path, code = page(f"{broken}{END}{HINT}{END}")
    assert code == 1
    text = path.read_text()
    assert text.startswith(f"{broken}{END}{HINT}\n```text\nHint 1")
    said = capfd.readouterr().err.splitlines()
    assert said[-2].startswith("1 not filled")
    assert re.fullmatch(
        r"lesson3.md line 1: cos598d learn 77: .* exit code 2, where 0 or 1 was expected: .*77.*", said[-1]
    )


def test_an_exit_code_that_the_comment_names_is_expected(page, capfd):
    path, code = page(f"<!-- book: output exit=2 learn 77 -->\n{END}")
    assert code == 0
    assert "```text\n" in path.read_text()
    _, code = page(f"<!-- book: output exit=2 learn 3 --hint 1 -->\n{END}")
    assert code == 1
    assert "exit code 0, where 2 was expected" in capfd.readouterr().err


ALT = 'alt="a ring"'
BAD = {
    "no end": (HINT, "line 1: this block has no end"),
    "nested": (f"{HINT}{HINT}{END}", "line 2: a block begins within that of line 1"),
    "an end alone": (f"text\n{END}", "line 2: no block is open that could end here"),
    "two ends": (f"{HINT}{END}{END}", "line 3: no block is open"),
    "unknown kind": (f"<!-- book: film learn 3 -->\n{END}", "film is no kind of block: the known ones are output,"),
    "no kind": (f"<!-- book: -->\n{END}", "nothing is no kind of block"),
    "no command": (f"<!-- book: output -->\n{END}", "it has no command"),
    "an open quotation mark": (f'<!-- book: output new "a b -->\n{END}', "close every quotation mark"),
    "an open comment": (f"<!-- book: output learn 3\n{END[:-4]}", "this comment has no end"),
    "two comments on a line": (f"{HINT.strip()} {END}", "a comment of the book begins its line"),
    "text behind": (f"{HINT.strip()} more\n{END}", "nothing stands behind its -->"),
    "indented": (f"  {HINT}{END}", "a comment of the book begins its line"),
    "a name that leaves": (f"<!-- book: picture ../x.svg {ALT} picture -o -->\n{END}", "../x.svg is no name of a pic"),
    "a name in a folder": (f"<!-- book: bench a/b bench -->\n{END}", "a/b is no name of a bench"),
    "a name that is hidden": (f"<!-- book: picture .x.svg {ALT} picture -o -->\n{END}", ".x.svg is no name"),
    "no name": (f"<!-- book: bench -->\n{END}", "nothing is no name of a bench"),
    "another form": (f"<!-- book: picture x.png {ALT} picture -o -->\n{END}", "a picture's name ends in .svg"),
    "no words for a picture": (f"<!-- book: picture x.svg picture -o -->\n{END}", 'say what it shows, by alt="..."'),
    "a file outside": (f"<!-- book: output check ../mine.py:Mine -->\n{END}", "../mine.py is outside the repository"),
    "an absolute path": (f"<!-- book: output compare --flag=/tmp/x -->\n{END}", "/tmp/x is outside the repository"),
    "a word twice": (f"<!-- book: output exit=1 learn exit=2 -->\n{END}", "exit= is given twice"),
    "another's word": (f"<!-- book: output learn {ALT} -->\n{END}", "alt= is for picture: take it out of this output"),
    "no number": (f"<!-- book: output learn exit=two -->\n{END}", "exit=two: give the command's exit code as a number"),
    "an open word of a cluster": (f'<!-- book: output cluster="\'" learn -->\n{END}', "close every quotation mark"),
    "a picture twice": (f"{PICTURE}{END}{PICTURE}{END}", "ring.svg is drawn by lesson3.md line 1 already"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_block_is_a_sentence_and_nothing_is_run(name, page, made, tmp_path):
    text, says = BAD[name]
    with pytest.raises(UserError) as error:
        page(f"{text}{AFTER}")
    assert says in str(error.value)
    assert str(error.value).startswith("lesson3.md line ")
    assert "\n" not in str(error.value)
    assert (tmp_path / "lessons" / "lesson3.md").read_text() == f"{text}{AFTER}"
    assert made == []


def test_words_are_read_as_a_shell_reads_them():
    words = 'a-1 bench --model "two words" --sync x:y=3'
    text = f"<!-- book: bench cluster=\"--hosts 2 --rate '1 gbit'\" {words} -->\n{END}"
    (block,) = book.blocks(book_pages.read_page(text, "lesson3.md"))
    assert (block.kind, block.name) == ("bench", "a-1")
    assert block.words == ("bench", "--model", "two words", "--sync", "x:y=3")
    assert block.hosts == ("--hosts", "2", "--rate", "1 gbit")
    hosts = ["cos598d", "cluster", "run", *block.hosts, "--"]
    assert book_blocks.typed(block, "docs/lessons") == [*hosts, "cos598d", *block.words]


def test_an_example_in_fenced_code_is_no_block(page, made):
    text = f"````text\n```\n{HINT}````\n{HINT}\n~~~\n{END}~~~\n{END}"
    path, code = page(text)
    assert code == 0
    assert len(made) == 1
    assert path.read_text() == f"````text\n```\n{HINT}````\n{HINT}\nfilled\n\n{END}"


def test_a_page_is_written_completely_or_not_at_all(page, made, tmp_path, capsys):
    folder = tmp_path / "lessons"
    folder.mkdir()
    (folder / "figures").write_text("a file, where a folder should be")
    text = f"{HINT}{END}{PICTURE}{END}"
    path, code = page(text)
    assert code == 1
    assert "figures cannot be written" in capsys.readouterr().err
    assert path.read_text() == text
    (folder / "figures").unlink()
    assert page(text)[1] == 0
    assert (folder / "figures" / "ring.svg").read_text() == "<svg/>"
    assert path.read_text().count("\nfilled\n") == 2


def test_a_page_that_is_edited_meanwhile_keeps_the_edit(page, monkeypatch, tmp_path, capsys):
    def _make(block, folder, root):
        (tmp_path / "lessons" / "lesson3.md").write_text("other words\n")
        return book_blocks.Made("filled")

    monkeypatch.setattr(book, "make", _make)
    path, code = page(f"{HINT}{END}")
    assert code == 1
    assert "it was changed while its commands ran" in capsys.readouterr().err
    assert path.read_text() == "other words\n"


def test_without_root_a_block_of_hosts_stays_unchanged(page, made, monkeypatch, capsys):
    def refuse():
        raise UserError("needs root's rights.")

    monkeypatch.setattr(book, "check_rights", refuse)
    text = f'<!-- book: output cluster="--hosts 2" learn 3 -->\nas it was\n{END}'
    path, code = page(text)
    assert code == 0
    assert made == []
    assert path.read_text() == text
    assert "stays as it was: needs root's rights." in capsys.readouterr().out


def test_one_page_can_be_made_and_pages_are_sorted_by_number(page, made, tmp_path):
    page("")
    for name in ("lesson10", "lesson2"):
        (tmp_path / "lessons" / f"{name}.md").write_text(f"{HINT}{END}")
    assert [path.stem for path in book.find_pages(tmp_path / "lessons", None)] == ["lesson2", "lesson3", "lesson10"]
    assert book.main([str(tmp_path / "lessons"), "--page", "lesson10"]) == 0
    assert len(made) == 1
    assert (tmp_path / "lessons" / "lesson2.md").read_text() == f"{HINT}{END}"
    with pytest.raises(UserError, match="--page lesson4: .* has lesson2, lesson3, lesson10"):
        book.main([str(tmp_path / "lessons"), "--page", "lesson4"])
    with pytest.raises(UserError, match="has no pages"):
        book.main([str(tmp_path / "nowhere")])


def test_shown_output_has_no_colours_bars_or_absolute_paths(tmp_path):
    said = f"\n\x1b[31mred\x1b[0m \n 10%|#\r 20%|##\rdone\na {tmp_path}/run/x.json (/usr/lib/y.py) 2/3 https://a.b/c/d\n\x07\n"
    expected = "red\ndone\na run/x.json (y.py) 2/3 https://a.b/c/d\n\\x07"
    assert book_blocks.cleaned(said, [tmp_path]) == expected


def test_backticks_get_a_longer_fence_and_no_or_long_output_is_refused():
    assert book_blocks.fenced("a\n```b```") == "````text\na\n```b```\n````"
    with pytest.raises(UserError, match="prints nothing"):
        book_blocks.fenced("")
    with pytest.raises(UserError, match="prints 300 lines, and a page shows at most"):
        book_blocks.fenced("a line\n" * 300)


def test_a_command_that_does_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(book_blocks, "SECONDS", 1.0)
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    with pytest.raises(UserError, match="it did not end within 1 s"):
        book_blocks.run([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, tmp_path / "said.txt")
    assert started[0].returncode is not None


def test_commands_do_not_see_this_machine_s_data(tmp_path, monkeypatch):
    monkeypatch.setenv("GLUE_DIR", "/somewhere")
    words = [sys.executable, "-c", "import os; print(os.environ.get('GLUE_DIR'))"]
    assert book_blocks.run(words, tmp_path, tmp_path / "said.txt") == (0, "None\n")


def test_only_the_files_that_a_command_names_are_copied(tmp_path):
    root, here = tmp_path / "root", tmp_path / "here"
    for name in ("a/b.py", "c/d/e.txt", "f.py", "g/h.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    here.mkdir()
    book_blocks.copy_named(["--sync", "a/b.py:Mine,ring", "c/d", "--x=f.py", "g", "none"], root, here)
    copied = sorted(str(path.relative_to(here)) for path in here.rglob("*") if path.is_file())
    assert copied == ["a/b.py", "c/d/e.txt", "f.py"]
