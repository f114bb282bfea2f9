"""A missing compiler is a sentence with the Debian package; the compiler's wrapper does what it says."""

import os
import subprocess
import sys

import pytest
from programs import ROOT

TOOL = ROOT / "scripts" / "install_horovod.py"


def a_program(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def install(tmp_path, path):
    """Run the tool with an empty cache and that PATH."""
    environ = os.environ | {"PATH": str(path), "COS598D_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(TOOL)], env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("missing", ["g++", "make"])
def test_a_missing_compiler_is_one_sentence_with_the_package(tmp_path, missing):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in {"g++", "make"} - {missing}:
        a_program(programs, name, "#!/bin/sh\n")
    done = install(tmp_path, programs)
    assert done.returncode == 1
    assert done.stderr == (
        f"Horovod has to be compiled, and there is no {missing} here: install Debian's package {missing} "
        f"(apt-get install {missing}), then make engines again.\n"
    )
    assert not (tmp_path / "cache").exists()


def test_the_wrapper_compiles_as_c17_whatever_it_is_told(tmp_path):
    a_program(tmp_path, "g++", '#!/bin/sh\nfor word in "$@"; do echo "[$word]"; done\n')
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["-std=c++11", "-DNAME=a b", "-O3", "-std=gnu++14", "x.cc"]
    said = subprocess.run([ROOT / "scripts" / "cxx17", *words], env=environ, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == ["[-std=c++17]", "[-DNAME=a b]", "[-O3]", "[-std=c++17]", "[x.cc]"]
