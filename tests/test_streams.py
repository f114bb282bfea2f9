"""What is printed: on streams that are full, closed or of few letters, without harm to a terminal, once per message."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import PATIENCE, ROOT, TINY_TRAINING, script
from report_records import write_run

from cos598d.commands.cli import main
from cos598d.data.samples import write_squad_sample
from cos598d.data.squad import read_questions
from cos598d.errors import UserError
from cos598d.measure.environment import network_facts
from cos598d.terminal.console import Console
from cos598d.terminal.files import cache_folder
from cos598d.terminal.printable import LONGEST, printable

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
def test_a_full_stdout_is_one_error(tmp_path):
    words = ["-m", "cos598d", "compare", write_run(tmp_path / "run")]
    assert run(words, tmp_path, ">/dev/full") == (1, b"", LOST.encode())
    assert run([*words[:3], "--help"], tmp_path, ">/dev/full") == (1, b"", LOST.encode())


@needs_full
def test_errors_that_cannot_be_printed_change_no_exit_code(tmp_path):
    assert run(["-m", "cos598d", "compare", "nowhere"], tmp_path, "2>/dev/full") == (1, b"", b"")
    page = ["-m", "cos598d", "sample", "here"]
    assert run(page, tmp_path, "<&- >&- 2>&-") == (0, b"", b"")
    assert (tmp_path / "here").is_dir()


@pytest.mark.long
@needs_full
def test_a_run_survives_full_and_closed_streams(tmp_path):
    words = [script("task1/run_glue.py"), *TINY_TRAINING, "--max_steps", "2", "--output_dir"]
    for name, redirected in (("full", ">/dev/full 2>/dev/full"), ("closed", ">&- 2>&-")):
        assert run([*words, name], tmp_path, redirected, COS598D_CACHE=str(tmp_path)) == (0, b"", b"")
        assert json.loads((tmp_path / name / "summary.json").read_text())["iterations"] == 2


def test_letters_outside_a_stream_s_encoding_are_escaped(tmp_path):
    words = ["-m", "cos598d", "compare", "--verbose", write_run(tmp_path / "r\u00e9sum\u00e9", words="na\u00efve")]
    code, out, err = run(words, tmp_path, PYTHONIOENCODING="ascii")
    assert (code, err) == (0, b"")
    assert b"r\\xe9sum\\xe9" in out
    assert b"na\\xefve" in out


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


def test_help_and_errors_that_nobody_reads_are_no_tracebacks(tmp_path):
    assert ended_unread(["-m", "cos598d", "compare", "--help"], "stdout") == (141, b"")
    assert ended_unread(["-m", "cos598d", "compare", tmp_path / "nosuch"], "stderr") == (141, b"")


FAILS = """from cos598d.commands.start import exit_code_of
from cos598d.errors import UserError
from cos598d.terminal.streams import prepare_streams
def main():
    print("a line")
    raise {error}
