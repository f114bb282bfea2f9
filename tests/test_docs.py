"""Links, commands, files and flags in the documents exist."""

import argparse
import ast
import functools
import importlib
import re
import shlex
from itertools import chain
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from cos598d.commands.cli import COMMANDS
from cos598d.commands.flags import Parser
from cos598d.tools.course import NUMBERS, get_lesson

ROOT = Path(__file__).resolve().parents[1]

OUR_CODE = ROOT / "cos598d"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
LESSONS = sorted((ROOT / "docs" / "lessons").glob("*.md"))
OURS = re.compile(
    r"(task\w+|benchmarks|scripts|tools|examples|tests|cos598d|docs|sync|scale|records)/[\w./-]*|[\w-]+\.py"
)
# The flags of torchrun, and those of sbatch that the documents name.
LAUNCHERS = {"--requeue", "--ntasks-per-node", "--gpus-per-node", *get_args_parser()._option_string_actions}
PLACEHOLDERS = ("FILE.py", "my_sync.py", "cho.py", "TASK/run_glue.py", *(f"lesson{each}.py" for each in NUMBERS))


def name(page):
    return str(page.relative_to(ROOT))


def anchors(text):
    """The anchors that a page's headings have, as the usual renderers make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(text, folder, own=None):
    """The relative links in `text`, a page of `folder`, that lead nowhere."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text):
        link = target[0] or target[1]
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        page = (folder / path).resolve() if path else own
        if (path and not page.exists()) or (anchor and anchor not in anchors(page.read_text() if path else text)):
            dead.append(link)
    return dead


def code(text):
    """Lines of the blocks without a language, and code spans: each one piece of code, without its comment."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for language, block in blocks if language in ("", "sh") for line in block.splitlines()]
    rest = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest)]
    return [re.sub(r"\s+# .*", "", piece).strip() for piece in lines + spans]


@functools.cache
def flags_of(command):
    """The flags of a command of ours and of its subcommands."""
    parsers = [Parser()]
    importlib.import_module(f"cos598d.commands.{command}").add_options(parsers[0])
    for action in parsers[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers += action.choices.values()
    return set().union(*(parser._option_string_actions for parser in parsers))


@functools.cache
def flags_of_file(path):
    if path.parent.name.startswith("task"):
        return flags_of("train")
    source = (OUR_CODE / "data" / "fetch.py" if path.name == "download_glue_data.py" else path).read_text()
    found = set(re.findall(r"\"(--?\w+)\"", source))
    return found | flags_of("train") if "parse_known_args" in source else found  # the rest are its runs' flags


@functools.cache
def all_flags():
    files = [ROOT / "download_glue_data.py", *ROOT.glob("benchmarks/*.py"), *ROOT.glob("scripts/*.py")]
    return set().union(*map(flags_of, COMMANDS), *map(flags_of_file, files))


def wrong_in(piece):
    """What a piece of code names that is not there: a command, a script, a target of make, or a flag."""
    try:
        words = shlex.split(piece.replace("...", " ").replace("[", " ").replace("]", " "))
    except ValueError:  # prose with an apostrophe
        words = piece.split()
    while words and re.fullmatch(r"[A-Z_\d]+=.*", words[0]):
        words = words[1:]
    if "--" in words:
        end = words.index("--")
        return wrong_in(shlex.join(words[:end])) + wrong_in(shlex.join(words[end + 1 :]))
    given = {word.split("=")[0] for word in words if re.match(r"--\w", word)}
    first, second, *_ = [*words, "", ""]
    if Path(first).name in ("python", "python3") and second.endswith(".py"):
        if second in PLACEHOLDERS:
            return sorted(given - all_flags())
        path = ROOT / second
        return sorted(given - flags_of_file(path)) if path.is_file() else [second]
    if Path(first).name == "cos598d" and second and not second.startswith("-"):
        if second not in (*COMMANDS, "COMMAND"):
            return [second]
        first = second
    if first == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
        return [word for word in words[1:] if "=" not in word and word not in targets]
    if first in COMMANDS:
        return sorted(given - flags_of(first))
    return sorted(given - all_flags() - LAUNCHERS) if first.startswith("--") else []


def lost_files(piece):
    """The file of ours that a code span names and that is nowhere."""
    if not OURS.fullmatch(piece) or piece in PLACEHOLDERS:
        return []
    places = (ROOT / piece, OUR_CODE / piece)
    is_there = any(place.exists() for place in places)
    is_there = is_there or ("/" not in piece and any(chain(OUR_CODE.rglob(piece), ROOT.glob(f"task*/{piece}"))))
    return [] if is_there else [piece]


@pytest.mark.parametrize("page", [*PAGES, *LESSONS], ids=name)
def test_links_commands_flags_and_files_of_a_page_exist_and_its_python_is_python(page):
    assert dead_links(page.read_text(), page.parent, page) == []
    # The changelog names what was removed.
    pieces = [] if page.name == "changelog.md" else code(page.read_text())
    assert [(piece, wrong) for piece in pieces if (wrong := wrong_in(piece) + lost_files(piece))] == []
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        ast.parse(block)


def test_the_readme_and_the_nine_files_of_the_reading_path_stay_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    rows = re.findall(r"^\| \d \| \[`(.+?)`\]", (ROOT / "docs" / "reading.md").read_text(), re.MULTILINE)
    assert len(rows) == 9
    assert sum(len((ROOT / name).read_text().splitlines()) for name in rows) <= 1100


@pytest.mark.parametrize("number", NUMBERS)
def test_what_a_lesson_says_at_its_end_and_in_its_file_exists(number):
    """Its files to read, its command to measure, and the commands that make its page's figures and outputs."""
    lesson = get_lesson(number)
    assert [file for file in re.findall(r"[\w/-]+/[\w.-]+\.(?:py|md)", lesson.read) if not (ROOT / file).exists()] == []
    file = lesson.tests.with_name("page.py.txt").read_text()
    commands = [lesson.measure, *re.findall(r"^#     (cos598d .+?)(?:  .*)?$", file, flags=re.MULTILINE)]
    for hint in re.findall(r"<!-- book: \w+ (.+) -->", (ROOT / f"docs/lessons/lesson{number}.md").read_text()):
        ours = re.sub(r"^\S+\.svg |(?:cluster|alt)=\"[^\"]*\"", "", hint).strip()
        commands.append(f"cos598d {ours}")
    assert [(command, wrong) for command in commands if (wrong := wrong_in(command))] == []


