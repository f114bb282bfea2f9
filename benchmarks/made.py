"""Runs for a benchmark: each is made only once, so that the same command continues where it was stopped."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from cos598d.errors import UserError
from cos598d.terminal.program import own_environment


def call(words: Sequence[object], output: IO[str] | int = sys.stderr) -> None:
    """Run `python WORDS`, and wait for its end, even if Ctrl-C asks both to end: it may have hosts to remove.

    Its standard output goes to `output`. Raises UserError if it fails.
    """
    program = subprocess.Popen([sys.executable, *map(str, words)], env=own_environment(), stdout=output)
    try:
        code = program.wait()
    except KeyboardInterrupt:
        program.wait()
        raise
    if code:
        shown = " ".join(map(str, words))
        raise UserError(f"`{shown[:200]}` ended with exit code {code}; see its error above.")


def make_run(folder: Path, words: Sequence[object], output: IO[str] | int = sys.stderr) -> Path:
    """The folder of the run that `python WORDS` makes there, for a run's arguments. It is made unless it exists.

    Raises UserError if it fails.
    """
    if not (folder / "summary.json").exists():
        print(f"\n== {folder.name}", file=sys.stderr, flush=True)
        call([*words, "--output_dir", folder, "--overwrite_output_dir"], output)
    return folder
