"""Did a change move anything? Losses, weights and traffic of short runs, kept in a file and compared to the last digit.

    python scripts/goldens.py record before.json --tree ../before     # a checkout of what there was before
    python scripts/goldens.py record after.json
    python scripts/goldens.py compare before.json after.json

`record` runs tasks 1, 2(a), 2(b), 3 and other rungs (--syncs) on 1, 2 and 4 ranks for a few iterations of the bundled
sample, one thread each. `compare` names the first difference and exits with 1. Losses depend on the processor and on
the versions of the packages, so both files have to come from one machine: none is kept in the repository.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cos598d.commands.flags import Parser, check_output_file  # noqa: E402
from cos598d.errors import UsageError, UserError  # noqa: E402
from cos598d.terminal.files import write_json  # noqa: E402
from cos598d.terminal.printable import printable  # noqa: E402
from cos598d.terminal.reading import read_json  # noqa: E402

STEPS = 6
TASKS = ("task1", "task2a", "task2b", "task3")
COUNTED = ("payload_bytes", "bytes_sent", "bytes_received")
# Beside what is compared: where these differ, losses may differ in the last digits and nobody is to blame.
SURROUNDINGS = ("torch", "python", "machine")


def main() -> int:
    """Run the command; return 0 where nothing differs, 1 for a difference or a run that failed, 2 for wrong words."""
    parser = Parser(prog="python scripts/goldens.py", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    record = commands.add_parser("record", help="run, and write losses, weights and traffic to a file")
    record.add_argument("file", type=Path, metavar="FILE")
    record.add_argument("--tree", type=Path, default=ROOT, metavar="FOLDER", help="the checkout to run (default: this)")
    record.add_argument("--ranks", default="1,2,4", metavar="N,N", help="numbers of ranks (default: 1,2,4)")
    record.add_argument("--tasks", default=",".join(TASKS), metavar="TASK,TASK", help="tasks (default: all four)")
    record.add_argument("--syncs", default="ring,bucketed", metavar="SYNC,SYNC", help="rungs (default: ring,bucketed)")
    record.add_argument("--model", default="tiny", help="tiny, or minilm and what else a run takes (default: tiny)")
    compare = commands.add_parser("compare", help="name the first difference between two files")
    for name in ("first", "second"):
        compare.add_argument(name, type=Path, metavar="FILE")
    options = parser.parse_args()
    try:
        if options.command == "record":
            return _record(options)
        return _compare(options.first, options.second)
    except UserError as error:
        print(printable(error), file=sys.stderr)
        return error.exit_code


def _record(options: argparse.Namespace) -> int:
    check_output_file("FILE", options.file)
    tree = options.tree.resolve()
    if not (tree / "cos598d" / "run.py").is_file():
        raise UsageError(f"--tree {options.tree} is not a checkout of this project: it has no cos598d/run.py.")
    turns = list(_turns(options))
    runs = {}
    with tempfile.TemporaryDirectory(prefix="cos598d-goldens-") as folder:
        for place, (name, words, ranks) in enumerate(turns, 1):
            print(f"[{place}/{len(turns)}] {name}", flush=True)
            runs[name] = _run(tree, words, ranks, Path(folder) / str(place), options.model)
    write_json(options.file, {"steps": STEPS, "model": options.model, "surroundings": _surroundings(), "runs": runs})
    print(f"wrote {options.file}: {len(runs)} run{'s' if len(runs) != 1 else ''} of {STEPS} iterations")
    return 0


def _turns(options: argparse.Namespace) -> Iterator[tuple[str, list[str], int]]:
    """Of each run its name, the words that start it, and its ranks; task 1 is a single process."""
    try:
        sizes = [int(word) for word in options.ranks.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise UsageError(f"--ranks {options.ranks}: give numbers from 1 with commas between, as 1,2,4.")
    for task in filter(None, options.tasks.split(",")):
        if task not in TASKS:
            raise UsageError(f"--tasks {options.tasks}: no task {task}; the known ones are {', '.join(TASKS)}.")
        for ranks in [1] if task == "task1" else sizes:
            yield f"{task} on {ranks}", [f"{task}/run_glue.py"], ranks
    from cos598d.sync import SYNCS

    for sync in filter(None, options.syncs.split(",")):
        if sync not in SYNCS:
            raise UsageError(f"--syncs {options.syncs}: no rung {sync}; the known ones are {', '.join(SYNCS)}.")
        for ranks in sizes:
            yield f"{sync} on {ranks}", ["-m", "cos598d", "train", "--sync", sync], ranks


def _run(tree: Path, words: list[str], ranks: int, folder: Path, model: str) -> dict[str, Any]:
    """Losses, a digest of the trained weights and the ledger's totals of one run.

    Raises UserError when it fails, with the last that it said.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("GLUE_DIR", "COS598D_CACHE")}
    environment |= {"PYTHONPATH": str(tree), "COS598D_CACHE": str(folder.parent / "cache")}
    words = [*words, "--world_size", str(ranks), "--threads", "1", "--no_cuda", "--do_train"]
    words += ["--max_steps", str(STEPS), "--total_train_batch_size", "16", "--max_seq_length", "64"]
    words += ["--model_name_or_path", model, "--monitor_interval", "0", "--output_dir", str(folder)]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()[-1]
        raise UserError(f"{' '.join(words)} ended with exit code {done.returncode}: {said}")
    ledger = {str(rank): _totals(folder / f"communication.rank{rank}.jsonl") for rank in range(ranks)}
    losses = read_json(folder / "summary.json")["losses"]
    weights = _digest(folder / "model")
    shutil.rmtree(folder)
    return {"losses": losses, "weights": weights, "ledger": ledger}