def measured_ratios(heading):
    """The ratios to DDP by sync in the first table below a heading: the third column, without its interval."""
    text = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    rows = re.search(rf"^#+ {heading}$.*?\n((?:\|[^\n]*\n)+)", text, flags=re.DOTALL | re.MULTILINE)[1].splitlines()[2:]
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return {re.search(r"`(\w+)`", row[1])[1]: re.match(r"[\d.]+", row[3])[0] for row in cells}


def test_the_figure_and_the_readme_have_the_measured_ratios():
    tables = [measured_ratios(heading) for heading in ("The ladder on one host", "What a link costs")]
    drawn = re.findall(r">(\d\.\d\d)<", (ROOT / "benchmarks/ladder.svg").read_text(encoding="utf-8"))
    assert sorted(drawn) == sorted(ratio for table in tables for ratio in table.values() if ratio != "1")  # DDP's own
    readme = re.findall(r"^\| `(\w+)` \|.*\| (\S+) \| (\S+) \|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert len(readme) > 8
    assert readme == [(sync, *(table.get(sync, "-") for table in tables)) for sync, *_ in readme]


def test_every_page_is_at_most_two_links_from_the_readme_and_every_lesson_is_in_the_course():
    linked = {page for page in PAGES[1:] if f"]({name(page)}" in PAGES[0].read_text()}
    text = "".join(page.read_text() for page in linked)
    assert [name(page) for page in PAGES[1:] if page not in linked and f"]({page.name}" not in text] == []
    text = (ROOT / "docs" / "course.md").read_text()
    assert {page.name for page in LESSONS} == {f"lesson{number}.md" for number in NUMBERS}
    assert [page.name for page in LESSONS if f"](lessons/{page.name})" not in text] == []


WRONG = {
    "cos598d reports RUN": ["reports"],
    "cos598d bench --rounds 3 --rounds_of 3": ["--rounds_of"],
    "cos598d cluster run --rate 1gbit -- python task2b/run_glue.py --max_step 10": ["--max_step"],
    "GLUE_DIR=... python benchmarks/parities.py": ["benchmarks/parities.py"],
    "python benchmarks/student.py --no_flag x": ["--no_flag"],
    "make demos": ["demos"],
    "--no_such_flag": ["--no_such_flag"],
}


def test_wrong_commands_flags_targets_links_and_lost_files_are_found():
    assert {piece: wrong_in(piece) for piece in WRONG} == WRONG
    assert wrong_in("cos598d report RUN -o report.html") == []
    text = "# One\n[a](#one) [b](#two) [c](docs/nowhere.md) <img src='x'> <img src=\"no.svg\">"
    assert dead_links(text, ROOT) == ["#two", "docs/nowhere.md", "no.svg"]
    assert lost_files("cos598d/nowhere.py") == ["cos598d/nowhere.py"]
    assert lost_files("train.py") == []
