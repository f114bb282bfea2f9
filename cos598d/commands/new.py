"""`cos598d new`: a template for a gradient sync of your own."""

import argparse
import shlex
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's argument to `parser`."""
    parser.add_argument("file", type=Path, metavar="FILE.py", help="the file to write; it must not exist yet")


def run(options: argparse.Namespace) -> int:
    """Write the file and return 0. Raises UsageError if it cannot be written."""
    from cos598d.sync.from_file import write_template

    write_template(options.file)
    print(f"wrote {options.file}: fill it in.\n\nNext: cos598d check {shlex.quote(f'{options.file}:MySync')}")
    return 0
