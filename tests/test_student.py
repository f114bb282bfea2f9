"""The student's script does what the lessons do: from the same weights and batches it has the same losses."""

import re

from programs import ROOT, script


def test_a_students_script_and_ours_have_the_same_losses(start, tmp_path):
    words = ["--runs_dir", "runs", "--repeats", 1, "--max_steps", 4, "--world_size", 2, "--total_batch_size", 8]
    words += ["--max_seq_length", 32, "--model", "tiny", "--sync", "gather_scatter"]
    program = start("both", [script("benchmarks/beside_student.py"), *words], {"PYTHONPATH": str(ROOT)})
    assert program.wait() == 0, program.text
    rows = [line.split() for line in program.text.splitlines() if re.match("gather_scatter ", line)]
    assert len(rows) == 1
    assert 0 <= float(rows[0][-1]) < 1e-5, program.text
    assert len(list((tmp_path / "runs" / "repeat1").iterdir())) == 2
