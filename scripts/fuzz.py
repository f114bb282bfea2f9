"""Damaged files for every command that reads some: each answer is a result or one sentence, soon and in little memory.

    python scripts/fuzz.py --rounds 20000 --seed 1

A round takes one of the files that it has made itself, damages it in one or two places, and calls the command on it, in
this process. Damage is done to JSON by its values (a field gone, of another type, very large, hostile text) and to any
file by its bytes. The same seed makes the same rounds; `--only N` repeats round N with its traceback.
"""

import argparse
import contextlib
import io
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cos598d.errors import UserError  # noqa: E402

MOST_SECONDS, MOST_MEGABYTES = 60, 1000
SLOW = ("report", "scale")  # they draw, or fit: a tenth as often as the others
HOSTILE = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2.0,
        0.5,
        -0.0,
        10**18,
        -(10**18),
        10**30,
        1e99,
        1e-300,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        "none",
        "\x1b[2Jx",
        "\ud800",
        "\u202eabc",
        "<script>",
        "1gbit",
        "0gbit",
        "9" * 400 + "gbit",
        "10ms",
        "a" * 5000,
    ),
    *([], {}, [[]], [None], [0] * 3, {"": None}, {"median": None}, [1, "two"], "1e999", "deep"),
]
DEEP = "[" * 100_000


class Hung(BaseException):
    """A round that does not end."""


def main() -> int:
    """Play the rounds, print what failed and how often, and return 1 if anything did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="N", help="this round alone, with its traceback")
    parser.add_argument("--of", default="", metavar="WORD", help="only commands whose name has this word")
    options = parser.parse_args()
    found, summary = play(options.rounds, options.seed, options.only, options.of)
    print(summary)
    for place, examples in sorted(found.items()):
        print(f"{len(examples)} x {place}; rounds {', '.join(map(str, examples[:5]))}")
    return 1 if found else 0


def play(rounds: int, seed: int, only: int | None = None, of: str = "") -> tuple[dict[str, list[int]], str]:
    """The rounds that failed, by what failed where, and a line about all."""
    warnings.simplefilter("ignore")
    found: dict[str, list[int]] = {}
    ends: Counter[str] = Counter()
    longest, started, peak_before = 0.0, time.monotonic(), _peak_megabytes()
    with tempfile.TemporaryDirectory(prefix="cos598d-fuzz-") as folder:
        cases = [case for case in make_cases(Path(folder)) if of in case[0]]
        weights = [1 if name.startswith(SLOW) else 10 for name, *_ in cases]
        for number in range(rounds) if only is None else [only]:
            chance = random.Random(f"{seed}/{number}")
            name, origin, command = chance.choices(cases, weights)[0]
            place = Path(folder) / "damaged"
            shutil.copytree(origin, place)
            what = damage(place, chance)
            began = time.monotonic()
            try:
                with time_limit(MOST_SECONDS), quiet():
                    command(place)
                ends[f"{name}: taken"] += 1
            except UserError as error:
                ends[f"{name}: refused"] += 1
                if wrong := wrong_sentence(str(error)):
                    found.setdefault(f"{name}: {wrong}", []).append(number)
            except (Exception, Hung, SystemExit) as error:
                where = traceback.extract_tb(error.__traceback__)
                ours = next((at for at in reversed(where) if "cos598d" in at.filename), where[-1])
                key = (
                    f"{name}: {type(error).__name__} at {Path(ours.filename).name}:{ours.lineno} ({str(error)[:60]!r})"
                )
                found.setdefault(key, []).append(number)
                if only is not None:
                    traceback.print_exception(error)
            longest = max(longest, time.monotonic() - began)
            if only is not None:
                print(name, what)
            shutil.rmtree(place)
    memory = _peak_megabytes() - peak_before  # another test of the same process may have needed much before
    if memory > MOST_MEGABYTES:
        found.setdefault(f"{memory:.0f} MB of memory", []).append(-1)
    counts = ", ".join(f"{words} {count}" for words, count in sorted(ends.items()))
    failed = sum(map(len, found.values()))
    return found, (
        f"{rounds} rounds of seed {seed}: {failed} failed; longest {longest:.1f} s, {memory:.0f} MB more memory, "
        f"{time.monotonic() - started:.0f} s in all\n{counts}"
    )


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def wrong_sentence(sentence: str) -> str | None:
    """What is wrong with an error's sentence, as a user sees it."""
    from cos598d.terminal.printable import printable

    shown = printable(sentence)
    if not shown.isprintable() or not shown.rstrip().endswith((".", ":", "s")) or len(shown) > 2500:
        return f"no sentence: {shown[-60:]!r}"
    return None


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise Hung where the block takes longer."""

    def stop(*_: Any) -> None:
        raise Hung(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What is printed is thrown away, after it was made UTF-8."""
    with io.TextIOWrapper(io.BytesIO(), encoding="utf-8") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
        nowhere.flush()


