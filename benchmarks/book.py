"""Update the book's figures and numbers: run the command of each block of its pages, and fill the block.

    python benchmarks/book.py docs/lessons [--page lesson5] [--quick] [--list]

The pages are the folder's *.md, one after the other. `book_pages.py` defines blocks, `book_blocks.py` fills them. A
page and its pictures are written when all its blocks are done: completely, or not at all. A block whose command fails
stays unchanged and is listed at the end, and the exit code is 1. A block on emulated hosts needs Linux and root.
Without them it stays unchanged, and that is reported. `--quick` skips benches and emulated hosts: it updates checks and
pictures, in minutes. `--list` prints the commands and runs none.
"""

import argparse
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from book_blocks import make, typed
from book_pages import BENCH, FIGURES, PICTURE, Block, page_text, read_page

from cos598d.errors import UserError
from cos598d.terminal.files import write_together
from cos598d.tools.cluster.network import check_rights

Parts = Sequence[str | Block]


def main(words: Sequence[str] | None = None) -> int:
    """Fill the pages and return the exit code: 1 if a block could not be filled.

    Raises UserError, before any command is run, for a page that cannot be read.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the pages")
    parser.add_argument("--page", help="only this page, like lesson5")
    parser.add_argument("--quick", action="store_true", help="no benches, and nothing on emulated hosts")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    options = parser.parse_args(words)
    folder = options.folder.resolve()
    within = folder.relative_to(ROOT).as_posix() if folder.is_relative_to(ROOT) else folder.name
    pages = {path: read(path) for path in find_pages(options.folder, options.page)}
    check_names(pages)
    if options.list:
        for path, parts in pages.items():
            for block in asked(parts, options.quick):
                print(f"{path.name} line {block.line}: {shlex.join(typed(block, within))}")
        return 0
    failed = [line for path, parts in pages.items() for line in fill(path, parts, within, options.quick)]
    if failed:
        print("\n".join(["", f"{len(failed)} not filled, left as they were:", *failed]), file=sys.stderr)
    return 1 if failed else 0


def find_pages(folder: Path, name: str | None) -> list[Path]:
    """The folder's pages, lesson2 before lesson10; with `name` only that one. Raises UserError if there is none."""
    found = sorted(folder.glob("*.md"), key=lambda path: [int(n) if n.isdecimal() else n for n in _runs(path.stem)])
    if not found:
        raise UserError(f"{folder} has no pages: give the folder of the book's *.md files.")
    if name is None:
        return found
    wanted = [path for path in found if name in (path.stem, path.name)]
    if not wanted:
        raise UserError(f"--page {name}: {folder} has {', '.join(path.stem for path in found)}.")
    return wanted


def _runs(name: str) -> list[str]:
    """A name's sequences of letters and of digits, letters first."""
    return re.split(r"(\d+)", name)


def read(path: Path) -> Parts:
    """The page's parts. Raises UserError if it cannot be read."""
    try:
        return read_page(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None


def blocks(parts: Parts) -> list[Block]:
    """The blocks among a page's parts."""
    return [part for part in parts if isinstance(part, Block)]


def asked(parts: Parts, is_quick: bool) -> list[Block]:
    """The blocks to fill; if `is_quick`, without benches and emulated hosts."""
    return [block for block in blocks(parts) if not (is_quick and (block.kind == BENCH or block.hosts))]


def check_names(pages: Mapping[Path, Parts]) -> None:
    """Raise UserError if two blocks would write the same picture."""
    owners: dict[str, str] = {}
    for path, parts in pages.items():
        for block in blocks(parts):
            if block.kind == PICTURE:
                where = f"{path.name} line {block.line}"
                if block.name in owners:
                    raise UserError(f"{where}: {block.name} is drawn by {owners[block.name]} already: choose a name.")
                owners[block.name] = where


def fill(path: Path, parts: Parts, within: str, is_quick: bool = False) -> list[str]:
    """Fill a page's blocks that are `asked` for, and write it with its pictures. Return a line for each failure."""
    before, written = page_text(parts), {}
    done, failed = list(parts), []
    for place, block in enumerate(parts):
        if isinstance(block, str) or block not in asked(parts, is_quick):
            continue
        where = f"{path.name} line {block.line}: {shlex.join(typed(block, within))}"
        began = time.monotonic()
        try:
            if block.hosts and (reason := without_hosts()):
                print(f"{where}\n  stays as it was: {reason}", flush=True)
                continue
            made = make(block, within, ROOT)
        except UserError as error:
            failed.append(f"{where}: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
            continue
        done[place] = block.filled(made.inside)
        if made.drawing is not None:
            written[path.parent / FIGURES / block.name] = made.drawing
        print(f"{where} ({time.monotonic() - began:.1f} s)", flush=True)
    after = page_text(done)
    if after == before and not written:
        return failed
    if path.read_text(encoding="utf-8") != before:
        return [*failed, f"{path.name}: it was changed while its commands ran: fill it again."]
    try:
        write_together({**written, path: after})
    except OSError as error:
        return [*failed, f"{error.filename} cannot be written: {error.strerror}."]
    return failed


def without_hosts() -> str:
    """Why there can be no emulated hosts here; "" if there can."""
    try:
        check_rights()
    except UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
