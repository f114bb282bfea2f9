"""The book's pages: each document at its own path, and a listing of each source file that one of them links to."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import PathDistribution
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import Path as ZipPath

from cos598d.errors import UserError
from cos598d.tools.course import Lesson, all_lessons

FRONT = "README.md"
# The top of the site, after the front page. A folder stands for its pages, and "*" for all that are not named.
SECTIONS = {
    "Learn": ("docs/course.md", "docs/lessons/", "docs/lab.md", "docs/reading.md", "docs/glossary.md"),
    "Do": ("docs/training.md", "docs/checkpoints.md", "docs/tasks.md", "docs/launchers.md", "*"),
    "Look up": ("docs/syncs.md", "docs/engines.md", "docs/run-folder.md", "docs/troubleshooting.md"),
    "Understand": ("docs/measuring.md", "docs/measured.md", "docs/changelog.md"),
    "The project": ("CONTRIBUTING.md", "SECURITY.md"),
}
PICTURES = (".svg", ".png", ".jpg")
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yml": "yaml", ".json": "json", ".jinja": "jinja"}
# Where a site has its notebooks, next to the package's wheel.
TRY = "docs/lessons/try"
PYTHON = (3, 11)  # which the versions of constraints.txt need
NEEDS = (
    f"You need Linux, Python {PYTHON[0]}.{PYTHON[1]} or newer, and in a new environment 1.3 GB of disk and 0.3 GB of "
    "downloads. Without a network, torch and the other packages must be installed already."
)
# The first cell, after the versions. It asks torch's index only for torch. If that cannot be reached, each package that
# is asked for there takes half a minute.
INSTALL = """
import subprocess
import sys
from pathlib import Path


