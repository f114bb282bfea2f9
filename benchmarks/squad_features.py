"""The cost of building SQuAD's features, how exact their answers are, and how much slower the Python tokenizer is.

    python benchmarks/squad_features.py dev-v1.1.json train-v1.1.json --vocabulary vocab.txt [--python]

For each file: questions and windows, the status of the gold answers, seconds and peak memory of reading and building
without the cache. `--python` also tokenizes the same texts with pytorch-transformers' BertTokenizer, each context once,
and prints the ratio of seconds. `--questions N` repeats the file's questions to that number to show how both grow.
"""

import argparse
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cos598d.data.squad.read import Squad, read_squad
from cos598d.data.squad.windows import AnswerStatus, WindowOptions, build_windows
from cos598d.data.text.tokenization import load_encoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--vocabulary", type=Path, required=True, help="vocab.txt of an uncased BERT")
    parser.add_argument("--python", action="store_true", help="compare with pytorch-transformers' tokenizer")
    parser.add_argument("--questions", type=int, help="repeat the questions to this number")
    options = parser.parse_args()
    for file in options.files:
        measure(file, options)


def measure(file: Path, options: argparse.Namespace) -> None:
    encoder = load_encoder("bert", options.vocabulary, True)
    before = peak_mb()
    started = time.perf_counter()
    squad = read_squad(file)
    if options.questions:
        squad = repeated(squad, options.questions)
    reading = time.perf_counter() - started
    started = time.perf_counter()
    features = build_windows(squad, range(len(squad.questions)), encoder, WindowOptions(), training=False)
    building = time.perf_counter() - started
    print(
        f"{file.name}: {len(squad.questions):,} questions, {len(features):,} windows, {len(features.tokens):,} tokens"
    )
    print(f"  read in {reading:.2f} s, built in {building:.2f} s, peak memory {peak_mb():.0f} MB ({before:.0f} before)")
    counts = np.bincount(features.extra["finding"], minlength=len(AnswerStatus))
    answerable = counts.sum() - counts[AnswerStatus.IMPOSSIBLE]
    print(
        "  " + ", ".join(f"{finding.name.lower()} {counts[finding]:,}" for finding in AnswerStatus if counts[finding])
    )
    within = answerable - counts[AnswerStatus.NO_WINDOW]
    exact = counts[AnswerStatus.EXACT] + counts[AnswerStatus.MOVED]
    print(f"  tokens give the answer's text: {exact:,} of {within:,} answers that a window holds, {exact / within:.2%}")
    if options.python:
        compare(squad, encoder, options.vocabulary)


def compare(squad: Squad, encoder, vocabulary: Path) -> None:
    from pytorch_transformers import BertTokenizer

    texts = [*squad.contexts, *(question.text for question in squad.questions)]
    started = time.perf_counter()
    ours = [encoded.ids.tolist() for encoded in encoder.encode_with_offsets(texts)]
    seconds = time.perf_counter() - started
    tokenizer = BertTokenizer.from_pretrained(str(vocabulary), do_lower_case=True)
    started = time.perf_counter()
    theirs = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) for text in texts]
    python_seconds = time.perf_counter() - started
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    print(f"  tokenizing {len(texts):,} texts with offsets: {seconds:.2f} s; pytorch-transformers, without offsets: "
          f"{python_seconds:.2f} s, {python_seconds / seconds:.1f} times; same ids for {same:,}")  # fmt: skip


def repeated(squad: Squad, questions: int) -> Squad:
    """The file repeated up to that many questions, every time with its own contexts and ids."""
    contexts, items, copy = [], [], 0
    while len(items) < questions:
        begin = len(contexts)
        contexts += [f"{context} {copy}" for context in squad.contexts]
        items += [
            question._replace(identity=f"{question.identity}-{copy}", context=question.context + begin)
            for question in squad.questions
        ]
        copy += 1
    return replace(squad, contexts=contexts, questions=items[:questions])


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