prepare_streams()
raise SystemExit(exit_code_of(main))
"""


@pytest.mark.parametrize(
    ("error", "sentence"), [("UserError('the cause')", b"the cause"), ("KeyboardInterrupt", b"interrupted")]
)
def test_the_cause_is_printed_though_nobody_reads_the_output(error, sentence):
    words = ["-c", FAILS.format(error=error)]
    code, text = ended_unread(words, "stdout")
    assert code == 141
    assert sentence in text
    assert b"Traceback" not in text
    assert ended_unread(words, "stderr") == (141, b"a line\n")
    environ = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=environ, stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert sentence in done.stderr
    assert b"what is printed cannot be written" in done.stderr


def test_a_broken_pipe_of_another_kind_is_raised():
    code = "from cos598d.commands.start import exit_code_of\n"
    code += "def main():\n    raise BrokenPipeError(32, 'of a peer')\nexit_code_of(main)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "of a peer" in done.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain words, naïve 日本語 ∑", "plain words, naïve 日本語 ∑"),
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("two\nlines\r\ttab", r"two\x0alines\x0d\x09tab"),
        ("\x9b2J", r"\x9b2J"),  # the one-byte form of ESC [
        ("\ud800", r"\ud800"),
        ("cod\u202eexe.doc\u2066", r"cod\u202eexe.doc\u2066"),
        ("zero\u200bwidth\u2028line\U000e0041tag", r"zero\u200bwidth\u2028line\U000e0041tag"),
        ("", ""),
    ],
)
def test_control_characters_are_printed_as_escapes(text, shown):
    assert printable(text) == shown
    assert printable(text).isprintable()
    printable(text).encode("utf-8")


def test_a_text_of_several_lines_may_keep_them():
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def test_a_long_text_is_cut_in_its_middle():
    shown = printable("a" * LONGEST + "\x1b" * 70 + "z" * LONGEST)
    assert "aaa [2070 characters left out] zzz" in shown
    assert len(shown) < LONGEST + 50


def test_any_value_is_shown():
    assert printable(None) == "None"
    assert printable(["\x1b"]) == "['\\x1b']"


def test_compare_escapes_a_record_s_control_characters(tmp_path, capsys):
    folder = write_run(tmp_path / "a\x1brun", sync="\x1b[2Jevil\u202e", words="data\x07")
    for more in ([], ["--markdown"], ["--verbose"], ["--verbose", "--markdown"]):
        assert main(["compare", str(folder), *more]) == 0
        out = capsys.readouterr().out
        assert "x1b[2Jevil" in out.replace("\\", "")
        assert all(line.isprintable() for line in out.splitlines())


def test_an_error_escapes_control_characters(tmp_path, capsys):
    assert main(["compare", str(tmp_path / "\x1b]0;gone\x07")]) == 1
    assert "\\x1b]0;gone\\x07" in capsys.readouterr().err


def test_score_escapes_control_characters_of_ids(tmp_path, capsys):
    dev = sorted(write_squad_sample(tmp_path).rglob("dev*1.1*.json"))[0]
    known = read_questions(dev)[0].identity
    (tmp_path / "answers.json").write_text(json.dumps({known: "one", "\x1b[2Jstrange": "two"}))
    assert main(["score", "--task", "squad", "--data", str(dev), "--predictions", str(tmp_path / "answers.json")]) == 0
    err = capsys.readouterr().err
    assert "\\x1b[2Jstrange" in err
    assert all(line.isprintable() for line in err.splitlines())


def test_a_rank_escapes_control_characters(capsys):
    console = Console("rank 1: ", speaks=True)
    console.say("data from \x1b[2J")
    console.warn("lost \x07")
    shown = capsys.readouterr()
    assert shown.out == "rank 1: data from \\x1b[2J\n"
    assert shown.err == "warning: lost \\x07\n"


def test_without_a_terminal_progress_is_a_line_every_few_seconds(monkeypatch, capsys):
    clock = iter([100.0, *(100.0 + number for number in range(1, 21))])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with Console("", speaks=True).progress(20) as progress:
        for step in range(1, 21):
            progress(step, 0.5, 1.0, 8)
    lines = capsys.readouterr().out.splitlines()
    # Five, and then one whenever five seconds have passed.
    assert [int(line.split()[1][:-1]) for line in lines] == [1, 2, 3, 4, 5, 10, 15, 20]
    monkeypatch.undo()
    with Console("", speaks=False).progress(3) as progress:
        for step in range(1, 4):
            progress(step, 0.5, 1.0, 8)
    assert capsys.readouterr().out == ""


def test_an_epoch_is_one_line_with_its_speed_and_without_tables(capsys):
    facts = {"epoch": 2, "iterations": 5, "loss": 0.5, "acc": 0.25, "f1_macro": 0.2, "by_class": [], "confusion": [[1]]}
    speed = {"wall_seconds": 4.0, "examples_per_second_wall": 123.44, "tokens_per_second_wall": 1234.56}
    Console("", speaks=True).epoch(facts | {"seconds_evaluation": 0.5, "training": speed})
    (line,) = capsys.readouterr().out.splitlines()
    learned = "epoch 2: 5 iterations, loss 0.5000, acc 0.2500, f1_macro 0.2000"
    assert line == f"{learned} (evaluated in 0.5 s); trained in 4.0 s, 123.4 examples/s, 1,234.6 tokens/s"
    Console("", speaks=True).epoch(facts | {"training": speed | {"images_per_second_wall": 123.44}})
    assert capsys.readouterr().out == f"{learned}; trained in 4.0 s, 123.4 images/s\n"
    Console("", speaks=True).epoch(facts)
    assert capsys.readouterr().out == "epoch 2: 5 iterations, loss 0.5000, acc 0.2500, f1_macro 0.2000\n"


@pytest.mark.parametrize("said", ["{", "[]", "3", '{"rate": 1}', '{"hosts": "two"}'])
def test_a_damaged_variable_is_refused(said, monkeypatch):
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


def test_without_a_home_the_error_names_the_variable_to_set(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    for name in ("COS598D_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="Set COS598D_CACHE"):
        cache_folder()


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
def test_only_the_first_of_one_parent_s_children_prints_a_sentence():
    found = [child(sentence) for sentence in ("a", "a", "b")]
    for process, _ in found:
        process.communicate(timeout=PATIENCE)
    again = child("a")
    again[0].communicate(timeout=PATIENCE)
    # Linux alone gives such names; once their owner is gone they are free.
    assert [first for _, first in [*found, again]] == ["True", str(sys.platform != "linux"), "True", "True"]


def test_ranks_on_one_terminal_print_an_error_once(start):
    words = ["--world_size", 3, "--model_name_or_path", "./nosuch", "--max_steps", "1"]
    program = start("program", [script("task2b/run_glue.py"), *words])
    assert program.wait() > 0
    assert program.text.count("'./nosuch' is neither a folder nor a name on the model hub") == 1, program.text


def test_ranks_on_their_own_terminals_all_print_an_error(start_ranks):
    words = ["--model_name_or_path", "./nosuch", "--max_steps", "1", "--timeout", "5"]
    programs = start_ranks("task2b/run_glue.py", 2, words)
    for program in programs:
        assert program.wait() > 0
        assert "neither a folder nor a name on the model hub" in program.text