# --- what is damaged


def damage(folder: Path, chance: random.Random) -> str:
    """Damage one file of a folder; return what was done."""
    file = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    kinds = [damage_bytes] if file.suffix not in (".json", ".jsonl") else [damage_json] * 9 + [damage_bytes]
    done = [chance.choice(kinds)(file, chance) for _ in range(chance.choice((1, 1, 1, 2)))]
    return f"{file.name}: {'; '.join(done)}"


def damage_json(file: Path, chance: random.Random) -> str:
    """Change one value of a JSON file, or of a row of a JSON-lines file."""
    try:
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines() if file.suffix == ".jsonl" else [text]
        row = chance.randrange(len(lines) or 1)
        value = json.loads(lines[row])
    except (ValueError, RecursionError, IndexError):  # it was damaged before
        return damage_bytes(file, chance)
    places = list(all_places(value))
    if not places:
        return damage_bytes(file, chance)
    # A few fields, such as a loss of each iteration, are most of the places: choose by name first.
    by_name: dict[str, list[tuple[Any, Any, str]]] = {}
    for place in places:
        by_name.setdefault(place[2], []).append(place)
    holder, key, name = chance.choice(by_name[chance.choice(sorted(by_name))])
    how = chance.choice(("gone", "other", "other", "other", "other", "renamed", "again"))
    new: Any = None
    if how == "gone" or (how == "renamed" and isinstance(holder, list)):
        del holder[key]
    elif how == "renamed":
        holder[chance.choice(["", "\x1b", "other", key + key])] = holder.pop(key)
    elif how == "again" and isinstance(holder, list):
        holder.insert(key, holder[key])
    else:
        new = json.loads(json.dumps(chance.choice(HOSTILE)))
        holder[key] = new
    text = json.dumps(value)
    if new in ("1e999", "deep"):
        text = text.replace(json.dumps(new), DEEP if new == "deep" else "1e999", 1)
    lines[row] = text
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{name} {how} {str(new)[:40]!r}"


