"""The book's pages: each document at its own path, next to copies of the pictures and source files that it links to."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from cos598d.errors import UserError

SHOWN = (".svg", ".png", ".jpg", ".txt")  # which every browser shows as they are
# Fenced blocks, and code spans: nothing in them is a link or a list.
FENCED = re.compile(r"^ *(`{3,}).*?^ *\1`*[ \t]*$", flags=re.DOTALL | re.MULTILINE)
CODE = re.compile(FENCED.pattern + r"|(?<!`)(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\2(?!`)", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\(|\b(?:src|href)=\")([^)\s\"#]+)")
LIST_AFTER_TEXT = re.compile(r"^((?![-*] |\d+\. |[\s<|]).+\n)(?=(?:[-*]|1\.) )", flags=re.MULTILINE)


def assemble(root: Path, into: Path) -> int:
    """Write the pages of the repository at `root` into the folder `into`, with the files to which they link.

    A source file gets the ending .txt, so that a browser shows it. Returns the number of pages. Raises UserError for a
    link to what is no file of the repository.
    """
    pages = [path for pattern in ("*.md", "docs/*.md", "docs/lessons/*.md") for path in root.glob(pattern)]
    for page in pages:

        def follow(target: str, page: Path = page) -> str:
            path = (page.parent / target).resolve()
            if re.match(r"\w+:", target) or path in pages:
                return target
            if not path.is_file() or not path.is_relative_to(root):
                raise UserError(f"{page} links to {target}, which is no file of this repository. Correct the link.")
            ending = "" if path.suffix in SHOWN else ".txt"
            copy = into / f"{path.relative_to(root)}{ending}"
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            return f"{target}{ending}"

        name, text = page.relative_to(root).as_posix(), prepared(page.read_text(encoding="utf-8"), follow)
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        (into / name).write_text(text, encoding="utf-8")
    return len(pages)


def prepared(text: str, follow: Callable[[str], str]) -> str:
    """A document as the site generator takes it, which reads Markdown a little otherwise than code hosts do.

    `follow` gives a link's path in the book for its path in the repository.
    """

    def blocks(prose: str) -> str:
        return LIST_AFTER_TEXT.sub(r"\1\n", prose.replace("<summary>", '<summary markdown="span">'))

    def links(prose: str) -> str:
        return LINK.sub(lambda link: link[1] + follow(link[2]), prose)

    return _but_for(CODE, _but_for(FENCED, text, blocks), links)


def _but_for(pattern: re.Pattern[str], text: str, change: Callable[[str], str]) -> str:
    """`text` with `change` made in all that `pattern` does not match."""
    pieces, end = [], 0
    for found in pattern.finditer(text):
        pieces += [change(text[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*pieces, change(text[end:])])
