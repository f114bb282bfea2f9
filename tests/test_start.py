"""A rank's start imports what it uses: what it does not use costs every rank of every run."""

import importlib
import inspect
import shlex
import subprocess
import sys

import pytest
from programs import ROOT

from cos598d.commands.cli import COMMANDS, DOCS, main
from cos598d.commands.flags import Parser


def python(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.long
def test_a_run_imports_no_statistics_no_storage_and_no_other_tokenizers():
    loaded = set(python("import sys, cos598d.run; print(*sys.modules)"))
    assert "pytorch_transformers.modeling_bert" in loaded
    assert not loaded & {"scipy.stats", "sklearn", "boto3.session", "sacremoses.tokenize", "matplotlib", "tensorboard"}


def test_the_list_of_commands_and_what_only_reads_records_load_no_torch():
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
        assert (ROOT / DOCS / COMMANDS[name].page).is_file(), name
        assert list(inspect.signature(command.add_options).parameters)[0] == "parser"
        assert list(inspect.signature(command.run).parameters) == ["options"]


@pytest.mark.long
def test_what_is_imported_later_is_there_when_it_is_used():
    code = (
        "import cos598d.data.library, sys, sacremoses, boto3\n"
        "from pytorch_transformers import tokenization_xlm as xlm\n"
        "print(sacremoses.MosesTokenizer(lang='en').tokenize('one two')[1], xlm.sm.MosesTokenizer.__name__)\n"
        "print(boto3.session.Session.__name__)"
    )
    assert python(code) == ["two", "MosesTokenizer", "Session"]


EXAMPLES = [(name, words) for name, about in COMMANDS.items() for words in about.examples]


@pytest.mark.parametrize(("name", "words"), EXAMPLES)
def test_the_examples_of_help_can_be_typed(name, words):
    parser = Parser(prog=name)
    importlib.import_module(f"cos598d.commands.{name}").add_options(parser)
    parser.parse_args(shlex.split(words.partition(" > ")[0]))


@pytest.mark.parametrize(
    ("words", "near"),
    [(["traini"], "train"), (["train", "--synk", "ring"], "--sync"), (["train", "--sync", "rnig"], "ring")]
    + [(["train", "--lr_scheduler", "cosin"], "cosine")],
)
def test_a_typo_is_answered_with_the_word_that_was_meant(words, near, capsys):
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
