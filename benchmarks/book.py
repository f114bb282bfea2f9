"""Update the book's figures and numbers: run the command of each block of its pages, and fill the block.

    python benchmarks/book.py docs/lessons/*.md [--quick]

A block begins and ends with a comment on lines of its own:

    <!-- book: output learn 3 --check docs/lessons/wrong/lesson3.py.txt -->
    <!-- book: picture ring.svg picture --sync ring -o alt="A ring of four ranks" -->
    <!-- book: output bench --sync ring,flat --rounds 8 cluster="--hosts 4 --rate 1gbit" -->
    <!-- book: end -->

After the kind (and a picture's file) come the words after `cos598d`, as a shell reads them; a picture's file is added
as the last one. Words of the comment itself: `alt="..."` of a picture; `cluster="..."`, the words of `cluster run` on
whose hosts the command runs; `exit=2`, the exit code of an output if it is neither 0 nor 1. In fenced code a comment is
an example.

1. A command runs in a new folder with copies of only the repository's files that it names, without data sets. So it
   finds what every reader would, and leaves nothing behind.
2. A page and its pictures are written when all its blocks are done: completely, or not at all.
3. A block whose command fails stays unchanged and is listed at the end, and the exit code is 1.

A block on emulated hosts needs Linux and root, and else stays unchanged. `--quick` skips these and benches.
"""

import argparse
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cos598d.errors import UserError
from cos598d.measure.environment import processor
from cos598d.terminal.children import end_all
from cos598d.terminal.files import write_whole
from cos598d.terminal.printable import printable
from cos598d.terminal.program import ends_with_parent, own_environment
from cos598d.tools.cluster.plan import DEFAULT_NAME

OUTPUT, PICTURE = "output", "picture"
FIGURES = "figures"  # the folder of pictures, next to the pages
SECONDS, SECONDS_TO_END = 600.0, 20.0
MOST_LINES, MOST_BYTES = 200, 120_000  # of an output, of a picture
DATA = ("GLUE_DIR", "SQUAD_DIR", "IMAGE_DIR")
SHOWN = {"COLUMNS": "100", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
# A fenced block, or a block of ours: its comment's words, and what is inside.
PARTS = re.compile(
    r"^[ ]*(?P<fence>`{3,}|~{3,}).*?^[ ]*(?P=fence)[`~]*[ ]*$"
    r"|^<!-- book: (?P<words>(?:(?!-->).)*?)-->\n(?P<inside>(?:(?!^<!-- book:).)*)^<!-- book: end -->$",
    flags=re.DOTALL | re.MULTILINE,
)
ABSOLUTE = re.compile(r"(?<![\w.:/~-])/([\w.+@-]+)/(?:[\w.+@-]+/)*([\w.+@-]+)")


@dataclass(frozen=True)
class Block:
    """What a command fills. line: of its comment. name: of a picture's file. words: those after `cos598d`. options:
    the comment's own. inside: the text between the comments."""

    line: int
    kind: str
    name: str
    words: tuple[str, ...]
    options: Mapping[str, str]
    inside: str

    def typed(self, folder: str) -> list[str]:
        """The command as a reader types it; `folder` is that of the pages, relative to the repository's root."""
        words = ["cos598d", *self.words, *([f"{folder}/{FIGURES}/{self.name}"] if self.kind == PICTURE else [])]
        hosts = self.options.get("cluster")
        return ["cos598d", "cluster", "run", *shlex.split(hosts), "--", *words] if hosts else words


def block_of(text: str, found: re.Match[str]) -> Block:
    """The block that PARTS found. Raises ValueError if its comment describes none."""
    words = shlex.split(found["words"])
    own = [word for word in words if re.match("(alt|cluster|exit)=", word)]
    options = dict(word.split("=", 1) for word in own)
    kind, *command = [word for word in words if word not in own] or [""]
    name = command.pop(0) if kind == PICTURE and command else ""
    if kind not in (OUTPUT, PICTURE) or not command:
        raise ValueError(f"it needs a kind, {OUTPUT} or {PICTURE}, and the words after cos598d")
    if kind == PICTURE and not (re.fullmatch(r"\w[\w.-]*\.svg", name) and options.get("alt")):
        raise ValueError('a picture needs the name of an .svg file, and what it shows as alt="..."')
    line = text.count("\n", 0, found.start()) + 1
    return Block(line, kind, name, tuple(command), options, found["inside"])


def blocks(text: str, page: str) -> list[tuple[re.Match[str], Block]]:
    """The page's blocks, and where they are. Raises UserError with the line of a comment that is no block's."""
    found = []
    for match in PARTS.finditer(text):
        try:
            found += [] if match["fence"] else [(match, block_of(text, match))]
        except ValueError as error:
            line = text.count("\n", 0, match.start()) + 1
            raise UserError(f"{page} line {line}: this is no block: {error}. Correct its comment.") from None
    lost = PARTS.sub(lambda match: "\n" * match[0].count("\n"), text)
    if (place := lost.find("<!-- book:")) >= 0:
        line = lost.count("\n", 0, place) + 1
        raise UserError(f"{page} line {line}: this comment shares its line, or its block has no end. Fix it.")
    return found


def fill(page: Path, is_quick: bool) -> list[str]:
    """Fill a page's blocks, and write it with its pictures. Return a line for each failure."""
    text = page.read_text(encoding="utf-8")
    folder = page.resolve().parent
    within = folder.relative_to(ROOT).as_posix() if folder.is_relative_to(ROOT) else folder.name
    filled, written, failed, last = [], dict[Path, str](), [], 0
    for match, block in blocks(text, page.name):
        if is_quick and (block.words[0] == "bench" or "cluster" in block.options):
            continue
        where = f"{page.name} line {block.line}: {shlex.join(block.typed(within))}"
        print(where, flush=True)
        if "cluster" in block.options and os.geteuid():
            print("  stays as it was: emulated hosts need root", flush=True)
            continue
        try:
            inside, drawing = make(block, within)
        except UserError as error:
            failed.append(f"{where}: {error}")
            continue
        filled += [text[last : match.start("inside")], f"\n{inside}\n\n"]
        last = match.end("inside")
        written |= {folder / FIGURES / block.name: drawing} if drawing else {}
    after = "".join([*filled, text[last:]])
    if page.read_text(encoding="utf-8") != text:
        return [*failed, f"{page.name}: it was changed while its commands ran. Fill it again."]
    for path, content in {**written, page: after}.items() if after != text or written else ():
        write_whole(path, content)
    return failed


def make(block: Block, folder: str) -> tuple[str, str]:
    """Run the block's command, and return what fills it and a picture's drawing. Raises UserError if it fails."""
    with tempfile.TemporaryDirectory(prefix="cos598d-book-") as name:
        place = Path(name).resolve()
        here = place / "here"
        (here / folder / FIGURES).mkdir(parents=True)
        copy_named(block.words, here)
        shown, cluster = block.typed(folder), f"book{os.getpid()}"
        words = [*shown]
        if "cluster" in block.options:
            words[3:3] = ["--name", cluster]  # after `cluster run`: another one with the usual name may be up
        code, said = run([sys.executable, "-m", *words], here, place / "said.txt")
        said = cleaned(said.replace(cluster, DEFAULT_NAME), (here, ROOT, place))
        expected = [int(block.options["exit"])] if "exit" in block.options else [0, 1]  # a wrong file's check: 1
        if code not in expected:
            last = (said or "nothing").splitlines()[-1]
            raise UserError(f"it ended with exit code {code}, not {expected}, and printed: {last}")
        today, torch = datetime.now(timezone.utc).date(), importlib.metadata.version("torch").partition("+")[0]
        where = f"on {today}, {os.cpu_count()} cores of {processor()}, torch {torch}"
        made = f"<small>Made by `{shlex.join(shown)}` {where}.</small>"
        if block.kind == OUTPUT:
            return f"{fenced(said)}\n\n{made}", ""
        drawing = (here / folder / FIGURES / block.name).read_text(encoding="utf-8")
        if len(drawing) > MOST_BYTES:
            raise UserError(f"its picture has {len(drawing)} bytes, and one of a page has at most {MOST_BYTES}.")
        alt = re.sub(r"[\[\]\\]", r"\\\g<0>", block.options["alt"])
        return f"![{alt}]({FIGURES}/{block.name})\n\n{made}", drawing


def copy_named(words: Sequence[str], here: Path) -> None:
    """Copy the files and folders that the words name from the repository to the same places below `here`."""
    for part in dict.fromkeys(part for word in words for part in re.split("[,:=]", word) if "/" in part):
        source, target = ROOT / part, here / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_file():
            shutil.copyfile(source, target)
        elif source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)


