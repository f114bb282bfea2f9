"""How plain the documents' English is: words per sentence, long sentences, colons, "you", and words to avoid.

    python scripts/prose.py                   # a table of every document
    python scripts/prose.py --check README.md # exit with 1 for a long sentence or a word to avoid, with its line

Code, tables, headings and the targets of links are left out.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "docs/*.md", "docs/lessons/*.md")
MOST_WORDS, LONGEST_LINE = 30, 200  # of a sentence; of a line, since a paragraph has a line per sentence
# What to write instead: see CONTRIBUTING.md.
AVOID = {
    r"beside": "next to, compared with",
    r"alone(?= (that|who|which|is|are)\b)": "only",
    r"but for": "except for",
    r"anew|afresh": "again",
    r"mend(s|ed)?": "fix",
    r"for ever": "forever",
    r"quick(er|est)": "faster, fastest",
    r"goes on|go on": "continues, resumes",
    r"stands? (in|on|at|below|above|behind|under)": "is in, appears",
    r"(an?|every) (iteration|step|epoch|rank) each": "per",
    r"s an? (iteration|step|epoch)": "s per",
    r"MB an? (iteration|step|epoch|rank)": "MB per",
    r"in words of": "as",
    r"where there is none": "if there is none",
}
AVOIDED = {re.compile(rf"\b(?:{words})\b", re.IGNORECASE): instead for words, instead in AVOID.items()}


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """The sentences of a Markdown page's prose, each with the number of the line on which its paragraph begins."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    start, lines = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_prose = bool(line.strip()) and not re.match(r"\s*(#|\||<|\$|    )", line)
        if lines and (not is_prose or re.match(r"\s*([-*]|\d+\.) ", line)):
            yield from ((start, one) for one in _split(" ".join(lines)))
            lines = []
        if is_prose:
            start = start if lines else number
            lines.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line).strip())


def _split(paragraph: str) -> list[str]:
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"<[^>]+>", "", paragraph))
    plain = re.sub(r"`[^`]*`", "Code", plain).replace("*", "")
    return [one for one in re.split(r"(?<=[.!?])\s+(?=[A-Z\"(])|\s·\s", plain) if re.search(r"\w", one)]


def words(sentence: str) -> int:
    """The number of words in a sentence; code counts as one."""
    return len(re.findall(r"[\w'/.%-]*\w[\w'/.%-]*", sentence))


def faults(page: Path) -> list[str]:
    """What breaks the rules on a page, each with its line."""
    found = []
    for line, sentence in sentences(page.read_text(encoding="utf-8")):
        if (count := words(sentence)) > MOST_WORDS:
            found.append(f"{page}:{line}: {count} words in a sentence: {sentence[:60]}...")
        for pattern, instead in AVOIDED.items():
            if match := pattern.search(sentence):
                found.append(f"{page}:{line}: '{match[0]}': write {instead}: ...{sentence[: match.end()][-60:]}")
    return found


def table(pages: list[Path]) -> Iterator[str]:
    """A row for each page."""
    yield f"{'page':28} {'words':>6} {'per sentence':>13} {'over 30':>8} {'colons per 1,000':>17} {'you per 1,000':>14}"
    for page in pages:
        said = [sentence for _, sentence in sentences(page.read_text(encoding="utf-8"))]
        counts, text = [words(one) for one in said], " ".join(said)
        total = sum(counts) or 1
        long = sum(count > MOST_WORDS for count in counts) / max(1, len(counts))
        colons, you = (len(re.findall(p, text)) * 1000 / total for p in (r"[:;](?= )", r"\b[Yy]ours?\b|\b[Yy]ou\b"))
        mean = total / max(1, len(counts))
        yield f"{page.relative_to(ROOT)!s:28} {total:6} {mean:13.1f} {long:8.0%} {colons:17.0f} {you:14.1f}"


def main() -> int:
    """Print the table, or check pages and return 1 where a rule is broken."""
    parser = argparse.ArgumentParser(prog="python scripts/prose.py", description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="documents (default: all)")
    parser.add_argument("--check", action="store_true", help="print what breaks the rules, and exit with 1")
    options = parser.parse_args()
    pages = [page.resolve() for page in options.pages] or [
        page for pattern in PAGES for page in sorted(ROOT.glob(pattern))
    ]
    if not options.check:
        print(*table(pages), sep="\n")
        return 0
    found = [fault for page in pages for fault in faults(page)]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
