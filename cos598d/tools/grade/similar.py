"""Submissions that are similar except for names and comments: a hint to read both, and never a grade."""

import builtins
import io
import itertools
import keyword
import tokenize
from collections.abc import Mapping
from pathlib import Path

from cos598d.terminal.reading import read_plain
from cos598d.tools.grade.handed_in import plain_files

TOGETHER = 8  # tokens that are compared at once
FEWEST = 40  # of them that a submission needs: short ones are alike by chance
LEAST = 0.9  # of all that two have, they must share so much
MOST_BYTES = 1 << 20
LEFT_OUT = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
KEPT = frozenset((*keyword.kwlist, *keyword.softkwlist, *dir(builtins)))


def fingerprint(source: str) -> frozenset[tuple[str, ...]]:
    """The runs of TOGETHER tokens in Python source, without comments, docstrings and the names that it chose.

    Keywords, built-in names and names after a dot stay, which nobody can rename. Empty where it is no Python.
    """
    found: list[str] = []
    before = "\n"
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in LEFT_OUT or (token.type == tokenize.STRING and before == "\n"):
                continue
            is_chosen = token.type == tokenize.NAME and token.string not in KEPT and before != "."
            before = "name" if is_chosen else "text" if token.type == tokenize.STRING else token.string.strip(" \t\r")
            if before != "\n" or found[-1:] != ["\n"]:
                found.append(before)
    except (tokenize.TokenError, SyntaxError, ValueError):
        return frozenset()
    return frozenset(zip(*(found[start:] for start in range(TOGETHER)), strict=False))


def similar_pairs(submissions: Mapping[str, Path], given: str) -> list[tuple[float, str, str]]:
    """How much two submissions share (up to 1), and their names, the most similar first. `given` code is left out."""
    known = fingerprint(given)
    prints = {name: fingerprint(_source(path)) - known for name, path in submissions.items()}
    large = [(name, found) for name, found in prints.items() if len(found) >= FEWEST]
    pairs = []
    for (one, first), (other, second) in itertools.combinations(large, 2):
        share = 2 * len(first & second) / (len(first) + len(second))
        if share >= LEAST:
            pairs.append((share, one, other))
    return sorted(pairs, key=lambda pair: (-pair[0], *pair[1:]))


def _source(path: Path) -> str:
    """All Python files of a submission in one text; "" if they cannot be read or are too large."""
    try:
        files = [file for file in plain_files(path) if file.suffix == ".py"]
        return "\n".join(read_plain(file, MOST_BYTES, follows=False).decode(errors="replace") for file in files)
    except OSError:
        return ""
