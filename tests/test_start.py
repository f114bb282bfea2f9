"""The start of a program imports only what it uses, and the flags of a command: examples, typos, output files."""

import re
import subprocess
import sys

import pytest
from programs import ROOT
from report_records import write_run

from cos598d.commands.cli import COMMANDS, main


def python(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.long
def test_a_run_imports_no_statistics_and_no_pages():
    loaded = set(python("import sys, cos598d.run; print(*sys.modules)"))
    assert "pytorch_transformers.modeling_bert" in loaded
    assert not loaded & {"scipy.stats", "sklearn", "matplotlib", "tensorboard"}


def test_help_and_commands_that_only_read_records_load_no_torch():
    """Nor does any command load another: only the one that is asked for, with the flags that it shares."""
    code = (
        "import contextlib, io, sys; from cos598d.commands.cli import COMMANDS, main\n"
        "for words in map(str.split, ('', *'compare report cluster new score sample picture grade'.split())):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):\n"
        "        main([*words, '--help'])\n"
        "    loaded = {'torch', 'numpy', *(f'cos598d.commands.{name}' for name in COMMANDS)} & sys.modules.keys()\n"
        "    assert all(name in text.getvalue() for name in COMMANDS) or words\n"
        "    print(len(text.getvalue()) > 100, ','.join(sorted(loaded)) if not words else 'torch' in loaded)"
    )
    assert python(code) == ["True"] + ["True", "False"] * 8


TYPOS = {
    "train": "traini",
    "--sync": "train --synk ring",
    "ring": "train --sync rnig",
    "cosine": "train --lr_scheduler cosin",
}


@pytest.mark.parametrize(
    ("words", "says"),
    [(f"{name} --nosuch", "error: ") for name in COMMANDS if name != "audit"]
    + [(words, f"Did you mean '{near}'?") for near, words in TYPOS.items()],
)
def test_a_wrong_word_is_one_sentence_with_the_nearest_right_one(words, says, capsys):
    with pytest.raises(SystemExit) as left:
        raise SystemExit(main(words.split()))
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert said.startswith("error: ")
    assert says in said
    assert said.count("\n") == 1


def test_output_that_nobody_reads_ends_the_program_silently():
    words = [sys.executable, "-m", "cos598d", "cluster", "--help"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        program.stdout.close()
        assert program.stderr.read() == ""
        assert program.wait() in (141, 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("report RUN -o nosuch/a.html", r"nosuch/a.html cannot be written: there is no folder nosuch\. Make it"),
        ("check flat --results nosuch/a.json", r"nosuch/a.json cannot be written: there is no folder nosuch\. Make it"),
        ("new nosuch/a.py", r"nosuch/a.py cannot be written \(No such file or directory\)\. Give another path\."),
        ("report RUN -o x.html", r"-o x.html is a folder\. Give a file's name\."),
        ("sample FILE", r"FILE cannot be used \(File exists\)"),
        ("sweep --grid sync=flat --runs_dir FILE", r"FILE/logs cannot be used \(Not a directory\)"),
        ("bench --output FILE", "--output FILE is a file"),
        ("picture --sync nosuch.py:Mine", "nosuch.py: no such file"),
        ("check nosuch.py:Mine", "nosuch.py: no such file"),
        ("check bad.py:Mine", r"bad.py is not Python \(.*line 1"),
        ("check empty.py:Mine", "empty.py has no class Mine"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence_and_nothing_is_made(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "RUN")
    (tmp_path / "x.html").mkdir()
    (tmp_path / "FILE").touch()
    (tmp_path / "empty.py").touch()
    (tmp_path / "bad.py").write_text("class Mine(:\n")
    assert main(words.split()) in (1, 2)
    said = capsys.readouterr().err
    assert re.match(f"error: .*{says}", said)
    assert said.count("\n") == 1
    assert not (tmp_path / "nosuch").exists()
