"""The bundled samples, in the formats of RTE and SQuAD, for a first run without any data."""

import functools
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from cos598d.terminal.files import write_whole

PARTS = ("train", "dev")
Pair = tuple[str, str, str]


def rte_sample(part: str) -> list[Pair]:
    """The pairs of "train" or "dev": (report, statement, "entailment" or "not_entailment")."""
    _, *lines = _text(f"rte-{part}.tsv").rstrip("\n").split("\n")
    rows = (line.split("\t") for line in lines)
    return [(first, second, label) for _, first, second, label in rows]


def write_rte_sample(folder: Path) -> Path:
    """Write train.tsv and dev.tsv in RTE's format into `folder`, and return it."""
    for part in PARTS:
        write_whole(Path(folder) / f"{part}.tsv", _text(f"rte-{part}.tsv"))
    return Path(folder)


def squad_sample(part: str, version_2: bool) -> dict[str, Any]:
    """SQuAD's JSON object for "train" or "dev"; 1.1 is 2.0 without the impossible questions."""
    squad = json.loads(_text(f"squad-{part}.json"))
    if version_2:
        return squad
    squad["version"] = "1.1"
    for article in squad["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["qas"] = [asked for asked in paragraph["qas"] if not asked.pop("is_impossible")]
    return squad


def write_squad_sample(folder: Path) -> Path:
    """Write train-v1.1.json, dev-v1.1.json, train-v2.0.json and dev-v2.0.json into `folder`, and return it."""
    for part in PARTS:
        for version in ("1.1", "2.0"):
            content = json.dumps(squad_sample(part, version == "2.0"), ensure_ascii=False)
            write_whole(Path(folder) / f"{part}-v{version}.json", content + "\n")
    return Path(folder)


@functools.cache
def vocabulary() -> list[str]:
    """An uncased BERT vocabulary: special tokens, characters and their `##` forms, the words of the RTE sample."""
    return _text("vocab.txt").rstrip("\n").split("\n")


def _text(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")
