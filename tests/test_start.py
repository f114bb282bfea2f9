"""The start of a program imports only what it uses, and the flags of a command: examples, typos, output files."""

import importlib
import inspect
import os
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
def test_a_run_imports_no_statistics_no_storage_and_no_other_tokenizers():
    loaded = set(python("import sys, cos598d.run; print(*sys.modules)"))
    assert "pytorch_transformers.modeling_bert" in loaded
    assert not loaded & {"scipy.stats", "sklearn", "boto3.session", "sacremoses.tokenize", "matplotlib", "tensorboard"}


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


def test_every_command_is_a_file_of_the_same_shape():
    for name in COMMANDS:
        command = importlib.import_module(f"cos598d.commands.{name}")
        assert command.__doc__.startswith(f"`cos598d {name}`"), name
        assert (ROOT / "docs" / COMMANDS[name][1]).is_file(), name
        assert list(inspect.signature(command.add_options).parameters)[0] == "parser"
        assert list(inspect.signature(command.run).parameters) == ["options"]


@pytest.mark.long
def test_modules_that_are_imported_late_work():
    code = (
        "import cos598d.data.library, sys, sacremoses, boto3\n"
        "from pytorch_transformers import tokenization_xlm as xlm\n"
        "print(sacremoses.MosesTokenizer(lang='en').tokenize('one two')[1], xlm.sm.MosesTokenizer.__name__)\n"
        "print(boto3.session.Session.__name__)"
    )
    assert python(code) == ["two", "MosesTokenizer", "Session"]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "audit"])
def test_a_wrong_flag_of_every_command_is_one_sentence(name, capsys):
    with pytest.raises(SystemExit) as left:
        raise SystemExit(main([name, "--nosuch"]))
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_output_that_nobody_reads_ends_the_program_silently():
    words = [sys.executable, "-m", "cos598d", "train", "--help", "all"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        program.stdout.close()
        assert program.stderr.read() == ""
        assert program.wait() in (141, 0)


def test_a_character_that_the_output_lacks_is_an_escape():
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "cos598d", "train", "--label", "\u00fc/x"]
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert "--label \\xfc/x is not valid" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "near"),
    [(["traini"], "train"), (["train", "--synk", "ring"], "--sync"), (["train", "--sync", "rnig"], "ring")]
    + [(["train", "--lr_scheduler", "cosin"], "cosine")],
)
def test_a_typo_is_answered_with_the_nearest_word(words, near, capsys):
    with pytest.raises(SystemExit) as left:
        raise SystemExit(main(words))
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert said.startswith("error: ")
    assert f"Did you mean '{near}'?" in said


def test_no_command_prints_the_help_with_every_command(capsys):
    assert main([]) == 2
    printed = capsys.readouterr()
    assert all(f"  {name} " in printed.out for name in COMMANDS)
    assert not printed.err


NO_FOLDER = {
    "report -o": ["report", "RUN", "-o", "nosuch/report.html"],
    "check --results": ["check", "flat", "--results", "nosuch/card.json"],
    "new": ["new", "nosuch/mine.py"],
}


@pytest.mark.parametrize("name", NO_FOLDER)
def test_a_missing_output_folder_is_named_and_not_made(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [str(write_run(tmp_path / "run")) if word == "RUN" else word for word in NO_FOLDER[name]]
    file = next(word for word in words if word.startswith("nosuch/"))
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert f"{file} cannot be written" in printed.err
    reason = r": there is no folder nosuch\. Make it first\.|\(No such file or directory\)\. Give another path\."
    assert re.search(reason, printed.err)
    assert not (tmp_path / "nosuch").exists()
    assert printed.out == ""


def test_a_folder_as_output_file_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.html").mkdir()
    assert main(["report", str(write_run(tmp_path / "run")), "-o", "x.html"]) == 2
    assert capsys.readouterr().err == "error: -o x.html is a folder. Give a file's name.\n"
