"""Programs of our own that find out what a forecast rests on."""

import subprocess
import sys
from collections.abc import Sequence

from cos598d.errors import UserError
from cos598d.program import own_environment

MOST_SECONDS = 300  # after which one has gone wrong


def answer_of(words: Sequence[str], failure: str, question: str = "") -> str:
    """What `python WORDS` prints, with `question` on its standard input.

    A process computes with one thread unless OMP_NUM_THREADS says otherwise.
    Raises UserError that begins with `failure` where it does not end well.
    """
    try:
        done = subprocess.run(
            [sys.executable, *words],
            input=question,
            capture_output=True,
            text=True,
            env={"OMP_NUM_THREADS": "1"} | own_environment(),
            timeout=MOST_SECONDS,
            check=False,
        )
        if done.returncode == 0:
            return done.stdout
        said = (done.stderr.strip() or "nothing was said").splitlines()[-1]
    except subprocess.TimeoutExpired:
        said = f"it did not end within {MOST_SECONDS} s"
    raise UserError(f"{failure}: {said}.")
