"""Ways to start an audit: a module, a script that spawns ranks, and a variable of the environment."""

import os
import subprocess
import sys

import pytest
from audit_scripts import with_changes
from programs import ROOT, free_port

from cos598d.tools.audit.book import read_book

SITE = ROOT / "cos598d" / "tools" / "audit" / "site"
SUM = with_changes("by_hand", [("        p.grad /= ranks\n", "")])
INDENTED = "".join(f"    {line}\n" for line in SUM.splitlines())
SPAWN = f"""
import os

import torch.multiprocessing as mp


def main(rank, ranks, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
{INDENTED}

if __name__ == "__main__":
    for port in ({{}}, {{}}):
        mp.spawn(main, (2, port), nprocs=2)
"""


def run(words, folder, **more):
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


CHECKS = """import os, sys
from .names import NAME
assert __package__ == "package"
assert sys.argv[1:] == [f"{os.environ['RANK']}/2", "{x}"], sys.argv
"""


def test_a_module_is_audited_as_python_runs_it_with_the_words_of_each_rank(start, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "names.py").write_text("NAME = 1\n")
    (tmp_path / "package" / "train.py").write_text(CHECKS + SUM)
    words = ["--strict", "--world_size", 2, "--", "-m", "package.train", "{rank}/{world_size}", "{x}"]
    program = start("audit", ["-m", "cos598d", "audit", *words], {"PYTHONPATH": str(ROOT)})
    assert (program.wait(), "[summed]" in program.text) == (3, True), program.text
    folder = tmp_path / "runs" / "audit-package.train"
    assert (folder / "audit.json").exists()
    assert read_book(folder / "books" / "rank1.json", 1)["rank"] == 1


@pytest.mark.long
def test_a_variable_audits_every_world_that_a_script_opens(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('the other one, too')\n")
    (tmp_path / "train.py").write_text(SPAWN.format(free_port(), free_port()))
    path = os.pathsep.join(map(str, (SITE, ROOT, tmp_path)))
    code, text = run(["train.py"], tmp_path, COS598D_AUDIT="1", PYTHONPATH=path)
    assert (code, text.count("[summed]")) == (0, 2), text
    assert "the other one, too" in text
    assert (tmp_path / "runs" / "audit-train" / "audit.json").exists()
    code, text = run(["-c", "import torch.distributed"], tmp_path, PYTHONPATH=path)
    assert (code, text) == (0, "the other one, too\n")


@pytest.mark.long
def test_only_the_last_of_a_script_s_worlds_is_judged(tmp_path):
    (tmp_path / "train.py").write_text(SPAWN.format(free_port(), free_port()))
    code, text = run(["-m", "cos598d", "audit", "--strict", "train.py"], tmp_path)
    assert (code, text.count("[summed]")) == (3, 1), text
    assert "those of 1 worlds that the command opened before" in " ".join(text.split()), text
