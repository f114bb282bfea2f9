"""A command whose reader has left, as `| head` does, ends as other programs do: quietly."""

import os
import subprocess
import sys

from programs import ROOT
from report_records import write_run


def ended_unread(words, stream):
    """The exit code, and what came out of the other stream, of a program nobody reads from."""
    reading, writing = os.pipe()
    os.close(reading)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: writing}
    try:
        environ = os.environ | {"PYTHONUNBUFFERED": ""}
        done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=environ, check=False, **streams)
    finally:
        os.close(writing)
    return done.returncode, (done.stdout or b"") + (done.stderr or b"")


def test_a_table_that_nobody_reads_is_no_error(tmp_path):
    run = write_run(tmp_path / "run")
    assert ended_unread(["-m", "cos598d", "compare", run], "stdout") == (141, b"")


def test_help_and_complaints_that_nobody_reads_are_no_tracebacks(tmp_path):
    assert ended_unread(["-m", "cos598d", "compare", "--help"], "stdout") == (141, b"")
    assert ended_unread(["-m", "cos598d", "compare", tmp_path / "nosuch"], "stderr") == (141, b"")


def test_a_pipe_of_another_kind_that_breaks_is_told():
    code = "from cos598d.commands.start import exit_code_of\n"
    code += "def main():\n    raise BrokenPipeError(32, 'of a peer')\nexit_code_of(main)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "of a peer" in done.stderr
