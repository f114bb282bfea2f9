"""The linter of the documents' English: long sentences, and words to avoid.

    python scripts/prose.py             # all documents
    python scripts/prose.py README.md   # only this page

It exits with 1 for a word to avoid, or a document with too many long sentences. It prints the place of each. Code,
tables, headings and the targets of links are not prose.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "docs/*.md", "docs/lessons/*.md")
MOST_WORDS, MOST_LONG = 30, 0.05  # words of a sentence, and the share of a document's sentences that may have more
# What to write instead: see CONTRIBUTING.md.
AVOID = {
    r"beside": "next to, compared with",
    r"alone(?= (that|who|which|is|are)\b)": "only",
    r"but for": "except for",
    r"anew|afresh": "again",
    r"goes on|go on": "continues, resumes",
    r"stands? (in|on|at|below|above|behind|under)": "is in, appears",
    r"(an?|every) (iteration|step|epoch|rank) each": "per",
    r"s an? (iteration|step|epoch)": "s per",
    r"MB an? (iteration|step|epoch|rank)": "MB per",
    r"behind (`?--|a flag|the flags?)": "after",
    r"(page|table|record|flag|file|report|document|row|column|card|ledger)s? (says?|tells?|knows?|speaks?)": (
        "shows, prints, lists; or name who does it"
    ),
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


def faults(name: str, text: str) -> list[str]:
    """What breaks the rules in the Markdown `text` of the document `name`, each with its line."""
    found, long = [], []
    said = list(sentences(text))
    for line, sentence in said:
        if (count := words(sentence)) > MOST_WORDS:
            long.append(f"{name}:{line}: {count} words in a sentence: {sentence[:60]}...")
        for pattern, instead in AVOIDED.items():
            if match := pattern.search(sentence):
                found.append(f"{name}:{line}: '{match[0]}': write {instead}: ...{sentence[: match.end()][-60:]}")
    return found + (long if len(long) > MOST_LONG * len(said) else [])


def main() -> int:
    """Print what breaks the rules, and return 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="documents (default: all)")
    pages = parser.parse_args().pages or [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    texts = {str(page): page.read_text(encoding="utf-8") for page in pages}
    found = [line for name, text in texts.items() for line in faults(name, text)]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
