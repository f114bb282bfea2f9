"""Streams that are full, closed or of few letters, and variables and names that would do harm later: a sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, TINY_TRAINING, script
from report_records import write_run

from cos598d.config import RunConfig
from cos598d.errors import UserError
from cos598d.measure.environment import network_facts
from cos598d.terminal.files import cache_folder

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
LOST = "error: what is printed cannot be written (No space left on device). Make room there, or print elsewhere.\n"


def run(words, folder, redirected="", **variables):
    """The exit code and what the streams have, of a program that a shell starts with `redirected` streams."""
    done = subprocess.run(
        ["sh", "-c", f'"$@" {redirected}', "sh", sys.executable, *map(str, words)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@needs_full
def test_a_table_that_cannot_be_written_is_one_sentence(tmp_path):
    words = ["-m", "cos598d", "compare", write_run(tmp_path / "run")]
    assert run(words, tmp_path, ">/dev/full") == (1, b"", LOST.encode())
    assert run([*words[:3], "--help"], tmp_path, ">/dev/full") == (1, b"", LOST.encode())


@needs_full
def test_complaints_that_cannot_be_written_change_no_exit_code(tmp_path):
    assert run(["-m", "cos598d", "compare", "nowhere"], tmp_path, "2>/dev/full") == (1, b"", b"")
    page = ["-m", "cos598d", "sample", "here"]
    assert run(page, tmp_path, "<&- >&- 2>&-") == (0, b"", b"")
    assert (tmp_path / "here").is_dir()


@pytest.mark.long
@needs_full
def test_a_run_is_not_lost_with_its_lines(tmp_path):
    words = [script("task1/run_glue.py"), *TINY_TRAINING, "--max_steps", "2", "--output_dir"]
    for name, redirected in (("full", ">/dev/full 2>/dev/full"), ("closed", ">&- 2>&-")):
        assert run([*words, name], tmp_path, redirected, COS598D_CACHE=str(tmp_path)) == (0, b"", b"")
        assert json.loads((tmp_path / name / "summary.json").read_text())["iterations"] == 2


def test_letters_that_a_stream_has_not_are_escaped(tmp_path):
    words = ["-m", "cos598d", "compare", "--verbose", write_run(tmp_path / "r\u00e9sum\u00e9", words="na\u00efve")]
    code, out, err = run(words, tmp_path, PYTHONIOENCODING="ascii")
    assert (code, err) == (0, b"")
    assert b"r\\xe9sum\\xe9" in out
    assert b"na\\xefve" in out


@pytest.mark.parametrize("label", ["../../../x", "/x", "", ".hidden", "--x", "a/b", "a\x1b", "a" * 101])
def test_a_label_that_is_no_folder_s_name_is_refused(label):
    with pytest.raises(UserError, match="Give a name of up to 100 letters"):
        RunConfig(label=label).check(1)


@pytest.mark.parametrize("said", ["{", "[]", "3", '{"rate": 1}', '{"hosts": "two"}'])
def test_a_damaged_variable_is_told_before_anything_is_done(said, monkeypatch):
    monkeypatch.setenv("COS598D_NETWORK", said)
    with pytest.raises(UserError, match="the environment's COS598D_NETWORK is damaged"):
        network_facts()


def test_a_damaged_variable_stops_a_run_before_it_trains(tmp_path):
    words = [script("task1/run_glue.py"), *TINY_TRAINING, "--max_steps", "2", "--output_dir", "run"]
    code, out, err = run(words, tmp_path, COS598D_NETWORK="{")
    assert code == 1
    assert out == b""
    assert b"COS598D_NETWORK" in err
    assert err.count(b"\n") == 1


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    for name in ("COS598D_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="Set COS598D_CACHE"):
        cache_folder()
