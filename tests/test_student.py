"""The student's script does what the lessons do: from the same weights and batches it has the same losses."""

import re
import subprocess
import sys

from programs import ROOT, script


def test_a_student_s_script_and_ours_do_the_same_work(tmp_path):
    words = ["--runs_dir", str(tmp_path / "runs"), "--repeats", "1", "--max_steps", "4", "--world_size", "2"]
    words += [
        "--total_batch_size",
        "8",
        "--max_seq_length",
        "32",
        "--model",
        "tiny",
        "--sync",
        "gather_scatter",
    ]
    done = subprocess.run(
        [sys.executable, script("benchmarks/beside_student.py"), *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if re.match("gather_scatter ", line)]
    assert len(rows) == 1
    assert 0 <= float(rows[0][-1]) < 1e-5, done.stdout
    assert len(list((tmp_path / "runs" / "repeat1").iterdir())) == 2
