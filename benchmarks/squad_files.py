"""One SQuAD file from several, or from some of one's articles: a split by article shares no context between its parts.

python benchmarks/squad_files.py --output train-v2.0.json dev-v2.0.json --articles 0:25
python benchmarks/squad_files.py --output both.json train-v1.1.json extra.json
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cos598d.data.squad import read_questions
from cos598d.terminal.files import write_whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--articles", default=":", metavar="A:B", help="articles A to B - 1 of all (default: all)")
    options = parser.parse_args()
    parts = [json.loads(file.read_bytes()) for file in options.files]
    chosen = slice(*(int(number) if number else None for number in options.articles.split(":")))
    articles = [article for part in parts for article in part["data"]][chosen]
    value = {"version": parts[0].get("version", ""), "data": articles}
    write_whole(options.output, json.dumps(value, ensure_ascii=False))
    asked = read_questions(options.output)
    impossible = sum(question.impossible for question in asked)
    print(f"{options.output}: {len(articles)} articles, {len(asked)} questions, {impossible} impossible")


if __name__ == "__main__":
    main()