def installed():
    words = [sys.executable, "-c", "import cos598d; print(cos598d.__version__)"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def pip(*words):
    words = [sys.executable, "-m", "pip", "install", "--quiet", *words]
    return subprocess.run(words, capture_output=True, text=True)


there = installed()
if there not in ("", VERSION):
    sys.exit(
        f"error: {sys.prefix} has cos598d {there}, and this notebook needs {VERSION}. "
        "Uninstall the other version there, or use another environment."
    )
if not there:
    if not Path(WHEEL).is_file():
        sys.exit(f"error: {WHEEL} is not in {Path.cwd()}. Save it there, next to this notebook.")
    done = pip("--no-index", WHEEL)  # enough if all that it needs is there
    if done.returncode and sys.version_info < PYTHON:
        sys.exit(f"error: this is Python {sys.version.split()[0]}. Use Python {'.'.join(map(str, PYTHON))} or newer.")
    if done.returncode:
        print("Downloading torch and other packages. This takes some minutes.", flush=True)
        cpu = "https://download.pytorch.org/whl/cpu"
        done = pip("--no-deps", "--extra-index-url", cpu, PINNED[0])
        done = done if done.returncode else pip(WHEEL, *PINNED)
    if installed() != VERSION:
        sys.exit(f"error: pip could not install cos598d:\\n{done.stderr}\\nFix that, and run this cell again.")
print(f"cos598d {installed()} is there, in {sys.prefix}.")
"""
# Fenced blocks, and code spans: nothing in them is a link or a list.
FENCED = re.compile(r"^ *(`{3,}).*?^ *\1`*[ \t]*$", flags=re.DOTALL | re.MULTILINE)
CODE = re.compile(FENCED.pattern + r"|(?<!`)(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\2(?!`)", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\(|\b(?:src|href)=\")([^)\s\"#]+)")
MADE_BY = re.compile(r"^<!-- book: .*?-->$", flags=re.DOTALL | re.MULTILINE)
LIST_AFTER_TEXT = re.compile(r"^((?![-*] |\d+\. |[\s<|]).+\n)(?=(?:[-*]|1\.) )", flags=re.MULTILINE)


def documents(root: Path) -> list[str]:
    """The paths of all documents of the repository at `root`, lessons by their numbers."""
    found = [root / FRONT, root / "CONTRIBUTING.md", root / "SECURITY.md"]
    found += sorted((root / "docs").glob("*.md")) + sorted((root / "docs" / "lessons").glob("*.md"), key=_by_number)
    return [path.relative_to(root).as_posix() for path in found if path.exists()]


def navigation(pages: list[str]) -> list[dict[str, Any]]:
    """The front page, and the others of `pages` under the titles of their sections."""
    named = [FRONT] + [name for names in SECTIONS.values() for name in names]
    rest = [page for page in pages if page not in named and f"{PurePosixPath(page).parent}/" not in named]

    def of(name: str) -> list[str]:
        if name == "*":
            return rest
        return [page for page in pages if page == name or f"{PurePosixPath(page).parent}/" == name]

    sections = {title: [page for name in names for page in of(name)] for title, names in SECTIONS.items()}
    return [{"Start": FRONT}] + [{title: found} for title, found in sections.items() if found]


def assemble(root: Path, into: Path, offers: Mapping[str, str] | None = None) -> tuple[list[str], list[str]]:
    """Write the pages of the repository at `root` into the folder `into`, with the pictures that they show.

    `offers` has by a page's path a paragraph that only the site has; it comes before the page's first section.
    Returns the paths of the documents and of the listings. Raises UserError naming each link that leads nowhere, or to
    what is neither a document, a picture nor another file of text.
    """
    pages = documents(root)
    linked: dict[str, None] = {}
    complaints: list[str] = []
    for page in pages:

        def follow(target: str, page: str = page) -> str:
            if re.match(r"\w+:", target):
                return target
            path = ((root / page).parent / target).resolve()
            if not path.is_file() or not path.is_relative_to(root):
                complaints.append(f"{page} links to {target}, which is no file of this repository")
                return target
            place = path.relative_to(root).as_posix()
            if place in pages:
                return target
            linked[place] = None
            return target if path.suffix in PICTURES else f"{target}.md"

        text = (root / page).read_text(encoding="utf-8")
        text = prepared(text, follow)
        if offers and page in offers:
            text = text.replace("\n## ", f"\n{offers[page]}\n\n## ", 1)
        _write(into / page, text)
    listings = []
    for place in linked:
        if PurePosixPath(place).suffix in PICTURES:
            (into / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / place, into / place)
            continue
        try:
            _write(into / f"{place}.md", listing(place, (root / place).read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            complaints.append(f"{place}, to which a page links, is neither text nor a picture ({', '.join(PICTURES)})")
        listings.append(f"{place}.md")
    if complaints:
        raise UserError("; ".join(complaints) + ": mend the links.")
    return pages, listings


def prepared(text: str, follow: Callable[[str], str]) -> str:
    """A document as the site generator takes it, which reads Markdown a little otherwise than code hosts do.

    `follow` gives a link's path in the book for its path in the repository.
    """

    def blocks(prose: str) -> str:
        prose = MADE_BY.sub("", prose).replace("<summary>", '<summary markdown="span">')
        return LIST_AFTER_TEXT.sub(r"\1\n", prose)

    def links(prose: str) -> str:
        return LINK.sub(lambda link: link[1] + follow(link[2]), prose)

    return _but_for(CODE, _but_for(FENCED, text, blocks), links)


def listing(place: str, source: str) -> str:
    """The page of a source file: its lines, numbered and highlighted, on all of the width. The search leaves it out."""
    path = PurePosixPath(place)
    language = LANGUAGES.get(PurePosixPath(path.stem).suffix if path.suffix == ".txt" else path.suffix, "text")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", source)), default=0))
    return (
        f"---\ntitle: {place}\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n\n# `{place}`\n\n"
        f'{fence} {language} linenums="1"\n{source.rstrip()}\n{fence}\n'
    )


def write_notebooks(wheel: Path, constraints: Path) -> dict[str, str]:
    """Write a notebook for each lesson next to `wheel`; it installs packages at the versions of `constraints`.

    Returns by the path of a lesson's page the paragraph that links to its notebook.
    """
    version = wheel.name.split("-")[1]
    needed = PathDistribution(ZipPath(wheel, f"cos598d-{version}.dist-info/")).requires or []
    names = [re.split(r"[<>=]", each)[0].replace("_", "-") for each in needed if ";" not in each]
    pins = dict(re.findall(r"^(.+)==(.+)$", constraints.read_text(encoding="utf-8").replace("_", "-"), re.MULTILINE))
    facts = f'VERSION, WHEEL, PYTHON = "{version}", "{wheel.name}", {PYTHON}\n'
    facts += "PINNED = [" + "".join(f'\n    "{name}=={pins[name]}",' for name in names) + "\n]"
    offers = {}
    for lesson in all_lessons():
        name = f"lesson{lesson.number}"
        _write(wheel.parent / f"{name}.ipynb", notebook(lesson, facts))
        offers[f"docs/lessons/{name}.md"] = (
            f"**Try it in a notebook:** save [{name}.ipynb](try/{name}.ipynb) and [the package](try/{wheel.name}) in a "
            f"folder of your own, and run the notebook's cells in Jupyter. {NEEDS}"
        )
    return offers


def notebook(lesson: Lesson, facts: str) -> str:
    """A lesson's notebook as JSON: it installs the package as `facts` has it, and asks, checks, gives hints and draws.

    Each cell of code needs no other one to have run, so that it also runs after the kernel is restarted.
    """
    number, file = lesson.number, lesson.file_name
    command = f'import sys\n\n!"{{sys.executable}}" -m cos598d learn {number}'
    forms = "\n".join(f"    {form}" for form in lesson.contract.values())
    cells = [
        f"# Lesson {number}: {lesson.title}\n\nRun the cells from top to bottom. {NEEDS}\n\nThe first cell installs "
        "the package into this notebook's Python. If this version is there, it does nothing. If another version is "
        "there, it installs nothing, and prints what to do. If a package that is needed is missing, it installs all "
        "of them at the versions below, in place of others.",
        f"{facts}\n{INSTALL}",
        f"{lesson.question}\n\nIt takes about {lesson.minutes} minutes. Your file has to define\n\n{forms}\n\n"
        f"[The lesson's page](../lesson{number}.html) has pictures and numbers. The link works within the site's "
        f"folder. Elsewhere, open `docs/lessons/lesson{number}.html` of the site.\n\n"
        f"Write your code in the next cell instead of `...`. The cell replaces `{file}` in this folder, so keep no "
        f"other work under that name. The check prints line numbers of `{file}`. In the cell each is one more.",
        f"%%writefile {file}\n{lesson.page().rstrip()}",
        f"Check it. This prints what `cos598d learn {number} --check` prints:",
        f"{command} --check",
        "A hint, one more each time:",
        f"{command} --hint",
    ]
    kinds = ["code" if re.match(r"VERSION|%%|import|from", cell) else "markdown" for cell in cells]
    return json.dumps(
        {
            "cells": [
                {"cell_type": kind, "id": f"cell{place}", "metadata": {}, "source": cell.rstrip("\n")}
                | ({"execution_count": None, "outputs": []} if kind == "code" else {})
                for place, (kind, cell) in enumerate(zip(kinds, cells, strict=True))
            ],
            "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        },
        indent=1,
    )


def configuration(base: Path, source: Path, pages: list[str], listings: list[str]) -> dict[str, Any]:
    """The site generator's settings: those of `base`, and which pages of the folder `source` stand where."""
    hidden = "\n".join(f"/{place}" for place in listings)
    return {"INHERIT": str(base), "docs_dir": str(source), "nav": navigation(pages), "not_in_nav": hidden}


def _but_for(pattern: re.Pattern[str], text: str, change: Callable[[str], str]) -> str:
    """`text` with `change` made in all that `pattern` does not match."""
    pieces, end = [], 0
    for found in pattern.finditer(text):
        pieces += [change(text[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*pieces, change(text[end:])])


def _by_number(path: Path) -> tuple[int, str]:
    number = re.search(r"\d+", path.stem)
    return (int(number[0]) if number else 0, path.stem)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
