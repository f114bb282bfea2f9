"""How a block of the book is filled: its command runs in a folder of its own, and its output is kept.

The folder has only copies of the repository's files that the command names. So a command finds what every reader would,
and leaves nothing behind. Output flags are added: a picture's file as the last argument, a bench's record by --output.
Data sets on this machine are hidden: the book shows only the bundled samples.
"""

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from book_pages import BENCH, FIGURES, OUTPUT, PICTURE, PROGRAM, Block, named

from cos598d.errors import UserError
from cos598d.records.bench import Bench, read_bench
from cos598d.records.conventions import DDP, FLOOR, FLOORS
from cos598d.records.summary import paired_ratio
from cos598d.terminal.children import end_all
from cos598d.terminal.printable import printable
from cos598d.terminal.program import ends_with_parent, own_environment
from cos598d.terminal.tables import as_markdown, markdown_text
from cos598d.terminal.words import number_of
from cos598d.tools.cluster.plan import DEFAULT_NAME
from cos598d.tools.report.benches import message_fit, message_rows, remarks, setting_words
from cos598d.tools.report.cells import texts

SECONDS, SECONDS_TO_END = 600.0, 20.0
COLUMNS = 100
MOST_LINES, MOST_BYTES = 200, 120_000  # of an output, of a picture
DATA = ("GLUE_DIR", "SQUAD_DIR", "IMAGE_DIR")
SHOWN = {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
ABSOLUTE = re.compile(r"(?<![\w.:/~-])/([\w.+@-]+)/(?:[\w.+@-]+/)*([\w.+@-]+)")


@dataclass(frozen=True)
class Made:
    """A command's result: the text between the comments, and a picture's file."""

    inside: str
    drawing: str | None = None


def typed(block: Block, folder: str) -> list[str]:
    """The command as a reader types it; `folder` is that of the pages, relative to the repository's root."""
    words = [*PROGRAM, *block.words]
    if block.kind == PICTURE:
        words.append(f"{folder}/{FIGURES}/{block.name}")
    return [*PROGRAM, "cluster", "run", *block.hosts, "--", *words] if block.hosts else words


def make(block: Block, folder: str, root: Path) -> Made:
    """Run the block's command, and return what fills it.

    Raises UserError if the command fails, or has nothing to show.
    """
    with tempfile.TemporaryDirectory(prefix="cos598d-book-") as name:
        place = Path(name).resolve()
        here = place / "here"
        (here / folder / FIGURES).mkdir(parents=True)
        copy_named(block.words, root, here)
        shown = typed(block, folder)
        cluster = f"book{os.getpid()}"
        words = [*shown, "--output", block.name] if block.kind == BENCH else [*shown]
        if block.hosts:
            words[3:3] = ["--name", cluster]  # after `cluster run`: another one with the usual name may be up
        code, said = run([sys.executable, "-m", *words], here, place / "said.txt")
        said = cleaned(said.replace(cluster, DEFAULT_NAME), (here, root, place))
        if code not in block.exit_codes:
            expected = " or ".join(map(str, block.exit_codes))
            last = said.splitlines()[-1] if said else "without a word"
            raise UserError(f"it ended with exit code {code}, where {expected} was expected: {last}")
        if block.kind == OUTPUT:
            return Made(f"{fenced(said)}\n\n{small(f'Made by {made_by(shown)}')}")
        if block.kind == BENCH:
            file, record = read_bench(here / block.name)
            tables = bench_tables(json.loads(file.read_text(encoding="utf-8")), record)
            return Made(f"{tables}\n\n{small(f'{setting(record)} Made by {made_by(shown)}')}")
        drawing = read_drawing(here / folder / FIGURES / block.name)
        alt = re.sub(r"[\[\]\\]", r"\\\g<0>", block.options["alt"])
        link = f"![{alt}]({FIGURES}/{block.name})"
        return Made(f"{link}\n\n{small(f'Made by {made_by(shown)}')}", drawing)


def copy_named(words: Sequence[str], root: Path, here: Path) -> None:
    """Copy the files that the words name from the repository to the same places below `here`; folders need a "/"."""
    for part in dict.fromkeys(part for word in words for part in named(word)):
        source, target = root / part, here / part
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        elif "/" in part and source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)