def _digest(folder: Path) -> str:
    """Of the trained weights: a few steps of Adam hardly move the losses, least of all where gradients are scaled."""
    from cos598d.models.checkpoint import load_weights

    digest = hashlib.sha256()
    for name, tensor in sorted(load_weights(folder / "pytorch_model.bin").items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _totals(file: Path) -> dict[str, dict[str, int]]:
    """Calls and bytes by what they were for and which collective they were."""
    totals: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(("calls", *COUNTED), 0))
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        total = totals[f"{row['purpose']}, {row['op']}"]
        total["calls"] += 1
        for name in COUNTED:
            total[name] += row[name]
    return dict(sorted(totals.items()))


def _surroundings() -> dict[str, str]:
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or "unknown",
    }


def _compare(first: Path, second: Path) -> int:
    before, after = _load(first), _load(second)
    differences = _differences(before, after)
    found = next(differences, None)
    unlike = [name for name in SURROUNDINGS if before["surroundings"].get(name) != after["surroundings"].get(name)]
    if unlike:
        print(printable(f"note: the two were recorded with another {' and another '.join(unlike)}."), file=sys.stderr)
    if found is None:
        count = len(before["runs"])
        print(f"the same to the last digit: {count} run{'s' if count != 1 else ''} of {before['steps']} iterations")
        return 0
    place, mine, theirs = found
    print(printable(f"{place}: {_shown(mine)} in {first}, {_shown(theirs)} in {second}"))
    rest = sum(1 for _ in differences)
    if rest:
        print(f"and {rest} more difference{'s' if rest > 1 else ''}")
    return 1


def _load(file: Path) -> dict[str, Any]:
    try:
        record = read_json(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    kinds = {"steps": int, "model": str, "surroundings": dict, "runs": dict}
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in kinds.items()):
        raise UsageError(f"{file} is not a file of goldens: make one with `python scripts/goldens.py record FILE`.")
    return record


_ABSENT = object()


def _differences(before: Any, after: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two values differ, in order: the place, and the two. A number is not the same as one of another type."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before | after:
            if place or name != "surroundings":
                pair = before.get(name, _ABSENT), after.get(name, _ABSENT)
                yield from _differences(*pair, f"{place} / {name}" if place else name)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True), 1):
            yield from _differences(*pair, f"{place} {number}")
    elif type(before) is not type(after) or before != after:
        yield place, before, after


def _shown(value: Any) -> str:
    return "nothing" if value is _ABSENT else json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())
