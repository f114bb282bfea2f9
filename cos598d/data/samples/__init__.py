"""The bundled samples, in the formats of RTE and SQuAD, for a first run without any data."""

import json
from importlib.resources import files
from pathlib import Path

from cos598d.terminal.files import write_whole

PARTS = ("train", "dev")


def write_rte_sample(folder: Path) -> Path:
    """Write train.tsv and dev.tsv in RTE's format into `folder`, and return it."""
    for part in PARTS:
        write_whole(Path(folder) / f"{part}.tsv", _text(f"rte-{part}.tsv"))
    return Path(folder)


def write_squad_sample(folder: Path) -> Path:
    """Write train-v1.1.json, dev-v1.1.json, train-v2.0.json and dev-v2.0.json into `folder`, and return it.

    Version 1.1 is 2.0 without the impossible questions.
    """
    for part in PARTS:
        squad = json.loads(_text(f"squad-{part}.json"))
        write_whole(Path(folder) / f"{part}-v2.0.json", json.dumps(squad, ensure_ascii=False) + "\n")
        squad["version"] = "1.1"
        for paragraph in (one for article in squad["data"] for one in article["paragraphs"]):
            paragraph["qas"] = [asked for asked in paragraph["qas"] if not asked.pop("is_impossible")]
        write_whole(Path(folder) / f"{part}-v1.1.json", json.dumps(squad, ensure_ascii=False) + "\n")
    return Path(folder)


def vocabulary() -> list[str]:
    """An uncased BERT vocabulary: special tokens, characters and their `##` forms, the words of the RTE sample."""
    return _text("vocab.txt").rstrip("\n").split("\n")


def _text(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")
