"""What several ranks on one terminal have to say alike is said once."""

import subprocess
import sys

import pytest
from programs import PATIENCE, ROOT, script

SAYING = """
import sys
from cos598d.world.exit import first_to_say
with first_to_say(sys.argv[1]) as is_first:
    print(is_first, flush=True)
    sys.stdin.read(1)
"""


def child(sentence):
    """A process that has claimed `sentence`, and whether it was the first, as text."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAYING, sentence], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    return process, process.stdout.readline().strip()


@pytest.mark.long
def test_the_first_of_one_parent_s_children_with_a_sentence_says_it():
    found = [child(sentence) for sentence in ("a", "a", "b")]
    for process, _ in found:
        process.communicate(timeout=PATIENCE)
    again = child("a")
    again[0].communicate(timeout=PATIENCE)
    # Linux alone gives such names; once their owner is gone they are free.
    assert [first for _, first in [*found, again]] == ["True", str(sys.platform != "linux"), "True", "True"]


def test_a_model_that_is_not_there_is_told_by_one_of_the_ranks_on_a_terminal(start):
    words = ["--world_size", 3, "--model_name_or_path", "./nosuch", "--max_steps", "1"]
    program = start("program", [script("task2b/run_glue.py"), *words])
    assert program.wait() > 0
    assert program.text.count("'./nosuch' is neither a folder nor a name on the model hub") == 1, program.text


def test_ranks_on_terminals_of_their_own_all_say_it(start_ranks):
    words = ["--model_name_or_path", "./nosuch", "--max_steps", "1", "--timeout", "5"]
    programs = start_ranks("task2b/run_glue.py", 2, words)
    for program in programs:
        assert program.wait() > 0
        assert "neither a folder nor a name on the model hub" in program.text
