"""Write the bundled samples' files from their grammar: `python tools/make_samples.py [FOLDER]`.

FOLDER is the package's `cos598d/data/samples` unless it is given. The files are always the same, byte for byte.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from sample_grammar import rte, squad  # noqa: E402

from cos598d.files import write_whole  # noqa: E402


def make(folder: Path) -> list[Path]:
    """Write every file into `folder` and return their paths."""
    contents = {"vocab.txt": "\n".join(rte.vocabulary()) + "\n"}
    for part in ("train", "dev"):
        rows = (f"{place}\t{first}\t{second}\t{label}" for place, (first, second, label) in enumerate(rte.pairs(part)))
        contents[f"rte-{part}.tsv"] = "\n".join(["index\tsentence1\tsentence2\tlabel", *rows]) + "\n"
        contents[f"squad-{part}.json"] = json.dumps(squad.articles(part), ensure_ascii=False, indent=0) + "\n"
    for name, content in contents.items():
        write_whole(folder / name, content)
    return [folder / name for name in contents]


if __name__ == "__main__":
    for path in make(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "cos598d" / "data" / "samples"):
        print(path)
