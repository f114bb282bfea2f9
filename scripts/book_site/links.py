"""Where the pages of a built site lead: what they take from elsewhere, and which of their links lead nowhere."""

import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

# Attributes by which a page names something else.
NAMES = ("href", "src", "srcset", "poster", "data", "action", "xlink:href")
ELSEWHERE = re.compile(r"(?!data:|mailto:|javascript:void)(?:[a-z][a-z\d+.-]*:|//)", flags=re.IGNORECASE)
IN_STYLE = re.compile(r"url\(\s*[\"']?([^\"')]+)|@import\s+[\"']([^\"']+)")


class Page(HTMLParser):
    """What a page or an SVG names, and the anchors that it has.

    references: (tag, target) of each attribute that names something, and of each style.
    """

    def __init__(self, text: str):
        super().__init__()
        self.references: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self._is_style = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_style = tag == "style"
        for name, value in attrs:
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value or "")
            elif name == "srcset":
                self.references += [(tag, each.split()[0]) for each in (value or "").split(",")]
            elif name in NAMES and value is not None:
                self.references.append((tag, value))
            elif name == "style":
                self.references += [(tag, target) for target in in_style(value or "")]

    def handle_endtag(self, tag: str) -> None:
        self._is_style = False

    def handle_data(self, data: str) -> None:
        if self._is_style:
            self.references += [("style", target) for target in in_style(data)]


def in_style(text: str) -> list[str]:
    """What a style sheet names."""
    return [first or second for first, second in IN_STYLE.findall(text)]


def read_pages(site: Path) -> dict[Path, Page]:
    """The pages and SVGs in the folder `site`, by their resolved paths."""
    return {
        path: Page(path.read_text(encoding="utf-8"))
        for path in sorted(site.resolve().rglob("*"))
        if path.suffix in (".html", ".svg")
    }


def taken_from_elsewhere(site: Path, pages: Mapping[Path, Page]) -> list[str]:
    """What is not in the folder `site`, and a reader's browser would fetch: "page: target"; links to click are none."""
    site = site.resolve()
    found = [
        (path, target)
        for path, page in pages.items()
        for tag, target in page.references
        if tag != "a" and ELSEWHERE.match(target)
    ]
    for path in sorted(site.rglob("*.css")):
        found += [(path, target) for target in in_style(path.read_text(encoding="utf-8")) if ELSEWHERE.match(target)]
    return [f"{path.relative_to(site)}: {target[:200]}" for path, target in found]


def leading_nowhere(site: Path, pages: Mapping[Path, Page]) -> list[str]:
    """References within the folder `site` to a file or an anchor that is not there: "page: target"."""
    site, found = site.resolve(), []
    for path, page in pages.items():
        for _, target in page.references:
            if ELSEWHERE.match(target) or target.startswith(("data:", "mailto:", "javascript:")):
                continue
            place, _, anchor = target.partition("#")
            goal = (path.parent / unquote(place.partition("?")[0])).resolve() if place else path
            is_there = goal.is_file() and goal.is_relative_to(site) and not place.startswith("/")
            if is_there and anchor and goal in pages:
                is_there = unquote(anchor) in pages[goal].anchors
            if not is_there:
                found.append(f"{path.relative_to(site)}: {target}")
    return found
