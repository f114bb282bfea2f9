"""A rank's start imports what it uses: what it does not use costs every rank of every run."""

import subprocess
import sys

from programs import ROOT


def python(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_run_imports_no_statistics_no_storage_and_no_other_tokenizers():
    loaded = set(python("import sys, cos598d.run; print(*sys.modules)"))
    assert "pytorch_transformers.modeling_bert" in loaded
    assert not loaded & {"scipy.stats", "sklearn", "boto3.session", "sacremoses.tokenize", "matplotlib", "tensorboard"}


def test_what_is_imported_later_is_there_when_it_is_used():
    code = (
        "import cos598d.library, sys, sacremoses, boto3; from pytorch_transformers import tokenization_xlm as xlm\n"
        "print(sacremoses.MosesTokenizer(lang='en').tokenize('one two')[1], xlm.sm.MosesTokenizer.__name__)\n"
        "print(boto3.session.Session.__name__)"
    )
    assert python(code) == ["two", "MosesTokenizer", "Session"]