def all_places(value: Any, name: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Every value inside `value`, as its holder, its key, and a name without numbers."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        own = f"{name}.{key}" if isinstance(value, dict) else f"{name}[]"
        yield value, key, own
        yield from all_places(part, own)


def damage_bytes(file: Path, chance: random.Random) -> str:
    """Cut a file, or change some of its bytes, tabs and ends of lines before others."""
    data = bytearray(file.read_bytes())
    how = chance.choice(("cut", "byte", "insert", "twice", "empty", "line"))
    place = chance.randrange(len(data)) if data else 0
    if how == "cut":
        del data[place:]
    elif how == "byte" and data:
        data[place] = chance.choice(b'\x00\t\n\r"\\\xff{}[]:,-e9')
    elif how == "insert":
        data[place:place] = chance.choice(
            [b"\t", b"\n", b"\x00" * 9, b"\xff\xfe", b"\xef\xbb\xbf", b"\x1b[2J", b"9" * 5000, b"a" * 200_000]
        )
    elif how == "twice":
        data *= 2
    elif how == "empty":
        data.clear()
    else:
        lines = bytes(data).splitlines(keepends=True)
        if lines:
            lines.insert(chance.randrange(len(lines)), lines.pop(chance.randrange(len(lines))))
        data = bytearray(b"".join(lines))
    file.write_bytes(data)
    return f"{how} at {place}"


# --- what is called

Case = tuple[str, Path, Callable[[Path], Any]]


def make_cases(folder: Path) -> list[Case]:
    """Every command that reads files, with a folder of whole ones for it."""
    return [
        *_of_records(folder),
        *_of_configs(folder),
        *_of_benches(folder),
        *_of_squad(folder),
        *_of_glue(folder),
        *_of_models(folder),
    ]


def call(*words: object) -> None:
    """A command by its words, but for what a user's errors become at the very top."""
    from cos598d.commands import cli

    exit_code_of, cli.exit_code_of = cli.exit_code_of, lambda function, options: function(options)
    try:
        cli.main(list(map(str, words)))
    finally:
        cli.exit_code_of = exit_code_of


def _of_records(folder: Path) -> Iterator[Case]:
    from report_records import write_run, write_unfinished

    runs = folder / "runs"
    network = {"hosts": 2, "rate": "1gbit", "delay": "10ms"}
    write_run(runs / "alone", ranks=1, sync="none")
    write_run(runs / "all", host=True, wire_share=1.0, network=network)
    write_run(runs / "ddp", sync="ddp", host=True, wire_share=1.1, shared=2)
    for name in ("all", "ddp"):
        _with_packets(runs / name / "summary.json")
    whole = ("alone", "all", "ddp")
    tables = folder / "tables"  # what tables are made of
    shutil.copytree(runs, tables, ignore=shutil.ignore_patterns("*.jsonl"))
    yield "compare", tables, lambda place: call("compare", *(place / name for name in whole))
    yield "compare --markdown", tables, lambda place: call("compare", "--markdown", *(place / name for name in whole))
    yield "traffic", tables, lambda place: call("traffic", place / "all", place / "ddp")
    yield "compare --assert_equal", runs, lambda place: call("compare", "--assert_equal", place / "all", runs / "all")
    for form in ("md", "html"):
        # Drawing takes most of the time, so a run or two will do.
        page = folder / f"page.{form}"
        yield f"report {form}", runs / "all", lambda place, page=page: call("report", place, "-o", page)
    yield "picture", runs / "all", lambda place: call("picture", place, "-o", folder / "picture.svg")
    unfinished = folder / "unfinished"
    write_unfinished(unfinished / "run", wire_share=1.0, host=True)
    page = folder / "unfinished.md"
    yield "compare of an unfinished run", unfinished, lambda place: call("compare", place / "run")
    yield "report of an unfinished run", unfinished, lambda place: call("report", place / "run", "-o", page)
    yield "report of two", runs, lambda place: call("report", place / "all", place / "ddp", "-o", folder / "page.md")


def _with_packets(path: Path) -> None:
    summary = json.loads(path.read_text())
    sent = summary["wire"]["bytes_sent_per_iteration"]
    summary["wire"] |= {
        "packets_sent_per_iteration": [1000.0] * len(sent),
        "packets_received_per_iteration": [900.0] * len(sent),
    }
    path.write_text(json.dumps(summary))


def _of_configs(folder: Path) -> Iterator[Case]:
    from dataclasses import asdict

    from cos598d.commands.replay import read_config
    from cos598d.config import RunConfig, config_from

    configs = folder / "configs"
    configs.mkdir()
    (configs / "config.json").write_text(json.dumps(asdict(config_from({})) | {"world_size": 2}))

    def replay(place: Path) -> None:
        values = read_config(place / "config.json")
        world_size = values.pop("world_size")
        RunConfig(**values).check(world_size)

    yield "train --config", configs, replay


def _of_benches(folder: Path) -> Iterator[Case]:
    from scale_records import write_bench

    benches = folder / "benches"
    syncs = "all_reduce,bucketed,ring,sparse_rows,bucketed+bf16"
    write_bench(benches / "fast", syncs=syncs)
    write_bench(benches / "slow", syncs=syncs, rate=3e8)
    yield "scale", benches, lambda place: call("scale", place / "fast", place / "slow", "--to", 8)
    yield "scale --predict", benches, lambda place: call("scale", place / "fast", "--predict", place / "slow")
    yield "report of a bench", benches, lambda place: call("report", place / "fast", "-o", folder / "bench.md")


def _of_squad(folder: Path) -> Iterator[Case]:
    from cos598d.data.samples import write_squad_sample
    from cos598d.data.squad import read_questions, score_file

    sample = folder / "squad"
    write_squad_sample(sample)
    files = sorted(path.relative_to(sample) for path in sample.rglob("*.json"))
    dev = next(name for name in files if "dev" in name.name and "2" in name.name)
    small = folder / "small-squad"
    small.mkdir()
    value = json.loads((sample / dev).read_text())
    value["data"] = [{**article, "paragraphs": article["paragraphs"][:2]} for article in value["data"][:3]]
    (small / "dev.json").write_text(json.dumps(value))
    questions = read_questions(small / "dev.json")
    (small / "answers.json").write_text(json.dumps({one.identity: one.text[:9] for one in questions}))
    (small / "odds.json").write_text(json.dumps({one.identity: 0.5 for one in questions}))
    shutil.rmtree(sample)

    def score(place: Path) -> None:
        words = [
            "--data",
            place / "dev.json",
            "--predictions",
            place / "answers.json",
            "--null_odds",
            place / "odds.json",
        ]
        call("score", "--task", "squad", *words)

    yield "score", small, score
    yield "score_file", small, lambda place: score_file(place / "dev.json", place / "answers.json")


def _of_glue(folder: Path) -> Iterator[Case]:
    from data_files import FILES, write_task

    from cos598d.data.tables import TABLES, read_rows

    for task in FILES:
        place = folder / "glue" / task
        place.mkdir(parents=True)
        write_task(place, task)

        def read(place: Path, table: Any = TABLES[task]) -> None:
            for file in sorted(place.rglob("*.tsv")):
                list(read_rows(file, table, table.labels))

        yield f"glue {task}", place, read


def _of_models(folder: Path) -> Iterator[Case]:
    from cos598d.models.configs import CONFIGS, TINY, plain_config, read_config

    for kind in CONFIGS:
        place = folder / "models" / kind
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(plain_config(CONFIGS[kind](**TINY[kind]))))
        yield f"config {kind}", place, lambda place: read_config(place / "config.json")


if __name__ == "__main__":
    sys.exit(main())
