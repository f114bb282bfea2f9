"""Does a folder have a data set's files, undamaged? It counts examples and compares digests."""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from cos598d.data.fetch.catalogue import Dataset
from cos598d.data.glue.read import FORMATS
from cos598d.data.images.cifar10 import parse_batch
from cos598d.data.images.mnist import parse_idx
from cos598d.data.task import digest_file


@dataclass
class Findings:
    """The result of checking a folder.

    `problems`, by file name, make a file unusable; `notes` do not. `rows` are the counts by file name. `digests` counts
    the files with the recorded digest, by its kind.
    """

    problems: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    digests: Counter[str] = field(default_factory=Counter)


def look_at(dataset: Dataset, folder: Path, published: bool = False) -> Findings:
    """Check every part of `dataset` in `folder`.

    `published`: these files come from an archive whose own sha256 is the published one. A part with another digest or
    number of rows is then only noted, since the archive's digest is the stronger evidence.
    """
    found = Findings()
    for part in dataset.parts:
        path = folder / part.name
        if not path.is_file():
            if part.optional:
                found.notes.append(f"without {part.name}, which training and evaluation don't need")
            else:
                found.problems[part.name] = f"{part.name} is missing"
            continue
        try:
            rows = count_rows(path, part.header)
            wrong_header = _wrong_header(dataset, path)
        except ValueError as error:
            found.problems[part.name] = f"{part.name} cannot be read ({error})"
            continue
        found.rows[part.name] = rows
        differs = None
        size = path.stat().st_size
        kind, expected = ("sha256", part.sha256) if part.sha256 else ("md5", part.md5)
        if rows not in part.rows:
            differs = f"{part.name} has {rows} rows, not {' or '.join(map(str, part.rows))}"
        elif wrong_header:
            differs = f"in {part.name} {wrong_header}"
        elif part.size and size != part.size:
            differs = f"{part.name} has {size} bytes, not {part.size}"
        elif expected and (digest := digest_file(path, kind)[0]) != expected:
            differs = f"{part.name} has the {kind} {digest[:12]}..., not {expected[:12]}..."
        elif expected:
            found.digests["size and md5" if kind == "md5" else kind] += 1
        if differs and published:
            found.notes.append(f"{differs}, though the archive is the published one")
        elif differs:
            found.problems[part.name] = differs
    return found


def count_rows(path: Path, header: bool = True) -> int:
    """The number of examples in a file, whose name tells its kind: lines of TSV, questions of SQuAD's JSON, MNIST's
    images or labels, or images of a CIFAR-10 batch. Raises ValueError if it is none of these.

    A TSV line counts if it has at least as many columns as the first line. Readers cannot use a shorter one, such as a
    line that was cut or split.
    """
    if path.suffix == ".json":
        try:
            articles = json.loads(path.read_bytes())["data"]
            return sum(len(paragraph["qas"]) for article in articles for paragraph in article["paragraphs"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a SQuAD file: {type(error).__name__} {error}") from error
    if dimensions := re.search(r"-idx(\d)-ubyte", path.name):
        return len(parse_idx(path, int(dimensions[1])))
    if "_batch" in path.name:
        return len(parse_batch(path)[1])
    try:
        with open(path, encoding="utf-8-sig") as lines:
            tabs = next(lines, "").count("\t")
            complete = sum(line.count("\t") >= tabs and line != "\n" for line in lines)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error.reason} at byte {error.start}") from error
    empty = path.stat().st_size == 0
    return complete if header or empty else complete + 1


def _wrong_header(dataset: Dataset, path: Path) -> str | None:
    """What is wrong with the first line of a file that a GLUE task reads; None for all others."""
    form = FORMATS.get(dataset.name.lower())
    if form is None or not form.has_header or path.stem not in form.parts:
        return None
    with open(path, encoding="utf-8-sig") as lines:
        return form.wrong_header(lines.readline().rstrip("\r\n").split("\t"))