def run(words: Sequence[str], here: Path, output: Path) -> tuple[int, str]:
    """Run a program in the folder `here`. Return its exit code, and all its output, which goes to the file `output`.

    Raises UserError if it does not end.
    """
    environ = {name: value for name, value in own_environment().items() if name not in DATA} | SHOWN
    # So that `cluster run -- cos598d ...` finds the program next to this Python.
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    with output.open("wb") as stream:  # not a pipe, which a remaining process would keep open
        streams = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(ends_with_parent(words), cwd=here, env=environ, start_new_session=True, **streams)
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise UserError(f"it did not end within {SECONDS:g} s.") from None
        finally:
            end_all([process], SECONDS_TO_END)
    return code, output.read_bytes().decode(errors="replace")


def cleaned(said: str, folders: Sequence[Path]) -> str:
    """A program's output without overwritten bars; absolute paths are relative to these folders, or last names only."""
    for folder in folders:
        said = said.replace(f"{folder}/", "")
    said = ABSOLUTE.sub(lambda path: path[2] if Path(f"/{path[1]}").exists() else path[0], said)
    lines = [printable(line.rpartition("\r")[2]).rstrip() for line in said.replace("\r\n", "\n").split("\n")]
    return "\n".join(lines).strip("\n")


def fenced(said: str) -> str:
    """Text as a fenced block. Raises UserError if it is empty or too long."""
    if not 1 <= (count := len(said.splitlines())) <= MOST_LINES:
        raise UserError(f"it prints {count} lines, and a page shows 1 to {MOST_LINES}.")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", said)), default=0))
    return f"{fence}text\n{said}\n{fence}"


def main(words: Sequence[str] | None = None) -> int:
    """Fill the pages and return the exit code: 1 if a block could not be filled.

    Raises UserError, before any command is run, for a page with a wrong block.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE", help="the pages")
    parser.add_argument("--quick", action="store_true", help="no benches, and nothing on emulated hosts")
    options = parser.parse_args(words)
    for page in options.pages:
        blocks(page.read_text(encoding="utf-8"), page.name)
    failed = [line for page in options.pages for line in fill(page, options.quick)]
    print("\n".join(failed and ["not filled, left as they were:", *failed]), end="\n" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