def run(words: Sequence[str], here: Path, output: Path) -> tuple[int, str]:
    """Run a program in the folder `here`. Return its exit code, and all its output, which goes to the file `output`.

    Raises UserError if it does not end.
    """
    environ = {name: value for name, value in own_environment().items() if name not in DATA} | SHOWN
    # So that `cluster run -- cos598d ...` finds the program next to this Python.
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    with output.open("wb") as stream:  # not a pipe, which a remaining process would keep open
        process = subprocess.Popen(
            ends_with_parent(words),
            cwd=here, env=environ, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise UserError(f"it did not end within {SECONDS:g} s.") from None
        finally:
            end_all([process], SECONDS_TO_END)
    return code, output.read_bytes().decode(errors="replace")


def cleaned(said: str, folders: Sequence[Path]) -> str:
    """A program's output, cleaned for a page: no colours, no overwritten bars, and absolute paths relative to these
    folders, or only their last names."""
    said = COLOURS.sub("", said.replace("\r\n", "\n"))
    for folder in folders:
        said = said.replace(f"{folder}/", "")
    said = ABSOLUTE.sub(lambda path: path[2] if Path(f"/{path[1]}").exists() else path[0], said)
    lines = [printable(line.rpartition("\r")[2]).rstrip() for line in said.split("\n")]
    return "\n".join(lines).strip("\n")


def fenced(said: str) -> str:
    """Text as a fenced block. Raises UserError if it is empty or too long."""
    count = len(said.splitlines())
    if not said:
        raise UserError("it prints nothing that could be shown.")
    if count > MOST_LINES:
        raise UserError(f"it prints {count} lines, and a page shows at most {MOST_LINES}.")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", said)), default=0))
    return f"{fence}text\n{said}\n{fence}"


def read_drawing(path: Path) -> str:
    """The drawing's text. Raises UserError if it is missing or too large."""
    if not path.is_file():
        raise UserError("it draws no picture: its last word must be the flag that takes the file.")
    drawing = path.read_text(encoding="utf-8")
    if len(drawing) > MOST_BYTES:
        raise UserError(f"its picture has {len(drawing)} bytes, and one of a page has at most {MOST_BYTES}.")
    return drawing


def bench_tables(found: dict[str, Any], record: Bench) -> str:
    """All tables of a bench's record in Markdown, with their warnings."""
    parts = []
    if record.message_size:
        parts += [as_markdown(texts(message_rows(record))), sentence(message_fit(record))]
    if record.candidates:
        parts.append(as_markdown(candidate_rows(found)))
    return "\n\n".join([*parts, *map(sentence, remarks(record))])


def candidate_rows(found: dict[str, Any]) -> list[list[str]]:
    """A header and a row for each candidate. Ratios are to DDP, or to the first if DDP was not measured; none for a
    single candidate. Exposed time needs a floor next to others."""
    seconds: dict[str, list[float]] = {one["label"]: [] for one in found["candidates"]}
    for sample in found["samples"]:
        seconds[sample["candidate"]].append(sample["seconds"])
    reference = DDP if DDP in seconds else next(iter(seconds))
    unit = "a step" if found["setting"]["step"] else "an iteration"
    has_others, is_above_floor = len(seconds) > 1, has_floor([*seconds])
    ratio_head = [f"times {reference}'s"] if has_others else []
    exposed_head = ["exposed ms"] if is_above_floor else []
    rows = [["sync", f"ms {unit}", *ratio_head, *exposed_head, "calls", "MB sent"]]
    for one in found["candidates"]:
        label = one["label"]
        summary, traffic = found["summary"][label], found["traffic"][label]
        exposed = None if label in FLOORS else summary["seconds_exposed"]
        ratio = "1" if label == reference else ratio_words(paired_ratio(seconds[label], seconds[reference]))
        is_known = one["bytes_from"] == "ledger"
        rows.append(
            [label, milliseconds(summary["seconds_median"])]
            + ([ratio] if has_others else [])
            + (["-" if exposed is None else milliseconds(exposed)] if is_above_floor else [])
            + [str(max(traffic["calls"])) if is_known else "-"]
            + [f"{max(traffic['bytes_sent']) / 1e6:.2f}" if is_known else "-"]
        )
    return rows


def has_floor(labels: Sequence[str]) -> bool:
    """Whether the floor was measured next to others."""
    return len(labels) > 1 and FLOOR in labels


def ratio_words(ratio: dict[str, Any]) -> str:
    """ "0.97 (0.94-1.01)": a median and its interval, if there are enough rounds for one."""
    low, high = ratio["interval_95"] or (None, None)
    return f"{ratio['median']:.2f}" + (f" ({low:.2f}-{high:.2f})" if low is not None else "")


def milliseconds(seconds: float) -> str:
    """With at least three digits, and at most one after the point."""
    return f"{1000 * seconds:.1f}" if abs(seconds) < 0.1 else f"{1000 * seconds:.0f}"


def setting(record: Bench) -> str:
    """What a bench measured, and the meaning of the columns of its candidates."""
    words, labels = sentence(setting_words(record).replace("\n", "; ")), [one.label for one in record.candidates]
    if not labels:
        return words
    ratios = " ratios are within rounds, with the 95 % interval of their median from 6 rounds on;"
    ratios = ratios if len(labels) > 1 else ""
    exposed = f" exposed: less the median of {FLOOR};" if has_floor(labels) else ""
    return f"{words} Medians over the rounds;{ratios}{exposed} calls and MB: of the rank that sends most."


def sentence(words: str) -> str:
    """A table's footnote as a sentence of a page."""
    words = markdown_text(words)
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def made_by(words: Sequence[str]) -> str:
    """The command, and when and where it was run."""
    from cos598d.measure.environment import processor

    today = datetime.now(timezone.utc).date().isoformat()
    torch = importlib.metadata.version("torch").partition("+")[0]
    cores = number_of(os.cpu_count() or 1, "core")
    return f"`{shlex.join(words)}` on {today}, {cores} of {processor()}, torch {torch}."


def small(words: str) -> str:
    """A line in small type."""
    return f"<small>{words}</small>"
