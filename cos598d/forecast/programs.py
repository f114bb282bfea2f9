"""Programs of our own that find out what a forecast rests on, and end with it."""

import subprocess
import sys
from collections.abc import Sequence

from cos598d.errors import UserError
from cos598d.terminal.program import start

MOST_SECONDS = 300  # after which one has gone wrong


def answer_of(words: Sequence[str], failure: str, question: str = "") -> str:
    """What `python WORDS` prints, with `question` on its standard input.

    A process computes with one thread unless OMP_NUM_THREADS says otherwise.
    Raises UserError that begins with `failure` where it does not end well.
    """
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with start([sys.executable, *words], {"OMP_NUM_THREADS": "1"}, **pipes) as child:
        try:
            answer, errors = child.communicate(question, MOST_SECONDS)
            if child.returncode == 0:
                return answer
            said = (errors.strip() or "nothing was said").splitlines()[-1]
        except subprocess.TimeoutExpired:
            said = f"it did not end within {MOST_SECONDS} s"
        finally:
            child.terminate()
    raise UserError(f"{failure}: {said}.")
