"""The book's pages: each document at its own path, and a listing of each source file that one of them links to."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from cos598d.errors import UserError

FRONT = "README.md"
MEASUREMENTS = (
    "docs/measured.md",
    "docs/measured-one-host.md",
    "docs/measured-hosts.md",
    "docs/measured-training.md",
    "docs/measured-running.md",
    "docs/measured-cost.md",
    "docs/changelog.md",
)
# The top of the site, after the front page. A folder stands for its pages, and "*" for all that are not named.
SECTIONS = {
    "Learn": ("docs/course.md", "docs/lessons/", "docs/lab.md", "docs/reading.md", "docs/glossary.md"),
    "Do": ("docs/training.md", "docs/checkpoints.md", "docs/tasks.md", "docs/launchers.md", "docs/hosts.md", "*"),
    "Look up": ("docs/syncs.md", "docs/zero.md", "docs/engines.md", "docs/run-folder.md", "docs/troubleshooting.md"),
    "Understand": ("docs/compared.md", "docs/measuring.md", "docs/cost.md", *MEASUREMENTS, "docs/images.md"),
    "The project": ("CONTRIBUTING.md", "SECURITY.md"),
}
PICTURES = (".svg", ".png", ".jpg")
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yml": "yaml", ".json": "json", ".jinja": "jinja"}

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


def assemble(root: Path, into: Path) -> tuple[list[str], list[str]]:
    """Write the pages of the repository at `root` into the folder `into`, with the pictures that they show.

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
        _write(into / page, prepared(text, follow))
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
